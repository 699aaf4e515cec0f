"""The verdict: any compile is named, what never ran is not verified, and a silent monitor is no proof."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megacpp_validate.catalog.prewarm import PrewarmTask, UnkeptKernel
from megacpp_validate.errors import Exit
from megacpp_validate.jit import driver_cache
from megacpp_validate.jitcache import verify
from megacpp_validate.jitcache.layout import (
    JitCompile,
    Manifest,
    StackDifference,
    find_products,
    list_files,
    read_manifest,
)
from megacpp_validate.jitcache.stack import Answer, JitOptions, JitRow, JitVerdict
from megacpp_validate.jitcache.verify import JitVerifyResult, judge_files, judge_task, name_verdict, run_on_copy
from megacpp_validate.process import Processes
from tests.sealed_caches import KERNEL, OBJECT, TASK, make_sealed, put

CACHED_BY_DEEP_GEMM = "deep_gemm/cache/kernel.fp8_gemm.abc/kernel.cubin"
CELL = TASK.model_copy(update={"code": "probe", "settings": {"probe": "attention"}})
GRAPH = TASK.model_copy(update={"library": "inductor"})
MISSED = JitCompile(library="fa4", kernel="fwd", shape="bf16 d96", seconds=2.2)


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return read_manifest(make_sealed(tmp_path)[0])[0]


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (Answer(hits={"fa4": 3}), JitVerdict.WARM),
        (Answer(hits={"triton": 9, "fa4": 0}), JitVerdict.SILENT),
        (Answer(compiled=(MISSED,), hits={"fa4": 3}), JitVerdict.COMPILED),
        (Answer(failure="fail: out of bounds"), JitVerdict.FAILED),
        (Answer(missing="no GPU", compiled=(MISSED,)), JitVerdict.NOT_RUN),
    ],
)
def test_how_a_task_finds_the_cache(manifest: Manifest, answer: Answer, verdict: JitVerdict) -> None:
    row = judge_task(TASK, answer, manifest)
    assert row.verdict is verdict
    if verdict is JitVerdict.COMPILED:
        assert (row.compiled, row.known) == ((MISSED,), (f"fwd: {KERNEL.shape}",))


@pytest.mark.parametrize(
    ("kernels", "release", "verdict", "unkept"),
    [
        (["rmsnorm_to_e4m3"], "2.20.2", JitVerdict.WARM, 1),
        (["rmsnorm_to_e4m3"], "2.19.0", JitVerdict.COMPILED, 0),  # for the release in which it was seen alone
        # As receipts of one H200 have it: a file with a name, and one without, a kernel.
        (["rmsnorm_to_e4m3", "PTX"], "2.20.2", JitVerdict.WARM, 2),
        (["rmsnorm_to_e4m3", "PTX", "PTX"], "2.20.2", JitVerdict.COMPILED, 1),
        (["rmsnorm_to_e4m3", "PTX", "cudnn_sdpa"], "2.20.2", JitVerdict.COMPILED, 1),
    ],
)
def test_what_no_cache_keeps_closes_nothing(
    manifest: Manifest, kernels: list[str], release: str, verdict: JitVerdict, unkept: int
) -> None:
    stack = manifest.stack.model_copy(update={"versions": {"transformer-engine": release}})
    row = UnkeptKernel(library="cuda", kernel="rmsnorm_to_e4m3", releases=["2.20.2"], reason="a test", source="a test")
    compiled = tuple(JitCompile(library="cuda", kernel=name, shape=str(at)) for at, name in enumerate(kernels))
    sealed = manifest.model_copy(update={"stack": stack})
    judged = judge_task(TASK, Answer(compiled=compiled, hits={"fa4": 3}), sealed, (row,))
    assert (judged.verdict, len(judged.unkept)) == (verdict, unkept)
    assert len(judged.compiled) + len(judged.unkept) == len(kernels)
    assert driver_cache._NAMELESS.decode() == verify._NAMELESS


@pytest.mark.parametrize(
    ("task", "used", "hits", "verdict"),
    [
        # Another task had compiled it: a fallback that looks for nothing would pass for warm.
        (TASK, {"asked": ("cuda", "fa4")}, {}, JitVerdict.SILENT),
        (TASK, {"asked": ("cuda", "fa4")}, {"fa4": 1}, JitVerdict.WARM),
        # What looked for nothing when it was prewarmed need not look now.
        (CELL, {"asked": ()}, {}, JitVerdict.WARM),
        (CELL, {"asked": ("fa4",)}, {}, JitVerdict.SILENT),
        (TASK, {"asked": ()}, {}, JitVerdict.SILENT),  # it is there for nothing else
        # Kernels of a graph are found with the graph.
        (GRAPH, {"asked": ("inductor", "triton")}, {"triton": 1}, JitVerdict.WARM),
        (GRAPH, {"asked": ("inductor", "triton")}, {"fa4": 1}, JitVerdict.SILENT),
    ],
)
def test_what_was_used_when_it_was_prewarmed_must_be_used_again(
    manifest: Manifest, task: PrewarmTask, used: dict[str, Any], hits: dict[str, int], verdict: JitVerdict
) -> None:
    sealed = manifest.model_copy(update={"tasks": tuple(one.model_copy(update=used) for one in manifest.tasks)})
    assert judge_task(task, Answer(hits=hits), sealed).verdict is verdict


def test_a_kernel_that_no_process_reported_is_found(tmp_path: Path) -> None:
    folder, _ = make_sealed(tmp_path)
    before = list_files(folder)
    put(folder / "deep_gemm" / "cache" / "kernel.x" / "kernel.cubin", b"new")
    put(folder / "inductor" / "fxgraph" / "ab" / "fab" / "cde", b"a graph")
    put(folder / "triton" / "KEY" / "kernel.json", b"no kernel")
    put(folder / "cuda" / "6" / "a" / "fa3a0d85", b"of a process that could not work on a copy")
    put(folder / "cuda" / "index", b"no kernel")
    after = list_files(folder)
    new = ("cuda/6/a/fa3a0d85", "deep_gemm/cache/kernel.x/kernel.cubin", "inductor/fxgraph/ab/fab/cde")
    assert tuple(find_products(before, after)) == new
    silent = judge_task(TASK, Answer(), read_manifest(folder)[0])
    assert judge_files(new, [silent], ()) == (new, ())
    for kernel, left in (
        (JitCompile(library="inductor", kernel="graph"), new[:2]),
        (JitCompile(library="cuda", kernel="k", shape="6/a/fa3a0d85"), new[1:]),
    ):
        assert judge_files(new, [silent.model_copy(update={"compiled": (kernel,)})], ()) == (left, ())
    touched = {path: seen._replace(mtime_ns=1) for path, seen in after.items()}
    assert {CACHED_BY_DEEP_GEMM, OBJECT} <= set(find_products(after, touched))
    # The driver may touch what it finds, and the others do not.
    assert new[0] not in find_products(after, touched)


@pytest.mark.parametrize(
    ("unwatched", "closes"), [(("cuda: /r/cuda has 600 MiB, too much to be copied",), False), ((), True)]
)
def test_what_appears_in_a_drivers_cache_closes_where_it_could_be_watched(
    tmp_path: Path, unwatched: tuple[str, ...], closes: bool
) -> None:
    work = tmp_path / "work"

    def run(task: PrewarmTask, logs: Path, limit_s: float) -> Answer:
        """What the driver does when a process needs a kernel, and the process does not report it."""
        put(work / "sm_90a" / "cuda" / "0" / "e" / "f557", task.id.encode())
        return Answer(hits={"fa4": 1}, unwatched=unwatched)

    put(work / "sm_90a" / "cuda" / "index", b"of a process that only named its GPU")
    stack: Any = SimpleNamespace(architecture="sm_90a", root=work, run=run, processes=Processes())
    sealed = make_sealed(tmp_path)[0]
    answers, new = run_on_copy(stack, sealed, (TASK,), JitOptions(), tmp_path / "receipts", lambda _: None)
    row = judge_task(TASK, answers[TASK.id], read_manifest(sealed)[0])
    unreported, unproven = judge_files(new, [row], answers[TASK.id].unwatched)
    assert unreported == (("cuda/0/e/f557",) if closes else ())
    assert unproven == (() if closes else ("cuda/0/e/f557",))


def _result(*rows: JitRow, **more: object) -> JitVerifyResult:
    blank = JitVerifyResult(
        tool="t", target="h200", architecture="sm_90a", folder="/r/sm_90a", manifest="sha256:0",
        interpreter="python", rows=rows,
    )  # fmt: skip
    return blank.model_copy(update=more)


def _row(verdict: JitVerdict) -> JitRow:
    return JitRow(task="fa4_d128", verdict=verdict)


WARM = _row(JitVerdict.WARM)
DIFFERS = StackDifference(what="torch", recorded="2.11.0", observed="2.13.0", matters="inductor")


@pytest.mark.parametrize(
    ("result", "code"),
    [
        (_result(WARM), Exit.OPEN),
        (_result(), Exit.EVIDENCE_MISSING),
        (_result(WARM, _row(JitVerdict.COMPILED)), Exit.CLOSED),
        (_result(WARM, _row(JitVerdict.NOT_RUN)), Exit.EVIDENCE_MISSING),
        (_result(WARM, _row(JitVerdict.FAILED)), Exit.CLOSED),
        (_result(WARM, _row(JitVerdict.SILENT)), Exit.CLOSED),
        (_result(WARM, unreported=("deep_gemm/a.cubin",)), Exit.CLOSED),
        (_result(WARM, unproven=("1 file(s) appeared in the driver's cache",)), Exit.EVIDENCE_MISSING),
        (_result(differences=(DIFFERS,)), Exit.CLOSED),
    ],
)
def test_when_it_is_open(result: JitVerifyResult, code: Exit) -> None:
    assert result.exit is code


def test_a_verdict_in_part_never_lies_where_a_whole_one_is_looked_for() -> None:
    names = [name_verdict(_result(WARM, left_out=left)) for left in ((), ("a: not named",))]
    assert names == ["jit_verify-h200.json", "jit_verify-h200.part.json"]
