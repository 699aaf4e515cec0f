"""Tasks of prewarm as processes and as orders; kernels for a GPU that is not there."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from megacpp_validate.bridge import kernels
from megacpp_validate.jit import driver_cache
from megacpp_validate.jit.__main__ import run_task
from megacpp_validate.jit.tasks import (
    KERNELS,
    DoesNotCompile,
    JitOrder,
    compiling_for,
    row_counts,
)
from megacpp_validate.jitcache.layout import cache_variables

has_triton = importlib.util.find_spec("triton") is not None
has_fa4 = has_triton and importlib.util.find_spec("cutlass") is not None
needs_triton = pytest.mark.skipif(not has_triton, reason="not-run: there is no triton here")
needs_fa4 = pytest.mark.skipif(not has_fa4, reason="not-run: there is no flash-attn-4 here")


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No caches of this machine are shared or compiled into; a copy of the driver's goes with its test."""
    for name in ("MEGACPP_JIT_ROOT", "MEGACPP_JIT_ARCH"):
        monkeypatch.delenv(name, raising=False)
    yield
    driver_cache.give_back()
    os.environ.pop(driver_cache.SOURCE, None)


def test_the_stack_is_told_by_a_process_in_one_line(tmp_path: Path) -> None:
    given = json.dumps({"task": "stack", "code": "stack", "arch": "cpu"})
    variables = cache_variables(tmp_path / "jit", "cpu")
    ended = subprocess.run(
        [sys.executable, "-m", "megacpp_validate.jit"],
        input=given, capture_output=True, text=True, check=True, cwd=tmp_path, env={**os.environ, **variables},
    )  # fmt: skip
    told = json.loads(ended.stdout.strip().splitlines()[-1])
    assert (told["task"], told["compiled"], told["failure"], told["missing"]) == ("stack", [], "", "")
    assert told["versions"]["torch"] == str(torch.__version__)
    assert told["versions"]["python"]
    assert set(told["compiler"]) == {"path", "version"}
    assert isinstance(told["include_paths"], list)


