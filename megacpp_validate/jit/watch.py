"""Hooks on each compiler: every compile is noted with its kernel and shape, and made by one process at a time.

HOOKS is the table of libraries. A hook takes the module that its library compiles in, when that module is loaded.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from .compiles import inside, is_inside, saw, words_of
from .once import MISSED, current

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
    """Asks the other finders, and puts a loader that calls the hooks before theirs."""

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
    """Calls the hooks after the loader of the module."""

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


# --- TorchInductor ---------------------------------------------------------------------------------------------------
#
# torch 2.11 and 2.13 alike: `_compile_fx_inner` looks a graph up by `FxGraphCache.load_with_key`, and what that does
# not have goes through `fx_codegen_and_compile`. Triton kernels of a graph are compiled in worker processes of
# Inductor's own: they count as the graph's. C++ of a graph has a key of its own, with the folders of headers in it: a
# graph that the cache has may be compiled all the same, and that is noted too.
#
# The key of a graph holds the number of its device (torch 2.13, `FxGraphCachePickler._reduce_fake_tensor`): ranks share
# graphs where each sees its own GPU as cuda:0, and compile one each where they see all of them.


_open: Final = threading.local()  # turns of the compile that runs, by depth: a graph may be compiled inside another
_handed_over: Final[set[str]] = set()  # files that are compiled by others than who asked
_SHOWN: Final = 12


def _hook_inductor(module: Any) -> None:
    if hasattr(module.fx_codegen_and_compile, "__wrapped__"):
        return
    module.FxGraphCache.load_with_key = staticmethod(_looking_twice(module.FxGraphCache.load_with_key))
    module._compile_fx_inner = _giving_back(module._compile_fx_inner)
    module.fx_codegen_and_compile = _noting(module.fx_codegen_and_compile)


def _hook_cpp(module: Any) -> None:
    """`load_async` submits the compile to worker processes, or else compiles in this process."""
    cache = module.CppCodeCache
    plain = cache.__dict__["load_async"].__func__
    if hasattr(plain, "__wrapped__"):
        return
    cache.load_async = classmethod(_noting_hand_over(plain))
    module._worker_compile_cpp = _noting_cpp(module._worker_compile_cpp)


def _noting_hand_over(plain: Any) -> Any:
    @functools.wraps(plain)
    def load_async(cls: Any, *args: Any, **options: Any) -> Any:
        submit = options.get("submit_fn")
        if submit is not None:

            def hand_over(work: Any) -> Any:
                builders = work.args[1]  # of _worker_compile_cpp: the lock, and what is built
                _handed_over.add(_target_of(builders))
                _saw_cpp(builders)
                return submit(work)

            options["submit_fn"] = hand_over
        return plain(cls, *args, **options)

    return load_async


def _noting_cpp(plain: Any) -> Any:
    @functools.wraps(plain)
    def _worker_compile_cpp(lock_path: str, cpp_builders: Any) -> Any:
        target, began = _target_of(cpp_builders), time.perf_counter()
        missed = not Path(target).exists() and target not in _handed_over  # a thread of a pool that it was handed to
        done = plain(lock_path, cpp_builders)
        if missed:
            _saw_cpp(cpp_builders, time.perf_counter() - began)
        return done

    return _worker_compile_cpp


def _saw_cpp(builders: Any, seconds: float = 0.0) -> None:
    """C++ that is compiled for a graph which the cache had; that of a new graph counts as the graph's."""
    if not getattr(_open, "graphs", 0):
        name = "C++ of a graph that the cache has"
        saw("inductor", name, "", seconds, cached=False, looked_for=_target_of(builders))


def _target_of(builders: Any) -> str:
    """The file that a loader looks for: what the last builder makes."""
    return str(builders[-1].get_target_file_path())


def _noting(plain: Any) -> Any:
    @functools.wraps(plain)
    def fx_codegen_and_compile(gm: Any, example_inputs: Any, *args: Any, **options: Any) -> Any:
        began = time.perf_counter()
        # Cleared at once: a graph inside this one has its own key, and the next graph may look into no cache (torch
        # skips graphs that it cannot keep): this key must not be recorded for it.
        key, _open.missed = getattr(_open, "missed", ""), ""
        _open.graphs = getattr(_open, "graphs", 0) + 1
        try:
            made = plain(gm, example_inputs, *args, **options)
        finally:
            _open.graphs -= 1
        seconds = time.perf_counter() - began
        saw("inductor", _graph_name(options), _inputs_of(example_inputs), seconds, cached=False, looked_for=key)
        return made

    return fx_codegen_and_compile


