"""The `data` section of the YAML file."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from training.yaml_file import Section


class MaskingSection(Section):
    """Selects the tokens to predict in masked-language modelling (`task: mlm`)."""

    percent: int = Field(default=15, ge=1, le=100)
    """How many percent of a row's ordinary tokens are predicted."""

    predictions: int | None = Field(default=None, ge=1)
    """Static number of predicted tokens that a row has room for. Default: as many as a full row needs."""


class DataSection(Section):
    """Folders of shards (local or `gs://`), as `tpu-train shards` writes them."""

    train: str
    """The folder of the training shards."""

    evaluation: str | None = None
    """The folder of the evaluation shards. Needed for any evaluation."""

    tokenizer: str
    """A folder (local or `gs://`) with `tokenizer.json`, or `ORGANISATION/NAME` on the Hugging Face Hub. It must be the
    one that the shards were made with."""

    masking: MaskingSection = MaskingSection()
    """Selects the tokens to predict. Only for `task: mlm`."""

    cache: str | None = None
    """Absolute path of a folder that keeps what was read from `gs://` for the next epoch and the next attempt on the
    host: `tpu-launch` mounts a volume of the host's engine there, on GKE the subfolder data of gke.node_cache, without
    which it ends with the pod. Only for `task: mlm` and `causal-lm`, and `backend: torch-xla`. Use it when reading
    from the bucket limits training."""

    cache_gb: float = Field(default=40, gt=0, le=100_000)
    """GB (of 10^9 bytes) that data.cache may hold; 2 % of the disk, at least 1 GiB, stay free in any case. When it is
    full, datasets that no process reads are removed, the one used longest ago first; the rest is read from `gs://`."""

    on_corrupt: Literal["stop", "skip"] = "stop"
    """Handling of a record with a wrong checksum: `stop` ends the run and names the record; `skip` replaces it by
    another one, always the same, and reports at the end how many rows of the attempt's steps were replaced."""
