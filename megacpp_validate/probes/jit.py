"""How much was compiled just in time, in this process: a compile after warm-up is a step that suddenly takes seconds.

Triton, Inductor and FlashAttention 4 are asked in the process; what Triton and Inductor took from their caches does
not count. DeepGEMM compiles in C++ and leaves nothing but files in its cache: there, what a process beside this one
compiles at the same time counts too.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

# Where deep_gemm's own C++ looks: this variable, else .deep_gemm of the home folder; one kernel.cubin a kernel.
_DEEP_GEMM: Final = "DG_JIT_CACHE_DIR"
_FLASH_ATTENTION_4: Final = "flash_attn.cute.interface"
_triton: Counter[str] = Counter()


def watch_triton(gpu: bool) -> None:
    """Count Triton's compilations from here on; once a process is enough.

    Args:
        gpu: whether to load Triton for that: what is compiled later may load it itself, unseen.
    """
    if gpu:
        with suppress(Exception):  # not there, or damaged: then nothing is compiled with it
            importlib.import_module("triton")
    knobs = getattr(sys.modules.get("triton"), "knobs", None)
    compilation = getattr(knobs, "compilation", None)  # since Triton 3.4
    listener = getattr(compilation, "listener", None)
    if compilation is None or isinstance(listener, _Listener):
        return
    compilation.listener = _Listener(listener)


class _Listener:
    """Triton's compilation listener: counts what no cache answered, and passes everything on."""

    def __init__(self, behind: Any) -> None:
        self._behind = behind

    def __call__(self, *args: Any, **told: Any) -> None:
        if not told.get("cache_hit", False):
            _triton["triton"] += 1
        if self._behind is not None:
            self._behind(*args, **told)


def count_compiles() -> Counter[str]:
    """How much every compiler has compiled so far; subtract two of these."""
    return Counter(_triton) + _count_inductor() + _count_flash_attention_4() + _count_deep_gemm()


def compiled_since(before: Counter[str]) -> dict[str, int]:
    """What was compiled since, by compiler; only those that compiled anything."""
    return {name: number for name, number in sorted((count_compiles() - before).items()) if number}


def _count_inductor() -> Counter[str]:
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    if counters is None:
        return Counter()
    inductor = counters["inductor"]
    return Counter({"inductor": inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_bypass"]})


def _count_flash_attention_4() -> Counter[str]:
    """Its functions keep what the CuTe DSL compiled for them in `compile_cache`, by key."""
    functions = vars(sys.modules[_FLASH_ATTENTION_4]).values() if _FLASH_ATTENTION_4 in sys.modules else ()
    caches = [function.compile_cache for function in functions if hasattr(function, "compile_cache")]
    return Counter({"flash_attn_4": sum(len(getattr(cache, "cache", cache)) for cache in caches)})


def _count_deep_gemm() -> Counter[str]:
    with suppress(OSError, RuntimeError):  # a user without a home has no such cache
        folder = Path(os.environ.get(_DEEP_GEMM) or Path.home() / ".deep_gemm")
        return Counter({"deep_gemm": sum(1 for _ in folder.rglob("*.cubin"))})
    return Counter()
