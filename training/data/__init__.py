"""Data: from text to batches that are a function of the step.

What the room promises
  * batch(k) follows from (dataset, seed, global batch size, k) alone: not from the number of hosts or threads, nor from
    what was read before. Going on at step 3,000,000 costs what starting at 0 costs.
  * Each epoch is a permutation of all records, another one each time; batches run through the epochs without dropping
    or repeating a record.
  * Masks follow from (seed, epoch, record, position), in integers: both backends see the same ids and labels.
  * Every record's CRC is checked. A bad one stops the run with shard, record and byte offset, or is replaced alike on
    every host and counted.
  * Shards are TFRecord files of tf.train.Example, which TensorFlow reads with no code of ours. The same text gives the
    same bytes.

Words for numbers (all from 0)
  record    0 .. N-1 in the order of the manifest's shards; `record` of a shard, in messages, counts within the shard
  step k    its global batch has rows 0 .. B-1; host h of H holds rows h*B/H .. (h+1)*B/H - 1 (order.rows)
  place     k*B + row, in one endless stream of epochs
  epoch     place // N, and `index` = place % N in it
  block     neighbouring records that are read together; window: blocks that are shuffled together; cell: an index from
  its window's start position  of a token in its row; `places` of a row are where predictions may stand

From text to shards                                 From shards to batches
  corpus         documents of any source              dataset        dataset.json; needs neither numpy nor a framework
  tokenizer      train, recognise, load               order          which record stands where: start reading here
  unigram        the vocabulary, the same each time   reader         this host's rows, read ahead
  prepare        pack, write, resume                  shards         records by number, checked
  pipeline       the same on Apache Beam              masking        what is hidden (masking_tensorflow: in TensorFlow
  ops) examples       labelled texts, in length buckets    batches        MlmBatches, evaluation, prefetch
                                                      classification ClassificationBatches, evaluation
Formats: tfrecord (frames), example (tf.train.Example), records (a block of records as one array), recipe (the public
recipe's layout). For people: commands (tokenizer, shards, dataset show|verify|preview), verify, preview. Random
numbers: mixing.
"""
