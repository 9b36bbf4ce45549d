"""A clock that stands still until a test moves it."""

from training.machine.clock import SystemClock


class ManualClock(SystemClock):
    seconds = 1000.0

    def monotonic(self) -> float:
        return self.seconds

    __call__ = monotonic