def _looking_twice(plain: Any) -> Any:
    @functools.wraps(plain)
    def load_with_key(key: str, debug_lines: Any, example_inputs: Any, *args: Any, **options: Any) -> Any:
        def look() -> Any:
            answer = plain(key, debug_lines, example_inputs, *args, **options)
            return MISSED if answer[0] is None else answer

        answer = plain(key, debug_lines, example_inputs, *args, **options)
        guard, turns = current(), getattr(_open, "turns", [])
        if answer[0] is None and guard is not None and turns:  # elsewhere nobody would end the turn
            found, turn = guard.begin(f"inductor-{key[:100]}", look)
            if found is not MISSED:
                answer = found
            turns[-1].append((guard, turn))
        _open.missed = key if answer[0] is None else ""
        if answer[0] is not None:
            saw("inductor", "graph", _inputs_of(example_inputs), 0.0, cached=True, looked_for=key)
        return answer

    return load_with_key


def _giving_back(plain: Any) -> Any:
    @functools.wraps(plain)
    def _compile_fx_inner(*args: Any, **options: Any) -> Any:
        turns: list[list[Any]] = _open.__dict__.setdefault("turns", [])
        turns.append([])
        try:
            return plain(*args, **options)
        finally:
            for guard, turn in turns.pop():
                guard.end(turn)

    return _compile_fx_inner


def _graph_name(options: Any) -> str:
    return f"graph {options.get('graph_id')} {'backward' if options.get('is_backward') else 'forward'}"


def _inputs_of(inputs: Any) -> str:
    shown = [words_of(one) for one in list(inputs)[:_SHOWN]]
    more = len(inputs) - len(shown)
    return " ".join(shown) + (f" and {more} more" if more > 0 else "")


# --- Triton ----------------------------------------------------------------------------------------------------------
#
# Each kernel is noted by Triton's listener (since 3.4).


_probing: Final = threading.local()
_OPTIONS: Final = ("num_warps", "num_stages", "num_ctas")


class _Missed(Exception):
    """A lookup found nothing in the cache; the text is Triton's own key."""


def _hook_triton(module: Any) -> None:
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

    def __call__(self, *args: Any, **passed: Any) -> None:
        """As Triton calls it."""
        source, times = passed.get("src"), passed.get("times")
        seconds = float(getattr(times, "total", 0) or 0) / 1e6  # CompileTimes counts microseconds
        saw(
            "triton",
            str(getattr(source, "name", "") or source or "?"),
            _signature_of(source, passed.get("metadata") or {}),
            0.0 if passed.get("cache_hit", False) else seconds,
            cached=bool(passed.get("cache_hit", False)),
            looked_for=str((passed.get("metadata") or {}).get("hash", "")),
        )
        if self._behind is not None:
            self._behind(*args, **passed)


def _signature_of(source: Any, metadata: Any) -> str:
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


# --- CuTe DSL and FlashAttention 4 -----------------------------------------------------------------------------------
#
# CuTe DSL (nvidia-cutlass-dsl) and FlashAttention 4, which keeps what it had the DSL compile under keys of its own.


_missing: Final = threading.local()  # of FlashAttention 4: keys that were missed and are being compiled


def _hook_flash_attention(module: Any) -> None:
    """Its `key not in cache` begins a compile, and `cache[key] = kernel` ends it."""
    plain, kept = module.JITCache, module.JITPersistentCache
    for one in (plain, kept):
        if not hasattr(one.__contains__, "__wrapped__"):
            one.__contains__ = _asked(one.__contains__, one)
            one.__setitem__ = _given(one.__setitem__, one)


def _asked(plain: Any, of: Any) -> Any:
    @functools.wraps(plain)
    def ask(self: Any, key: Any) -> bool:
        if type(self) is not of:  # its class for caches on disk asks the one for memory
            return bool(plain(self, key))
        there = key in self.cache
        found = bool(plain(self, key))
        guard, missing = current(), _missing.__dict__.setdefault("keys", {})
        _end(guard, missing)  # a compile that raised never came to its end
        name = _cache_name(self)
        if not found and guard is not None and hasattr(self, "cache_path"):
            look = functools.partial(_look_for_kernel, plain, self, key)
            answer, turn = guard.begin(f"fa4-{name}-{self._key_to_hash(key)[:40]}", look)
            found = answer is not MISSED
            missing[key] = (time.perf_counter(), turn)
        if not found:
            missing.setdefault(key, (time.perf_counter(), None))
        elif not there:
            missing.pop(key, None)
            saw("fa4", name, words_of(key), 0.0, cached=True, looked_for=_file_of(self, key))
        return found

    return ask