def test_what_a_task_raises_or_lacks_is_in_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    told = run_task(JitOrder("t", "inductor_cpu"))
    assert "KeyError: 'rows'" in told["failure"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    told = run_task(JitOrder("t", "expert_rows", settings={"size": "small", "recipes": "delayed"}))
    assert (told["failure"], told["compiled"]) == ("", [])
    assert "no CUDA device" in told["missing"]
    if not has_triton:
        assert "no Triton" in run_task(JitOrder("t", "triton", arch="sm_90a"))["missing"]
    if not has_fa4:
        assert "cannot be imported" in run_task(JitOrder("t", "fa4", arch="sm_90a"))["missing"]


@pytest.mark.parametrize(
    ("tokens", "experts", "align"), [(8192, 8, 16), (100, 3, 16), (8, 4, 16), (64, 64, 32), (512, 2, 16)]
)
def test_every_number_of_rows_that_an_expert_may_have_is_some_experts(tokens: int, experts: int, align: int) -> None:
    calls = list(row_counts(tokens, experts, align))
    assert {(len(counts), counts[0]) for counts in calls} == {(experts, 0)}, "else all are cast by one kernel"
    padded = {-(-rows // align) * align for rows in range(1, tokens + 1)}
    assert {rows for counts in calls for rows in counts[1:]} == padded


def order_of(code: str, arch: str, root: Path, path: str = "", **settings: str) -> dict[str, Any]:
    """One task as a process of its own; `path` goes before the user's PYTHONPATH."""
    given = json.dumps({"task": "t", "code": code, "arch": arch, "settings": settings})
    before = os.pathsep.join(filter(None, (path, os.environ.get("PYTHONPATH", ""))))
    variables = {**cache_variables(root, arch), "PYTHONPATH": before}
    ended = subprocess.run(
        [sys.executable, "-m", "megacpp_validate.jit"],
        input=given, capture_output=True, text=True, check=True, env={**os.environ, **variables}, timeout=300,
    )  # fmt: skip
    told: dict[str, Any] = json.loads(ended.stdout.strip().splitlines()[-1])
    assert (told["failure"], told["missing"]) == ("", ""), ended.stderr
    return told


@needs_triton
def test_triton_kernels_are_compiled_for_an_architecture_and_found_again(tmp_path: Path) -> None:
    names = {"kernels": " ".join(name for name in KERNELS if name != "te_permute"), "sizes": "small"}
    cold, warm = (order_of("triton", "sm_90a", tmp_path, **names) for _ in range(2))
    sources = "".join(file.read_text() for file in Path(kernels.__file__).parent.glob("*.py"))
    assert {one["kernel"] for one in cold["compiled"]} == set(re.findall(r"def (\w+_kernel)\(", sources))
    assert {one["cached"] for one in warm["compiled"]} == {True}
    assert len(list((tmp_path / "sm_90a" / "triton").rglob("*.cubin"))) == sum(
        not one["cached"] for one in cold["compiled"]
    )


@needs_triton
def test_transformer_engines_kernels_are_compiled_from_its_python_files(
    wheel_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """In each of the seven configurations that its autotuner times; those without a configuration once."""
    wheel, names = str(wheel_of("2.20.2")), {"kernels": "te_permute", "sizes": "small"}
    compiled = order_of("triton", "sm_121a", tmp_path, wheel, **names)["compiled"]
    tuned = {"_sort_chunks_by_map_kernel": 28, "_permute_kernel": 14, "_unpermute_kernel": 21,
             "_unpermute_bwd_with_merging_probs_kernel": 7}  # fmt: skip
    others = ("_row_id_map_pass_1_kernel", "_row_id_map_pass_2_kernel", "_row_id_map_pass_3_kernel")
    wanted = {**tuned, **dict.fromkeys(others, 1), "_make_chunk_sort_map_kernel": 1}
    assert Counter(one["kernel"] for one in compiled) == wanted


@needs_triton
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_121a"])
def test_a_kernel_that_another_architecture_lacks_is_named(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.jit.hopper_kernel import hopper_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    said = f"hopper_kernel for {arch}: error   : Instruction 'wgmma.fence' not supported on .target '{arch}'"
    with nullcontext() if arch == "sm_90a" else pytest.raises(DoesNotCompile, match=re.escape(said)):
        with compiling_for(arch):
            hopper_kernel[(1,)](torch.empty(128, dtype=torch.int32), 128)
        assert len(list(tmp_path.rglob("*.cubin"))) == 1


@needs_triton
def test_a_tensor_without_memory_is_specialised_as_one_that_has_it() -> None:
    from triton._C.libtriton import native_specialize_impl  # type: ignore[import-not-found, unused-ignore]
    from triton.backends.compiler import BaseBackend  # type: ignore[import-not-found, unused-ignore]

    from megacpp_validate.jit.tasks import Pointer

    for dtype in (torch.bfloat16, torch.float32, torch.int32, torch.int64, torch.float8_e4m3fn):
        whole = torch.empty(4096, dtype=dtype)
        assert whole.data_ptr() % 16 == 0
        for one in (whole, whole[1:], whole[16:], whole[:0]):
            real, told = (native_specialize_impl(BaseBackend, each, False, True, True) for each in (one, Pointer(one)))
            assert real == told, (dtype, one.storage_offset())


@needs_fa4
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_121a"])
def test_flash_attention_4_is_compiled_for_an_architecture_and_found_again(arch: str, tmp_path: Path) -> None:
    settings = {"head_dim": "64", "heads": "8", "groups": "2"}
    cold, warm = (order_of("fa4", arch, tmp_path, **settings) for _ in range(2))
    assert [one["kernel"] for one in cold["compiled"]] == ["fwd", "fwd", "bwd_pre", "bwd", "bwd_post"]
    assert {one["cached"] for one in cold["compiled"]} == {False}
    assert {one["cached"] for one in warm["compiled"]} == {True}
    assert len(warm["compiled"]) == len(cold["compiled"])
