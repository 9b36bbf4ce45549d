"""The `data` section of the YAML file."""

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

    on_corrupt: Literal["stop", "skip"] = "stop"
    """Handling of a record with a wrong checksum: `stop` ends the run and names the record; `skip` replaces it by
    another one, always the same, and reports at the end how many rows of the attempt's steps were replaced."""