def _given(plain: Any, of: Any) -> Any:
    @functools.wraps(plain)
    def give(self: Any, key: Any, kernel: Any) -> None:
        plain(self, key, kernel)
        if type(self) is not of:
            return
        missing = _missing.__dict__.setdefault("keys", {})
        began, turn = missing.pop(key, (time.perf_counter(), None))
        if turn is not None and (guard := current()) is not None:
            guard.end(turn)
        seconds = time.perf_counter() - began
        saw("fa4", _cache_name(self), words_of(key), seconds, cached=False, looked_for=_file_of(self, key))

    return give


def _look_for_kernel(plain: Any, cache: Any, key: Any) -> Any:
    return True if plain(cache, key) else MISSED


def _end(guard: Any, missing: dict[Any, Any]) -> None:
    for _, turn in missing.values():
        if turn is not None and guard is not None:
            guard.end(turn)
    missing.clear()


def _file_of(cache: Any, key: Any) -> str:
    """Where a cache on disk keeps it; empty of one in memory."""
    name_of = getattr(cache, "_key_to_hash", None)
    return "" if name_of is None else f"{_cache_name(cache)}/{name_of(key)}.o"


def _cache_name(cache: Any) -> str:
    path = getattr(cache, "cache_path", None)
    return "kernel" if path is None else str(path.name)


def _hook_dsl(module: Any) -> None:
    plain = module.BaseDSL.compile_and_cache
    if hasattr(plain, "__wrapped__"):
        return

    @functools.wraps(plain)
    def compile_and_cache(self: Any, module: Any, module_hash: Any, function_name: str, *args: Any, **more: Any) -> Any:
        def make() -> Any:
            return plain(self, module, module_hash, function_name, *args, **more)

        if getattr(_missing, "keys", None):  # FlashAttention 4 has it compiled, and it counts there
            return make()
        began, guard = time.perf_counter(), current()
        if guard is None or not module_hash:
            made = make()
        else:
            made = guard.once(f"cute-{str(module_hash)[:48]}", functools.partial(_look_up, self, module_hash), make)
        saw("cute", function_name, _arguments_of(more), time.perf_counter() - began, cached=False)
        return made

    module.BaseDSL.compile_and_cache = compile_and_cache


def _look_up(dsl: Any, module_hash: Any) -> Any:
    found = dsl.jit_cache.get(module_hash)
    return MISSED if found is None or getattr(found, "capi_func", None) is None else found


def _arguments_of(more: dict[str, Any]) -> str:
    return " ".join(words_of(one) for one in (more.get("full_args") or ()))


# --- DeepGEMM --------------------------------------------------------------------------------------------------------
#
# Compiles in C++, inside of a call, and leaves a folder `kernel.NAME.HASH` in its cache.
#
# So a call with shapes that this process has not used yet is looked at: what lies in the cache after it and did not
# before was compiled by it. One process at a time is inside such a call where the caches are shared, or the folders
# would be another's.


CACHE: Final = "DG_JIT_CACHE_DIR"  # else .deep_gemm of the home folder
_WATCHED: Final = re.compile(r"gemm|einsum|mqa|prenorm")
_NO_KERNEL: Final = re.compile(r"^(get|set|transform|is|_)")
_used: Final[set[Any]] = set()


def _hook_deep_gemm(module: Any) -> None:
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


# --- Extensions of torch ---------------------------------------------------------------------------------------------


def _hook_extensions(module: Any) -> None:
    plain = module._run_ninja_build
    if hasattr(plain, "__wrapped__"):
        return

    @functools.wraps(plain)
    def _run_ninja_build(build_directory: str, *args: Any, **more: Any) -> Any:
        folder, began = Path(build_directory), time.perf_counter()
        before = _built(folder)
        made = plain(build_directory, *args, **more)
        is_new = _built(folder) != before
        seconds = time.perf_counter() - began if is_new else 0.0
        saw("torch_extensions", folder.name, "C++", seconds, cached=not is_new)
        return made

    module._run_ninja_build = _run_ninja_build


def _built(folder: Path) -> dict[str, float]:
    return {path.name: path.stat().st_mtime for path in folder.glob("*.so")}


HOOKS: Final[dict[str, Callable[[Any], None]]] = {
    "torch._inductor.compile_fx": _hook_inductor,
    "torch._inductor.codecache": _hook_cpp,
    "triton.compiler.compiler": _hook_triton,
    "flash_attn.cute.cache_utils": _hook_flash_attention,
    "cutlass.base_dsl.dsl": _hook_dsl,
    "deep_gemm": _hook_deep_gemm,
    "torch.utils.cpp_extension": _hook_extensions,
}
