"""The model on the Hugging Face Hub: `push_model` uploads one; `BackgroundUploader` does so during a run, which it can
neither stop nor slow down.

A background upload is a process of its own with low priority. It reads a committed checkpoint from the run's folder, so
it uses neither the device nor the step loop, and it ends with the run. A failure is one warning and a line of the
summary. The token is HF_TOKEN of the environment and nothing else: it is in no argument, no file and no message. Files
go through the Hub's LFS protocol; its newer Xet store is not used.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from training import storage
from training.config import Hub
from training.errors import BadInput, TrainError
from training.models import export
from training.models.hugging_face import read_config
from training.registry import TASKS, task_of_model
from training.telemetry.metrics import read_history

TOKEN = "HF_TOKEN"
CARD = "README.md"
_TRIES, _RETRY_SECONDS = 2, 3.0  # of an upload


def push_model(
    run: str, repository: str, step: int | None, private: bool, sleep: Callable[[float], None] = time.sleep
) -> tuple[int, str]:
    """Uploads the model of a run's checkpoint. A README.md that the repository already has is not replaced.

    Args:
        run: the run's folder.
        repository: ORGANISATION/NAME; made if there is none.
        step: of the checkpoint; the newest, unless given.
        private: of a repository that is made.
        sleep: waits between tries.

    Returns:
        The step, and the URL of the commit.

    Raises:
        BadInput: no token, or no such checkpoint.
        TrainError: the Hub did not take it.
    """
    token = os.environ.get(TOKEN)
    if not token:
        raise BadInput(
            f"{TOKEN} is not in the environment: make a token that may write at https://huggingface.co/settings/tokens"
        )
    os.environ["HF_HUB_DISABLE_XET"] = os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # read at the import below
    from huggingface_hub import HfApi

    with tempfile.TemporaryDirectory() as folder:
        exported_step = export.export_checkpoint(run, folder, step)
        api = HfApi(token=token, library_name="tpu-launch")
        for attempt in range(_TRIES):
            try:
                api.create_repo(repository, private=private, exist_ok=True)
                if not api.file_exists(repository, CARD):
                    card = render_card(repository, read_config(folder), last_figures(run, exported_step))
                    (Path(folder) / CARD).write_text(card)
                message = f"Step {exported_step} of {storage.name_of(run)}"
                commit = api.upload_folder(repo_id=repository, folder_path=folder, commit_message=message)
                return exported_step, str(commit.commit_url)
            except (OSError, ValueError, RuntimeError) as error:  # the library's own errors are of these kinds
                status = getattr(getattr(error, "response", None), "status_code", None) or 500
                if attempt + 1 < _TRIES and status >= 500:
                    sleep(_RETRY_SECONDS)
                    continue
                text = " ".join(str(error).split()).replace(token, "***")[:400]
                raise TrainError(f"{repository} was not pushed to the Hub: {type(error).__name__}: {text}") from None
    raise AssertionError("each try ends with a result or an error")


def last_figures(run: str, step: int) -> dict[str, float]:
    """The figures of the run's last evaluation up to `step`; none when there was no evaluation."""
    evaluations = [
        line for line in read_history(run) if line["step"] <= step and any(name.startswith("eval_") for name in line)
    ]
    if not evaluations:
        return {}
    return {name.removeprefix("eval_"): value for name, value in evaluations[-1].items() if name != "step"}


def render_card(repository: str, config: Mapping[str, Any], figures: Mapping[str, float]) -> str:
    """The README.md of a repository, with the metadata that the Hub reads.

    Args:
        repository: ORGANISATION/NAME.
        config: values of the model's config.json.
        figures: of an evaluation, by name.
    """
    pipeline = TASKS[task_of_model(config)].head.pipeline
    lines = ["---", "library_name: transformers", f"pipeline_tag: {pipeline}", "---", "", f"# {repository}", ""]
    lines += [f"A {config.get('model_type')} model, trained with tpu-launch.", ""]
    if figures:
        bullets = [f"* {name.replace('_', ' ')}: {value:.4f}" for name, value in figures.items()]
        lines += ["Over the whole evaluation set:", "", *bullets, ""]
    lines += [
        "```python",
        "from transformers import pipeline",
        f'pipeline("{pipeline}", model="{repository}")',
        "```",
        "",
    ]
    return "\n".join(lines)


class BackgroundUploader:
    """The uploads of one attempt, on host 0: one at a time. Commits during an upload are left out, except the last."""

    def __init__(self, settings: Hub, run: str, warn: Callable[[str], None]) -> None:
        """Uploads nothing yet.

        Args:
            settings: the section hub of the configuration.
            run: the run's folder.
            warn: shows a warning.
        """
        self.settings, self.run, self.warn = settings, run, warn
        self.pushed: int | None = None  # the newest step on the Hub
        self.commit: str | None = None  # its URL
        self.error: str | None = None  # of the newest upload
        self._started_for: int | None = None  # the newest commit that an upload was started for
        self._process: subprocess.Popen[bytes] | None = None
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # as long as this object

    def committed(self, step: int | None) -> None:
        """Starts the upload of a newly committed step, if that is wanted and none is under way. Called after every
        step."""
        if self._process is not None and self._process.poll() is not None:
            self._read_result(self._process.returncode)
        is_new = step is not None and step != self._started_for
        if step is not None and is_new and self._process is None and self.settings.every == "checkpoint":
            self._start(step)

    def finish(self, step: int) -> dict[str, Any]:
        """Uploads the last step, unless it is there, and waits for it as long as the settings say.

        Returns:
            What the summary says under "hub".
        """
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
        self._started_for = step
        if not os.environ.get(TOKEN):
            self._fail(f"{TOKEN} is not in the environment (name it in run.secrets)")
            return
        command = [sys.executable, "-m", "training.cli", "push", self.run, self.settings.repository]
        command += ["--step", str(step), "--beside", "--private" if self.settings.private else "--public"]
        self._output.seek(0)
        self._output.truncate()
        try:
            # A session of its own: Ctrl-C is for the trainer, which then ends the upload too.
            self._process = subprocess.Popen(
                command, stdout=self._output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            self._fail(f"can't start a process: {error}")

    def _wait(self) -> None:
        if self._process is None:
            return
        try:
            self._read_result(self._process.wait(self.settings.wait_seconds))
        except subprocess.TimeoutExpired:
            self.close()
            self._fail(f"not done within hub.wait_seconds ({self.settings.wait_seconds:g} s)")

    def _read_result(self, code: int) -> None:
        self._process = None
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").strip().splitlines()
        if code == 0 and lines:
            result = json.loads(lines[-1])
            self.pushed, self.commit, self.error = result["step"], result["commit"], None
        else:
            self._fail(lines[-1].removeprefix("tpu-train: error: ") if lines else f"the upload ended with {code}")

    def _fail(self, reason: str) -> None:
        reason = reason.replace(os.environ.get(TOKEN) or "\0", "***")
        if self.error is None:
            self.warn(f"hub: {reason}; the run goes on")
        self.error = reason
