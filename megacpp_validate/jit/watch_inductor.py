"""TorchInductor: each graph that no cache answered is noted, and compiled by one process at a time.

torch 2.11 and 2.13 alike: `_compile_fx_inner` looks a graph up by `FxGraphCache.load_with_key`, and what that does not
have goes through `fx_codegen_and_compile`. Triton kernels of a graph are compiled in worker processes of Inductor's
own: they count as the graph's.

The key of a graph holds the number of its device (torch 2.13, `FxGraphCachePickler._reduce_fake_tensor`): ranks share
graphs where each sees its own GPU as cuda:0, and compile one each where they see all of them.
"""

from __future__ import annotations

import functools
import threading
import time
from typing import Any, Final

from .compiles import saw, words_of
from .late import after_import
from .once import MISSED, current

_open: Final = threading.local()  # turns of the compile that runs, by depth: a graph may be compiled inside another
_SHOWN: Final = 12


def watch_inductor() -> None:
    """Hook Inductor, now or when it is loaded."""
    after_import("torch._inductor.compile_fx", _hook)


def _hook(module: Any) -> None:
    if hasattr(module.fx_codegen_and_compile, "__wrapped__"):
        return
    module.FxGraphCache.load_with_key = staticmethod(_looking_twice(module.FxGraphCache.load_with_key))
    module._compile_fx_inner = _giving_back(module._compile_fx_inner)
    module.fx_codegen_and_compile = _noting(module.fx_codegen_and_compile)


def _noting(plain: Any) -> Any:
    @functools.wraps(plain)
    def fx_codegen_and_compile(gm: Any, example_inputs: Any, *args: Any, **options: Any) -> Any:
        began = time.perf_counter()
        made = plain(gm, example_inputs, *args, **options)
        seconds, key = time.perf_counter() - began, getattr(_open, "missed", "")
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
