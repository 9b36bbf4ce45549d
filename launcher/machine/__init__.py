"""The machine that the launcher runs on: everything through which its code acts on the outside, as one value.

`cli` makes one (`launcher.providers.this_machine`) and passes it down. No code below it uses `time`, `threading`,
`queue`, `subprocess` or `random` itself (ruff's banned-api holds that), so a simulation that makes its own `Machine`
decides what time it is, who runs next, and what gcloud, ssh and hosts answer. Files are not part of it: they are real.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from launcher.clock import Clock
from launcher.machine.owner import NOBODY, Owner
from launcher.machine.remote import Connect
from launcher.machine.tasks import Tasks
from launcher.shell import Result


class RunCommand(Protocol):
    """Runs a local command: `launcher.shell.run`."""

    def __call__(
        self,
        argv: Sequence[str],
        *,
        timeout: float,
        input: str | bytes | None = None,
        on_start: Callable[[Callable[[], None]], None] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> Result:
        """As `launcher.shell.run`."""


@dataclass(frozen=True)
class Machine:
    """Where time, concurrency, processes, connections and randomness come from, and who works there."""

    clock: Clock
    tasks: Tasks
    run: RunCommand
    connect: Connect
    random: random.Random
    owner: Owner = NOBODY
    """Who works at it: what is created from here carries their labels."""
