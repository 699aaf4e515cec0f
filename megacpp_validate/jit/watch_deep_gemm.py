"""DeepGEMM: compiles in C++, inside of a call, and leaves a folder `kernel.NAME.HASH` in its cache.

So a call with shapes that this process has not used yet is looked at: what lies in the cache after it and did not
before was compiled by it. One process at a time is inside such a call where the caches are shared, or the folders would
be another's.
"""

from __future__ import annotations

import functools
import os
import re
import time
from pathlib import Path
from typing import Any, Final

from .compiles import inside, is_inside, saw, words_of
from .late import after_import
from .once import MISSED, current

CACHE: Final = "DG_JIT_CACHE_DIR"  # else .deep_gemm of the home folder
_WATCHED: Final = re.compile(r"gemm|einsum|mqa|prenorm")
_NO_KERNEL: Final = re.compile(r"^(get|set|transform|is|_)")
_used: Final[set[Any]] = set()


def watch_deep_gemm() -> None:
    """Hook DeepGEMM, now or when it is loaded; who took a function of it before that is not seen."""
    after_import("deep_gemm", _hook)


def _hook(module: Any) -> None:
    for name, value in list(vars(module).items()):
        compiles = _WATCHED.search(name) and not _NO_KERNEL.match(name)
        if compiles and callable(value) and not isinstance(value, type) and not hasattr(value, "__wrapped__"):
            setattr(module, name, watched(name, value))


def watched(name: str, plain: Any) -> Any:
    """A function of the library, looked at where its shapes are new."""

    @functools.wraps(plain, assigned=("__doc__",), updated=())
    def call(*args: Any, **more: Any) -> Any:
        shapes = (name, _shapes(args), _shapes(tuple(more.values())))
        if shapes in _used or is_inside("deep_gemm"):
            return plain(*args, **more)
        guard = current()
        with inside("deep_gemm"):
            turn = None if guard is None else guard.begin("deep_gemm", lambda: MISSED)[1]
            try:
                made = _look_at(name, plain, args, more)
            finally:
                if guard is not None:
                    guard.end(turn)
        _used.add(shapes)
        return made

    return call


def _look_at(name: str, plain: Any, args: tuple[Any, ...], more: dict[str, Any]) -> Any:
    before, began = kernels_there(), time.perf_counter()
    made = plain(*args, **more)
    seconds, new = time.perf_counter() - began, sorted(kernels_there() - before)
    shape = " ".join(words_of(one) for one in (*args, *more.values()))
    for kernel in new:
        name_alone = kernel.split(".")[1]
        saw("deep_gemm", name_alone, shape, seconds / len(new), cached=False, looked_for=kernel)
    if not new:
        saw("deep_gemm", name, shape, 0.0, cached=True)
    return made


def kernels_there() -> frozenset[str]:
    """Names of the kernels in the cache, as in "kernel.sm90_fp8_gemm_1d2d.1f03"."""
    try:
        folder = Path(os.environ.get(CACHE) or Path.home() / ".deep_gemm")
        names = (entry.name for entry in (folder / "cache").iterdir())
        return frozenset(name for name in names if name.startswith("kernel."))
    except (OSError, RuntimeError):  # nothing was compiled yet; a user without a home has no cache
        return frozenset()


def _shapes(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a kernel can depend on: rows of the first dimension by their power of two, the others as they are."""
    return tuple(_shape(one) for one in values)


def _shape(value: Any) -> Any:
    shape = getattr(value, "shape", None)
    if shape is not None and hasattr(value, "dtype"):
        return (str(value.dtype), *(int(size).bit_length() if place == 0 else size for place, size in enumerate(shape)))
    if isinstance(value, tuple | list):
        return _shapes(tuple(value))
    return value.bit_length() if isinstance(value, int) and not isinstance(value, bool) else str(value)
