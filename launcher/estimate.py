"""Estimates the hours and dollars of a run on each candidate, before anything is rented. Compiles nothing.

The bound on a step's time comes from the compiler (a kept preflight of the type), else from another type's preflight,
whose FLOPs and bytes are spread over the type's devices, else from the model's sizes. The range is that bound divided
by shares of it that runs reached: measured ones, of attempts in this folder on the same type, else on other types, else
published ones. Emulated runs have a folder of their own, so their shares concern emulated runs only.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher import costs
from launcher.checks import preflight
from launcher.config import Candidate, Config
from launcher.errors import BadInput, LaunchError
from launcher.run import events, specification
from launcher.run.session import list_runs
from launcher.tpu_vm.requests import RequestRecord, median_seconds_to_grant
from launcher.workstation import Workstation
from training import storage
from training.accelerators import Accelerator, accelerator
from training.data.formats.dataset import MANIFEST, load_manifest
from training.errors import TrainError

PUBLISHED = (0.21, 0.71)
PUBLISHED_SOURCE = "published: 21 % (github.com/marin-community/marin) to 71 % of the peak (MLPerf's BERT on v4-128)"
_MARGIN, _MARGIN_OF_ONE = 0.1, 0.5  # around measured shares: attempts differ, and few show little of how much
_STATE_BYTES = 28  # that one step of AdamW reads and writes for each parameter: weight, gradient, two moments in fp32


Range = tuple[float, float] | None  # least and most; None: unknown


@dataclass(frozen=True)
class Bound:
    """The least seconds that a step takes, and where that comes from."""

    seconds: float
    source: str


@dataclass(frozen=True)
class Shares:
    """Shares of the bound's speed that runs have reached."""

    low: float
    high: float
    source: str


@dataclass(frozen=True)
class Estimate:
    """A run on one candidate."""

    candidate: Candidate
    fits: bool | None  # None: not compiled yet
    bound: Bound | None
    shares: Shares
    hours: Range
    spot: Range
    on_demand: Range
    wait_seconds: float | None  # from a request to its grant, as recorded here

    @property
    def finish(self) -> float:
        """Returns hours to the end: the middle of the range, and the known wait for capacity; infinity if unknown."""
        return math.inf if self.hours is None else sum(self.hours) / 2 + (self.wait_seconds or 0.0) / 3600


def estimate(config: Config, home: Path, machine: Workstation) -> list[Estimate]:
    """Returns an estimate for each type and zone of the candidates; the wait is that of the first capacity there. Reads
    `home`, the datasets' manifests and the tokenizer, and hashes the image's files. Raises BadInput without trainer's
    sections, Dockerfile or CA bundle."""
    if config.trainer is None:
        raise BadInput(
            f"{config.document.name}: has no trainer's sections, and only the trainer's step can be estimated"
        )
    record, measured, found = RequestRecord(config).read(), list(_measured(home, machine)), {}
    for candidate in config.all_candidates:
        if (place := (candidate.accelerator_type, candidate.zone)) in found:
            continue
        placed = config.placed(candidate)
        kept = preflight.known(placed, home)
        bound = step_bound(placed, home, kept)
        hours, shares = None, choose_shares(candidate.accelerator_type, measured)
        if bound is not None:
            least = bound.seconds * config.trainer.train.steps / 3600
            hours = (least / shares.high, least / shares.low)
        found[place] = Estimate(
            candidate,
            bool(kept["fits"]) if kept else None,
            bound,
            shares,
            hours,
            _dollars(candidate, "spot", hours),
            _dollars(candidate, "on-demand", hours),
            median_seconds_to_grant([request for request in record if request.candidate == candidate]),
        )
    return list(found.values())


def _dollars(candidate: Candidate, capacity: str, hours: Range) -> Range:
    """Returns the least and the most dollars for `hours`; None if these or the price are unknown."""
    price = costs.per_hour(candidate.accelerator_type, candidate.zone, capacity)
    return None if price is None or hours is None else (price * hours[0], price * hours[1])


# -- the bound --------------------------------------------------------------------------------------------------------


