"""The rows that this host needs, in order, read ahead.

A `Reader` joins an order (which record comes when) and a source (records by number). It works window by window (see
`training.data.sampling.order`): when a window is first touched, all blocks that hold a row of this host are requested
at once, in the order of first use, by a few threads; neighbouring blocks are one request. When the last block is there,
the next window is begun. A batch waits only for the blocks that it needs. A dataset that fits into one window is read
once, not once an epoch.

Memory: at most three windows of this host's rows (the one before, in case a batch spans two; the current; the next),
each about order.WINDOW_BLOCKS * order.BLOCK_BYTES = 64 MB over the number of hosts, and one request a thread.

Failures: an error of a thread is raised by the first `rows` that needs its block, as it is; every request has the
deadline of training.storage.gcs.
"""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np

from training.data.loading.shards import Arrays, Source
from training.data.sampling.order import Ints, Order, Shuffled, cells_of_rows, stretches

RUN_BYTES = 4 << 20
WINDOWS_KEPT = 3


class Reader:
    """Rows [first, last) of each global batch of `batch` rows. Thread-safe; `close` it, or use it in a `with` block."""

    def __init__(self, source: Source, order: Order, batch: int, first: int, last: int, *, threads: int = 8) -> None:
        self.source, self.order, self.batch, self.first, self.last = source, order, batch, first, last
        self._windows: OrderedDict[tuple[int, int], _Window] = OrderedDict()
        self._lock = threading.Lock()
        self._workers = _Workers(threads)

    def rows(self, start: int, stop: int) -> tuple[Ints, Ints, Arrays]:
        """This host's rows among the places [start, stop): epochs (n,), records (n,), feature -> (n, ...)"""
        epochs, records, parts = [], [], []
        for stretch in stretches(self.order.geometry, start, stop):
            with self._lock:
                window = self._window(stretch.epoch, stretch.number)
            low, high = np.searchsorted(window.cells, (stretch.start, stretch.stop))
            parts.append(window.gather(int(low), int(high)))
            records.append(window.records[low:high])
            epochs.append(np.full(high - low, stretch.epoch, np.int64))
            following = self._after(stretch.epoch, stretch.number)
            if window.complete and following:
                with self._lock:
                    self._window(*following)
        if len(parts) == 1:
            return epochs[0], records[0], parts[0]
        return (
            np.concatenate(epochs),
            np.concatenate(records),
            {name: np.concatenate([part[name] for part in parts]) for name in parts[0]},
        )

    def close(self) -> None:
        """Ends the threads; requests under way are abandoned."""
        self._workers.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _after(self, epoch: int, number: int) -> tuple[int, int] | None:
        """The window that comes next; after one pass of evaluation, none."""
        if number + 1 < self.order.geometry.windows:
            return epoch, number + 1
        return (epoch + 1, 0) if isinstance(self.order, Shuffled) else None

    def _window(self, epoch: int, number: int) -> _Window:
        found = self._windows.get((epoch, number))
        if found is None:
            cells = np.flatnonzero(cells_of_rows(self.order, self.batch, epoch, number, self.first, self.last))
            records = self.order.window(epoch, number)[cells]
            last = next(reversed(self._windows.values()), None)
            found = _Window(self.source, cells, records, self.order.geometry.block, self._workers, last)
            self._windows[epoch, number] = found
            while len(self._windows) > WINDOWS_KEPT:
                _, old = self._windows.popitem(last=False)
                old.cancel()
        self._windows.move_to_end((epoch, number))
        return found


class _Window:
    """This host's records of one window. `cells` are their places in it, ascending; `records` their numbers; both
    (n,)."""

    def __init__(
        self, source: Source, cells: Ints, records: Ints, block: int, workers: _Workers, last: _Window | None
    ) -> None:
        self.cells, self.records = cells, records
        self.complete: bool
        self._arrays: Arrays
        self._futures: list[Future[None]] = []
        self._source, self._block = source, block
        needed, first_use, slot = np.unique(
            records // block, return_index=True, return_inverse=True
        )  # (blocks,), (blocks,), (n,)
        self._needed = needed
        if last is not None and last.complete and np.array_equal(last._needed, needed):
            # A dataset that fits into one window needs the same blocks in every epoch: they are here.
            self._arrays, self._location, self.complete = last._arrays, slot * block + records % block, True
            return
        self._arrays = source.empty(len(needed) * block)
        self._location = slot * block + records % block  # (n,) rows of the arrays
        self._run_of_slot = _runs(needed, max(1, RUN_BYTES // (block * source.record_bytes)))
        self._futures = [Future() for _ in range(int(self._run_of_slot[-1]) + 1 if len(needed) else 0)]
        self.complete = not self._futures
        runs = np.split(np.arange(len(needed)), np.flatnonzero(np.diff(self._run_of_slot)) + 1)
        for number in sorted(range(len(self._futures)), key=lambda number: int(first_use[runs[number]].min())):
            slots = runs[number]
            workers.submit(
                self._futures[number], self._load, int(needed[slots[0]]), int(needed[slots[-1]]) + 1, int(slots[0])
            )

    def gather(self, low: int, high: int) -> Arrays:
        """Records number low .. high-1 of this window, waiting for their blocks."""
        location = self._location[low:high]
        if not self.complete:
            for run in np.unique(self._run_of_slot[location // self._block]):
                self._futures[run].result()
            self.complete = all(
                future.done() and not future.cancelled() and not future.exception() for future in self._futures
            )
        return {name: values.take(location, axis=0) for name, values in self._arrays.items()}

    def cancel(self) -> None:
        """Drops what has not been begun."""
        for future in self._futures:
            future.cancel()

    def _load(self, first_block: int, last_block: int, slot: int) -> None:
        first, last = first_block * self._block, min(last_block * self._block, self._source.records)
        for name, values in self._source.read(first, last, self._block).items():
            self._arrays[name][slot * self._block : slot * self._block + last - first] = values


def _runs(needed: Ints, longest: int) -> Ints:
    """Which run each of the ascending block numbers belongs to: a run is at most `longest` neighbours. (blocks,)"""
    run = np.zeros(len(needed), np.int64)
    number = size = 0
    for at in range(1, len(needed)):
        size = size + 1 if needed[at] == needed[at - 1] + 1 and size + 1 < longest else 0
        number += size == 0
        run[at] = number
    return run


class _Workers:
    """Daemon threads, so that a silent bucket can't hold up the end of the process (concurrent.futures' pool joins its
    threads at exit)."""

    def __init__(self, threads: int) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"reader-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, future: Future[None], function: Callable[..., None], *arguments: int) -> None:
        """Runs the function on a thread, unless the future has been cancelled by then."""

        def task() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                function(*arguments)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)

        self._tasks.put(task)

    def close(self) -> None:
        for _ in self._threads:
            self._tasks.put(None)

    def _work(self) -> None:
        while task := self._tasks.get():
            task()
