"""Reads the rows of one host in the order of the steps, ahead of time.

A `Reader` combines an order (which record comes when) with a record source, window by window (see
`training.data.sampling.order`): at the first use of a window, a few threads request all blocks that hold a row of this
host, in the order of first use; neighbouring blocks are one request. When the last block of a window has been read, the
next window is requested. A batch waits only for the blocks that it needs. A dataset that fits into one window is read
once, not once per epoch.

Memory: at most three windows of this host's rows (the previous one, for a batch that spans two; the current one; the
next one), each about order.WINDOW_BLOCKS * order.BLOCK_BYTES = 64 MB over the number of hosts, at most twice as much,
and one request per thread.

Failure model: each `rows` that needs a block whose request failed raises that error, unchanged. Every request has the
deadline of `training.storage.gcs`.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np

from training.data.loading.record_source import Arrays, HostSlice, RecordSource
from training.data.sampling.order import cells_of_rows, split_places, training_order
from training.data.sampling.random_bits import Ints

RUN_BYTES = 4 << 20  # the largest request of training
AHEAD_BYTES = 64 << 20  # that an evaluation reads ahead, if a batch is smaller
WINDOWS_KEPT = 3


class Reader:
    """Reads one host's rows of each global batch, in training order. Thread-safe. Close it in the end."""

    def __init__(self, source: RecordSource, host_slice: HostSlice, seed: int, threads: int) -> None:
        """Starts `threads` threads, which read nothing before the first call of `rows`. `seed`: of the order. Raises
        BadInput if hosts can't share a batch evenly."""
        self.source, self.batch, (self.first, self.last) = source, host_slice.global_batch_size, host_slice.rows()
        self.order = training_order(source.records, source.record_bytes, seed=seed, batch=self.batch)
        self._windows: OrderedDict[tuple[int, int], _Window] = OrderedDict()
        self._lock = threading.Lock()
        self._workers = DaemonPool(threads, "reader")
        weakref.finalize(self, self._workers.close)  # the threads of a reader that is never closed end with it

    def rows(self, start: int, stop: int) -> tuple[Ints, Ints, Arrays]:
        """Returns epochs (n,), records (n,) and feature -> (n, ...) of this host's rows among the places [start, stop)
        of the order. Waits for their blocks, and requests the next window once a window is read. Raises the error of a
        request that failed, as `RecordSource.read`, and CancelledError for one that `close` cancelled."""
        epochs, records, arrays = [], [], []  # of each window
        for epoch, number, first, last in split_places(self.order, start, stop):
            with self._lock:
                window = self._window(epoch, number)
            low, high = np.searchsorted(window.cells, (first, last))
            arrays.append(window.gather(int(low), int(high)))
            records.append(window.records[low:high])
            epochs.append(np.full(high - low, epoch, np.int64))
            if window.complete:
                with self._lock:
                    self._window(*((epoch, number + 1) if number + 1 < self.order.windows else (epoch + 1, 0)))
        return (
            np.concatenate(epochs),
            np.concatenate(records),
            {name: np.concatenate([part[name] for part in arrays]) for name in arrays[0]},
        )

    def close(self) -> None:
        """Ends the threads after the requests that they have begun, without waiting. Cancels the others: `rows` that
        waits for one raises CancelledError."""
        self._workers.close()

    def _window(self, epoch: int, number: int) -> _Window:
        """Returns a window; creates a new one, requests its blocks, and drops the window used longest ago beyond
        WINDOWS_KEPT, with its requests. The caller holds the lock."""
        window = self._windows.get((epoch, number))
        if window is None:
            cells = np.flatnonzero(cells_of_rows(self.order, self.batch, epoch, number, self.first, self.last))
            records = self.order.window(epoch, number)[cells]
            previous = next(reversed(self._windows.values()), None)
            window = _Window(self.source, cells, records, self.order.block, self._workers, previous)
            self._windows[epoch, number] = window
            while len(self._windows) > WINDOWS_KEPT:
                _, oldest = self._windows.popitem(last=False)
                oldest.cancel()
        self._windows.move_to_end((epoch, number))
        return window


