"""Data: from text to batches that are a function of the step.

Promises
  * batch(k) follows from (dataset, seed, global batch size, k) alone: not from the number of hosts or threads, nor from
    what was read before. Resuming at step 3,000,000 takes as long as starting at 0.
  * Each epoch is a permutation of all records, a different one each time; batches run through the epochs without
    dropping or repeating a record.
  * Masks follow from (seed, epoch, record, position), in integers: all backends see the same ids and labels.
  * Every record's CRC is checked. A bad one stops the run with shard, record and byte offset, or is replaced by the
    same record on every host, and counted.
  * Shards are TFRecord files of tf.train.Example, which TensorFlow reads by itself. The same text gives the same bytes.

Glossary of indices. All count from 0; N records in the dataset, B rows in a global batch, H hosts.
  record          0 .. N-1, through the shards in the manifest's order. In messages about a shard: its number there.
  step k          0, 1, 2, ...; its global batch has rows 0 .. B-1.
  row             of a global batch. *Global* rows are 0 .. B-1; host h holds the rows [h*B/H, (h+1)*B/H), which are its
                  *local* rows 0 .. B/H-1 (`sampling.order.host_rows`, `loading.record_source.HostSlice`).
  place           k*B + row: the rows of all steps as one endless stream, so a batch may span two epochs.
  epoch           place // N; `index` = place % N within it. For labelled rows, each length bucket counts its own
                  records and epochs, and `sampling.order` counts epochs of the whole dataset.
  block           consecutive records that are read together (`sampling.order`).
  lane            rows of a global batch that draw from the same whole blocks (`sampling.order`), whatever the hosts.
  window          consecutive indices of an epoch that are shuffled together, whole blocks; `cell`: an index counted
                  from its window's start.
  position        of a token in its row; the `places` of a masked row are its static number of predictions.
Array shapes in comments: n rows or records at hand, `length` tokens of a row.

What is where; each imports only from those before it (a contract in pyproject.toml)
  config.py       the `data` section of the YAML file
  formats/        bytes on disk: TFRecord frames, Example codec, fixed-size records, manifest, verifying
  sampling/       pure functions of (records, seed, epoch, step): random bits, order, masks, schedule of batch lengths.
                  `sampling.random_bits` lists every seed
  tokenizer.py    tokenizer folders
  loading/        one host's input: record sources, read-ahead, batches of masked or labelled rows
  prepare/        from text to shards and tokenizers
"""
