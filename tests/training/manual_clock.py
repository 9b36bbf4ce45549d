"""A clock that stands still until a test moves it."""


class ManualClock:
    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds
