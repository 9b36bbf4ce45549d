"""Reads strict YAML 1.2 files into frozen pydantic models; every error names its file and line.

Framework-free, shared by `tpu-launch` and `tpu-train`, which read the same file. A document is loaded once, changed by
`--set key=value`, and validated against models that forbid unknown keys. Values are never converted silently:
`steps: "100"` is an error.

Scalars have their YAML 1.2 meaning: `1e-4` is a number, `010` is ten, and `yes`, `no`, `on`, `off` and `1:30` are
strings. The output of `Document.dump` means the same to readers of YAML 1.1, such as PyYAML.

Every document is refused that has keys other than text, numbers that are not finite, text that no file name or protocol
can carry (half a surrogate pair, a NUL), a part that contains itself, or an absurd depth or size.
"""

import bisect
import difflib
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError
from ruamel.yaml.representer import SafeRepresenter
from ruamel.yaml.resolver import implicit_resolvers

from training.errors import BadInput


class ConfigError(BadInput):
    """One or more mistakes in a configuration; the message has a line for each, starting with file:line."""

    heading = "bad configuration:\n"


class Section(BaseModel):
    """Base of every section: immutable, no unknown keys, no silent conversions (an integer may stand for a float)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


Model = TypeVar("Model", bound=BaseModel)
Path_ = tuple[str | int, ...]

_DEEPEST = 32  # sections within sections
_LARGEST = 100_000  # parts, with all aliases written out
_TOO_DEEP = f"more than {_DEEPEST} sections or lists within each other"
_TAG = "tag:yaml.org,2002:"


@dataclass(frozen=True)
class Document:
    """A parsed file: its plain value, and the place where each part was written."""

    name: str
    value: dict[str, Any]
    places: Mapping[Path_, str]  # ("train", "steps") -> "run.yaml:12", or "--set train.steps"

    def place(self, path: Sequence[str | int]) -> str:
        """Returns where `path`, or its nearest enclosing part, was written: "file:line" or "--set KEY"; else the file's
        name."""
        parts = tuple(path)
        while parts and parts not in self.places:
            parts = parts[:-1]
        return self.places.get(parts, self.name)

    def locate(self, key: str) -> str:
        """Returns the beginning of a message about a key ("train.steps"): its `place`, and its name."""
        return f"{self.place(key.split('.'))}: {key}"

    def dump(self) -> str:
        """Formats the document with all `--set` changes, as YAML that means the same in YAML 1.1 and 1.2."""
        yaml = YAML(typ="safe", pure=True)
        yaml.Representer = _Representer
        yaml.default_flow_style = False
        yaml.width = 4096
        yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # declared without its type
        text = io.StringIO()
        yaml.dump(self.value, text)
        return text.getvalue()


def load(path: str | Path, overrides: Iterable[str] = ()) -> Document:
    """Reads a YAML file and applies `overrides` ("train.steps=100"; the value is YAML). Raises ConfigError."""
    name = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{name}: no such file") from None
    except IsADirectoryError:
        raise ConfigError(f"{name}: is a folder, not a YAML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"{name}: can't be read: {error.strerror}") from None
    return parse(text, name, overrides)


def parse(text: str, name: str, overrides: Iterable[str] = ()) -> Document:
    """Parses text like `load`; `name` is the file's name in messages. Raises ConfigError."""
    if directive := re.search(r"^%YAML\s+(?!1\.2\s*$).*$", text, re.MULTILINE):
        line = text.count("\n", 0, directive.start()) + 1
        raise ConfigError(f"{name}:{line}: files are read as YAML 1.2: remove {directive[0].strip()}")
    value, places = _read(text, name)
    if not isinstance(value, dict | None):
        raise ConfigError(f"{name}:1: expected `key: value` lines at the top")
    document = Document(name, value or {}, places)
    for override in overrides:
        document = _override(document, override)
    return document


def validate(model: type[Model], document: Document) -> Model:
    """Returns the document's values as an instance of `model`. Raises ConfigError with a line for each mistake."""
    try:
        return model.model_validate(document.value)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(model, document, detail) for detail in error.errors())) from None


