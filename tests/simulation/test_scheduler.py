"""The simulators' scheduler: a run is a function of its seed, and a killed process does nothing more."""

import random

import pytest

from tests.simulation.scheduler import Killed, Process, Scheduler, SimulatedClock, SimulatedThreads, Stuck


@pytest.fixture
def scheduler():
    return Scheduler(random.Random(0))


def run_tasks(seed: int) -> list[str]:
    scheduler = Scheduler(random.Random(seed))
    threads, clock = SimulatedThreads(scheduler), SimulatedClock(scheduler)
    items, lines = threads.queue(2), list[str]()

    def produce(name: str) -> None:
        for number in range(5):
            clock.sleep(scheduler.random.random())
            items.put(f"{name}{number}")

    def consume() -> None:
        while (item := items.get(timeout=3)) is not None:
            lines.append(f"{scheduler.now:.6f} {item}")
        lines.append("empty")

    for name in "abc":
        scheduler.spawn(produce, name, name=name)
    scheduler.spawn(consume, name="consumer")
    scheduler.run(seconds=100)
    return lines


def test_a_run_is_a_function_of_its_seed():
    assert run_tasks(1) == run_tasks(1)
    assert run_tasks(1) != run_tasks(2)
    expected = [*(f"{name}{number}" for name in "abc" for number in range(5)), "empty"]
    assert sorted(line.split()[-1] for line in run_tasks(3)) == expected


def test_a_killed_process_does_nothing_more_even_while_it_unwinds(scheduler):
    threads, done = SimulatedThreads(scheduler), list[str]()
    process = Process("victim")

    def victim() -> None:
        try:
            threads.event().wait(50)
            done.append("lived on")
        finally:
            scheduler.sleep(1)
            done.append("cleaned up")

    def stubborn() -> None:
        try:
            scheduler.sleep(50)
        except BaseException:
            scheduler.sleep(1)
            done.append("caught it")

    tasks = [scheduler.spawn(function, name="main", process=process) for function in (victim, stubborn)]
    scheduler.call_at(10, lambda: scheduler.kill(process))
    scheduler.run(seconds=100)
    assert done == []
    assert not any(task.is_alive() for task in tasks)


def test_a_process_that_kills_itself_stops_at_once(scheduler):
    done, process = list[str](), Process("victim")

    def leave() -> None:
        with pytest.raises(Killed):
            scheduler.kill(process)
        scheduler.sleep(1)
        done.append("lived on")

    scheduler.spawn(leave, name="main", process=process)
    scheduler.run(seconds=100)
    assert done == []


def test_time_goes_on_for_a_frozen_process(scheduler):
    process, times = Process("sleeper"), list[float]()

    def sleeper() -> None:
        for _ in range(3):
            scheduler.sleep(1)
            times.append(scheduler.now)

    scheduler.spawn(sleeper, name="main", process=process)
    scheduler.call_at(1.5, lambda: scheduler.freeze(process))
    scheduler.call_at(60, lambda: scheduler.thaw(process))
    scheduler.run(seconds=100)
    assert times == [1, 60, 61]


def test_conditions_and_futures_behave_as_those_of_python():
    scheduler = Scheduler(random.Random(4), preempt=0.5)
    threads, results = SimulatedThreads(scheduler), list[object]()

    def main() -> None:
        results.extend(threads.map(lambda number: number * number, range(5), at_once=2))
        results.append(type(threads.submit(int, "x").exception()).__name__)
        changed, ready = threads.condition(), list[int]()

        def notify() -> None:
            scheduler.sleep(1)
            with changed:
                ready.append(1)
                changed.notify_all()

        threads.start(notify)
        with changed:
            results.append(changed.wait_for(lambda: ready, timeout=5))
            results.append(changed.wait_for(lambda: len(ready) > 1, timeout=5))
        results.append(scheduler.now)

    scheduler.spawn(main, name="main")
    scheduler.run(seconds=100)
    assert results == [0, 1, 4, 9, 16, "ValueError", [1], False, 6]


def test_a_deadlock_names_what_each_task_waits_for(scheduler):
    lock = SimulatedThreads(scheduler).lock()

    def hold() -> None:
        with lock, lock:
            pass

    task = scheduler.spawn(hold, name="main", process=Process("program"))
    with pytest.raises(Stuck, match="program/main waits for a lock that program/main holds"):
        scheduler.run(until=lambda: not task.is_alive(), seconds=100)
    scheduler.close()
    assert not task.is_alive()
