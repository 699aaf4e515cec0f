"""What is said of the JIT caches: one snapshot a result type."""

from __future__ import annotations

from syrupy.assertion import SnapshotAssertion

from megacpp_validate.jitcache.cache import JitCacheResult
from megacpp_validate.jitcache.layout import JitCompile, StackDifference
from megacpp_validate.jitcache.prewarm import PrewarmResult
from megacpp_validate.jitcache.stack import JitRow, JitVerdict
from megacpp_validate.jitcache.verify import JitVerifyResult
from megacpp_validate.report.describe.jit import describe_cache, describe_prewarm, describe_verify
from megacpp_validate.report.render.markdown import render_markdown

KERNEL = JitCompile(library="fa4", kernel="fwd", shape="bf16 d96", seconds=2.2)
WHERE = {"tool": "t", "architecture": "sm_90a", "folder": "/r/sm_90a", "mode": "nvcc", "manifest": "sha256:0"}
CACHE = {name: value for name, value in WHERE.items() if name != "mode"}
ROWS = (
    JitRow(task="fa4_d64", verdict=JitVerdict.WARM, hits=3, unkept=(KERNEL,)),
    JitRow(task="fa4_d96", verdict=JitVerdict.COMPILED, compiled=(KERNEL,), known=("fwd: d64",)),
    JitRow(task="triton", verdict=JitVerdict.SILENT),
    JitRow(task="smoke", verdict=JitVerdict.NOT_RUN, reason="no GPU"),
)
DIFFERS = StackDifference(what="torch", recorded="2.11.0", observed="2.13.0", matters="inductor")


def test_prewarm(snapshot: SnapshotAssertion) -> None:
    rows = (
        JitRow(task="fa4_d64", verdict=JitVerdict.DONE, compiled=(KERNEL,), hits=1, seconds=3.0),
        JitRow(task="triton", verdict=JitVerdict.DONE),
        JitRow(task="smoke", verdict=JitVerdict.FAILED, reason="signal 6"),
    )
    result = PrewarmResult(
        target="h200", interpreter="python", rows=rows, caches={"fa4": 3 * 2**20}, left_out=("x: not named",), **WHERE
    )
    assert render_markdown(describe_prewarm(result)) == snapshot


def test_verify(snapshot: SnapshotAssertion) -> None:
    result = JitVerifyResult(
        target="h200", interpreter="python", rows=ROWS, files=5, bytes=2048, unreported=("cuda/a.cubin",),
        unwatched=("te: NVRTC in memory",), missing=("deep_gemm",), **WHERE,
    )  # fmt: skip
    assert render_markdown(describe_verify(result)) == snapshot
    other = result.model_copy(update={"rows": (), "differences": (DIFFERS,), "unreported": ()})
    assert "| torch | 2.11.0 | 2.13.0 | inductor |" in render_markdown(describe_verify(other))


def test_cache(snapshot: SnapshotAssertion) -> None:
    result = JitCacheResult(deed="open", variables={"TRITON_CACHE_DIR": "/w"}, **CACHE)
    assert render_markdown(describe_cache(result)) == snapshot