def step_bound(config: Config, home: Path, kept: dict[str, Any] | None = None) -> Bound | None:
    """Returns the least seconds of a training step on the configuration's accelerator, with their source: its preflight
    (`kept`; None: the one in `home`), else another type's in `home`, else the model's sizes; None without all these.
    Call it with trainer's sections only. Reads and raises as `preflight.known`."""
    assert config.trainer is not None
    batch, target = config.trainer.train.global_batch_size, config.accelerator
    kept = kept or preflight.known(config, home)
    if kept is not None and (graph := _training_graph(kept)) is not None:
        return Bound(batch / graph["costs"]["examples_per_second"], "compiled")
    for name, other in preflight.known_elsewhere(config, home).items():
        if (graph := _training_graph(other)) is not None:
            devices = accelerator(name).devices
            rows = batch / graph["rows"]
            flops, byte_count = (graph["costs"][key] * devices * rows for key in ("flops", "bytes"))
            return Bound(_roofline(flops, byte_count, target), f"from the compiler's figures for {name}")
    return _bound_by_sizes(config)


def _training_graph(result: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the training program with the fewest examples/s of a preflight's result, even one that compiled and does
    not fit in memory beside the state; None if none compiled."""
    graphs = [graph for graph in result["graphs"] if graph["kind"] == "training" and graph["costs"]]
    return min(graphs, key=lambda graph: graph["costs"]["examples_per_second"], default=None)


def _roofline(flops: float, byte_count: float, target: Accelerator) -> float:
    """Returns the seconds of all devices' work on a slice at the published peaks: of FLOPs or of bytes, the longer."""
    generation = target.generation
    return max(
        flops / (generation.bf16_flops_per_chip * target.chips),
        byte_count / (generation.hbm_bytes_per_second_per_chip * target.chips),
    )


def _bound_by_sizes(config: Config) -> Bound | None:
    """Returns the least seconds of a step, the longer of two: for the FLOPs, six for each token and parameter of the
    layers and, for mlm, for each masked token and parameter of the embedding (arxiv.org/abs/2001.08361), and for the
    bytes of the optimizer's state, whole on each device. Reads the dataset's manifest; None without that or a named
    model."""
    assert config.trainer is not None
    trainer = config.trainer
    if trainer.model.name is None:
        return None
    try:
        url = trainer.data.train
        manifest = load_manifest(storage.read(storage.join(url, MANIFEST)), url).manifest
    except (TrainError, storage.StorageError):
        return None
    width, layers, _, inner, _ = trainer.model.shape
    length, vocabulary = manifest.sequence_length, trainer.model.vocabulary_size or manifest.vocabulary
    of_layers, embedding = layers * (4 * width * width + 2 * width * inner), vocabulary * width
    places = math.ceil(length * trainer.data.masking.percent / 100) if trainer.task == "mlm" else 0  # of the head
    flops = 6.0 * trainer.train.global_batch_size * (length * of_layers + places * embedding)
    state = float(_STATE_BYTES * (of_layers + embedding) * config.accelerator.devices)  # each device has all of it
    return Bound(_roofline(flops, state, config.accelerator), "from the model's sizes, not compiled")


# -- shares -----------------------------------------------------------------------------------------------------------


def choose_shares(name: str, measured: Sequence[tuple[str, float]]) -> Shares:
    """Returns the range of the `measured` shares (type, share of the bound's speed) of attempts on the type `name`, or
    on all types if there is none, widened by a margin that narrows with their number; the published range if nothing
    was measured."""
    of_type = [share for kind, share in measured if kind == name]
    if not measured:
        return Shares(*PUBLISHED, PUBLISHED_SOURCE)
    found = of_type or [share for _, share in measured]
    margin = 1 + max(_MARGIN, _MARGIN_OF_ONE / len(found))
    count = f"{len(found)} attempt{'s'[: len(found) > 1]} on {name if of_type else 'other types'}"
    return Shares(min(found) / margin, max(found) * margin, f"measured in {count}, of this folder's runs")


def _measured(home: Path, machine: Workstation) -> Iterable[tuple[str, float]]:
    """Yields, for each ended attempt in `home` with timed steps, its type and the bound divided by a step's time; none
    without a bound, trainer's sections, or a file that this version reads and that still has its candidate. Computes a
    bound, for which it may read a bucket, once for all attempts with the same file and candidate."""
    bounds: dict[tuple[str, str, Candidate], Bound | None] = {}
    for ledger in list_runs(home, machine):
        began: dict[int, str] = {}
        for event in ledger.events():
            if isinstance(event, events.AttemptBegan):
                began[event.attempt] = event.slice
            elif isinstance(event, events.Ended) and event.step_seconds:
                try:
                    config = specification.read(ledger.folder).config()
                    if config.trainer is None:
                        continue
                    place = next(item for item in config.all_candidates if str(item) == began.get(event.attempt))
                    key = (config.document.name, config.document.dump(), place)
                    if key not in bounds:
                        bounds[key] = None  # also if the next line raises
                        bounds[key] = step_bound(config.placed(place), home)
                except (LaunchError, StopIteration):  # another version's, or the file's candidates have changed
                    continue
                if (bound := bounds[key]) is not None:
                    yield place.accelerator_type, bound.seconds / event.step_seconds


# -- in words ---------------------------------------------------------------------------------------------------------


COLUMNS = ("type", "zone", "fits", "bound", "hours", "spot", "on demand", "wait")


def row(item: Estimate) -> list[str]:
    """Returns an estimate's cells in the table with the headings COLUMNS; an unknown wait is ""."""
    fits = {True: "yes", False: "no", None: "not compiled"}[item.fits]
    bound = "unknown" if item.bound is None else f"{item.bound.seconds * 1000:.3g} ms a step"
    wait = "" if item.wait_seconds is None else costs.duration(item.wait_seconds)
    prices = [_price(item.spot), _price(item.on_demand)]
    return [item.candidate.accelerator_type, item.candidate.zone, fits, bound, _hours(item.hours), *prices, wait]


def notes(items: Sequence[Estimate]) -> list[str]:
    """Returns the lines below the table: which would finish first, where the figures come from, what is missing."""
    lines = []
    if usable := [item for item in items if item.hours is not None and item.fits is not False]:
        first = min(usable, key=lambda item: item.finish)
        lines.append(f"first to finish: {first.candidate.accelerator_type} in {first.candidate.zone}")
    for shares in dict.fromkeys(item.shares for item in items):
        names = _types(item for item in items if item.shares == shares)
        lines.append(f"hours on {names}: the bound divided by {shares.low:.2g} to {shares.high:.2g}, {shares.source}")
    for source in dict.fromkeys(item.bound.source for item in items if item.bound is not None):
        names = _types(item for item in items if item.bound is not None and item.bound.source == source)
        lines.append(f"bound of {names}: {source}")
    if missing := _types(item for item in items if item.fits is None).replace(" ", ""):
        lines.append(f"`tpu-launch preflight --accelerator {missing}` compiles what is not compiled yet")
    return lines


def _types(items: Iterable[Estimate]) -> str:
    return ", ".join(dict.fromkeys(item.candidate.accelerator_type for item in items))


def line(config: Config, home: Path, machine: Workstation) -> str | None:
    """Returns the first candidate's estimate in one line; None without a bound or trainer's sections. Raises as
    `estimate`."""
    if config.trainer is None:
        return None
    item = estimate(config, home, machine)[0]
    if item.hours is None:
        return None
    name = item.candidate.accelerator_type
    return (
        f"estimate: {name}: {_hours(item.hours)}, spot {_price(item.spot)}, on demand {_price(item.on_demand)} "
        f"({item.shares.source}; bound {item.bound.source if item.bound else ''})"
    )


def _hours(values: Range) -> str:
    return "unknown" if values is None else f"{values[0]:.3g} to {values[1]:.3g} h"


def _price(values: Range) -> str:
    return "unknown" if values is None else f"${values[0]:.3g} to ${values[1]:.3g}"
