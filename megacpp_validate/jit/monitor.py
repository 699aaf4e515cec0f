"""How much this process compiled just in time: a compile after warm-up is a step that suddenly takes seconds.

Each compiler is hooked when it is loaded; what it takes from its cache on disk does not count. `unwatched` names what
cannot be seen. `start_compiling` is the start of every process that compiles: a probe, a rank, a task of a prewarm.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from .driver_cache import list_compiled, watch_driver, why_shared, work_on_copy

# --- what was compiled ------------------------------------------------------------------------------------------------

ROOT: Final = "MEGACPP_JIT_ROOT"  # set where processes share the caches
ARCH: Final = "MEGACPP_JIT_ARCH"
LONGEST: Final = 400  # characters of a shape: a signature of thirty arguments says nothing that its first twenty do not
_seen: list[Compile] = []


@dataclass(frozen=True)
class Compile:
    """One kernel or graph that was needed and not in memory.

    Attributes:
        library: "triton", "inductor", "cute", "fa4", "deep_gemm", "cuda" (the driver).
        kernel: its name.
        shape: what it was compiled for: shapes, or the signature and its constants.
        seconds: that it took; of a hit, 0.
        cached: whether a cache on disk had it.
        looked_for: key or name under which a cache keeps it, where the library tells.
    """

    library: str
    kernel: str
    shape: str
    seconds: float
    cached: bool
    looked_for: str = ""


def saw(library: str, kernel: str, shape: str, seconds: float, *, cached: bool, looked_for: str = "") -> None:
    """Note a compile, or a hit."""
    short = shape if len(shape) <= LONGEST else f"{shape[:LONGEST]} ..."
    _seen.append(Compile(library, kernel, short, round(seconds, 4), cached, looked_for))


def seen_since(mark: int = 0) -> tuple[Compile, ...]:
    """What was noted after `mark`, which is the length of the list then."""
    return tuple(_seen[mark:])


def words_of(value: Any) -> str:
    """A value as a shape has it: "bf16[8,512]" of a tensor, a list of such, else its text."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        kind = str(value.dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")
        return f"{kind}[{','.join(map(str, value.shape))}]"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(words_of, value))})"
    return str(value)


# --- this process -----------------------------------------------------------------------------------------------------

# NVRTC keeps what it compiles in the driver's cache since CUDA 12.9 (its manual, "Caching"), and is seen there. Before,
# it compiled in memory and reported nothing: module that is loaded where it does -> what it compiles.
_BY_NVRTC: Final = {
    "transformer_engine": "its NVRTC kernels (transposes, casts) are compiled in memory, in every process",
    "cudnn": "its fused engines are compiled in memory by NVRTC, in every process",
}
_CACHES_SINCE: Final = (12, 9)
_NO_CACHE: Final = "CUDA_CACHE_DISABLE"
MODE: Final = "MEGACPP_JIT_MODE"
# The working folder is in the key of NVRTC's cache (CUDA 13.0, one H200: with the same cache the first attention of a
# process took 0.13 s in the folder in which it was filled, and 1.6 s in another). So every process on shared caches
# works in one that is the same on every machine, and in which nobody can leave a header that a compiler would take.
FOLDER: Final = "/"


@functools.cache
def watch_compilers() -> None:
    """Watch every compiler from here on, once a process. Imports no compiler."""
    for name, hook in HOOKS.items():
        after_import(name, hook)
    watch_driver()


def start_compiling(*, private: bool = True) -> None:
    """Watch every compiler, and count the driver's compiles in a private cache.

    Where the caches are shared (MEGACPP_JIT_ROOT is set), the working folder is changed: read relative paths before.
    Call it before CUDA is initialised.

    Args:
        private: whether this process is one that may have a copy of the driver's cache: not a part of another program.
    """
    if os.environ.get(ROOT):
        os.chdir(FOLDER)
    if private:
        work_on_copy()
    watch_compilers()


def look_at_driver() -> None:
    """Note what the driver compiled since the last look, by the name of its kernel."""
    for name, kernel in list_compiled().items():
        saw("cuda", kernel, name, 0.0, cached=False, looked_for=name)


