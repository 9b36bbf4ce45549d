"""Deterministic cooperative tasks over a virtual clock, on which both simulators rest.

Blocking code runs unchanged, each task in a greenlet of one thread. A task runs until it blocks in a primitive of this
file; then the scheduler picks the next runnable task by the random numbers of the seed. If no task can run, the clock
jumps to the next timer. The same seed gives the same simulated run, line by line.

Every task belongs to a `Process`, which can be killed (none of its tasks runs any more: `Killed` unwinds their stacks,
and any blocking call meanwhile raises it again), frozen and thawed (time goes on meanwhile).

`SimulatedClock` and `SimulatedThreads` implement `training.machine.Clock` and `training.machine.Threads`.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from greenlet import getcurrent, greenlet

from training.machine import Clock, Threads

Function = Callable[..., Any]
PREEMPT = 0.1  # probability that another task runs first when a task sets an event, starts a task, and the like


class Killed(BaseException):
    """Unwinds the tasks of a killed process. No code of a program may act on it."""


class Stuck(Exception):
    """A simulated run does not end. The message names the tasks and what each waits for."""


class Process:
    """A unit that is killed and frozen: a program on a host, or a part of the world."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive, self.frozen = True, False
        self.tasks: dict[Task, None] = {}
        self.held: list[Task] = []  # runnable, but the process is frozen
        self.enter: Callable[[], None] | None = None  # called before its tasks run: sets its environment, for example

    def __repr__(self) -> str:
        return self.name


class Task:
    """A thread of a process, a training.machine.Thread."""

    def __init__(self, scheduler: Scheduler, function: Function, args: tuple[Any, ...], name: str, process: Process):
        self.name, self.process, self.daemon = name, process, True
        self.error: BaseException | None = None  # that ended it
        self.result: Any = None
        self.waits_for = ""
        self._scheduler, self._function, self._args = scheduler, function, args
        self._greenlet = greenlet(self._run, scheduler.hub)
        self._outcome: Any = None  # of the last wait
        self._waits: dict[Task, None] | None = None  # the waiters that contain it
        self._generation = 0  # counts its waits: a timer of an earlier wait is void
        self._interruption: BaseException | None = None  # raised when it runs next
        self._done = False
        self._joining: dict[Task, None] = {}

    def is_alive(self) -> bool:
        return not self._done

    def join(self, timeout: float | None = None) -> None:
        self._scheduler.wait_until(lambda: self._done, self._joining, timeout, f"the end of {self.name}")

    def _run(self) -> None:
        try:
            self.result = self._function(*self._args)
        except Killed:
            pass
        except BaseException as error:
            self.error = error
            if self.process.alive:
                self._scheduler.crashed.append(self)
        finally:
            self._done = True
            self.process.tasks.pop(self, None)
            self._scheduler.wake_all(self._joining)

    def __repr__(self) -> str:
        return f"{self.process}/{self.name}"


