"""Generates the pages of docs/reference/ from the code: python -m tools.reference [--check]

Without an argument it writes the pages; with `--check` it writes nothing, and the exit code is 1 if a page is stale.
tests/launcher/test_documentation.py checks the same, and that every key, option and exit code has its text.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import sys
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

import launcher.config
import launcher.errors
import training.errors
from launcher.cli.main import cli as tpu_launch
from launcher.run.events import KINDS
from training.accelerators import ACCELERATORS
from training.cli.main import tpu_train
from training.config import TrainerConfig
from training.lazy_command import LazyCommand

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"
_UNITS = ("seconds", "minutes", "hours", "steps")
_TYPE_NAMES = {str: "text", int: "integer", float: "number", bool: "true or false", Any: "any"}


# Configuration


@dataclass(frozen=True)
class Key:
    """One key of the YAML file. `section` is set when its value is a section of its own."""

    name: str
    type: str
    default: str
    unit: str
    meaning: str
    section: type[BaseModel] | None = None


def configuration_page() -> str:
    """Returns the page of all keys of the YAML file."""
    lines = [
        *_title("Configuration", "launcher/config/sections.py", "training/config.py"),
        "One YAML file describes a run. Unknown keys, wrong types and contradictions are refused, with their line,",
        "before anything is created. `--set slice.capacity=spot` changes a key for one command; the value is YAML.",
        "",
        "The first sections are read by `tpu-launch` alone. The others are the trainer's: both programs check them,",
        "and `tpu-train` reads them on every host.",
        "",
    ]
    for heading, root, names in roots():
        lines += [f"## {heading}", ""]
        top = [key for key in keys(root) if key.name in names]
        lines += _key_table([key for key in top if key.section is None])
        for key in top:
            if key.section is not None:
                lines += _section(key.name, key.section)
    return "\n".join(lines).rstrip() + "\n"


def roots() -> list[tuple[str, type[BaseModel], tuple[str, ...]]]:
    """Returns the two halves of the file: heading, model, names of its keys."""
    root = launcher.config.Root
    return [
        ("Read by `tpu-launch`", root, tuple(root.model_fields)),
        ("Read by `tpu-launch` and `tpu-train`", TrainerConfig, tuple(TrainerConfig.model_fields)),
    ]


def all_keys() -> Iterator[tuple[str, Key]]:
    """Yields every key with its path, for example ("slice.queued.valid_until_hours", Key)."""

    def below(prefix: str, model: type[BaseModel]) -> Iterator[tuple[str, Key]]:
        for key in keys(model):
            yield prefix + key.name, key
            if key.section is not None:
                yield from below(f"{prefix}{key.name}.", key.section)

    for _, root, _ in roots():
        yield from below("", root)


def keys(model: type[BaseModel]) -> list[Key]:
    """Returns the keys of a section, in the order of the code."""
    hints = typing.get_type_hints(model, include_extras=True)
    sections = reversed(model.__mro__[:-2])  # without BaseModel and object
    texts = {name: text for section in sections for name, text in member_texts(section).items()}
    return [_key(name, field, hints[name], texts.get(name, "")) for name, field in model.model_fields.items()]


def _key(name: str, field: FieldInfo, hint: Any, text: str) -> Key:
    section = _section_of(hint)
    meaning = text or (_docstring(section) if section is not None else "")
    bounds = _bounds(field.metadata)
    type_name = "section" if section is not None else f"{_type_name(hint)} {bounds}".strip()
    return Key(name, type_name, _default(field), _unit(name, field), " ".join(meaning.split()), section)


def _section(path: str, model: type[BaseModel]) -> list[str]:
    lines = [f"### {path}", "", _docstring(model), ""]
    inner = keys(model)
    lines += _key_table(inner, path)
    for key in inner:
        if key.section is not None:
            lines += _section(f"{path}.{key.name}", key.section)
    return lines


def _key_table(rows: list[Key], path: str = "") -> list[str]:
    if not rows:
        return []
    lines = ["| key | type | default | unit | meaning |", "|---|---|---|---|---|"]
    for key in rows:
        anchor = f"{path}{key.name}".replace(".", "")
        type_name = f"[section](#{anchor})" if key.section is not None else key.type
        lines.append(_row(f"`{key.name}`", type_name, key.default, key.unit, key.meaning))
    return [*lines, ""]


def _section_of(hint: Any) -> type[BaseModel] | None:
    for part in (hint, *get_args(hint)):
        if inspect.isclass(part) and issubclass(part, BaseModel):
            return part
    return None


def _type_name(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is typing.Annotated:
        return _type_name(arguments[0])
    if origin in (Union, types.UnionType):
        return " or ".join(_type_name(part) for part in arguments if part is not type(None))
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin is list:
        return f"list of {_type_name(arguments[0])}"
    if origin is dict:
        return f"map from {_type_name(arguments[0])} to {_type_name(arguments[1])}"
    return _TYPE_NAMES.get(hint, getattr(hint, "__name__", str(hint)))


def _bounds(metadata: list[Any]) -> str:
    """Returns the bounds as text, for example ">= 1, <= 600"."""
    signs = ((annotated_types.Ge, "ge", ">="), (annotated_types.Gt, "gt", ">"))
    signs += ((annotated_types.Le, "le", "<="), (annotated_types.Lt, "lt", "<"))
    return ", ".join(
        f"{sign} {getattr(item, attribute)}"
        for item in metadata
        for kind, attribute, sign in signs
        if isinstance(item, kind)
    )


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    value = field.get_default(call_default_factory=True)
    if value is None or value is PydanticUndefined or isinstance(value, BaseModel):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, list | dict) and not value:
        return "empty"
    return f"`{value}`"


def _unit(name: str, field: FieldInfo) -> str:
    extra = field.json_schema_extra
    if isinstance(extra, dict) and "unit" in extra:
        return str(extra["unit"])
    last = name.rsplit("_", 1)[-1]
    return last if last in _UNITS else ""


# Commands


def commands_page() -> str:
    """Returns the page of all commands of `tpu-launch`."""
    introduction = "`tpu-launch` runs on your machine. Every command takes `-h` and explains itself."
    return _commands("Commands of tpu-launch", "launcher/cli", "tpu-launch", tpu_launch, introduction)


def trainer_commands_page() -> str:
    """Returns the page of all commands of `tpu-train`."""
    introduction = (
        "`tpu-train` runs in the container: on every host of a slice when `tpu-launch run` starts it, "
        "or on this machine by `tpu-launch local -- tpu-train ...`."
    )
    return _commands("Commands of tpu-train", "training/cli", "tpu-train", tpu_train, introduction)


def all_commands(program: str, group: click.Group) -> Iterator[tuple[str, click.Command]]:
    """Yields every command below a group with its full name, for example ("tpu-train dataset show", Command)."""
    context = click.Context(group, info_name=program)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, LazyCommand):
            command = command.load()
        if command.hidden:
            continue
        yield f"{program} {name}", command
        if isinstance(command, click.Group):
            yield from all_commands(f"{program} {name}", command)


def parameters(command: click.Command) -> list[click.Parameter]:
    """Returns the visible parameters, arguments first."""
    visible = [item for item in command.params if not getattr(item, "hidden", False)]
    return sorted(visible, key=lambda item: not isinstance(item, click.Argument))


def _commands(title: str, source: str, program: str, group: click.Group, introduction: str) -> str:
    lines = [*_title(title, source), introduction, ""]
    lines += ["| command | what it does |", "|---|---|"]
    listed = list(all_commands(program, group))
    for name, command in listed:
        anchor = name.replace(" ", "-")
        lines.append(_row(f"[`{name}`](#{anchor})", _first_sentence(command)))
    lines.append("")
    if group.params:
        lines += ["## Options before the command", "", *_option_table(group)]
    for name, command in listed:
        lines += [f"## {name}", "", *_help(command), ""]
        if not isinstance(command, click.Group):
            usage = " ".join(command.collect_usage_pieces(click.Context(command, info_name=name)))
            lines += ["```", f"{name} {usage}", "```", ""]
        lines += _option_table(command)
    return "\n".join(lines).rstrip() + "\n"


def _help(command: click.Command) -> list[str]:
    """Returns the help text; paragraphs that click must not wrap become code."""
    lines: list[str] = []
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        if paragraph.startswith("\b"):
            lines += ["```console", *(line.rstrip() for line in paragraph.split("\n")[1:]), "```", ""]
        else:
            lines += [" ".join(paragraph.split()), ""]
    return lines[:-1]


def _first_sentence(command: click.Command) -> str:
    text = " ".join(inspect.cleandoc(command.help or "").split("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z`])", text)[0]


def _option_table(command: click.Command) -> list[str]:
    context = click.Context(command, show_default=True)  # as the group's
    rows = []
    for item in parameters(command):
        if isinstance(item, click.Option):
            record = item.get_help_record(context)
            assert record is not None
            rows.append(_row(f"`{record[0]}`", record[1]))
    return ["| option | meaning |", "|---|---|", *rows, ""] if rows else []


# Exit codes


def exit_codes_page() -> str:
    """Returns the page of the exit codes of both programs."""
    lines = [
        *_title("Exit codes", "launcher/errors.py", "training/errors.py"),
        "What a script may decide by. A number means the same in every command that can return it.",
        "",
        "## tpu-launch",
        "",
        *_code_table(launcher.errors.Exit),
        "`tpu-launch ssh -- COMMAND` and `tpu-launch local -- COMMAND` return the command's own exit code",
        "(`ssh` returns 254 for 255, which gcloud would take for a failure of ssh, and if the connection broke).",
        "`tpu-launch exec -- COMMAND` returns 0 when the command succeeded on every host, else its code on the host",
        "that failed first, or 24 when that host gave none: it could not be reached, or the command took too long.",
        "",
        "## tpu-train",
        "",
        *_code_table(training.errors.Exit),
        "From these codes `tpu-launch run` decides whether another attempt follows. 0 and 2 end the run. 75 without a",
        "requested stop counts as a preemption (`run.preemption_retries`). 76 is a symptom: another host's failure",
        "decides. Every other code is a failure (`run.failure_retries`). Your own command may use the same codes.",
        "",
    ]
    return "\n".join(lines).rstrip() + "\n"


def member_texts(definition: type) -> dict[str, str]:
    """Returns name -> string literal below the member, for members of a class that have one."""
    (body,) = (node.body for node in ast.parse(inspect.getsource(definition)).body if isinstance(node, ast.ClassDef))
    texts: dict[str, str] = {}
    for node, following in itertools.pairwise(body):
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        literal = following.value if isinstance(following, ast.Expr) else None
        if isinstance(target, ast.Name) and isinstance(literal, ast.Constant):
            texts[target.id] = " ".join(str(literal.value).split())
    return texts


def _code_table(codes: type[IntEnum]) -> list[str]:
    meanings = member_texts(codes)
    rows = [_row(str(int(code)), f"`{code.name}`", meanings[code.name]) for code in codes]
    return ["| code | name | meaning |", "|---|---|---|", *rows, ""]


# Events


def events_page() -> str:
    """Returns the page of all kinds of events of a run's ledger."""
    lines = [
        *_title("Events of a run", "launcher/run/events.py"),
        "`tpu-launch events` shows what happened to a run, `--json` with every detail. Each line of `events.jsonl`",
        "in the run's folder is one JSON object: `time` (RFC 3339, UTC), `event`, `attempt`, and the fields below.",
        "",
        "| event | meaning | fields |",
        "|---|---|---|",
    ]
    for name, kind in KINDS.items():
        texts = {}
        for base in kind.__mro__[-2::-1]:
            comments = re.findall(r"^    (\w+): [^#\n]+  # (.+)$", inspect.getsource(base), re.MULTILINE)
            texts |= member_texts(base) | dict(comments)
        names = [item.name for item in dataclasses.fields(kind) if item.name != "attempt"]
        details = [f"`{item}`: {texts[item]}" if item in texts else f"`{item}`" for item in names]
        lines.append(_row(f"`{name}`", _docstring(kind), "<br>".join(details)))
    return "\n".join(lines) + "\n"


