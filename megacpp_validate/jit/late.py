"""A hook on a module that may be loaded later: called when it is whole, before anyone else has it.

A monitor must not import what it watches: a library that is never used costs seconds, and one that is damaged fails.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Final

_waiting: Final[dict[str, list[Callable[[Any], None]]]] = {}
_faults: Final[dict[str, str]] = {}


def after_import(name: str, hook: Callable[[Any], None]) -> None:
    """Call a hook with a module: now where it is loaded, else when it will be.

    What the hook raises is kept for `faults`, and never reaches whoever imports.
    """
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    if module is not None and not getattr(spec, "_initializing", False):
        _call(name, hook, module)
        return
    _waiting.setdefault(name, []).append(hook)
    if not any(isinstance(one, _Finder) for one in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def faults() -> dict[str, str]:
    """Modules whose hook failed, and why: what they compile is not seen."""
    return dict(_faults)


def _call(name: str, hook: Callable[[Any], None], module: ModuleType) -> None:
    try:
        hook(module)
    except Exception as fault:
        _faults[name] = f"{type(fault).__name__}: {fault}"


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself: lets the others find, and puts a loader before theirs that calls the hooks."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _waiting:
            return None
        for finder in [one for one in sys.meta_path if one is not self]:
            spec = finder.find_spec(fullname, path, target) if hasattr(finder, "find_spec") else None
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """A loader as it was, and then the hooks."""

    def __init__(self, behind: Any) -> None:
        self._behind = behind

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._behind.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        if module.__spec__ is not None:
            module.__spec__.loader = self._behind  # whoever asks the module for its source finds its own loader
            module.__loader__ = self._behind
        self._behind.exec_module(module)
        for hook in _waiting.pop(name, ()):
            _call(name, hook, module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._behind, name)
