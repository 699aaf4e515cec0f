"""What was compiled just in time is counted, and what came from a cache is not."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch._dynamo.utils

from megacpp_validate.probes import jit


def test_files_in_the_caches_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path))
    before = jit.count_compiles()
    assert jit.compiled_since(before) == {}
    (tmp_path / "kernel.fp8.1").mkdir()
    (tmp_path / "kernel.fp8.1" / "kernel.cubin").write_text("")
    (tmp_path / "kernel.fp8.1" / "kernel.cu").write_text("")
    assert jit.compiled_since(before) == {"deep_gemm": 1}


def test_inductor_is_asked_in_the_process() -> None:
    before = jit.count_compiles()
    torch._dynamo.utils.counters["inductor"]["fxgraph_cache_miss"] += 2
    try:
        assert jit.compiled_since(before) == {"inductor": 2}
    finally:
        torch._dynamo.utils.counters["inductor"]["fxgraph_cache_miss"] -= 2


def test_triton_is_listened_to_and_a_cache_hit_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    compilation = types.SimpleNamespace(listener=lambda **words: told.append(words))
    triton = types.ModuleType("triton")
    vars(triton)["knobs"] = types.SimpleNamespace(compilation=compilation)
    monkeypatch.setitem(sys.modules, "triton", triton)
    jit.watch_triton(gpu=False)
    jit.watch_triton(gpu=False)
    before = jit.count_compiles()
    compilation.listener(src="permute", cache_hit=False)
    compilation.listener(src="permute", cache_hit=True)
    assert jit.compiled_since(before) == {"triton": 1}
    assert len(told) == 2  # who listened before still hears everything, once


def test_flash_attention_4_is_asked_for_what_it_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    interface = types.ModuleType("flash_attn.cute.interface")
    forward, backward = types.SimpleNamespace(compile_cache={}), types.SimpleNamespace(compile_cache=None)
    backward.compile_cache = types.SimpleNamespace(cache={"d64": 1})
    vars(interface).update(forward=forward, backward=backward)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)
    before = jit.count_compiles()
    forward.compile_cache["d128"] = 1
    backward.compile_cache.cache["d128"] = 1
    assert jit.compiled_since(before) == {"flash_attn_4": 2}


def test_without_triton_there_is_nothing_to_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    jit.watch_triton(gpu=True)