class Scheduler:
    def __init__(self, randomness: random.Random, now: float = 0.0, preempt: float = PREEMPT) -> None:
        """`randomness` decides which task runs next, and, as often as `preempt` says, when none need wait."""
        self.random, self.now, self.preempt = randomness, now, preempt
        self.hub = getcurrent()
        self.world = Process("world")
        self.current: Task | None = None
        self._running: Process | None = None  # the last process that ran
        self.crashed: list[Task] = []  # tasks ended by an exception
        self.steps = 0
        self.trace: list[str] | None = None  # lines, if wanted
        self.processes: dict[Process, None] = {}  # all that ever had a task
        self._ready: list[Task] = []
        self._dying: list[Task] = []
        self._timers: list[tuple[float, int, Task | Function, int]] = []
        self._numbers = itertools.count()

    # --- the run

    def run(self, until: Callable[[], bool] | None = None, *, seconds: float, steps: int = 1_000_000) -> None:
        """Runs tasks until `until()` is true; without it, until no task can ever run again.

        Raises:
            Stuck: The clock passed `seconds`, the run took `steps`, or all tasks wait for each other.
        """
        ready, rand = self._ready, self.random.random
        while until is None or not until():
            while self._dying:
                self._unwind(self._dying.pop())
            if not ready and not self._fire_timers():
                if until is None:
                    return
                raise Stuck(f"all tasks wait for each other: {self.describe()}")
            if not ready:
                continue
            self.steps += 1
            if self.now > seconds or self.steps > steps:
                raise Stuck(f"still running after {self.now:.0f} s and {self.steps} steps: {self.describe()}")
            index = int(rand() * len(ready))
            task = ready[index]
            last = ready.pop()
            if last is not task:
                ready[index] = last
            self._enter(task)
            task._greenlet.switch()
            self.current = None

    def close(self) -> None:
        """Unwinds all tasks that are left. Call it at the end of each run."""
        for process in self.processes:
            self.kill(process)
        while self._dying:
            self._unwind(self._dying.pop())

    def note(self, text: str) -> None:
        if self.trace is not None:
            who = self.current.process.name if self.current else "world"
            self.trace.append(f"{self.now:10.3f}  {who:<16} {text}")

    def describe(self) -> str:
        """Returns what each task waits for."""
        lines = [f"{task} waits for {task.waits_for or '?'}" for process in self.processes for task in process.tasks]
        return "; ".join(lines) or "no task is left"

    # --- processes

    def spawn(self, function: Function, *args: Any, name: str, process: Process | None = None) -> Task:
        """Starts a task, in the process of the current task unless one is given."""
        if process is None:
            process = self.current.process if self.current else self.world
        if not process.alive:
            raise Killed
        task = Task(self, function, args, name, process)
        process.tasks[task] = None
        self.processes[process] = None
        self._make_ready(task)
        return task

    def kill(self, process: Process) -> None:
        """Ends a process at once: none of its tasks runs any more. Raises Killed in the process's own task."""
        if process.alive:
            process.alive = False
            self._dying += [task for task in process.tasks if task is not self.current]
            process.held.clear()
        if self.current is not None and self.current.process is process:
            raise Killed

    def freeze(self, process: Process) -> None:
        """Stops a process until `thaw`; time goes on."""
        process.frozen = True
        mine = [task for task in self._ready if task.process is process]
        self._ready[:] = [task for task in self._ready if task.process is not process]
        process.held += mine
        if self.current is not None and self.current.process is process:
            self.pause()

    def thaw(self, process: Process) -> None:
        """Resumes a frozen process."""
        process.frozen = False
        self._ready += process.held
        process.held.clear()

    def interrupt(self, task: Task, error: BaseException) -> None:
        """Raises `error` in a waiting task: Ctrl-C, for example."""
        if not task._done and task is not self.current:
            task._interruption = error
            if task not in self._ready and task not in task.process.held:
                self._wake(task, False)

    # --- blocking

    def sleep(self, seconds: float) -> None:
        """Blocks the caller for `seconds`."""
        self.wait(None, max(0.0, seconds), "time to pass")

    def pause(self) -> None:
        """Lets other tasks run first; the caller stays runnable."""
        self.check_alive()
        if (task := self.current) is not None:
            task._generation += 1
            self._make_ready(task)
            self.hub.switch()
            self._resumed(task)

    def maybe_pause(self) -> None:
        """Pauses with probability `preempt`, as an operating system may preempt a thread."""
        if self.current is not None and (not self.current.process.alive or self.random.random() < self.preempt):
            self.pause()

    def wait(self, waiters: dict[Task, None] | None, timeout: float | None, what: str = "") -> bool:
        """Blocks the caller until it is woken, at most `timeout` seconds. Returns whether it was woken.

        Args:
            waiters: Through which `wake` finds it; None to wait for the time only.
            timeout: None for no limit.
            what: A description of what it waits for.
        """
        task = self.current
        assert task is not None, f"the scheduler itself can't wait for {what}"
        self.check_alive()
        task._generation += 1
        if waiters is not None:
            waiters[task] = None
        task._waits, task.waits_for = waiters, what
        if timeout is not None:
            heapq.heappush(self._timers, (self.now + timeout, next(self._numbers), task, task._generation))
        self.hub.switch()
        self._resumed(task)
        task.waits_for = ""
        return bool(task._outcome)

    def wait_until(self, is_so: Callable[[], Any], waiters: dict[Task, None], timeout: float | None, what: str) -> Any:
        """Blocks the caller until `is_so()`, asked at each `wake`, at most `timeout` seconds. Returns the answer."""
        deadline = self.now + (timeout or 0.0)
        while not (answer := is_so()):
            if not self.wait(waiters, None if timeout is None else max(0.0, deadline - self.now), what):
                return is_so()
        return answer

    def wake(self, waiters: dict[Task, None], count: int = 1) -> None:
        """Wakes the `count` tasks that have waited longest."""
        while waiters and count:
            self._wake(next(iter(waiters)), True)
            count -= 1

    def wake_all(self, waiters: dict[Task, None]) -> None:
        for task in list(waiters):
            self._wake(task, True)

    def call_at(self, when: float, function: Callable[[], None]) -> None:
        """Calls a function, which must not block, at a time."""
        heapq.heappush(self._timers, (when, next(self._numbers), function, 0))

    def check_alive(self) -> None:
        """Raises Killed in a task of a killed process. For operations of the world that do not block."""
        if self.current is not None and not self.current.process.alive:
            raise Killed

    # --- inside

    def _resumed(self, task: Task) -> None:
        self.current = task
        if not task.process.alive:
            raise Killed
        if task._interruption is not None:
            interruption, task._interruption = task._interruption, None
            raise interruption

    def _enter(self, task: Task) -> None:
        self.current = task
        if task.process is not self._running:
            self._running = task.process
            if task.process.enter is not None:
                task.process.enter()

    def _make_ready(self, task: Task) -> None:
        (task.process.held if task.process.frozen else self._ready).append(task)

    def _wake(self, task: Task, outcome: bool) -> None:
        if task._waits is not None:
            task._waits.pop(task, None)
            task._waits = None
        task._generation += 1
        task._outcome = outcome
        if task.process.alive:
            self._make_ready(task)

    def _fire_timers(self) -> bool:
        """Moves the clock to the next timer and fires it. Returns whether there was one."""
        timers = self._timers
        while timers:
            when, _, subject, generation = heapq.heappop(timers)
            if isinstance(subject, Task):
                if subject._generation != generation or subject._done or not subject.process.alive:
                    continue
                self.now = max(self.now, when)
                self._wake(subject, False)
            else:
                self.now = max(self.now, when)
                subject()
            return True
        return False

    def _unwind(self, task: Task) -> None:
        """Ends a task of a killed process. Any blocking call while its stack unwinds raises Killed again."""
        if task in self._ready:
            self._ready.remove(task)
        if task._waits is not None:
            task._waits.pop(task, None)
            task._waits = None
        self._enter(task)
        if not task._greenlet:  # it never ran, or it has ended
            task._done = True
            task.process.tasks.pop(task, None)
        while task._greenlet:
            task._greenlet.throw(Killed)
        self.current = None