def refuse_unknown(document: Document, known: Iterable[str]) -> None:
    """Raises ConfigError for every top-level key that isn't in `known`."""
    known = tuple(known)
    wrong = [key for key in document.value if key not in known]
    if wrong:
        raise ConfigError(
            "\n".join(f"{document.place((key,))}: unknown key {key!r}{_did_you_mean(str(key), known)}" for key in wrong)
        )


class _Representer(SafeRepresenter):
    """Writes scalars so that readers of YAML 1.1 and of 1.2 get the same value."""

    def represent_str(self, data: str) -> ScalarNode:
        """Quotes text that a YAML version would read as another type, or that is not printable ASCII."""
        ambiguous = any(pattern.match(data) for _, _, pattern, _ in implicit_resolvers)
        plain = data.isascii() and data.isprintable() and not ambiguous
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=None if plain else '"')

    def represent_float(self, data: float) -> ScalarNode:
        """Writes a float with a point: without one, YAML 1.1 reads text."""
        text = {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}.get(repr(data), repr(data))
        return self.represent_scalar("tag:yaml.org,2002:float", text if "." in text else text.replace("e", ".0e"))


_Representer.add_representer(str, _Representer.represent_str)
_Representer.add_representer(float, _Representer.represent_float)


def _read(text: str, name: str) -> tuple[Any, dict[Path_, str]]:
    """Returns the value of a YAML text (None if it is empty), and where its parts were written. Raises ConfigError."""
    places: dict[Path_, str] = {}
    yaml = YAML(typ="safe", pure=True)
    try:
        root = yaml.compose(text)
        if root is None:
            return None, places
        _collect_places(root, (), name, places)
        return yaml.constructor.construct_document(root), places
    except MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{name}:{line}: not valid YAML: {error.problem or error.context}") from None
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{name}:{line}: not valid YAML: character U+{error.character:04X} is not allowed") from None
    except YAMLError as error:
        raise ConfigError(f"{name}: not valid YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{name}:{_failing_line(text, RecursionError)}: {_TOO_DEEP}") from None
    except ValueError as error:  # a bad escape sequence
        raise ConfigError(f"{name}:{_failing_line(text, ValueError)}: not valid YAML: {error}") from None


def _failing_line(text: str, kind: type[Exception]) -> int:
    """Returns the number of the first line up to which parsing raises `kind`: the library does not report it."""
    lines = text.splitlines(keepends=True)

    def fails(count: int) -> bool:
        """Returns whether parsing the first `count` lines raises `kind`."""
        try:
            YAML(typ="safe", pure=True).compose("".join(lines[:count]))
        except YAMLError:
            return False
        except kind:
            return True
        return False

    return bisect.bisect_left(range(len(lines)), True, key=fails)


def _check_scalar(node: ScalarNode, place: str) -> None:
    """Raises ConfigError, naming `place`, for a scalar that contradicts its tag, is not finite or can't be written."""
    shown, tag = repr(node.value[:40]), str(node.tag)
    try:
        value = None if tag == f"{_TAG}merge" else YAML(typ="safe", pure=True).constructor.construct_object(node)
    except (ValueError, KeyError, IndexError, OverflowError):
        raise ConfigError(f"{place}: {shown} is not a value of type {tag.removeprefix(_TAG)}") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{place}: should be a finite number, not {node.value[:40]}")
    if isinstance(value, str) and any(character == "\0" or "\ud800" <= character <= "\udfff" for character in value):
        raise ConfigError(f"{place}: {shown} has a character that can't be written (NUL, or half a surrogate pair)")


