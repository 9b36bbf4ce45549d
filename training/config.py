"""The trainer's half of the YAML file: frozen sections, checked before anything is rented.

The launcher validates the same file with these functions before it creates a slice, so this module imports no
framework and no numpy. The launcher's sections are ignored, with one exception: if the file names an accelerator, the
global batch is checked against its devices.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError, field_validator

from training.accelerators import ACCELERATORS
from training.checkpoint.config import Best, CheckpointSection
from training.data.config import DataSection
from training.distributed.config import RendezvousSection
from training.errors import BadInput
from training.optim.adamw import AdamWSettings
from training.optim.schedule import ScheduleSettings
from training.registry import BACKENDS, TASKS, BackendName, OptimizerName, TaskName
from training.storage.types import REMOTE, place_mistake
from training.yaml_file import ConfigError, Document, Section, refuse_unknown, validate
from training.yaml_file import load as load_document

Remat = Literal["none", "attention", "layers"]
Attention = Literal["plain", "blocks", "kernel"]
TrackerName = Literal["wandb", "mlflow"]
Mistake = tuple[str, str]  # the key to change ("train.steps"), and what is wrong

IGNORED_SECTIONS = ("project", "zone", "slice", "image", "run", "gke")  # the launcher's

# The published BERT family (https://github.com/google-research/bert) and RoBERTa-base, by name:
# hidden size, layers, attention heads, intermediate size, positions.
SHAPES: dict[str, tuple[int, int, int, int, int]] = {
    "bert-tiny": (128, 2, 2, 512, 512),
    "bert-mini": (256, 4, 4, 1024, 512),
    "bert-small": (512, 4, 8, 2048, 512),
    "bert-medium": (512, 8, 8, 2048, 512),
    "bert-base": (768, 12, 12, 3072, 512),
    "bert-large": (1024, 24, 16, 4096, 512),
    "roberta-base": (768, 12, 12, 3072, 512),
}
ModelName = Literal["bert-tiny", "bert-mini", "bert-small", "bert-medium", "bert-base", "bert-large", "roberta-base"]


class Model(Section):
    """Which network: a published one by its name, with some of its sizes changed, or existing weights to start from."""

    name: ModelName | None = None
    """A model of the published BERT family or RoBERTa-base, trained from random weights. Either this or `path`."""

    path: str | None = None
    """Start from these weights: a folder (local or `gs://`) with `config.json` and `model.safetensors`, or
    `ORGANISATION/NAME` on the Hub. Either this or `name`."""

    config: dict[str, Any] | None = None
    """Train a network of any family from random weights: the values of its `config.json`, at least `model_type` and
    `architectures` (for example `[LlamaForCausalLM]`). Instead of `name` and `path`. Not for `backend: tensorflow`."""

    hidden_size: int | None = Field(default=None, ge=8)
    """Width of the layers, instead of the named model's. Heads and intermediate size follow from it unless given."""

    layers: int | None = Field(default=None, ge=1)
    """Number of layers, instead of the named model's."""

    heads: int | None = Field(default=None, ge=1)
    """Attention heads of a layer, instead of the named model's. The hidden size must be a multiple of them."""

    intermediate_size: int | None = Field(default=None, ge=8)
    """Width of the feed-forward block, instead of the named model's. Default with another `hidden_size`: 4 times it."""

    max_positions: int | None = Field(default=None, ge=8)
    """The longest sequence the model can take, in tokens, instead of the named model's."""

    vocabulary_size: int | None = Field(default=None, ge=8)
    """Rows of the embedding. Default: the tokenizer's vocabulary."""

    @property
    def family(self) -> str:
        """Returns the family of the model called `name`, "bert" or "roberta"; "bert" without a name."""
        return "roberta" if self.name == "roberta-base" else "bert"

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Returns hidden size, layers, heads, intermediate size, positions: each as given, else that of `name`, or for
        heads and intermediate size that which suits a given `hidden_size`. Call it only for a model with a name."""
        assert self.name is not None
        hidden, layers, heads, intermediate, positions = SHAPES[self.name]
        if self.hidden_size is not None:
            heads, intermediate = max(1, self.hidden_size // (hidden // heads)), 4 * self.hidden_size
        return (
            self.hidden_size or hidden,
            self.layers or layers,
            self.heads or heads,
            self.intermediate_size or intermediate,
            self.max_positions or positions,
        )


class Mesh(Section):
    """How the devices share the state of training."""

    fsdp: int = Field(default=1, ge=1, json_schema_extra={"unit": "devices"})
    """Each matrix of the weights and of the optimizer's state is split over so many devices (fully sharded data
    parallel): gathered layer by layer for the step, and each device updates its part. It divides the slice's devices;
    the rest of them hold copies. 1: every device holds all. The batches, and the losses up to rounding, are the same; a
    run may resume with another value. On CPU hosts every host holds all. Not for `backend: tensorflow`."""


class EarlyStopping(Section):
    """Training ends before its last step when evaluations get better no more. The result is then the model with the
    best one, and its checkpoint is never deleted. Needs `evaluation.every`."""

    metric: str
    """The deciding figure of an evaluation: `loss`, or one of the task, such as `accuracy`."""

    patience: int = Field(ge=1, json_schema_extra={"unit": "evaluations"})
    """So many evaluations in a row without a better figure than the best one end training."""


class Train(ScheduleSettings, AdamWSettings):
    """How to train: the schedule's keys, the optimizer's, and those of the training step itself."""

    global_batch_size: int = Field(ge=1, json_schema_extra={"unit": "examples"})
    """Examples of a batch over all devices of all hosts. The batches do not depend on the number of hosts."""

    optimizer: OptimizerName = "adamw"
    """The optimizer."""

    clip_norm: float | None = Field(default=1.0, gt=0)
    """A gradient with a larger norm is scaled down to this one. `null`: never."""

    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What a step does whose loss or gradient norm is not finite: `stop` ends the attempt before such a state is saved;
    `skip` leaves weights and moments as they were, counts the step and goes on. 50 such steps in a row end the run."""

    dropout: float | None = Field(default=None, ge=0, lt=1)
    """The share of activations that is dropped in training, in every place of the network. Default: the rates of
    `model.path`, or 0.1 with `model.name`."""

    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """The share of each label that is spread evenly over all classes or tokens, in training only. Not for `task:
    regression` and `multi-label`, nor for `backend: tensorflow`."""

    class_weights: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = {}
    """Weights in the training loss of the predictions whose label has this name; 1 for labels that are not here. Only
    for `task: classification` and `token-classification`."""

    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """The precision of matrix products: `auto` is `bf16` on TPUs and `fp32` on CPUs. `fp32` on a TPU takes six times
    the products of `bf16`. Weights and the optimizer's state are fp32 in any case. With `backend: tensorflow`, `bf16`
    is Keras' `mixed_bfloat16`: attention scores, softmax and the values passed between layers are bf16 too."""

    remat: Remat | None = None
    """What is computed again in the backward pass instead of being kept, which saves memory: `none`, the `attention`'s
    probabilities, or whole `layers`. Default: `attention` on TPUs, `none` on CPUs. Not for `backend: tensorflow`."""

    attention: Attention | None = None
    """How attention is computed: `plain` stores the scores of all pairs of a row's tokens; `blocks` those of a block of
    tokens at a time; `kernel` none, by a Pallas kernel, on TPUs from v4 on with `precision: bf16`. Default: from rows
    of 2,048 tokens on `kernel` where it can be had, else `blocks`, for the families whose attention was compared
    (Llama, Mistral, Qwen2, Qwen3, Gemma 1 to 3, Phi-3, OLMo2, ModernBERT) if it has no dropout; else `plain`. Not for
    `backend: tensorflow`."""

    scan: bool | None = None
    """Runs the layers of a decoder as one loop on TPUs: the time and the memory of compilation do not grow with their
    number, and each layer keeps its input alone and is computed again in the backward pass. Default: for the families
    whose layers are alike (Llama, Mistral, Qwen2, Qwen3, Gemma, Phi-3, OLMo2), unless `remat: none`. Only for
    `backend: torch-xla`."""

    freeze: list[str] = []
    """Parameters that stay as they are: patterns of their names, as `model.embed_tokens.*`. Not for `backend:
    tensorflow`, and without `lora`, which freezes all others itself."""

    gradient_accumulation: int = Field(default=1, ge=1)
    """A batch is computed in so many pieces, one after the other: less memory, the same update."""

    mesh: Mesh = Mesh()
    """How the devices share the state of training."""

    early_stopping: EarlyStopping | None = None
    """When training ends before `steps`. Default: never."""

    log_every: int = Field(default=10, ge=1, json_schema_extra={"unit": "steps"})
    """Steps between two progress lines, which are also the points of the charts."""

    strict: bool = False
    """A program that is compiled after warm-up ends the run, instead of a warning."""

    prefetch: int = Field(default=2, ge=1, json_schema_extra={"unit": "batches"})
    """How many batches are read ahead in the background. Raise it when the step waits for data."""

    jit_compile: bool = False
    """Compile the step with XLA on CPUs too, as on TPUs. Only for `backend: tensorflow`."""

    steps_per_call: int | None = Field(default=None, ge=1, le=10_000, json_schema_extra={"unit": "steps"})
    """Training steps that one call of the program runs where it reads its rows itself: several devices and batches of
    one shape. Default: as many as take about half a second, at most 64. A stop, a save or an evaluation cuts a call, so
    it happens on its step; the losses are the same to 2e-6. Only for `backend: tensorflow`."""


