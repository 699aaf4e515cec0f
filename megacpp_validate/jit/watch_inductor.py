"""TorchInductor: each graph that no cache answered is noted, and compiled by one process at a time.

torch 2.11 and 2.13 alike: `_compile_fx_inner` looks a graph up by `FxGraphCache.load_with_key`, and what that does not
have goes through `fx_codegen_and_compile`. Triton kernels of a graph are compiled in worker processes of Inductor's
own: they count as the graph's. C++ of a graph has a key of its own, with the folders of headers in it: a graph that the
cache has may be compiled all the same, and that is noted too.

The key of a graph holds the number of its device (torch 2.13, `FxGraphCachePickler._reduce_fake_tensor`): ranks share
graphs where each sees its own GPU as cuda:0, and compile one each where they see all of them.
"""

from __future__ import annotations

import functools
import threading
import time
from pathlib import Path
from typing import Any, Final

from .compiles import saw, words_of
from .late import after_import
from .once import MISSED, current

_open: Final = threading.local()  # turns of the compile that runs, by depth: a graph may be compiled inside another
_handed_over: Final[set[str]] = set()  # files that are compiled by others than who asked
_SHOWN: Final = 12


def watch_inductor() -> None:
    """Hook Inductor, now or when it is loaded."""
    after_import("torch._inductor.compile_fx", _hook)
    after_import("torch._inductor.codecache", _hook_cpp)


def _hook(module: Any) -> None:
    if hasattr(module.fx_codegen_and_compile, "__wrapped__"):
        return
    module.FxGraphCache.load_with_key = staticmethod(_looking_twice(module.FxGraphCache.load_with_key))
    module._compile_fx_inner = _giving_back(module._compile_fx_inner)
    module.fx_codegen_and_compile = _noting(module.fx_codegen_and_compile)


def _hook_cpp(module: Any) -> None:
    """`load_async` hands the compiler to worker processes; where it hands it to nobody, it is called here."""
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
        # Taken at once: a graph inside this one has its own, and the next one may ask no cache (torch passes over
        # graphs that it cannot keep), and would be told to have looked for this key.
        key, _open.missed = getattr(_open, "missed", ""), ""
        _open.graphs = getattr(_open, "graphs", 0) + 1
        try:
            made = plain(gm, example_inputs, *args, **options)
        finally:
            _open.graphs -= 1
        seconds = time.perf_counter() - began
        saw("inductor", _name_of(options), _shape_of(example_inputs), seconds, cached=False, looked_for=key)
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
            saw("inductor", "graph", _shape_of(example_inputs), 0.0, cached=True, looked_for=key)
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


def _name_of(options: Any) -> str:
    return f"graph {options.get('graph_id')} {'backward' if options.get('is_backward') else 'forward'}"


def _shape_of(inputs: Any) -> str:
    shown = [words_of(one) for one in list(inputs)[:_SHOWN]]
    more = len(inputs) - len(shown)
    return " ".join(shown) + (f" and {more} more" if more > 0 else "")
