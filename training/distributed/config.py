"""The `rendezvous` section of the YAML file."""

from pydantic import Field

from training.yaml_file import Section


class RendezvousSection(Section):
    """How long hosts wait for each other before the attempt ends with the missing hosts' names."""

    start_seconds: float = Field(default=600.0, gt=0, le=30 * 86400)
    """Seconds for all hosts to connect at the start, then to open the devices, and then, at least 30 minutes, to
    compile and run the first step; the attempt ends when one takes longer. Raise it if some hosts pull their image much
    later than others."""

    seconds: float = Field(default=300.0, gt=0, le=30 * 86400)
    """Seconds for all hosts to arrive at any later barrier. After writing or reading a checkpoint in Cloud Storage, the
    time-out of storage is added: 120 s, and 1 s for each 2 MB."""

    lost_seconds: float = Field(default=4.0, ge=2, le=86400)
    """Seconds of silence of a host's network after which the host counts as lost."""
