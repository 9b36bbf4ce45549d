"""A configuration is right as a whole, or each mistake is named with its line."""

from operator import attrgetter
from typing import Any

import pytest

from training.config import TrainerConfig, batch_mistake, from_document, restore
from training.errors import BadInput
from training.storage.types import place_mistake
from training.yaml_file import ConfigError, parse

GOOD = """\
project: my-project
slice:
  accelerator_type: v4-16
seed: 1
model:
  name: bert-tiny
data:
  train: gs://b/train
  evaluation: gs://b/evaluation
  tokenizer: gs://b/tokenizer
train:
  steps: 100
  global_batch_size: 64
evaluation:
  every: 50
output: gs://b/runs
"""


BATCH = "global_batch_size: 64"


def mistakes(text: str) -> str:
    with pytest.raises(ConfigError) as raised:
        config_of(text)
    return str(raised.value)


def config_of(text: str) -> TrainerConfig:
    return from_document(parse(text, "run.yaml"))


def changed(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new)


def test_the_launchers_sections_are_allowed_and_ignored() -> None:
    config = config_of(GOOD)
    assert config.train.steps == 100
    assert config.evaluation_batch_size == 64
    assert "slice" not in config.canonical()


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("steps: 100", "stesp: 100", "run.yaml:12: unknown key 'train.stesp'; did you mean 'steps'?"),
        ("seed: 1", "trian: {}", "run.yaml:4: unknown key 'trian'; did you mean 'train'?"),
        ("steps: 100", "steps: '100'", "run.yaml:12: train.steps: should be a valid integer"),
        ("steps: 100", "steps: 0", "run.yaml:12: train.steps: should be greater than or equal to 1"),
        ("name: bert-tiny", "name: bert-huge", "run.yaml:6: model.name"),
        ("  tokenizer: gs://b/tokenizer\n", "", "missing key 'data.tokenizer'"),
        ("name: bert-tiny", "layers: 2",
         "give one of model.name (for example bert-base), model.path (weights to start from) and model.config"),
        ("name: bert-tiny", "{name: bert-tiny, hidden_size: 100, heads: 3}",
         "does not divide evenly over 3 attention heads"),
        ("  evaluation: gs://b/evaluation\n", "", "evaluation needs data"),
        ("steps: 100", "steps: 100\n  warmup_steps: 101",
         "run.yaml:13: train.warmup_steps: 101 steps of warm-up are more than train.steps (100)"),
        ("global_batch_size: 64", "global_batch_size: 12",
         "run.yaml:13: train.global_batch_size: train.global_batch_size is 12"),
        ("name: bert-tiny", "{path: gs://b/model, layers: 2}", "model.path brings its own sizes"),
        ("seed: 1", "task: classify", "run.yaml:4: task: "),
        ("train:\n  steps: 100", "backend: tensorflow\ntrain:\n  remat: layers\n  steps: 100",
         "run.yaml:13: train.remat: the TensorFlow backend keeps everything"),
        ("  tokenizer: gs://b/tokenizer",
         "  masking: {percent: 20}\n  tokenizer: gs://b/tokenizer\ntask: classification",
         "run.yaml:10: data.masking: classification predicts labels"),
        ("output: gs://b/runs", "output: ''", "run.yaml:16: output: is empty: give a folder"),
        ("output: gs://b/runs", "output: ' runs'", "run.yaml:16: output: ' runs' begins or ends with white space"),
        ("output: gs://b/runs", "output: s3://b/runs", "run.yaml:16: output: 's3://b/runs': s3: is not supported"),
        ("output: gs://b/runs", "output: GS://b/runs", "run.yaml:16: output: 'GS://b/runs' is not gs:// and the name"),
        ("output: gs://b/runs", "output: gs:///runs", "run.yaml:16: output: 'gs:///runs' is not gs:// and the name"),
        ("output: gs://b/runs", "output: gs://b-/runs", "run.yaml:16: output: 'gs://b-/runs' is not gs:// and the"),
        ("tokenizer: gs://b/tokenizer", "tokenizer: ''", "run.yaml:10: data.tokenizer: is empty"),
        ("name: bert-tiny", "path: gs:/b", "run.yaml:6: model.path: 'gs:/b' is not gs:// and the name of a bucket"),
        ("evaluation: gs://b/evaluation", "evaluation: gs://b/train/", "run.yaml:9: data.evaluation: this is data"),
        ("train: gs://b/train\n  evaluation: gs://b/evaluation", "train: d/train\n  evaluation: ./d//train/",
         "run.yaml:9: data.evaluation: this is data.train"),
        ("output: gs://b/runs", "output: gs://b/runs\nrendezvous: {seconds: 1e300}",
         "run.yaml:17: rendezvous.seconds: should be less than or equal to 2592000"),
        ("output: gs://b/runs", "output: gs://b/runs\ncheckpoint:\n  best: {metric: accurcy, mode: max}",
         "run.yaml:18: checkpoint.best.metric: an evaluation of task mlm has no accurcy; it has loss, perpl"),
        ("output: gs://b/runs", "output: gs://b/runs\ncheckpoint:\n  best: {metric: loss, mode: max}",
         "run.yaml:18: checkpoint.best.mode: the best loss is its minimum, and this would keep the worst: write min"),
        ("steps: 100", "steps: 100\n  early_stopping: {metric: accurcy, patience: 2}",
         "run.yaml:13: train.early_stopping.metric: an evaluation of task mlm has no accurcy; it has loss"),
        ("global_batch_size: 64", "global_batch_size: 12", "8 devices on 2 hosts"),
        (BATCH, f"{BATCH}\n  mesh: {{fsdp: 3}}",
         "train.mesh.fsdp: train.mesh.fsdp is 3, which does not divide 8 devices; use 1, 2, 4, 8 ("),
        ("train:\n", "backend: tensorflow\ntrain:\n  mesh: {fsdp: 4}\n", "holds the whole state on every device"),
        ("steps: 100", "steps: 100\n  steps_per_call: 4",
         "run.yaml:13: train.steps_per_call: only the TensorFlow backend"),
        ("output: gs://b/runs", "output: gs://b/runs\nhub: {repository: model}",
         "run.yaml:17: hub.repository: must be a name on the Hub, ORGANISATION/NAME, not 'model'"),
    ],
)  # fmt: skip
def test_a_mistake_is_named(old: str, new: str, expected: str) -> None:
    text = changed(old, new) if not new.startswith("{") else GOOD.replace(f"model:\n  {old}", f"model: {new}")
    assert expected in mistakes(text)


