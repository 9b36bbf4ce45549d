"""A package that is left out of an import comes when something asks for it."""

from __future__ import annotations

import gc
import importlib
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from training.machine.deferred_imports import (
    Unanswered,
    add_stand_in,
    defer_functions,
    defer_initialization,
    defer_module,
    defer_package,
    hidden,
    uncollected,
)


@pytest.fixture(autouse=True)
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A library on the path: big.heavy has a submodule `settings`, a decorator, and a value."""
    heavy = tmp_path / "big" / "heavy"
    heavy.mkdir(parents=True)
    (heavy.parent / "__init__.py").write_text("")
    (heavy / "__init__.py").write_text(
        "from . import settings\nvalue = settings.limit\ndef mark(function):\n    return 'marked'\n"
    )
    (heavy / "settings.py").write_text("limit = 1\n")
    (heavy.parent / "sizes.py").write_text("class Symbol:\n    real = True\ndef describe(value):\n    return 'large'\n")
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "__init__.py").write_text("Symbol = str\n")
    (tmp_path / "alone" / "part.py").write_text("value = 3\n")
    (heavy.parent / "export.py").write_text("def save(name, *, twice=False):\n    return (name, twice)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] in ("big", "alone", "lazy")]:
        del sys.modules[name]


def test_a_deferred_package_is_imported_when_it_is_asked_for_more() -> None:
    defer_package("big.heavy", submodules=("settings",), decorators=("mark",), before="big.export")
    big = importlib.import_module("big")

    big.heavy.settings.limit = 7
    assert big.heavy.mark(len) is len, "unmarked before the import"
    assert big.heavy.mark(option=True)(len) is len
    assert "value" not in vars(big.heavy), "it was imported for a submodule or a decorator"

    assert big.heavy.value == 7, "the submodule's value from before"
    assert big.heavy.mark(len) == "marked", "the package's own decorator from then on"
    assert sys.modules["big.heavy"] is big.heavy
    with pytest.raises(AttributeError):
        _ = big.heavy.missing


def test_a_module_that_needs_the_package_imports_it_first() -> None:
    defer_package("big.heavy", submodules=("settings",), decorators=("mark",), before="big.export")
    importlib.import_module("big.export")
    assert "value" in vars(importlib.import_module("big.heavy"))


def test_a_module_that_the_package_imported_meanwhile_is_imported_once(library: None, tmp_path: Path) -> None:
    """torch._dynamo imports torch._inductor, whose import comes after it."""
    (tmp_path / "big" / "after").mkdir()
    (tmp_path / "big" / "after" / "__init__.py").write_text("")
    (tmp_path / "big" / "after" / "part.py").write_text("value = 9\n")
    with (tmp_path / "big" / "heavy" / "__init__.py").open("a") as heavy:
        heavy.write("import big.after.part\n")
    defer_package("big.heavy", submodules=("settings",), decorators=("mark",), before="big.after")
    after = importlib.import_module("big.after")
    assert after.part.value == 9
    assert after.__spec__.submodule_search_locations, "its own"
    assert importlib.import_module("big.after") is after


def test_a_package_that_is_imported_already_stays() -> None:
    heavy = importlib.import_module("big.heavy")
    defer_package("big.heavy", submodules=("settings",), decorators=("mark",), before="big.export")
    assert sys.modules["big.heavy"] is heavy
    assert heavy.mark(len) == "marked"


def test_a_deferred_function_calls_the_modules_own() -> None:
    defer_functions("big.export", ("save",))
    save = importlib.import_module("big.export").save
    assert save("a", twice=True) == ("a", True)
    assert sys.modules["big.export"].__file__, "the module itself"
    assert save("b") == ("b", False)


def test_a_stand_in_does_not_replace_what_is_imported() -> None:
    real = importlib.import_module("big.export")
    add_stand_in("big.export", {"save": None})
    assert sys.modules["big.export"] is real


def test_a_hidden_module_is_not_found_until_the_end() -> None:
    with hidden("big.export"), pytest.raises(ModuleNotFoundError):
        importlib.import_module("big.export")
    export = importlib.import_module("big.export")
    with hidden("big.export"):
        assert importlib.import_module("big.export") is export, "it was imported before"


def answer_small(value: int) -> str:
    if value > 9:
        raise Unanswered
    return "small"


def test_a_deferred_module_is_imported_for_what_its_stand_in_cannot_answer() -> None:
    importlib.import_module("big")
    defer_module("big.sizes", {"describe": answer_small, "Symbol": type("Symbol", (), {})})
    sizes = importlib.import_module("big.sizes")
    assert sizes.describe(3) == "small"
    assert not isinstance(3, sizes.Symbol)
    assert not hasattr(sizes, "__wrapped__")
    from big.sizes import describe as imported

    assert imported(3) == "small"
    assert sys.modules["big.sizes"] is sizes, "nothing was asked that it can't answer"

    describe = sizes.describe
    assert describe(12) == "large"
    assert importlib.import_module("big.sizes").__file__, "the module itself"
    assert sizes.Symbol.real, "who has the stand-in gets the module's own now"
    assert describe(3) == "small"


def test_a_submodule_of_a_deferred_package_imports_it() -> None:
    defer_module("alone", {"Symbol": int})
    assert importlib.import_module("alone.part").value == 3
    assert importlib.import_module("alone").Symbol is str


@pytest.fixture
def lazy(tmp_path: Path) -> None:
    """A package whose `__init__` puts another module in its place, as those of transformers do."""
    (tmp_path / "lazy" / "models").mkdir(parents=True)
    (tmp_path / "lazy" / "__init__.py").write_text(
        "import sys, types\nedition = 5\nfrom . import part\nnames = types.ModuleType(__name__)\n"
        "names.value, names.__path__, names.__spec__ = part.value, __path__, __spec__\nsys.modules[__name__] = names\n"
    )
    (tmp_path / "lazy" / "part.py").write_text("from . import edition\nvalue = edition\n")
    (tmp_path / "lazy" / "models" / "__init__.py").write_text("names = ['small']\n")
    (tmp_path / "lazy" / "models" / "small.py").write_text("layers = 2\n")


def test_a_package_is_initialized_when_more_than_its_submodules_is_asked_for(lazy: None) -> None:
    defer_initialization("lazy", {"edition": 5})
    defer_initialization("lazy.models", {})
    package = importlib.import_module("lazy")
    small = importlib.import_module("lazy.models.small")
    part = importlib.import_module("lazy.part")
    assert (small.layers, part.value) == (2, 5)
    assert not hasattr(package, "__wrapped__")
    assert "names" not in vars(sys.modules["lazy.models"]), "initialized for a submodule"
    assert sys.modules["lazy"] is package, "initialized for a submodule"

    assert (package.value, package.models.names) == (5, ["small"])
    assert importlib.import_module("lazy") is not package, "the module that it makes has taken its place"
    assert package.value == 5, "who has the first one gets what the other has"
    assert "value" in dir(package)
    assert importlib.import_module("lazy").part is part
    assert importlib.import_module("lazy.models.small") is small, "a submodule was imported again"
    with pytest.raises(AttributeError):
        _ = package.missing


def test_an_initialization_that_failed_may_be_tried_again(lazy: None, tmp_path: Path) -> None:
    file = tmp_path / "lazy" / "models" / "__init__.py"
    names = file.read_text()
    file.write_text("raise OSError('no memory')\n")
    defer_initialization("lazy", {"edition": 5})
    defer_initialization("lazy.models", {})
    models = importlib.import_module("lazy.models")
    with pytest.raises(OSError, match="no memory"):
        _ = models.names
    file.write_text(names)
    importlib.invalidate_caches()
    assert models.names == ["small"]


class Loop:
    """Refers to itself: the garbage collector alone frees it."""

    def __init__(self) -> None:
        self.own = self


def test_what_an_import_leaves_is_old_and_can_still_be_collected() -> None:
    with uncollected():
        assert not gc.isenabled()
        loop = Loop()
        with uncollected():
            pass
        assert not gc.isenabled(), "the outer import goes on"
    assert gc.isenabled()
    assert any(value is loop for value in gc.get_objects(generation=2))
    left = weakref.ref(loop)
    del loop
    gc.collect()
    assert left() is None


def test_a_disabled_collector_and_what_is_frozen_stay_as_they_are() -> None:
    try:
        gc.freeze()
        gc.disable()
        with uncollected():
            pass
        assert not gc.isenabled()
        gc.enable()
        with uncollected():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.enable()
        gc.unfreeze()
