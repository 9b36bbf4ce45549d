"""Parts of large libraries that are left out of an import until something asks for them.

A library's import may bring packages that a process never uses, and takes seconds of the processor with them. A
stand-in in `sys.modules` takes their place. What asks a stand-in for something that it does not have gets the real
package, imported at that moment.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any


def defer_package(name: str, *, submodules: Sequence[str], decorators: Sequence[str], before: str) -> None:
    """The package's `__init__` runs when an attribute other than these is first asked for.

    Args:
        name: a package, whose parent is imported here. One that is imported already stays as it is.
        submodules: attributes that are modules of the package and work without its `__init__`.
        decorators: attributes that mark functions for the package. Before it is imported they return the function
            unmarked.
        before: a module that can only be imported after the package.
    """
    if name in sys.modules:
        return
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        return
    loader = spec.loader
    package = importlib.util.module_from_spec(spec)

    def load_package() -> None:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)
            for deferred in ("__getattr__", *decorators):
                package.__dict__.pop(deferred, None)
            loader.exec_module(package)

    def load_attribute(attribute: str) -> Any:
        if attribute in submodules:
            return importlib.import_module(f"{name}.{attribute}")
        if attribute.startswith("__"):
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
        load_package()
        return getattr(package, attribute)

    for decorator in decorators:
        setattr(package, decorator, _leave_unmarked)
    setattr(package, "__getattr__", load_attribute)  # noqa: B010  a module's own, PEP 562
    finder = _LoadsBefore(before, load_package)
    sys.meta_path.insert(0, finder)
    sys.modules[name] = package
    parent, _, attribute = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], attribute, package)


class _LoadsBefore:
    """Loads a deferred package before a module is looked for, and finds that module where the package imported it."""

    def __init__(self, before: str, load: Callable[[], None]) -> None:
        self._before, self._load = before, load

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        if name == self._before:
            self._load()
            if module := sys.modules.get(name):
                # The import system takes the specification of a module that has come meanwhile.
                module.__spec__ = ModuleSpec(name, _Imported(module))
                return module.__spec__
        return None


class _Imported(Loader):
    """Loads a module that is imported already, as it is: a second one would lack the submodules of the first."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """See `importlib.abc.Loader`."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """See `importlib.abc.Loader`."""
        module.__spec__ = self._spec


def _leave_unmarked(function: Any = None, *_arguments: Any, **_options: Any) -> Any:
    """A decorator, with or without arguments, that changes nothing."""
    return (lambda given: given) if function is None else function


def defer_initialization(name: str, attributes: Mapping[str, Any]) -> None:
    """The package's `__init__` runs when an attribute other than these is first asked for, in a module that takes this
    one's place. Its submodules are imported without it until then.

    Args:
        name: a package, whose parent is imported. One that is imported already stays as it is.
        attributes: what its `__init__` would give, and submodules need.
    """
    spec = importlib.util.find_spec(name) if name not in sys.modules else None
    if spec is None:
        return
    package = importlib.util.module_from_spec(spec)
    parent, _, short = name.rpartition(".")

    def initialized() -> ModuleType:
        if sys.modules.get(name) is package:
            submodules = {key: value for key, value in vars(package).items() if isinstance(value, ModuleType)}
            del sys.modules[name]
            try:
                vars(importlib.import_module(name)).update(submodules)
            except BaseException:
                sys.modules[name] = package
                raise
        return importlib.import_module(name)

    def load_attribute(attribute: str) -> Any:
        if attribute.startswith("__") and attribute != "__all__":
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
        return getattr(initialized(), attribute)

    vars(package).update(attributes, __getattr__=load_attribute, __dir__=lambda: dir(initialized()))
    sys.modules[name] = package
    if parent:
        setattr(sys.modules[parent], short, package)


def defer_functions(name: str, functions: Sequence[str]) -> None:
    """A stand-in for the module `name` that has these functions; a call of one imports the module and calls its."""
    add_stand_in(name, {function: _call_later(name, function) for function in functions})


def _call_later(name: str, function: str) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        if isinstance(sys.modules.get(name), _StandIn):
            del sys.modules[name]
        return getattr(importlib.import_module(name), function)(*arguments, **options)

    return call


def defer_module(name: str, attributes: Mapping[str, Any]) -> None:
    """A stand-in for the module `name`, whose parent is imported, with these attributes. What else is asked of it gets
    the module's own, which is imported for it and takes its place.

    Args:
        name: of a module. One that is imported already stays as it is, and one that is not installed is not there.
        attributes: values, and functions that answer what they can: where one raises Unanswered, the module's own is
            called.
    """
    spec = importlib.util.find_spec(name) if name not in sys.modules else None
    if spec is None:
        return
    is_package = spec.submodule_search_locations is not None
    stand_in = _StandIn(name)
    parent, _, short = name.rpartition(".")

    def load_attribute(attribute: str) -> Any:
        # Submodules of a package are looked for by its path.
        if attribute.startswith("__") and not (is_package and attribute == "__path__"):
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
        if sys.modules.get(name) is stand_in:
            del sys.modules[name]
            for replaced in attributes:
                delattr(stand_in, replaced)
        return getattr(importlib.import_module(name), attribute)

    def answering(attribute: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            try:
                return function(*arguments, **options)
            except Unanswered:
                return load_attribute(attribute)(*arguments, **options)

        return call

    for attribute, value in attributes.items():
        setattr(stand_in, attribute, answering(attribute, value) if isinstance(value, FunctionType) else value)
    setattr(stand_in, "__getattr__", load_attribute)  # noqa: B010  a module's own, PEP 562
    sys.modules[name] = stand_in
    if parent:
        setattr(sys.modules[parent], short, stand_in)


class Unanswered(Exception):
    """A function of a stand-in leaves it to the module's own."""


def add_stand_in(name: str, attributes: Mapping[str, Any]) -> None:
    """A module with nothing but these attributes, unless the real one is imported already."""
    stand_in = _StandIn(name)
    stand_in.__dict__.update(attributes)
    sys.modules.setdefault(name, stand_in)


@contextmanager
def hidden(*names: str) -> Iterator[None]:
    """For what imports them only if they are installed: they aren't. One that is imported already stays."""
    missing = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(missing))  # type: ignore[arg-type]  # None: ModuleNotFoundError
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]


@contextmanager
def uncollected() -> Iterator[None]:
    """For large imports: the garbage collector does not look again and again through objects that stay. Afterwards they
    count as old, as those that it has looked at often."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():  # else they are somebody's, to be left frozen
                gc.freeze()
                gc.unfreeze()  # into the oldest generation
            gc.enable()


class _StandIn(ModuleType):
    """A module that takes another's place."""