class Lora(Section):
    """Low-rank adaptation: the starting model is frozen, and small matrices beside its linear layers are trained. Only
    these have optimizer state."""

    rank: int = Field(default=16, ge=1, le=1024)
    """Rank of the matrices."""

    alpha: float = Field(default=32, gt=0)
    """The additions are scaled by alpha / rank."""

    targets: list[str] | None = Field(default=None, min_length=1)
    """Names of the linear layers, or the ends of their names: `[q_proj, v_proj]`. Default: all of the base model."""

    merge: bool = False
    """Write the result as a whole model, with the additions merged into its weights; otherwise as peft's two files,
    `adapter_config.json` and `adapter_model.safetensors`."""


class Evaluation(Section):
    """When the model is evaluated on `data.evaluation`, always on all of its examples."""

    every: int | None = Field(default=None, ge=1, json_schema_extra={"unit": "steps"})
    """Evaluate after every so many steps. Default: only at the end."""

    at_end: bool = True
    """Evaluate when training has finished, if there is evaluation data."""

    batch_size: int | None = Field(default=None, ge=1, json_schema_extra={"unit": "examples"})
    """Global batch size of an evaluation. Default: `train.global_batch_size`."""


class Export(Section):
    """The result as a Hugging Face folder: `model` in the run's folder."""

    at_end: bool = True
    """Write the folder when training has finished. `tpu-train export` makes it from any checkpoint later."""


