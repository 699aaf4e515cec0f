"""CuTe DSL (nvidia-cutlass-dsl) and FlashAttention 4, which keeps what it had the DSL compile under keys of its own."""

from __future__ import annotations

import functools
import threading
import time
from typing import Any, Final

from .compiles import saw, words_of
from .late import after_import
from .once import MISSED, current

_missing: Final = threading.local()  # of FlashAttention 4: keys that were missed and are being compiled


def watch_cute() -> None:
    """Hook both, now or when they are loaded."""
    after_import("flash_attn.cute.cache_utils", _hook_flash_attention)
    after_import("cutlass.base_dsl.dsl", _hook_dsl)


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
        name = _name_of(self)
        if not found and guard is not None and hasattr(self, "cache_path"):
            look = functools.partial(_look, plain, self, key)
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
        saw("fa4", _name_of(self), words_of(key), seconds, cached=False, looked_for=_file_of(self, key))

    return give


def _look(plain: Any, cache: Any, key: Any) -> Any:
    return True if plain(cache, key) else MISSED


def _end(guard: Any, missing: dict[Any, Any]) -> None:
    for _, turn in missing.values():
        if turn is not None and guard is not None:
            guard.end(turn)
    missing.clear()


def _file_of(cache: Any, key: Any) -> str:
    """Where a cache on disk keeps it; empty of one in memory."""
    name_of = getattr(cache, "_key_to_hash", None)
    return "" if name_of is None else f"{_name_of(cache)}/{name_of(key)}.o"


def _name_of(cache: Any) -> str:
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
        saw("cute", function_name, _shape_of(more), time.perf_counter() - began, cached=False)
        return made

    module.BaseDSL.compile_and_cache = compile_and_cache


def _look_up(dsl: Any, module_hash: Any) -> Any:
    found = dsl.jit_cache.get(module_hash)
    return MISSED if found is None or getattr(found, "capi_func", None) is None else found


def _shape_of(more: dict[str, Any]) -> str:
    return " ".join(words_of(one) for one in (more.get("full_args") or ()))
