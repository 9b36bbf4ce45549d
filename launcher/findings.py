"""The result of a check, the same for `doctor` and `doctor --devices`."""

import enum
from collections.abc import Iterable
from dataclasses import dataclass


class Severity(enum.Enum):
    """How much a finding matters."""

    PASS = "PASS"
    WARN = "WARN"  # may be fine: the user decides
    FAIL = "FAIL"  # a run can't work


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    where: str
    """The thing that was checked: "ssh key", "host 3", "slice"."""

    severity: Severity

    message: str

    fix: str = ""
    """The remedy: a command, or a sentence where no command would do."""

    @property
    def fatal(self) -> bool:
        return self.severity is Severity.FAIL


def ok(where: str, message: str) -> Finding:
    return Finding(where, Severity.PASS, message)


def warning(where: str, message: str, fix: str = "") -> Finding:
    return Finding(where, Severity.WARN, message, fix)


def failure(where: str, message: str, fix: str = "") -> Finding:
    return Finding(where, Severity.FAIL, message, fix)


def any_fatal(findings: Iterable[Finding]) -> bool:
    return any(finding.fatal for finding in findings)