HUB = "hub: {repository: org/model}\n"


@pytest.mark.parametrize(
    ("old", "new", "name", "value"),
    [
        ("v4-16", "v4-32", "train.global_batch_size", 64),
        (BATCH, f"{BATCH}\n  mesh: {{fsdp: 4}}", "train.mesh.fsdp", 4),
        ("train:\n", "backend: tensorflow\ntrain:\n  steps_per_call: 4\n", "train.steps_per_call", 4),
        ("name: bert-tiny", "name: bert-base\n  hidden_size: 256", "model.shape", (256, 12, 4, 1024, 512)),
        ("output", f"run: {{secrets: [HF_TOKEN]}}\n{HUB}output", "hub.repository", "org/model"),
        ("output", f"gke: {{secrets: {{HF_TOKEN: huggingface/token}}}}\n{HUB}output", "hub.repository", "org/model"),
        # Without a slice a token is the environment's business.
        ("slice:\n  accelerator_type: v4-16\n", HUB, "hub.repository", "org/model"),
    ],
)
def test_what_fits_together_is_read(old: str, new: str, name: str, value: Any) -> None:
    assert attrgetter(name)(config_of(changed(old, new))) == value


def test_the_batch_must_divide_by_the_gradient_accumulation_too() -> None:
    config = config_of(changed("global_batch_size: 64", "global_batch_size: 64\n  gradient_accumulation: 4"))
    assert batch_mistake(config, 2, 16) is None
    assert "multiple of 128" in str(batch_mistake(config, 4, 32))


def test_the_hash_tells_configurations_apart_and_not_their_spelling() -> None:
    same = config_of(changed("seed: 1\n", "") + "seed: 1\ncheckpoint: {}\n")
    tracked = config_of(GOOD + "telemetry: {trackers: [wandb, mlflow]}\n")
    other = config_of(changed("seed: 1", "seed: 2"))
    assert config_of(GOOD).hash == same.hash == tracked.hash != other.hash


def test_precision_follows_the_device_unless_the_file_says_it() -> None:
    assert [config_of(GOOD).for_device(kind).train.precision for kind in ("TPU", "CPU")] == ["bf16", "fp32"]
    exact = config_of(changed("global_batch_size: 64", "global_batch_size: 64\n  precision: fp32"))
    assert exact.for_device("TPU") == exact


NO_TOKEN = "run.yaml:17: hub: uploading needs HF_TOKEN on the hosts: add it to run.secrets (on GKE: gke.secrets)"


@pytest.mark.parametrize(
    "section", ["", "run: {secrets: 5}", "run: {secrets: HF_TOKEN}", "gke: {secrets: 5}", "run: 5"]
)
def test_secrets_without_a_list_that_has_it_name_no_token(section: str) -> None:
    """What they should be is the launcher's to say; nothing is raised here but the mistake."""
    assert mistakes(f"{GOOD}{HUB}{section}\n") == NO_TOKEN


@pytest.mark.parametrize("place", ["runs", "./gs", "/a b/c", "gs://b", "gs://my_bucket.example.com/a", "C:", "a:b/c"])
def test_folders_and_buckets_are_places(place: str) -> None:
    assert place_mistake(place) is None


def test_a_checkpoint_of_another_program_is_named_with_what_is_wrong() -> None:
    config = config_of(GOOD)
    assert restore(config.canonical(), "step 40") == config
    why = "^step 40: the configuration in it can't be read: train: Field required; it was"
    with pytest.raises(BadInput, match=why):
        restore({key: value for key, value in config.canonical().items() if key != "train"}, "step 40")