class _Window:
    """This host's records of one window. `cells`: their cells, ascending (n,); `records`: their numbers (n,)."""

    def __init__(
        self, source: RecordSource, cells: Ints, records: Ints, block: int, pool: DaemonPool, previous: _Window | None
    ) -> None:
        """Has the threads of `pool` read the blocks, of `block` records, that hold `records`, in the order of first
        use; or takes the arrays of a complete `previous` window with the same blocks."""
        self.cells, self.records = cells, records
        self.complete: bool
        self._arrays: Arrays
        self._futures: dict[int, Future[None]] = {}  # by block; a request is of several
        self._source, self._block = source, block
        # The blocks (blocks,), where each is first used (blocks,), and which of them each record is in (n,).
        needed, first_use, slot = np.unique(records // block, return_index=True, return_inverse=True)
        self._needed = needed
        if previous is not None and previous.complete and np.array_equal(previous._needed, needed):
            # A dataset that fits into one window needs the same blocks in every epoch: reuse them.
            self._arrays, self._location, self.complete = previous._arrays, slot * block + records % block, True
            return
        self._arrays = source.empty(len(needed) * block)
        self._location = slot * block + records % block  # (n,) rows of the arrays
        self.complete = not len(needed)
        runs = _runs(needed, max(1, RUN_BYTES // (block * source.record_bytes)))
        for slots in sorted(runs, key=lambda slots: int(first_use[slots].min())):
            future = pool.submit(self._load, int(needed[slots[0]]), int(needed[slots[-1]]) + 1, int(slots[0]))
            self._futures.update(dict.fromkeys(slots.tolist(), future))

    def gather(self, low: int, high: int) -> Arrays:
        """Waits for the blocks of the records at [low, high) of `records`. Returns feature -> (high - low, ...). Raises
        the error of a request that failed, CancelledError if it was cancelled."""
        location = self._location[low:high]
        if not self.complete:
            for slot in np.unique(location // self._block).tolist():
                self._futures[slot].result()
            self.complete = all(
                future.done() and not future.cancelled() and not future.exception() for future in self._futures.values()
            )
        return {name: values.take(location, axis=0) for name, values in self._arrays.items()}

    def cancel(self) -> None:
        """Cancels the requests that have not started."""
        for future in self._futures.values():
            future.cancel()

    def _load(self, first_block: int, last_block: int, slot: int) -> None:
        """Reads blocks [first_block, last_block) into the arrays from block number `slot` on."""
        first, last = first_block * self._block, min(last_block * self._block, self._source.records)
        for name, values in self._source.read(first, last, self._block).items():
            self._arrays[name][slot * self._block : slot * self._block + last - first] = values


def _runs(needed: Ints, longest: int) -> list[Ints]:
    """Divides ascending block numbers into runs of neighbours, at most `longest` each; returns their places in `needed`
    for each run."""
    places = np.arange(len(needed))
    begins = np.diff(needed, prepend=-2) != 1  # of a row of neighbours
    within = places - np.maximum.accumulate(np.where(begins, places, 0))
    return [run for run in np.split(places, np.flatnonzero(within % longest == 0)) if len(run)]


T = TypeVar("T")


def read_once(source: RecordSource, host_slice: HostSlice, threads: int) -> Iterator[tuple[Ints, Arrays]]:
    """Yields records (n,) and feature -> (n, ...) of this host's rows of each batch of one pass in record order; the
    last batch may be short, with no row for some hosts. Every host reads all records, in requests of whole batches.
    Raises BadInput, StorageError."""
    batch, (first, last) = host_slice.global_batch_size, host_slice.rows()
    together = batch * max(1, RUN_BYTES // (batch * source.record_bytes))

    def read(number: int) -> Arrays:
        return source.read(number * together, min((number + 1) * together, source.records), together)

    threads = max(1, min(threads, AHEAD_BYTES // (together * source.record_bytes)))
    with contextlib.closing(prefetch(read, 0, threads, stop=-(-source.records // together), threads=threads)) as parts:
        for start in range(0, source.records, batch):
            if start % together == 0:
                part = next(parts)
            stop = min(start + last, source.records)
            place = start % together
            rows = {name: values[place + first : place + stop - start] for name, values in part.items()}
            yield np.arange(min(start + first, stop), stop), rows


def prefetch(
    function: Callable[[int], T], start: int, depth: int, *, stop: int | None = None, threads: int = 1
) -> Generator[T, None, None]:
    """Yields function(start), function(start + 1), ..., up to `stop` if that is given, computed at most `depth` values
    ahead by daemon threads, which start with the first `next`. Only they call the function; its exception is raised
    when its value is due. Closing the iterator ends the threads after their current calls."""
    pool, waiting = DaemonPool(threads, "prefetch"), deque[Future[T]]()
    try:
        for number in itertools.count(start) if stop is None else range(start, stop):
            waiting.append(pool.submit(function, number))
            if len(waiting) > depth:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.close()


class DaemonPool:
    """A pool of daemon threads. concurrent.futures' pool joins its threads at exit, so a bucket that does not answer
    would keep the process from ending."""

    def __init__(self, threads: int, name: str) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Queues the function for a thread, which skips it if the future is cancelled, and returns its future, which is
        cancelled after `close`."""
        future = Future[T]()

        def task() -> None:
            if self._is_closed:
                future.cancel()
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(*arguments))
            except BaseException as error:
                future.set_exception(error)

        self._tasks.put(task)
        if self._is_closed:  # maybe no thread takes it any more
            future.cancel()
        return future

    def close(self) -> None:
        """Ends the threads after the tasks that they have begun, without waiting; the first to be free cancels the
        other tasks, whose futures are pending until then."""
        self._is_closed = True
        for _ in self._threads:
            self._tasks.put(None)

    def _work(self) -> None:
        """Runs tasks until it takes one of the None that `close` queues."""
        while task := self._tasks.get():
            task()
            del task  # its error's traceback holds the caller