# Accelerators


def accelerators_page() -> str:
    """Returns the page of all accelerator types."""
    lines = [
        *_title("Accelerators", "training/accelerators.py"),
        "Values of `slice.accelerator_type`. A host is one TPU VM. A device is one PJRT device: a core on v2 and v3, a",
        "chip on later generations; `train.global_batch_size` must be a multiple of the number of devices. Memory is",
        "the part of a device's memory that the compiler gives to a program.",
        "",
        "| type | hosts | chips | devices | topology | memory per device | zones | through |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, slice_ in ACCELERATORS.items():
        memory = f"{slice_.generation.usable_hbm_bytes_per_device / 2**30:.2f} GiB"
        numbers = (slice_.hosts, slice_.chips, slice_.devices)
        zones = ", ".join(slice_.zones())
        apis = ", ".join(dict.fromkeys(api.value for offer in slice_.offers for api in offer.apis))
        lines.append(_row(f"`{name}`", *map(str, numbers), slice_.topology_name, memory, zones, apis))
    return "\n".join(lines) + "\n"


# All pages


PAGES = {
    "configuration.md": configuration_page,
    "commands.md": commands_page,
    "tpu-train.md": trainer_commands_page,
    "exit-codes.md": exit_codes_page,
    "events.md": events_page,
    "accelerators.md": accelerators_page,
}


def stale() -> list[str]:
    """Returns the names of the pages that differ from the generated ones."""
    return [
        name
        for name, page in PAGES.items()
        if not (FOLDER / name).is_file() or (FOLDER / name).read_text(encoding="utf-8") != page()
    ]


def main(arguments: list[str]) -> int:
    """Writes the pages, or checks them. Returns the exit code."""
    names = stale()
    if "--check" in arguments:
        for name in names:
            print(f"docs/reference/{name} is stale: run `make reference`", file=sys.stderr)
        return int(bool(names))
    for name in names:
        (FOLDER / name).write_text(PAGES[name](), encoding="utf-8")
        print(f"wrote docs/reference/{name}")
    return 0


def _title(title: str, *sources: str) -> list[str]:
    *others, last = (f"`{source}`" for source in sources)
    made_from = " and ".join(filter(None, (", ".join(others), last)))
    return [f"# {title}", "", f"Made from {made_from} by `make reference`; do not edit.", ""]


def _row(*cells: str) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


def _docstring(definition: type) -> str:
    return " ".join(inspect.cleandoc(definition.__doc__ or "").split())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
