"""`training.data.loading.reader` in TensorFlow operations: this host's rows in the order of the steps, as `tf.data`.

Reads a window of this host's rows at a time, and the next one ahead: about 3 * order.WINDOW_BLOCKS *
order.BLOCK_BYTES = 200 MB over the number of hosts, at most twice as much. Blocks are permuted once an epoch.
"""

from typing import Any

import numpy as np
import tensorflow as tf

from training.data.loading.record_source import REPLACED, HostSlice
from training.data.sampling.order import Order, evaluation_order, locate
from training.data.tf.order import ENDLESS, block_permutation, rows_of_window
from training.data.tf.record_source import Columns, TensorRecordSource

CONCURRENT_BLOCKS = 16  # blocks read at a time


def training_batches(source: TensorRecordSource, order: Order, host_slice: HostSlice, start: int) -> Any:
    """Returns a tf.data dataset of this host's rows of batches from number `start` on: columns, `records`, `epoch`."""
    first, last = host_slice.rows()
    batch_size = host_slice.global_batch_size
    rows = _read_rows(source, order, batch_size, first, last, start * batch_size)
    return rows.rebatch(last - first, drop_remainder=True)


def evaluation_batches(source: TensorRecordSource, host_slice: HostSlice) -> Any:
    """Returns a tf.data dataset of this host's rows of one pass in record order. Filler rows, whose record is -1,
    complete the last batch."""
    (first, last), batch_size = host_slice.rows(), host_slice.global_batch_size
    order = evaluation_order(source.records, source.record_bytes)
    rows = _read_rows(source, order, batch_size, first, last, 0, epochs=1)
    remainder = source.records % batch_size
    present = min(max(remainder - first, 0), last - first) if remainder else last - first  # rows in the last batch
    fillers = {"records": -1, "input_ids": host_slice.tokenizer.pad}
    filler = {
        name: np.full((last - first - present, *spec.shape[1:]), fillers.get(name, 0), spec.dtype.as_numpy_dtype)
        for name, spec in rows.element_spec.items()
    }
    return rows.concatenate(tf.data.Dataset.from_tensors(filler)).rebatch(last - first, drop_remainder=True)


def _read_rows(
    source: TensorRecordSource, order: Order, batch: int, first: int, last: int, start: int, epochs: int = ENDLESS
) -> Any:
    """Returns a tf.data dataset of rows [first, last) of each batch, from row `start` of the order to the end of epoch
    `epochs` - 1. An element has the rows of one window: columns, `records` (numbers) and `epoch`. Windows without
    such rows are left out. Reads one element ahead."""
    first_epoch, first_window, _ = locate(order, start)

    def windows_of(epoch: Any) -> Any:
        permuted = block_permutation(order, epoch)

        def select(number: Any) -> Any:
            return epoch, rows_of_window(order, permuted, batch, epoch, number, first, last, start)

        begin = tf.where(epoch == first_epoch, tf.constant(first_window, tf.int64), 0)
        return tf.data.Dataset.range(begin, order.windows).map(select)

    def read_block(number: Any) -> Columns:
        begin = number * order.block
        columns = source.read(begin, tf.minimum(begin + order.block, order.records))
        missing = order.block - tf.size(columns[REPLACED], tf.int64)  # the last block may be shorter
        return {
            name: tf.ensure_shape(
                tf.pad(values, [[0, missing], *[[0, 0]] * (values.shape.rank - 1)]), (order.block, *values.shape[1:])
            )
            for name, values in columns.items()
        }

    def read(epoch: Any, records: Any) -> Columns:
        blocks, slot = tf.unique(records // order.block, tf.int64)  # (blocks,), (n,)
        columns = tf.data.Dataset.from_tensor_slices(blocks).map(
            read_block, num_parallel_calls=CONCURRENT_BLOCKS, deterministic=True
        )
        columns = columns.batch(tf.size(blocks, tf.int64)).get_single_element()  # (blocks, block, ...) each
        location = slot * order.block + records % order.block  # (n,)
        rows = {
            name: tf.gather(tf.reshape(values, (-1, *values.shape[2:])), location) for name, values in columns.items()
        }
        return {**rows, "records": records, "epoch": tf.fill(tf.shape(records), epoch)}

    selected = tf.data.Dataset.range(first_epoch, epochs).flat_map(windows_of)
    return selected.filter(lambda _, records: tf.size(records) > 0).map(read).prefetch(1)