class SimulatedClock(Clock):
    """The clock of a host: virtual time from an origin of its own, and a wall clock that may be wrong."""

    def __init__(self, scheduler: Scheduler, *, started: float = 0.0, wall: float = 1_800_000_000.0) -> None:
        """`started`: virtual time at which `monotonic` was 0; `wall`: Unix time at virtual time 0, to be changed."""
        self._scheduler, self.started, self.wall = scheduler, started, wall

    def monotonic(self) -> float:
        return self._scheduler.now - self.started

    def time(self) -> float:
        return self._scheduler.now + self.wall

    def sleep(self, seconds: float) -> None:
        self._scheduler.sleep(seconds)


class Event:
    def __init__(self, scheduler: Scheduler, name: str = "an event") -> None:
        self._scheduler, self._name = scheduler, name
        self._is_set, self._waiters = False, dict[Task, None]()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._scheduler.wake_all(self._waiters)
        self._scheduler.maybe_pause()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        return bool(self._scheduler.wait_until(self.is_set, self._waiters, timeout, self._name))


class Lock:
    """threading.Lock; `reentrant` makes it threading.RLock."""

    def __init__(self, scheduler: Scheduler, *, reentrant: bool = False) -> None:
        self._scheduler, self._reentrant = scheduler, reentrant
        self._holder: Task | None = None
        self._waiters: dict[Task, None] = {}
        self.depth = 0

    def acquire(self) -> None:
        scheduler = self._scheduler
        scheduler.maybe_pause()
        while self.depth and not (self._reentrant and self._holder is scheduler.current):
            scheduler.wait(self._waiters, None, f"a lock that {self._holder} holds")
        self._holder, self.depth = scheduler.current, self.depth + 1

    def release(self) -> None:
        self.depth -= 1
        if not self.depth:
            self._holder = None
            self._scheduler.wake(self._waiters)

    def __enter__(self) -> bool:
        self.acquire()
        return True

    def __exit__(self, *exception: object) -> None:
        self.release()


