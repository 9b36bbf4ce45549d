"""Opens `transformers.pipeline` over a model folder without torch, in the tensorflow image."""

from pathlib import Path
from typing import Any

import tensorflow as tf
import transformers
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoTokenizer, pipeline
from transformers.modeling_tf_pytorch_utils import load_pytorch_state_dict_in_tf2_model

from training.backends.tensorflow.model import count_positions
from training.errors import BadInput
from training.models.hugging_face import WEIGHTS
from training.registry import TASKS

_NETWORKS = {entry.head.pipeline: f"TFAutoModel{entry.head.network}" for entry in TASKS.values()}


def open_pipeline(name: str, folder: str) -> Any:
    """Returns `transformers.pipeline(name)` over a local model folder, on the CPU. Raises BadInput for absent weights.

    Loads the weights itself because transformers 4.57's TFAutoModel.from_pretrained fails on a safetensors file with
    PyTorch's names ("'builtins.safe_open' object is not iterable")."""
    model = getattr(transformers, _NETWORKS[name]).from_config(AutoConfig.from_pretrained(folder))
    count_positions(model)
    ids = tf.constant([[0, 1]])
    weights = load_file(Path(folder) / WEIGHTS)
    _, report = load_pytorch_state_dict_in_tf2_model(
        model, weights, tf_inputs={"input_ids": ids}, allow_missing_keys=True, output_loading_info=True
    )
    if missing := sorted(report["missing_keys"]):
        raise BadInput(f"{folder} lacks {len(missing)} of the model's weights: {', '.join(missing[:3])}")
    # Without dtype=None, transformers would look its default up in torch.
    return pipeline(name, model=model, tokenizer=AutoTokenizer.from_pretrained(folder), framework="tf", dtype=None)