def mark() -> int:
    """A position in the list of compiles, for `compiles_since` and `seen_since`."""
    look_at_driver()
    return len(seen_since())


def compiles_since(moment: int = 0) -> tuple[Compile, ...]:
    """What was compiled since, in its order; what came from caches is left out."""
    look_at_driver()
    return tuple(one for one in seen_since(moment) if not one.cached)


def describe_jit() -> dict[str, Any]:
    """What a receipt holds of this process beside its compiles: hits of caches on disk, unwatched libraries, caches."""
    names = {"root": ROOT, "arch": ARCH, "mode": MODE}
    return {
        "hits": dict(sorted(Counter(one.library for one in seen_since() if one.cached).items())),
        "unwatched": unwatched(),
        **{name: os.environ.get(variable, "") for name, variable in names.items()},
    }


def unwatched() -> dict[str, str]:
    """Libraries in this process whose compiles cannot be seen, and why."""
    found = {name: why for name, why in _BY_NVRTC.items() if name in sys.modules and not _nvrtc_caches()}
    if why := why_shared():
        found["cuda"] = f"its compiles are not counted: {why}"
    return found | {name: f"its hook failed: {why}" for name, why in faults().items()}


def _nvrtc_caches() -> bool:
    """Whether NVRTC keeps compiled kernels in the driver's cache, where they are seen."""
    if os.environ.get(_NO_CACHE, "0") not in ("", "0"):
        return False
    cuda = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None) or ""
    release = re.match(r"(\d+)\.(\d+)", str(cuda))
    return release is not None and (int(release[1]), int(release[2])) >= _CACHES_SINCE


# --- modules that are loaded later ------------------------------------------------------------------------------------
#
# A monitor must not import what it watches: a library that is never used costs seconds, and a damaged one fails.

_waiting: Final[dict[str, list[Callable[[Any], None]]]] = {}
_faults: Final[dict[str, str]] = {}


