"""The model on the Hugging Face Hub: `push` uploads one, `BackgroundUploader` does so beside a run, which it can neither stop nor
slow down.

An upload beside a run is a process of its own with low priority. It reads a committed checkpoint from the run's folder,
so nothing is asked of the device or of the step loop, and it dies with the run. What goes wrong is one warning and a
line of the summary. The token is HF_TOKEN of the environment and nothing else: it is in no argument, no file and no
message. Files go through the Hub's LFS protocol; its newer Xet store is not used.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from training import storage
from training.config import Hub
from training.errors import BadInput, TrainError
from training.models import export
from training.models.hugging_face import read_config
from training.telemetry import metrics

TOKEN = "HF_TOKEN"
CARD = "README.md"
_TRIES, _DELAY = 2, 3.0  # of an upload, and the seconds between


def push_model(run: str, repository: str, step: int | None, private: bool) -> tuple[int, str]:
    """Uploads the model of a run's checkpoint (the newest, unless `step` is given), and returns its step and the
    commit's URL.

    The repository is made if there is none; a README.md that it has already is left alone. Raises BadInput,
    TrainError."""
    token = os.environ.get(TOKEN)
    if not token:
        raise BadInput(
            f"{TOKEN} is not in the environment: make a token that may write at https://huggingface.co/settings/tokens"
        )
    os.environ["HF_HUB_DISABLE_XET"] = os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # read at the import below
    from huggingface_hub import HfApi

    with tempfile.TemporaryDirectory() as folder:
        chosen = export.export_checkpoint(run, folder, step)
        api = HfApi(token=token, library_name="tpu-launch")
        for attempt in range(_TRIES):
            try:
                api.create_repo(repository, private=private, exist_ok=True)
                if not api.file_exists(repository, CARD):
                    (Path(folder) / CARD).write_text(card(repository, read_config(folder), figures(run, chosen)))
                commit = api.upload_folder(
                    repo_id=repository, folder_path=folder, commit_message=f"Step {chosen} of {storage.name_of(run)}"
                )
                return chosen, str(commit.commit_url)
            except (OSError, ValueError, RuntimeError) as error:  # the library's own errors are of these kinds
                status = getattr(getattr(error, "response", None), "status_code", None) or 500
                if attempt + 1 < _TRIES and status >= 500:
                    time.sleep(_DELAY)
                    continue
                told = " ".join(str(error).split()).replace(token, "***")[:400]
                raise TrainError(f"{repository} was not pushed to the Hub: {type(error).__name__}: {told}") from None
    raise AssertionError("a try ends with a result or an error")


def figures(run: str, step: int) -> dict[str, float]:
    """Of the run's last evaluation until `step`."""
    told = [
        line
        for line in metrics.read_history(run)
        if line["step"] <= step and any(name.startswith("eval_") for name in line)
    ]
    return {name.removeprefix("eval_"): value for name, value in told[-1].items() if name != "step"} if told else {}


def card(repository: str, config: Mapping[str, Any], told: Mapping[str, float]) -> str:
    """A README.md that says what the Hub needs to know."""
    classifier = any(name.endswith("ForSequenceClassification") for name in config.get("architectures") or [])
    task = "text-classification" if classifier else "fill-mask"
    lines = ["---", "library_name: transformers", f"pipeline_tag: {task}", "---", "", f"# {repository}", ""]
    lines += [f"A {config.get('model_type')} model, trained with tpu-launch.", ""]
    if told:
        lines += [
            "Over the whole evaluation set:",
            "",
            *(f"* {name.replace('_', ' ')}: {value:.4f}" for name, value in told.items()),
            "",
        ]
    return "\n".join(
        [
            *lines,
            "```python",
            "from transformers import pipeline",
            f'pipeline("{task}", model="{repository}")',
            "```",
            "",
        ]
    )


@dataclass
class BackgroundUploader:
    """The uploads of one attempt, on host 0: one at a time; what is committed meanwhile is left out, except the
    last."""

    settings: Hub
    run: str  # its folder
    warn: Callable[[str], None]
    pushed: int | None = None  # step
    commit: str | None = None  # URL
    error: str | None = None  # of the newest upload
    _seen: int | None = None  # the newest commit that an upload was started for
    _process: subprocess.Popen[bytes] | None = None
    _out: Any = field(default_factory=tempfile.TemporaryFile)

    def committed(self, step: int | None) -> None:
        """Starts to upload a newly committed step, if that is wanted and nothing is under way. Called after every
        step."""
        if self._process is not None and self._process.poll() is not None:
            self._read(self._process.returncode)
        if step is not None and step != self._seen and self._process is None and self.settings.every == "checkpoint":
            self._start(step)

    def finish(self, step: int) -> dict[str, Any]:
        """Uploads the last step, unless it is there, and waits for it as long as the settings say. What the summary
        tells."""
        self._wait()
        if self.pushed != step and (self.settings.at_end or self.settings.every):
            self._start(step)
            self._wait()
        return {"repository": self.settings.repository, "step": self.pushed, "commit": self.commit, "error": self.error}

    def close(self) -> None:
        """Ends an upload that is under way: the Hub takes a commit whole or not at all."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self, step: int) -> None:
        self._seen = step
        if not os.environ.get(TOKEN):
            self._failed(f"{TOKEN} is not in the environment (name it in run.secrets)")
            return
        command = [
            sys.executable,
            "-m",
            "training.cli",
            "push",
            self.run,
            self.settings.repository,
            "--step",
            str(step),
            "--beside",
        ]
        command += ["--private" if self.settings.private else "--public"]
        self._out.seek(0)
        self._out.truncate()
        try:
            # A session of its own: Ctrl-C is for the trainer, which then ends this too.
            self._process = subprocess.Popen(
                command, stdout=self._out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            self._failed(f"can't start a process: {error}")

    def _wait(self) -> None:
        if self._process is None:
            return
        try:
            self._read(self._process.wait(self.settings.wait_seconds))
        except subprocess.TimeoutExpired:
            self.close()
            self._failed(f"not done within hub.wait_seconds ({self.settings.wait_seconds:g} s)")

    def _read(self, code: int) -> None:
        self._process = None
        self._out.seek(0)
        lines = self._out.read().decode(errors="replace").strip().splitlines()
        if code == 0 and lines:
            told = json.loads(lines[-1])
            self.pushed, self.commit, self.error = told["step"], told["commit"], None
        else:
            self._failed(lines[-1].removeprefix("tpu-train: error: ") if lines else f"the upload ended with {code}")

    def _failed(self, why: str) -> None:
        why = why.replace(os.environ.get(TOKEN) or "\0", "***")
        if self.error is None:
            self.warn(f"hub: {why}; the run goes on")
        self.error = why