class Telemetry(Section):
    """Where the numbers of a run go, beside its own folder (metrics, TensorBoard, report)."""

    trackers: list[TrackerName] = []
    """Services that show them: `wandb`, `mlflow`. Our image gets their packages by this; your own must have them.
    Keys and addresses are in their own variables (`run.secrets`, `run.environment`). What fails there is a warning, and
    training goes on."""

    @field_validator("trackers")
    @classmethod
    def _once_each(cls, value: list[str]) -> list[str]:
        """Returns the list unchanged. Raises ValueError if it names a tracker twice."""
        if len(set(value)) < len(value):
            raise ValueError("names a tracker twice")
        return value


def _repository(value: str) -> str:
    """Returns the name of a Hub repository unchanged. Raises ValueError unless it is ORGANISATION/NAME."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", value):
        raise ValueError(f"must be a name on the Hub, ORGANISATION/NAME, not {value!r}")
    return value


class Hub(Section):
    """The model on the Hugging Face Hub, uploaded by host 0 in the background with the HF_TOKEN of its environment
    (`run.secrets`). A failed upload does not stop training."""

    repository: Annotated[str, AfterValidator(_repository)]
    """The repository, `ORGANISATION/NAME`. It is created when it does not exist."""

    every: Literal["checkpoint"] | None = None
    """`checkpoint`: upload each checkpoint's model too; one that is overtaken by the next is left out."""

    at_end: bool = True
    """Upload the final model."""

    private: bool = True
    """Whether a repository that is created is private. An existing one is not changed."""

    wait_seconds: float = Field(default=600.0, gt=0, le=30 * 86400)
    """How long the run waits at its end for the last upload."""


