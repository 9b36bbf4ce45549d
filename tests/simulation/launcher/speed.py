"""Makes simulated runs cheap without changing anything that a promise is about.

YAML of runs' folders is cached: reading and writing it would take half of the time. Each simulated run has another run
id, so the cache leaves the id out and puts it back. Hosts are observed as often as those of a larger slice.
"""

import functools
import json
import re
from collections.abc import Iterable
from dataclasses import replace

from launcher.run import supervise
from launcher.tpu_vm import host_scripts, provider
from training import yaml_file
from training.yaml_file import Document

_ID = "the-id-of-the-run"


def observe_every(seconds: float) -> None:
    """Sets the time between observations, 1 s for up to 16 hosts and 4 s for 64, without simulating so many hosts."""
    supervise.OBSERVE_EVERY = seconds
    supervise._INBOX_SECONDS, supervise._LONG_TURN_SECONDS = seconds / 2, 1.0 + seconds / 2


def read_pages(size: int, records: int) -> None:
    """Sets how many bytes and last records of a log one observation holds, so that logs of short programs fill many."""
    host_scripts.LOG_BYTES = size
    provider._TAIL = records


def remember_yaml() -> None:
    """Replaces `Document.dump` and `parse` by the same functions with a memory."""
    if getattr(yaml_file, "remembers", False):
        return
    dump, parse = Document.dump, yaml_file.parse
    texts: dict[str, str] = {}

    @functools.wraps(dump)
    def dump_once(self: Document) -> str:
        run = self.value.get("run")
        masked = {**self.value, "run": _ID} if isinstance(run, str) else self.value
        key = json.dumps(masked, default=repr)
        if key not in texts:
            texts[key] = dump(replace(self, value=masked))
        return texts[key].replace(_ID, run) if isinstance(run, str) else texts[key]

    documents = functools.lru_cache(maxsize=10_000)(lambda text, name: parse(text, name))

    @functools.wraps(parse)
    def parse_once(text: str, name: str, overrides: Iterable[str] = ()) -> Document:
        match = re.search(r"^run: (\S+)$", text, re.MULTILINE)
        if match is None or tuple(overrides):
            return parse(text, name, overrides)
        document = documents(f"{text[: match.start(1)]}{_ID}{text[match.end(1) :]}", name.replace(match[1], _ID))
        return replace(document, name=name, value={**document.value, "run": match[1]})

    Document.dump = dump_once  # type: ignore[method-assign]
    yaml_file.parse = parse_once
    yaml_file.remembers = True  # type: ignore[attr-defined]