def _collect_places(
    node: Node, path: Path_, name: str, places: dict[Path_, str], parents: tuple[Node, ...] = ()
) -> None:
    """Adds the place of each part to `places`. Raises ConfigError for a key that is not text or occurs twice, a bad
    scalar, a part that contains itself, and documents that are too deep or too large."""
    line = node.start_mark.line + 1
    if any(node is parent for parent in parents):
        raise ConfigError(f"{name}:{line}: not valid YAML: this part contains itself (an alias of its own anchor)")
    if len(parents) > _DEEPEST:
        raise ConfigError(f"{name}:{line}: {_TOO_DEEP}")
    if len(places) > _LARGEST:
        raise ConfigError(f"{name}:{line}: the document has more than {_LARGEST} parts, with its aliases written out")
    places[path] = f"{name}:{line}"
    if isinstance(node, ScalarNode):
        _check_scalar(node, ": ".join(filter(None, (places[path], ".".join(map(str, path))))))
    elif isinstance(node, MappingNode):
        seen: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag not in (f"{_TAG}str", f"{_TAG}merge", f"{_TAG}value"):
                shown = repr(key_node.value)[:40] if isinstance(key_node, ScalarNode) else "a list or section"
                raise ConfigError(f"{name}:{line}: the key {shown} is not text: keys are names, or text in quotes")
            _check_scalar(key_node, f"{name}:{line}")
            key = str(key_node.value)
            if key in seen:
                raise ConfigError(f"{name}:{line}: key {key!r} is given twice, first on line {seen[key]}")
            seen[key] = line
            _collect_places(value_node, (*path, key), name, places, (*parents, node))
            places[(*path, key)] = f"{name}:{line}"
    elif isinstance(node, SequenceNode):
        for index, item in enumerate(node.value):
            _collect_places(item, (*path, index), name, places, (*parents, node))


def _override(document: Document, override: str) -> Document:
    """Returns a copy of the document with one change, "section.key=value", and missing sections; the value is YAML, or
    "" if empty. Raises ConfigError without "=", for an empty key, bad YAML, or a key below one that is no section."""
    key, equals, text = override.partition("=")
    shown = override[:200] if override.isprintable() else repr(override[:200])
    parts = tuple(key.split("."))
    if not equals or not all(parts):
        raise ConfigError(f"--set {shown}: expected key=value, for example train.steps=100")
    try:
        new = _read(text, "")[0] if text else ""
    except ConfigError as error:
        reason = str(error).partition(": ")[2].removeprefix("not valid YAML: ")
        raise ConfigError(f"--set {shown}: {text[:80]!r} is not a YAML value: {reason}") from None
    value = section = dict(document.value)
    for part in parts[:-1]:
        below = section.get(part)
        if below is not None and not isinstance(below, dict):
            raise ConfigError(f"--set {key}: {part!r} is not a section")
        section[part] = dict(below or {})  # a copy: other keys may have the same section, by an alias
        section = section[part]
    section[parts[-1]] = new
    return Document(document.name, value, {**document.places, parts: f"--set {key}"})


def _explain(model: type[BaseModel], document: Document, detail: ErrorDetails) -> str:
    """Returns a line with file:line for a mistake that pydantic found in the document."""
    location = detail["loc"]
    dotted = ".".join(map(str, location))
    place = document.place(location)
    kind = detail["type"]
    if kind == "extra_forbidden":
        siblings = _keys_at(model, detail["loc"][:-1])
        return f"{place}: unknown key {dotted!r}{_did_you_mean(str(location[-1]), siblings)}"
    if kind == "missing":
        return f"{place}: missing key {dotted!r}"
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Input ").replace("Input ", "")
    given = detail.get("input")
    shown = "" if kind == "value_error" or isinstance(given, dict | list) else f", not {given!r}"
    return f"{place}: {dotted}: {message}{shown}"


def _keys_at(model: type[BaseModel], location: Sequence[str | int]) -> tuple[str, ...]:
    """Returns the keys of the section at this location of `model`; () if there is no section."""
    current: type[BaseModel] | None = model
    for part in location:
        field = current.model_fields.get(str(part)) if current else None
        annotation = field.annotation if field else None
        options = (annotation, *getattr(annotation, "__args__", ()))
        sections = (option for option in options if isinstance(option, type) and issubclass(option, BaseModel))
        current = next(sections, None)
    return tuple(current.model_fields) if current else ()


def _did_you_mean(key: str, known: Sequence[str]) -> str:
    """Returns the end of a message: the known key closest to `key`, else all known keys; "" if none are known."""
    close = difflib.get_close_matches(key, known, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known keys: {', '.join(known)}" if known else ""