class Condition:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._lock = scheduler, Lock(scheduler, reentrant=True)
        self._waiters: dict[Task, None] = {}

    def wait(self, timeout: float | None = None) -> bool:
        depth = self._lock.depth
        for _ in range(depth):
            self._lock.release()
        try:
            return self._scheduler.wait(self._waiters, timeout, "a condition")
        finally:
            for _ in range(depth):
                self._lock.acquire()

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        deadline = self._scheduler.now + (timeout or 0.0)
        while not (result := predicate()):
            if not self.wait(None if timeout is None else max(0.0, deadline - self._scheduler.now)):
                return predicate()
        return result

    def notify_all(self) -> None:
        self._scheduler.wake_all(self._waiters)

    def __enter__(self) -> bool:
        return self._lock.__enter__()

    def __exit__(self, *exception: object) -> None:
        self._lock.release()


class Semaphore:
    def __init__(self, scheduler: Scheduler, count: int) -> None:
        self._scheduler, self._free, self._waiters = scheduler, count, dict[Task, None]()

    def __enter__(self) -> bool:
        self._scheduler.wait_until(lambda: self._free, self._waiters, None, "a semaphore")
        self._free -= 1
        return True

    def __exit__(self, *exception: object) -> None:
        self._free += 1
        self._scheduler.wake(self._waiters)


class Queue:
    def __init__(self, scheduler: Scheduler, size: int) -> None:
        self._scheduler, self._size = scheduler, size
        self._items: deque[Any] = deque()
        self._getters, self._putters = dict[Task, None](), dict[Task, None]()

    def put(self, item: Any) -> None:
        self._scheduler.check_alive()
        self._scheduler.wait_until(lambda: len(self._items) < self._size, self._putters, None, "room in a queue")
        self._items.append(item)
        self._scheduler.wake(self._getters)
        self._scheduler.maybe_pause()

    def get(self, timeout: float) -> Any | None:
        self._scheduler.check_alive()
        if timeout > 0:
            self._scheduler.wait_until(lambda: self._items, self._getters, timeout, "an item of a queue")
        if not self._items:
            return None
        item = self._items.popleft()
        self._scheduler.wake(self._putters)
        return item


class Future:
    def __init__(self, scheduler: Scheduler, function: Function, *args: Any) -> None:
        self._function, self._args = function, args
        self._ended = Event(scheduler, f"the result of {getattr(function, '__name__', function)}")
        self._result: Any = None
        self._error: BaseException | None = None
        self.done, self._wait = self._ended.is_set, self._ended.wait

    def call(self) -> None:
        """Calls the function and keeps its outcome."""
        try:
            self._result = self._function(*self._args)
        except Killed:
            raise
        except BaseException as error:
            self._error = error

    def run(self) -> None:
        """Calls the function and tells the tasks that wait."""
        self.call()
        self._ended.set()

    def exception(self) -> BaseException | None:
        self._wait()
        return self._error

    def result(self) -> Any:
        self._wait()
        return self.outcome()

    def outcome(self) -> Any:
        """Returns or raises what the function did."""
        if self._error is not None:
            raise self._error
        return self._result


class SimulatedThreads(Threads):
    """The threads of simulated programs: a task belongs to the process of the task that starts it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.lock, self.semaphore = partial(Lock, scheduler), partial(Semaphore, scheduler)
        self.condition, self.event = partial(Condition, scheduler), partial(Event, scheduler)
        self.queue = partial(Queue, scheduler)

    def start(self, function: Function, *args: Any, name: str | None = None) -> Task:
        task = self._scheduler.spawn(function, *args, name=name or getattr(function, "__name__", "thread"))
        self._scheduler.maybe_pause()
        return task

    def submit(self, function: Function, *args: Any) -> Future:
        future = Future(self._scheduler, function, *args)
        self._scheduler.spawn(future.run, name="submitted")
        return future

    def map(self, function: Callable[[Any], Any], items: Iterable[Any], at_once: int) -> list[Any]:
        calls = [Future(self._scheduler, function, item) for item in items]
        waiting = iter(calls)

        def work() -> None:
            for each in waiting:
                each.call()

        workers = [self._scheduler.spawn(work, name=f"worker {number}") for number in range(min(at_once, len(calls)))]
        for worker in workers:
            worker.join()
        return [each.outcome() for each in calls]
