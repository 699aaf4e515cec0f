"""Triton: each kernel is noted by its listener (since 3.4), and compiled by one process at a time."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from .compiles import saw
from .late import after_import
from .once import MISSED, current

_probing: Final = threading.local()
_OPTIONS: Final = ("num_warps", "num_stages", "num_ctas")


class _Missed(Exception):
    """The answer of a look into the cache that has nothing; the text is Triton's own key."""


def watch_triton() -> None:
    """Hook Triton, now or when it is loaded."""
    after_import("triton.compiler.compiler", _hook)


def _hook(module: Any) -> None:
    if hasattr(module.compile, "__wrapped__"):
        return
    _listen(module)
    plain, managers = module.compile, module.get_cache_manager

    def get_cache_manager(key: str) -> Any:
        manager = managers(key)
        return _Look(manager, key) if getattr(_probing, "on", False) else manager

    @functools.wraps(plain)
    def compile_once(src: Any, *args: Any, **options: Any) -> Any:
        guard = current()
        if guard is None or isinstance(src, str) or module.knobs.compilation.always_compile:
            return plain(src, *args, **options)
        try:
            with _looking():
                return plain(src, *args, **options)
        except _Missed as missed:
            key = str(missed)

        def look() -> Any:
            try:
                with _looking():
                    return plain(src, *args, **options)
            except _Missed:
                return MISSED

        return guard.once(f"triton-{key[:48]}", look, lambda: plain(src, *args, **options))

    module.get_cache_manager = get_cache_manager
    _replace(module, plain, compile_once)


def _replace(module: Any, plain: Any, wrapped: Any) -> None:
    """In every place that has the function: the module itself, and the packages that took it from there."""
    import sys

    module.compile = wrapped
    for name in ("triton.compiler", "triton"):
        package = sys.modules.get(name)
        if getattr(package, "compile", None) is plain:
            package.compile = wrapped  # type: ignore[union-attr]


@contextmanager
def _looking() -> Iterator[None]:
    """While Triton compiles in here, it looks into its cache and does no more."""
    _probing.on = True
    try:
        yield
    finally:
        _probing.on = False


class _Look:
    """A cache manager that ends the compile where it has nothing."""

    def __init__(self, behind: Any, key: str) -> None:
        self._behind, self._key = behind, key

    def get_group(self, name: str) -> Any:
        group = self._behind.get_group(name)
        if not group or group.get(name) is None:
            raise _Missed(self._key)
        return group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._behind, name)


def _listen(module: Any) -> None:
    compilation = module.knobs.compilation
    if not isinstance(compilation.listener, Listener):
        compilation.listener = Listener(compilation.listener)


class Listener:
    """Triton's compilation listener: notes each kernel, and passes everything on."""

    def __init__(self, behind: Any) -> None:
        self._behind = behind

    def __call__(self, *args: Any, **told: Any) -> None:
        """As Triton calls it."""
        source, times = told.get("src"), told.get("times")
        seconds = float(getattr(times, "total", 0) or 0) / 1e6  # CompileTimes counts microseconds
        saw(
            "triton",
            str(getattr(source, "name", "") or source or "?"),
            _shape_of(source, told.get("metadata") or {}),
            0.0 if told.get("cache_hit", False) else seconds,
            cached=bool(told.get("cache_hit", False)),
            looked_for=str((told.get("metadata") or {}).get("hash", "")),
        )
        if self._behind is not None:
            self._behind(*args, **told)


def _shape_of(source: Any, metadata: Any) -> str:
    """Types of the arguments, values of the constants, warps and stages."""
    constants = getattr(source, "constants", None) or {}
    names = getattr(getattr(source, "fn", None), "arg_names", None) or ()
    fixed = {names[path[0]]: value for path, value in constants.items() if len(path) == 1 and path[0] < len(names)}
    types = [
        f"{name}={fixed[name]}" if name in fixed else f"{name}:{kind}"
        for name, kind in (getattr(source, "signature", None) or {}).items()
    ]
    options = [f"{name}={metadata[name]}" for name in _OPTIONS if name in metadata]
    return " ".join((*types, *options))
