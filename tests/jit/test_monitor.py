"""What was compiled just in time is noted with its kernel and shape, and what came from a cache is not counted."""

from __future__ import annotations

import sys
import types
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megacpp_validate.jit import driver_cache, monitor
from megacpp_validate.jit.monitor import seen_since


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No cache of this machine, no hook of another test."""
    monkeypatch.setenv("CUDA_CACHE_PATH", str(tmp_path / "driver"))
    monkeypatch.setattr(driver_cache, "_copies", [])
    monkeypatch.setattr(driver_cache, "_shared", [])
    monkeypatch.setattr(monitor, "_waiting", {})
    monkeypatch.delenv("MEGACPP_JIT_ROOT", raising=False)


def seen(moment: int) -> list[tuple[str, str, str]]:
    return [(one.library, one.kernel, one.shape) for one in monitor.compiles_since(moment)]


def hits(moment: int) -> dict[str, int]:
    return Counter(one.library for one in seen_since(moment) if one.cached)


def test_a_module_is_hooked_when_it_is_whole_and_before_anyone_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "compiler_of_a_test.py").write_text("def build():\n    return 'built'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    hooked: list[Any] = []
    monitor.after_import(
        "compiler_of_a_test", lambda module: (hooked.append(module), setattr(module, "build", lambda: 3))
    )
    assert "compiler_of_a_test" not in sys.modules
    from compiler_of_a_test import build  # type: ignore[import-not-found]

    assert build() == 3
    monitor.after_import("compiler_of_a_test", hooked.append)  # loaded by now: at once
    assert len(hooked) == 2
    assert hooked[0].__loader__ is hooked[0].__spec__.loader
    assert type(hooked[0].__loader__).__module__ != monitor.__name__  # who asks for the source asks its own loader


def test_a_hook_that_fails_is_told_and_the_import_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "_faults", {})
    monitor.after_import("wave", lambda module: module.no_such_thing)
    import wave

    assert wave.__name__ == "wave"
    assert "AttributeError" in monitor.unwatched()["wave"]


def triton_of(kept: set[str]) -> Any:
    """As much of triton.compiler.compiler as the hook touches (3.6 and 3.7)."""
    module: Any = types.ModuleType("triton.compiler.compiler")
    module.knobs = SimpleNamespace(compilation=SimpleNamespace(listener=None))

    def compile_kernel(src: Any) -> str:
        hit = src.name in kept
        kept.add(src.name)
        passed = {"src": src, "metadata": {"num_warps": 4}, "times": SimpleNamespace(total=1.5e6), "cache_hit": hit}
        module.knobs.compilation.listener(**passed)
        return "kernel"

    module.compile = compile_kernel
    return module


SOURCE = SimpleNamespace(
    name="gate",
    signature={"up": "*bf16", "width": "constexpr"},
    constants={(1,): 512},
    fn=SimpleNamespace(arg_names=["up", "width"]),
)


def test_triton_reports_kernel_signature_and_constants_and_a_hit_is_no_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    module = triton_of(set())
    monkeypatch.setitem(sys.modules, "triton.compiler.compiler", module)
    monitor.HOOKS["triton.compiler.compiler"](module)
    moment = monitor.mark()
    assert [module.compile(SOURCE) for _ in range(3)] == ["kernel"] * 3
    assert seen(moment) == [("triton", "gate", "up:*bf16 width=512 num_warps=4")]
    assert monitor.compiles_since(moment)[0].seconds == 1.5
    assert hits(moment) == {"triton": 2}


def test_flash_attention_4_tells_what_it_had_compiled_and_what_it_read_from_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk: dict[Any, str] = {}

    class JITCache:
        def __init__(self) -> None:
            self.cache: dict[Any, Any] = {}

        def __setitem__(self, key: Any, kernel: Any) -> None:
            self.cache[key] = kernel

        def __contains__(self, key: Any) -> bool:
            return key in self.cache

    class JITPersistentCache(JITCache):
        cache_path = Path("bwd_pre")

        def _key_to_hash(self, key: Any) -> str:
            return "b282f513"

        def __setitem__(self, key: Any, kernel: Any) -> None:
            JITCache.__setitem__(self, key, kernel)
            disk[key] = kernel

        def __contains__(self, key: Any) -> bool:
            if not JITCache.__contains__(self, key) and key in disk:
                JITCache.__setitem__(self, key, disk[key])
            return JITCache.__contains__(self, key)

    module: Any = types.ModuleType("flash_attn.cute.cache_utils")
    module.JITCache, module.JITPersistentCache = JITCache, JITPersistentCache
    monkeypatch.setitem(sys.modules, "flash_attn.cute.cache_utils", module)
    monitor.HOOKS["flash_attn.cute.cache_utils"](module)
    moment = monitor.mark()
    for made in (JITPersistentCache(), JITPersistentCache(), JITCache()):
        for _ in range(2):
            if ("bf16", 64) not in made:
                made["bf16", 64] = "kernel"
    assert seen(moment) == [("fa4", "bwd_pre", "(bf16, 64)"), ("fa4", "kernel", "(bf16, 64)")]
    assert hits(moment) == {"fa4": 1}


@pytest.mark.parametrize("shared", [False, True])
def test_deep_gemm_is_known_by_what_a_call_left_in_its_cache(
    shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shared:
        monkeypatch.setenv("MEGACPP_JIT_ROOT", str(tmp_path))
        monkeypatch.setenv("MEGACPP_JIT_ARCH", "sm_90a")
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path / "deep_gemm"))
    monkeypatch.setattr(monitor, "_used", set())
    calls: list[int] = []

    def m_grouped_fp8_gemm_nt_contiguous(rows: Any, weight: Any) -> str:
        calls.append(1)
        folder = tmp_path / "deep_gemm" / "cache" / f"kernel.sm90_fp8_gemm_1d2d.{weight.shape[1]}"
        folder.mkdir(parents=True, exist_ok=True)
        return "product"

    module: Any = types.ModuleType("deep_gemm")
    module.m_grouped_fp8_gemm_nt_contiguous, module.get_num_sms = m_grouped_fp8_gemm_nt_contiguous, lambda: 132
    plain = module.get_num_sms
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    monitor.HOOKS["deep_gemm"](module)
    assert module.get_num_sms is plain
    moment, weight = monitor.mark(), torch.zeros(2, 256, 128)
    for rows in (100, 101, 100, 4000):  # 4000: another power of two, and the same kernel
        assert module.m_grouped_fp8_gemm_nt_contiguous(torch.zeros(rows, 128), weight) == "product"
    module.m_grouped_fp8_gemm_nt_contiguous(torch.zeros(100, 128), torch.zeros(2, 384, 128))
    assert [shape for *_, shape in seen(moment)] == ["fp32[100,128] fp32[2,256,128]", "fp32[100,128] fp32[2,384,128]"]
    assert {kernel for _, kernel, _ in seen(moment)} == {"sm90_fp8_gemm_1d2d"}
    assert hits(moment) == {"deep_gemm": 1}
    assert len(calls) == 5
    assert (tmp_path / "sm_90a" / "locks" / "deep_gemm").exists() == shared


def test_files_in_a_shared_driver_cache_are_counted_as_nobodys_compiles(tmp_path: Path) -> None:
    """Issue 23: 34 files of other processes were blamed on a cell as compiles in its second use."""
    driver_cache.watch_driver()
    moment = monitor.mark()
    (tmp_path / "driver" / "a").mkdir(parents=True)
    (tmp_path / "driver" / "index").touch()
    assert (seen(moment), driver_cache.why_shared()) == ([], "")
    (tmp_path / "driver" / "a" / "0123").touch()
    assert seen(moment) == []
    assert "which other processes write to" in monitor.unwatched()["cuda"]


def test_inductor_is_noted_where_its_cache_had_nothing() -> None:
    """The order in which torch 2.11 and 2.13 call the three."""
    kept: dict[str, str] = {}
    module: Any = types.ModuleType("torch._inductor.compile_fx")

    class FxGraphCache:
        @staticmethod
        def load_with_key(key: str, lines: Any, inputs: Any, local: bool) -> Any:
            return kept.get(key), {"cache_state": "hit" if key in kept else "miss"}

    def fx_codegen_and_compile(gm: Any, inputs: Any, **options: Any) -> str:
        kept[gm] = "graph"
        return "graph"

    def _compile_fx_inner(gm: Any, inputs: Any) -> Any:
        found, info = module.FxGraphCache.load_with_key(gm, [], inputs, True)
        assert (found is None) == (info["cache_state"] == "miss")
        return found or module.fx_codegen_and_compile(gm, inputs, graph_id=3, is_backward=True)

    module.FxGraphCache, module.fx_codegen_and_compile = FxGraphCache, fx_codegen_and_compile
    module._compile_fx_inner = _compile_fx_inner
    monitor.HOOKS["torch._inductor.compile_fx"](module)
    moment, inputs = monitor.mark(), [torch.zeros(8, 16, dtype=torch.bfloat16), 3]
    assert module._compile_fx_inner("gm", inputs) == "graph"
    module.fx_codegen_and_compile("bypassed", inputs, graph_id=4)  # as torch does with what it cannot keep
    assert module._compile_fx_inner("gm", inputs) == "graph"
    assert seen(moment) == [("inductor", f"graph {name}", "bf16[8,16] 3") for name in ("3 backward", "4 forward")]
    assert hits(moment) == {"inductor": 1}