class TrainerConfig(Section):
    """Everything `tpu-train train` reads."""

    seed: int = Field(default=0, ge=0, lt=2**31)
    """Decides the order of records, masking, dropout and random weights. The same seed gives the same run."""

    task: TaskName = "mlm"
    """What is learnt: `mlm`, masked-language modelling; `classification` of texts into labels; `multi-label`, any
    number of labels for each text; `token-classification`, a label for each word; `regression`, one number for each
    text; or `causal-lm`, the next token of documents or of the answers in chats."""

    backend: BackendName = "torch-xla"
    """What trains: PyTorch with PyTorch/XLA or TorchTPU (v4 and newer), or TensorFlow. All give the same losses."""

    model: Model
    """Which network."""

    data: DataSection
    """The shards and the tokenizer."""

    train: Train
    """Steps, batch size, optimizer and schedule."""

    lora: Lora | None = None
    """Train an adapter instead of all weights. Default: all weights. Not for `backend: tensorflow`."""

    evaluation: Evaluation = Evaluation()
    """When the model is evaluated."""

    checkpoint: CheckpointSection = CheckpointSection()
    """When the state of training is saved, and which checkpoints are kept."""

    rendezvous: RendezvousSection = RendezvousSection()
    """How long hosts wait for each other."""

    export: Export = Export()
    """The result as a Hugging Face folder."""

    telemetry: Telemetry = Telemetry()
    """Where the numbers of a run go."""

    hub: Hub | None = None
    """Upload the model to the Hugging Face Hub. Default: no upload."""

    output: str
    """The folder of all runs (`gs://`, or a folder that all hosts share); a run writes into its run id below it."""

    def for_device(self, kind: str) -> TrainerConfig:
        """Returns the configuration with `train.precision: auto` decided: bf16 for kind "TPU", else fp32. Hashes and
        checkpoints keep the file's own value."""
        if self.train.precision != "auto":
            return self
        return self.with_train(precision="bf16" if kind == "TPU" else "fp32")

    def with_train(self, **settings: Any) -> TrainerConfig:
        """Returns the configuration with other `settings` of the section `train`, unchecked."""
        return self.model_copy(update={"train": self.train.model_copy(update=settings)})

    @property
    def best(self) -> Best | None:
        """Returns the rule that compares evaluations: train.early_stopping's, else checkpoint.best's, or None."""
        if self.train.early_stopping is None:
            return self.checkpoint.best
        metric = self.train.early_stopping.metric
        return Best(metric=metric, mode=TASKS[self.task].figures[metric])

    @property
    def evaluation_batch_size(self) -> int:
        return self.evaluation.batch_size or self.train.global_batch_size

    def canonical(self) -> dict[str, Any]:
        """Returns plain JSON values with every default written out, and without `telemetry`: it changes nothing that is
        computed, and an attempt may resume with another one."""
        return self.model_dump(mode="json", exclude={"telemetry"})

    @property
    def hash(self) -> str:
        """Returns 16 hexadecimal digits of SHA-256 over `canonical`: equal however the YAML was written."""
        return hashlib.sha256(json.dumps(self.canonical(), sort_keys=True).encode()).hexdigest()[:16]


def load(path: str | Path, overrides: tuple[str, ...] = ()) -> TrainerConfig:
    """Reads and checks a YAML file, with the changes of `--set`. Raises ConfigError if the file is missing or not YAML,
    and as `from_document`."""
    return from_document(load_document(path, overrides))


def from_document(document: Document) -> TrainerConfig:
    """Checks the trainer's sections of a document, which may hold the launcher's too. Raises ConfigError with a line
    for each mistake of the first kind found: unknown top-level keys, wrong keys or values, contradictions."""
    refuse_unknown(document, (*TrainerConfig.model_fields, *IGNORED_SECTIONS))
    own = {key: value for key, value in document.value.items() if key not in IGNORED_SECTIONS}
    config = validate(TrainerConfig, Document(document.name, own, document.places))
    mistakes = [f"{document.locate(key)}: {text}" for key, text in _contradictions(config, document)]
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return config


def restore(values: Mapping[str, Any], place: str) -> TrainerConfig:
    """Returns the configuration of a checkpoint's manifest, without checking keys against each other. Raises BadInput,
    naming `place` and the first mistake, if it can't be read."""
    try:
        return TrainerConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise BadInput(
            f"{place}: the configuration in it can't be read: {'.'.join(map(str, first['loc']))}: {first['msg']}; it "
            "was written by another program, or by a newer version of this one"
        ) from None


