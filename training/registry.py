"""Tasks, optimizers and backends by name.

Entries name modules as "module:attribute" and `load` imports them on first use, so this module imports no framework and
no numpy: the launcher reads it with the configuration.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

# Each name is listed twice, here and in the table below: a checked configuration needs the literal type.
TaskName = Literal["mlm", "classification", "multi-label", "token-classification", "regression", "causal-lm"]
OptimizerName = Literal["adamw"]
BackendName = Literal["torch-xla", "torch-tpu", "tensorflow"]  # each has a folder of images/


def load(reference: str) -> Any:
    """Imports "module:attribute" and returns the attribute."""
    module, _, attribute = reference.partition(":")
    return getattr(importlib.import_module(module), attribute)


@dataclass(frozen=True)
class Head:
    """The layers on top of a network's encoder, in the terms of Hugging Face's transformers."""

    network: str  # the end of the class's name: BertForMaskedLM -> ForMaskedLM
    pipeline: str  # transformers.pipeline that uses it
    problem_type: str | None = None  # of config.json, for ForSequenceClassification
    # Training may begin from an encoder without this head. It is fresh unless the starting model has the same labels;
    # any other head comes from the starting model.
    is_fresh: bool = True
    older: tuple[str, ...] = ()  # other ends of names: GPT2LMHeadModel

    def is_of(self, network: str) -> bool:
        """Returns whether the network, a class of transformers such as "BertForMaskedLM", has the head."""
        return network.endswith((self.network, *self.older))


@dataclass(frozen=True)
class TaskEntry:
    """The parts of a task."""

    data: str  # a class over one kind of rows: a training.tasks.task.Task
    rows: str  # of the datasets that it reads: training.data.formats.dataset.Rows
    torch: str  # sums(network, batch) of torch tensors
    tensorflow: str | None  # sums(network, batch, training) of TensorFlow tensors; None: torch only
    head: Head
    # Of an evaluation: name -> which values are better; in the order in which they are shown.
    figures: Mapping[str, Literal["min", "max"]]
    # Keys ("train.freeze") that the task does not use, with the message for a file that sets them.
    unused_keys: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class BackendEntry:
    """How a backend is imported."""

    backend: str  # a class with the protocol training.backends.protocol.Backend
    requires: str  # the module that must be installed to train
    inference_requires: str  # the module that must be installed to use a trained model
    open_pipeline: str  # (pipeline's name, model folder) -> a transformers.pipeline on the CPU
    tpu_environment: str  # (cluster, environment) -> variables to set before the import, on a TPU
    libtpu_defaults: str  # (generation, the user's LIBTPU_INIT_ARGS) -> flags that a training process has beside them
    tracer: str  # a class with the protocol training.preflight.programs.ProgramTracer
    devices: str  # a class with the protocol training.device_check.Devices
    profiler: str | None  # a class with the protocol training.profiler.Tracer; None if it lacks one
    defaults: Mapping[str, str] = field(default_factory=dict)  # variables to set before the import, unless they are set
    cpu_flags: str = ""  # for XLA_FLAGS, on CPUs
    # Keys ("train.freeze") that the backend does not use, with the message for a file that sets them.
    unused_keys: Mapping[str, str] = field(default_factory=dict)


MASKED_LM = Head("ForMaskedLM", "fill-mask", is_fresh=False)
CAUSAL_LM = Head("ForCausalLM", "text-generation", is_fresh=False, older=("LMHeadModel",))
_NO_SMOOTHING = {"train.label_smoothing": "needs backend: torch-xla and a task of labels or tokens: remove it"}
_NO_WEIGHTS = {"train.class_weights": "needs task: classification or token-classification: remove it"}
_ONE_STEP_A_CALL = {"train.steps_per_call": "only the TensorFlow backend runs several steps in one call: remove it"}


def _without_masks(task: str, predicted: str) -> dict[str, str]:
    """Returns the `unused_keys` of a task that predicts no masked tokens but `predicted`, a text for the message."""
    return {"data.masking": f"{task} predicts {predicted}, not masked tokens: remove data.masking, or set task: mlm"}


TASKS: dict[str, TaskEntry] = {
    "mlm": TaskEntry(
        data="training.tasks.tokens:MaskedLanguageModeling",
        rows="packed",
        torch="training.tasks.torch:masked_lm",
        tensorflow="training.tasks.tf:masked_lm",
        head=MASKED_LM,
        figures={"loss": "min", "perplexity": "min", "accuracy": "max"},
        unused_keys=_NO_WEIGHTS,
    ),
    "classification": TaskEntry(
        data="training.tasks.labels:Classification",
        rows="class-labelled",
        torch="training.tasks.torch:classification",
        tensorflow="training.tasks.tf:classification",
        head=Head("ForSequenceClassification", "text-classification", "single_label_classification"),
        figures={"loss": "min", "accuracy": "max", "weighted_f1": "max"},
        unused_keys=_without_masks("classification", "labels"),
    ),
    "multi-label": TaskEntry(
        data="training.tasks.labels:MultiLabel",
        rows="set-labelled",
        torch="training.tasks.torch:multi_label",
        tensorflow="training.tasks.tf:multi_label",
        head=Head("ForSequenceClassification", "text-classification", "multi_label_classification"),
        figures={"loss": "min", "micro_f1": "max"},
        unused_keys={**_without_masks("multi-label", "sets of labels"), **_NO_SMOOTHING, **_NO_WEIGHTS},
    ),
    "token-classification": TaskEntry(
        data="training.tasks.labels:TokenClassification",
        rows="token-labelled",
        torch="training.tasks.torch:classification",
        tensorflow="training.tasks.tf:classification",
        head=Head("ForTokenClassification", "token-classification"),
        figures={"loss": "min", "accuracy": "max", "micro_f1": "max"},
        unused_keys=_without_masks("token-classification", "labels of words"),
    ),
    "regression": TaskEntry(
        data="training.tasks.labels:Regression",
        rows="number-labelled",
        torch="training.tasks.torch:regression",
        tensorflow="training.tasks.tf:regression",
        head=Head("ForSequenceClassification", "text-classification", "regression"),
        figures={"loss": "min", "mse": "min", "mae": "min", "pearson": "max"},
        unused_keys={**_without_masks("regression", "numbers"), **_NO_SMOOTHING, **_NO_WEIGHTS},
    ),
    "causal-lm": TaskEntry(
        data="training.tasks.tokens:CausalLanguageModeling",
        rows="documents",
        torch="training.tasks.torch:causal_lm",
        tensorflow=None,
        head=CAUSAL_LM,
        figures={"loss": "min", "perplexity": "min", "accuracy": "max"},
        unused_keys={**_without_masks("causal-lm", "the next token"), **_NO_WEIGHTS},
    ),
}

# Name -> framework -> its half of the optimizer.
OPTIMIZERS: dict[str, dict[Literal["torch", "tensorflow"], str]] = {
    "adamw": {"torch": "training.optim.adamw_torch:AdamWTorch", "tensorflow": "training.optim.adamw_tf:AdamWTensorFlow"}
}

BACKENDS: dict[str, BackendEntry] = {
    "torch-xla": BackendEntry(
        backend="training.backends.torch_xla.backend:TorchXla",
        requires="torch_xla",
        inference_requires="torch",
        open_pipeline="training.models.torch.network:open_pipeline",
        tpu_environment="training.distributed.cluster:torch_xla_environment",
        libtpu_defaults="training.distributed.cluster:torch_xla_flags",
        tracer="training.backends.torch_xla.tracing:TorchTracer",
        devices="training.backends.torch_xla.sharding:TorchDevices",
        profiler="training.backends.torch_xla.backend:TorchProfiler",
        # With XNNPACK, XLA keeps packed weights by their address, and a step changes weights in place: from the second
        # step on, gradients of batches of few rows came from the first weights.
        cpu_flags="--xla_cpu_use_xnnpack=false",
        unused_keys=_ONE_STEP_A_CALL,
    ),
    "torch-tpu": BackendEntry(
        backend="training.backends.torch_tpu.backend:TorchTpu",
        requires="torch_tpu",
        inference_requires="torch",
        open_pipeline="training.models.torch.network:open_pipeline",
        tpu_environment="training.distributed.torch_tpu:trainer_environment",
        libtpu_defaults="training.distributed.cluster:no_flags",
        tracer="training.backends.torch_tpu.tracing:TorchTpuTracer",
        devices="training.backends.torch_tpu.processes:TorchTpuDevices",
        profiler=None,
        unused_keys=_ONE_STEP_A_CALL,
    ),
    "tensorflow": BackendEntry(
        backend="training.backends.tensorflow.backend:TensorFlow",
        requires="tensorflow",
        inference_requires="tensorflow",
        open_pipeline="training.backends.tensorflow.model:open_pipeline",
        tpu_environment="training.distributed.cluster:tensorflow_environment",
        libtpu_defaults="training.distributed.cluster:no_flags",
        tracer="training.backends.tensorflow.lowered:TensorFlowTracer",
        devices="training.backends.tensorflow.replicas:TensorFlowDevices",
        profiler="training.backends.tensorflow.backend:TensorFlowProfiler",
        defaults={"TF_CPP_MIN_LOG_LEVEL": "2"},
        unused_keys={
            **_NO_SMOOTHING,
            "lora": "the TensorFlow backend trains all weights; take torch-xla",
            "model.config": "TensorFlow trains BERT and RoBERTa by model.name; take torch-xla",
            "train.freeze": "the TensorFlow backend trains all weights; take torch-xla",
            "train.mesh.fsdp": (
                "the TensorFlow backend holds the whole state on every device: remove train.mesh, or use torch-xla"
            ),
            "train.attention": "the TensorFlow backend stores all scores: remove train.attention",
            "train.remat": (
                "the TensorFlow backend keeps everything for the backward pass: remove train.remat, or use torch-xla"
            ),
        },
    ),
}

for _names, _entries in ((TaskName, TASKS), (OptimizerName, OPTIMIZERS), (BackendName, BACKENDS)):
    assert set(get_args(_names)) == set(_entries), f"{_names} and its table differ"


def task_of_model(config: Mapping[str, Any]) -> str:
    """Returns the task of a model by `config`, the values of its config.json: the task that has its network, and of
    several the one with its problem_type, else the first; "mlm" if no task has it."""
    named = config.get("architectures")
    networks = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    tasks = [name for name, entry in TASKS.items() if any(map(entry.head.is_of, networks))]
    same_problem = [name for name in tasks if TASKS[name].head.problem_type == config.get("problem_type")]
    return next(iter((*same_problem, *tasks)), "mlm")