def after_import(name: str, hook: Callable[[Any], None]) -> None:
    """Call a hook with a module: now where it is loaded, else when it will be.

    What the hook raises is kept for `faults`, and never reaches whoever imports.
    """
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
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
    """Passes the search on to the other finders, and lets the loader that they find call the hooks."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _waiting:
            return None
        finders = [one for one in sys.meta_path if one is not self and hasattr(one, "find_spec")]
        spec = next(filter(None, (one.find_spec(fullname, path, target) for one in finders)), None)
        if spec is not None and spec.loader is not None:
            plain = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                plain(module)
                for hook in _waiting.pop(fullname, ()):
                    _call(fullname, hook, module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _wrap(owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
    """Replace a function of a module or a class by a wrapper of it."""
    plain = getattr(owner, name)
    setattr(owner, name, functools.wraps(plain)(wrapper(plain)))


# --- TorchInductor ---------------------------------------------------------------------------------------------------
#
# torch 2.11 and 2.13 alike: `_compile_fx_inner` looks a graph up by `FxGraphCache.load_with_key`, and what that does
# not have goes through `fx_codegen_and_compile`. Triton kernels of a graph are compiled in worker processes of
# Inductor's own: they count as the graph's.
#
# The key of a graph holds the number of its device (torch 2.13, `FxGraphCachePickler._reduce_fake_tensor`): ranks share
# graphs where each sees its own GPU as cuda:0, and compile one each where they see all of them.

_SHOWN: Final = 12


def _hook_inductor(module: Any) -> None:
    module.FxGraphCache.load_with_key = staticmethod(_note_hit(module.FxGraphCache.load_with_key))
    _wrap(module, "fx_codegen_and_compile", _note_graph)


def _note_hit(plain: Any) -> Any:
    @functools.wraps(plain)
    def load_with_key(key: str, debug_lines: Any, example_inputs: Any, *args: Any, **options: Any) -> Any:
        answer = plain(key, debug_lines, example_inputs, *args, **options)
        if answer[0] is not None:
            saw("inductor", "graph", _inputs_of(example_inputs), 0.0, cached=True, looked_for=key)
        return answer

    return load_with_key


def _note_graph(plain: Any) -> Any:
    def fx_codegen_and_compile(gm: Any, example_inputs: Any, *args: Any, **options: Any) -> Any:
        began = time.perf_counter()
        made = plain(gm, example_inputs, *args, **options)
        name = f"graph {options.get('graph_id')} {'backward' if options.get('is_backward') else 'forward'}"
        seconds = time.perf_counter() - began
        saw("inductor", name, _inputs_of(example_inputs), seconds, cached=False)
        return made

    return fx_codegen_and_compile


def _inputs_of(inputs: Any) -> str:
    more = len(inputs) - _SHOWN
    return " ".join(map(words_of, list(inputs)[:_SHOWN])) + (f" and {more} more" if more > 0 else "")


# --- Triton ----------------------------------------------------------------------------------------------------------
#
# Each kernel is noted by Triton's listener (since 3.4).

_OPTIONS: Final = ("num_warps", "num_stages", "num_ctas")


def _hook_triton(module: Any) -> None:
    behind = module.knobs.compilation.listener

    def note(*args: Any, **passed: Any) -> None:
        """Note a kernel, and pass everything on."""
        source, metadata, cached = passed.get("src"), passed.get("metadata") or {}, bool(passed.get("cache_hit"))
        seconds = float(getattr(passed.get("times"), "total", 0) or 0) / 1e6  # CompileTimes counts microseconds
        name, shape = str(getattr(source, "name", "") or source or "?"), _signature_of(source, metadata)
        saw("triton", name, shape, 0.0 if cached else seconds, cached=cached, looked_for=str(metadata.get("hash", "")))
        if behind is not None:
            behind(*args, **passed)

    module.knobs.compilation.listener = note


def _signature_of(source: Any, metadata: Any) -> str:
    """Types of the arguments, values of the constants, warps and stages."""
    constants = getattr(source, "constants", None) or {}
    names = getattr(getattr(source, "fn", None), "arg_names", None) or ()
    fixed = {names[path[0]]: value for path, value in constants.items() if len(path) == 1 and path[0] < len(names)}
    types = [
        f"{name}={fixed[name]}" if name in fixed else f"{name}:{kind}"
        for name, kind in (getattr(source, "signature", None) or {}).items()
    ]
    return " ".join((*types, *(f"{name}={metadata[name]}" for name in _OPTIONS if name in metadata)))


# --- FlashAttention 4 ------------------------------------------------------------------------------------------------
#
# It keeps what it had CuTe DSL (nvidia-cutlass-dsl) compile under keys of its own. Nothing else in a stack uses the DSL
# (no receipt names it): a file that appears in the DSL's own cache is found by `jit_verify`.

_missing: Final = threading.local()  # of FlashAttention 4: keys that were missed and are being compiled


def _hook_flash_attention(module: Any) -> None:
    """Its `key not in cache` begins a compile, and `cache[key] = kernel` ends it."""
    for one in (module.JITCache, module.JITPersistentCache):
        _wrap(one, "__contains__", functools.partial(_note_lookup, one))
        _wrap(one, "__setitem__", functools.partial(_note_kernel, one))


def _note_lookup(of: Any, plain: Any) -> Any:
    def contains(self: Any, key: Any) -> bool:
        if type(self) is not of:  # its class for caches on disk asks the one for memory
            return bool(plain(self, key))
        there, found = key in self.cache, bool(plain(self, key))
        missing = _missing.__dict__.setdefault("keys", {})
        missing.clear()  # a compile that raised never came to its end
        if not found:
            missing[key] = time.perf_counter()
        elif not there:
            name, file = _name_of(self, key)
            saw("fa4", name, words_of(key), 0.0, cached=True, looked_for=file)
        return found

    return contains


def _note_kernel(of: Any, plain: Any) -> Any:
    def setitem(self: Any, key: Any, kernel: Any) -> None:
        plain(self, key, kernel)
        if type(self) is not of:
            return
        began = _missing.__dict__.setdefault("keys", {}).pop(key, time.perf_counter())
        name, file = _name_of(self, key)
        saw("fa4", name, words_of(key), time.perf_counter() - began, cached=False, looked_for=file)

    return setitem


def _name_of(cache: Any, key: Any) -> tuple[str, str]:
    """Name of the kernel, and the file in which a cache on disk keeps it; empty of one in memory."""
    path = getattr(cache, "cache_path", None)
    return ("kernel", "") if path is None else (path.name, f"{path.name}/{cache._key_to_hash(key)}.o")


# --- DeepGEMM --------------------------------------------------------------------------------------------------------
#
# Compiles in C++, inside of a call, and leaves a folder `kernel.NAME.HASH` in its cache.
#
# So a call with shapes that this process has not used yet is looked at: what lies in the cache after it and did not
# before was compiled by it. Where the caches are shared (MEGACPP_JIT_ROOT is set), one process at a time is inside such
# a call: the new folders would be another's, and four cold ranks compiled each kernel four times (H200, 2026-11-23).

CACHE: Final = "DG_JIT_CACHE_DIR"  # else .deep_gemm of the home folder
_WATCHED: Final = re.compile(r"gemm|einsum|mqa|prenorm")
_NO_KERNEL: Final = re.compile(r"^(get|set|transform|is|_)")
_used: Final[set[Any]] = set()
_inside: Final = threading.local()
_WAIT_S: Final = 90.0  # less than a launcher allows a run to be silent (training.smoke.run.SILENT_S)


def _hook_deep_gemm(module: Any) -> None:
    for name, value in list(vars(module).items()):
        if _WATCHED.search(name) and not _NO_KERNEL.match(name) and callable(value) and not isinstance(value, type):
            _wrap(module, name, functools.partial(watched, name))


def watched(name: str, plain: Any) -> Any:
    """A function of the library, looked at where its shapes are new."""

    def call(*args: Any, **more: Any) -> Any:
        shapes = (name, _shape(args), _shape(tuple(more.values())))
        if shapes in _used or getattr(_inside, "on", False):
            return plain(*args, **more)
        _inside.on = True
        try:
            with _alone_in_cache():
                before, began = kernels_there(), time.perf_counter()
                made = plain(*args, **more)
                seconds, new = time.perf_counter() - began, sorted(kernels_there() - before)
        finally:
            _inside.on = False
        shape = " ".join(words_of(one) for one in (*args, *more.values()))
        for kernel in new:
            saw("deep_gemm", kernel.split(".")[1], shape, seconds / len(new), cached=False, looked_for=kernel)
        if not new:
            saw("deep_gemm", name, shape, 0.0, cached=True)
        _used.add(shapes)
        return made

    return call


@contextmanager
def _alone_in_cache() -> Iterator[None]:
    """Hold the lock of a shared cache; a lock that cannot be had ends no run: the call goes on without."""
    with ExitStack() as stack:
        if (root := os.environ.get(ROOT)) and (arch := os.environ.get(ARCH)):
            with suppress(Exception):
                from filelock import FileLock  # in every stack: torch requires it

                folder = Path(root, arch, "locks")
                folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(FileLock(folder / "deep_gemm", timeout=_WAIT_S))
        yield


def kernels_there() -> frozenset[str]:
    """Names of the kernels in the cache, as in "kernel.sm90_fp8_gemm_1d2d.1f03"."""
    try:
        folder = Path(os.environ.get(CACHE) or Path.home() / ".deep_gemm")
        return frozenset(entry.name for entry in (folder / "cache").iterdir() if entry.name.startswith("kernel."))
    except (OSError, RuntimeError):  # nothing was compiled yet; a user without a home has no cache
        return frozenset()


def _shape(value: Any) -> Any:
    """What a kernel can depend on: rows of the first dimension by their power of two, the others as they are."""
    shape = getattr(value, "shape", None)
    if shape is not None and hasattr(value, "dtype"):
        return (str(value.dtype), *(int(size).bit_length() if place == 0 else size for place, size in enumerate(shape)))
    if isinstance(value, tuple | list):
        return tuple(map(_shape, value))
    return value.bit_length() if isinstance(value, int) and not isinstance(value, bool) else str(value)


HOOKS: Final[dict[str, Callable[[Any], None]]] = {
    "torch._inductor.compile_fx": _hook_inductor,
    "triton.compiler.compiler": _hook_triton,
    "flash_attn.cute.cache_utils": _hook_flash_attention,
    "deep_gemm": _hook_deep_gemm,
}