def batch_mistake(config: TrainerConfig, hosts: int, devices: int) -> str | None:
    """Returns why the training batch (its pieces of gradient accumulation too) or the evaluation batch can't be divided
    evenly over the `devices` of all hosts; None if they can. `hosts` is for the message."""
    for name, size, pieces in (
        ("train.global_batch_size", config.train.global_batch_size, config.train.gradient_accumulation),
        ("the evaluation batch", config.evaluation_batch_size, 1),
    ):
        if size % (devices * pieces):
            accumulated = f" x {pieces} gradient accumulation" if pieces > 1 else ""
            return (
                f"{name} is {size}, which does not divide evenly over {devices} devices on {hosts} hosts{accumulated}; "
                f"use a multiple of {devices * pieces}"
            )
    return None


def mesh_mistake(fsdp: int, devices: int) -> str | None:
    """Returns why the state can't be split over `fsdp`, 1 or more, of the `devices` of all hosts; None if it can."""
    if devices % fsdp == 0:
        return None
    divisors = [number for number in range(1, devices + 1) if devices % number == 0]
    return f"train.mesh.fsdp is {fsdp}, which does not divide {devices} devices; use {', '.join(map(str, divisors))}"


def accelerator_name(document: Document) -> str | None:
    """Returns slice.accelerator_type as the file has it, which may be no known type; None without one."""
    name = _section(document, "slice").get("accelerator_type")
    return name if isinstance(name, str) else None


def _section(document: Document, name: str) -> dict[str, Any]:
    """Returns a section of the launcher's, which checks it; {} for one that is missing or no section."""
    section = document.value.get(name)
    return section if isinstance(section, dict) else {}


def _is_used(config: TrainerConfig, key: str) -> bool:
    """Returns whether the key ("train.freeze") has another value than its default, None or "none"."""
    section: Any = config
    *parents, name = key.split(".")
    for parent in parents:
        section = getattr(section, parent)
    return getattr(section, name) not in (type(section).model_fields[name].default, None, "none")


def _contradictions(config: TrainerConfig, document: Document) -> Iterator[Mistake]:
    """Yields (key, message) for each mistake between right keys, or with the launcher's slice and secrets."""
    unused = {**TASKS[config.task].unused_keys, **BACKENDS[config.backend].unused_keys}
    yield from _model_mistakes(config)
    yield from ((key, message) for key, message in unused.items() if _is_used(config, key))
    yield from _place_mistakes(config)
    yield from _training_mistakes(config)
    yield from _slice_mistakes(config, document)


def _model_mistakes(config: TrainerConfig) -> Iterator[Mistake]:
    """Yields mistakes of the network's choice: not exactly one of name, path and config; heads that do not divide the
    hidden size; sizes beside a path or config; a config without model_type or one architecture; a network without the
    task's head; a task that TensorFlow lacks; LoRA without model.path or beside train.freeze."""
    entry, model = TASKS[config.task], config.model
    if sum(value is not None for value in (model.name, model.path, model.config)) != 1:
        choices = "model.name (for example bert-base), model.path (weights to start from) and model.config"
        yield "model", f"give one of {choices}"
    elif model.name is not None:
        hidden, _, heads, _, _ = model.shape
        if hidden % heads:
            yield "model", f"hidden_size {hidden} does not divide evenly over {heads} attention heads"
    else:
        sizes = ("hidden_size", "layers", "heads", "intermediate_size", "max_positions", "vocabulary_size")
        given = [name for name in sizes if getattr(model, name) is not None]
        if given:
            own = "model.path" if model.path is not None else "model.config"
            yield f"model.{given[0]}", f"{own} brings its own sizes; remove {', '.join(given)}"
    if model.config is not None:
        named = model.config.get("architectures")
        if not isinstance(model.config.get("model_type"), str) or not isinstance(named, list) or len(named) != 1:
            yield "model.config", "needs model_type and architectures, for example [LlamaForCausalLM]"
        elif not entry.head.is_of(str(named[0])):
            yield "model.config", f"task {config.task} trains a network ...{entry.head.network}, not {named[0]}"
    elif config.task == "causal-lm" and model.name is not None:
        yield "model.name", "an encoder does not predict the next token: give model.path or model.config"
    if config.backend == "tensorflow" and entry.tensorflow is None:
        reason = "transformers has Keras networks for few decoders, and none with borders of documents"
        yield "backend", f"TensorFlow does not train task {config.task}: {reason}; take torch-xla"
    if config.lora is not None and model.path is None:
        yield "lora", "an adapter is trained on existing weights: give model.path"
    if config.lora is not None and config.train.freeze:
        yield "train.freeze", "lora freezes the starting model already: remove train.freeze"


