"""The slice of every global batch that one host reads, and the options that all of its readers share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from training.data.loading.record_source import OnCorrupt
from training.data.sampling.masking import SpecialTokens
from training.data.sampling.order import host_rows
from training.errors import BadInput


@dataclass(frozen=True)
class HostSlice:
    """One host's part of each global batch. Used by the numpy and the TensorFlow pipeline.

    Attributes:
        tokenizer: the special tokens and the vocabulary of the tokenizer that wrote the ids.
        global_batch_size: rows of a batch, over all hosts.
        host: this host's number, 0 .. hosts-1.
        hosts: how many hosts read the batch.
        on_corrupt: what to do about a damaged record.
        cache: a folder for blocks that came from a bucket. Only the numpy pipeline for masked rows uses it.
    """

    tokenizer: SpecialTokens
    global_batch_size: int
    host: int = 0
    hosts: int = 1
    on_corrupt: OnCorrupt = "stop"
    cache: Path | None = None

    def rows(self) -> tuple[int, int]:
        """The rows [first, last) of each global batch that this host holds.

        Raises:
            BadInput: the global batch can't be divided evenly among the hosts.
        """
        assert 0 <= self.host < self.hosts
        if self.global_batch_size < 1 or self.global_batch_size % self.hosts:
            raise BadInput(
                f"the global batch size {self.global_batch_size} can't be divided among {self.hosts} hosts: "
                f"use a multiple of {self.hosts}"
            )
        return host_rows(self.global_batch_size, self.host, self.hosts)
