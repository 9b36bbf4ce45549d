"""The `rendezvous` section of the YAML file."""

from __future__ import annotations

from pydantic import Field

from training.yaml_file import Section


class Rendezvous(Section):
    """How long hosts wait for each other before the attempt ends with the missing hosts' names."""

    start_seconds: float = Field(default=600.0, gt=0, le=30 * 86400)
    """For all hosts to appear at the start. Raise it when some hosts pull their image much later than others."""

    seconds: float = Field(default=300.0, gt=0, le=30 * 86400)
    """For all hosts to arrive anywhere else, for example at the end of a save. Raise it when a host's part of a
    checkpoint takes longer to write."""

    lost_seconds: float = Field(default=4.0, ge=2, le=86400)
    """How long a host's network may be silent before the host counts as lost."""