def _place_mistakes(config: TrainerConfig) -> Iterator[Mistake]:
    """Yields a mistake for each place that has not the form of a local path, a name on the Hub or a gs:// URL (not
    whether it exists), and for evaluation on data.train."""
    data = config.data
    for key, place in {
        "output": config.output,
        "data.train": data.train,
        "data.evaluation": data.evaluation,
        "data.tokenizer": data.tokenizer,
        "model.path": config.model.path,
    }.items():
        if place is not None and (mistake := place_mistake(place)):
            yield key, mistake
    if data.evaluation is not None and _plain(data.train) == _plain(data.evaluation):
        advice = "figures over the training data say nothing; give the folder of the evaluation split"
        yield "data.evaluation", f"this is data.train: {advice}"


def _plain(place: str) -> str:
    """Returns a local path normalised (`./`, `//`, `..`, `/` at the end), and a place in a bucket without the `/` at
    its end alone, as names there are exact."""
    return place.rstrip("/") if place.startswith(REMOTE) else os.path.normpath(place)


def _training_mistakes(config: TrainerConfig) -> Iterator[Mistake]:
    """Yields mistakes: evaluation.every without data; checkpoint.best or train.early_stopping without evaluation.every,
    by an unknown metric, or by different ones; a mode of checkpoint.best that keeps the worst; a scan that the backend
    lacks or `remat: none` excludes; too long a warm-up."""
    train = config.train
    every, best, stopping = config.evaluation.every, config.checkpoint.best, train.early_stopping
    if every is not None and config.data.evaluation is None:
        yield "evaluation.every", "evaluation needs data: set data.evaluation, or remove evaluation.every"
    if best is not None and every is None:
        yield "checkpoint.best", "the best checkpoint is known by its evaluations: set evaluation.every"
    if stopping is not None and every is None:
        yield "train.early_stopping", "evaluations decide when training ends: set evaluation.every"
    figures = TASKS[config.task].figures
    for key, section in (("train.early_stopping", stopping), ("checkpoint.best", best)):
        if section is not None and section.metric not in figures:
            known = ", ".join(figures)
            yield f"{key}.metric", f"an evaluation of task {config.task} has no {section.metric}; it has {known}"
    if best is not None and stopping is not None and stopping.metric != best.metric:
        kept = f"the checkpoint with the best {stopping.metric}"
        yield "checkpoint.best.metric", f"train.early_stopping keeps {kept}: remove checkpoint.best"
    if best is not None and (right := figures.get(best.metric, best.mode)) != best.mode:
        truth = f"the best {best.metric} is its {right}imum"
        yield "checkpoint.best.mode", f"{truth}, and this would keep the worst: write {right}"
    if train.scan and (config.backend != "torch-xla" or train.remat == "none"):
        yield "train.scan", "layers that run as a scan are computed again: take torch-xla, without remat: none"
    if train.warmup_steps > train.steps:
        warmup = f"{train.warmup_steps} steps of warm-up"
        yield "train.warmup_steps", f"{warmup} are more than train.steps ({train.steps})"


def _slice_mistakes(config: TrainerConfig, document: Document) -> Iterator[Mistake]:
    """Yields a mistake for a mesh that does not divide the accelerator's devices and a batch that does not divide over
    them (not if the accelerator is unknown, which the launcher reports), and in a file with a slice for uploads without
    HF_TOKEN in its secrets."""
    if slice_ := ACCELERATORS.get(accelerator_name(document) or ""):
        for key, mistake in (
            ("train.mesh.fsdp", mesh_mistake(config.train.mesh.fsdp, slice_.devices)),
            ("train.global_batch_size", batch_mistake(config, slice_.hosts, slice_.devices)),
        ):
            if mistake:
                yield key, f"{mistake} (slice.accelerator_type is {slice_.name})"
    named = [_section(document, name).get("secrets") for name in ("run", "gke")]
    secrets = [name for names in named if isinstance(names, list | dict) for name in names]  # the launcher checks them
    if config.hub is not None and isinstance(document.value.get("slice"), dict) and "HF_TOKEN" not in secrets:
        yield "hub", "uploading needs HF_TOKEN on the hosts: add it to run.secrets (on GKE: gke.secrets)"
