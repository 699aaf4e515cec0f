"""The verdict: any compile is named, what never ran is not verified, and a silent monitor is no proof."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megacpp_validate.catalog.prewarm import PrewarmTask, UnkeptKernel
from megacpp_validate.errors import Exit
from megacpp_validate.evidence.receipt import JitCompile as Told
from megacpp_validate.evidence.receipt import JitCompiles, Outcome, Receipt
from megacpp_validate.jit import driver_cache
from megacpp_validate.jitcache import verify
from megacpp_validate.jitcache.manifest import Manifest, list_files, read_manifest
from megacpp_validate.jitcache.result import (
    JitCause,
    JitCompile,
    JitVerdict,
    JitVerifyResult,
    JitVerifyRow,
    StackDifference,
)
from megacpp_validate.jitcache.stack import Answer, read_receipt_answer
from megacpp_validate.jitcache.verify import find_unreported, judge_task, set_unwatched_apart
from tests.sealed_caches import KERNEL, OBJECT, TASK, make_sealed, put

CACHED_BY_DEEP_GEMM = "deep_gemm/cache/kernel.fp8_gemm.abc/kernel.cubin"
CELL = TASK.model_copy(update={"code": "probe", "settings": {"probe": "attention"}})
MISSED = JitCompile(library="fa4", kernel="fwd", shape="bf16 d96", seconds=2.2)


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return read_manifest(make_sealed(tmp_path)[0])[0]


@pytest.mark.parametrize(
    ("answer", "verdict", "cause"),
    [
        (Answer(hits={"fa4": 3}), JitVerdict.WARM, None),
        (Answer(hits={}), JitVerdict.SILENT, None),
        (Answer(hits={"triton": 9, "fa4": 0}), JitVerdict.SILENT, None),
        (Answer(hits=None), JitVerdict.WARM, None),
        (Answer(compiled=(MISSED,), hits={"fa4": 3}), JitVerdict.COMPILED, JitCause.OTHER_KEY),
        (Answer(failure="fail: out of bounds"), JitVerdict.FAILED, None),
        (Answer(missing="not-run: no GPU"), JitVerdict.NOT_RUN, None),
        (Answer(missing="no GPU", compiled=(MISSED,)), JitVerdict.NOT_RUN, JitCause.OTHER_KEY),
    ],
)
def test_what_a_task_makes_of_the_cache(
    manifest: Manifest, answer: Answer, verdict: JitVerdict, cause: JitCause | None
) -> None:
    row = judge_task(TASK, answer, manifest)
    assert (row.verdict, row.cause) == (verdict, cause)


def test_a_compile_is_told_with_what_the_cache_has(manifest: Manifest) -> None:
    row = judge_task(TASK, Answer(compiled=(MISSED,)), manifest)
    assert row.compiled == (MISSED,)
    assert row.known == (f"fwd: {KERNEL.shape}",)
    unknown = MISSED.model_copy(update={"kernel": "bwd"})
    assert judge_task(TASK, Answer(compiled=(unknown,)), manifest).known == ("bwd: nothing",)


def test_what_no_cache_keeps_is_told_and_closes_nothing(manifest: Manifest) -> None:
    """For the release in which it was seen, and for that kernel alone."""
    row = UnkeptKernel(
        library="cuda", kernel=r"rmsnorm_fwd_\w+_kernel.*e4m3", releases=["2.20.2"], reason="of a test", source="a test"
    )
    every_time = JitCompile(library="cuda", kernel="9rmsnorm_fwd_tuned_kernel_to_e4m3", shape="0/e/f557", seconds=0.0)
    other = every_time.model_copy(update={"kernel": "9rmsnorm_fwd_tuned_kernel_to_bf16"})
    stack = manifest.stack.model_copy(update={"versions": {**manifest.stack.versions, "transformer-engine": "2.20.2"}})
    sealed = manifest.model_copy(update={"stack": stack})
    excused = judge_task(TASK, Answer(compiled=(every_time,), hits={"fa4": 3}), sealed, (row,))
    assert (excused.verdict, excused.compiled, excused.unkept) == (JitVerdict.WARM, (), (every_time,))
    both = judge_task(TASK, Answer(compiled=(every_time, other), hits={"fa4": 3}), sealed, (row,))
    assert (both.verdict, both.compiled, both.unkept) == (JitVerdict.COMPILED, (other,), (every_time,))
    of_another = judge_task(TASK, Answer(compiled=(every_time,), hits={"fa4": 3}), manifest, (row,))
    assert (of_another.verdict, of_another.unkept) == (JitVerdict.COMPILED, ())
    silent = judge_task(TASK, Answer(compiled=(every_time,), hits={}), sealed, (row,))
    assert silent.verdict is JitVerdict.SILENT, "it asked no cache for the rest"


@pytest.mark.parametrize(
    ("kernels", "verdict"),
    [
        (["to_e4m3", "PTX"], JitVerdict.WARM),
        (["to_e4m3", "to_e4m3", "PTX", "PTX"], JitVerdict.WARM),
        (["to_e4m3", "PTX", "PTX"], JitVerdict.COMPILED),
        (["to_e4m3", "PTX", "cudnn_sdpa"], JitVerdict.COMPILED),
        (["PTX"], JitVerdict.COMPILED),
    ],
)
def test_the_other_half_of_what_no_cache_keeps_has_no_name(
    manifest: Manifest, kernels: list[str], verdict: JitVerdict
) -> None:
    """As receipts of one H200 have it: a file with a name, and one without, a kernel."""
    stack = manifest.stack.model_copy(update={"versions": {"transformer-engine": "2.20.2"}})
    row = UnkeptKernel(library="cuda", kernel="rmsnorm_to_e4m3", releases=["2.20.2"], reason="a test", source="a test")
    names = [name.replace("to_e4m3", "rmsnorm_to_e4m3") for name in kernels]
    compiled = tuple(JitCompile(library="cuda", kernel=name, shape=str(at)) for at, name in enumerate(names))
    judged = judge_task(
        TASK, Answer(compiled=compiled, hits={"fa4": 3}), manifest.model_copy(update={"stack": stack}), (row,)
    )
    assert judged.verdict is verdict
    assert len(judged.compiled) + len(judged.unkept) == len(kernels)
    assert driver_cache._NAMELESS.decode() == verify._NAMELESS


def test_what_was_found_when_it_was_prewarmed_must_be_asked_for_again(manifest: Manifest) -> None:
    """Another task had compiled it: a fallback that asks for nothing would pass for warm."""
    done = [one.model_copy(update={"compiled": (), "asked": ("cuda", "fa4")}) for one in manifest.tasks]
    sealed = manifest.model_copy(update={"tasks": tuple(done)})
    assert judge_task(TASK, Answer(), sealed).verdict is JitVerdict.SILENT
    assert judge_task(TASK, Answer(hits={"fa4": 1}), sealed).verdict is JitVerdict.WARM
    assert Answer(compiled=(MISSED,), hits={"triton": 2, "cute": 0}).asked == ("fa4", "triton")


@pytest.mark.parametrize(
    ("asked", "verdict"), [((), JitVerdict.WARM), (None, JitVerdict.SILENT), (("fa4",), JitVerdict.SILENT)]
)
def test_what_asked_for_nothing_when_it_was_prewarmed_need_not_ask(
    manifest: Manifest, asked: tuple[str, ...] | None, verdict: JitVerdict
) -> None:
    """What it had compiled for an older stack stays in the manifest, and says nothing of this one."""
    done = [one.model_copy(update={"asked": asked}) for one in manifest.tasks]
    assert all(one.compiled for one in done)
    sealed = Manifest.model_validate_json(manifest.model_copy(update={"tasks": tuple(done)}).model_dump_json())
    assert judge_task(CELL, Answer(hits={}), sealed).verdict is verdict
    assert judge_task(TASK, Answer(hits={}), sealed).verdict is JitVerdict.SILENT, "it is there for nothing else"


def test_kernels_of_a_graph_are_found_with_the_graph(manifest: Manifest) -> None:
    kernels = [KERNEL.model_copy(update={"library": library}) for library in ("inductor", "triton")]
    tasks = tuple(one.model_copy(update={"compiled": tuple(kernels)}) for one in manifest.tasks)
    graphs = manifest.model_copy(update={"tasks": tasks})
    task = TASK.model_copy(update={"library": "inductor"})
    assert judge_task(task, Answer(hits={"inductor": 1}), graphs).verdict is JitVerdict.WARM
    assert judge_task(task, Answer(hits={"triton": 1}), graphs).verdict is JitVerdict.WARM
    assert judge_task(task, Answer(hits={"fa4": 1}), graphs).verdict is JitVerdict.SILENT


@pytest.mark.parametrize(
    ("task", "cause"),
    [
        (TASK, JitCause.OTHER_KEY),
        (TASK.model_copy(update={"settings": {"head_dim": "96"}}), JitCause.OTHER_SETTINGS),
        (TASK.model_copy(update={"id": "fa4_d96"}), JitCause.NO_TASK),
    ],
)
def test_the_cause_is_read_from_the_manifest(manifest: Manifest, task: PrewarmTask, cause: JitCause) -> None:
    assert judge_task(task, Answer(compiled=(MISSED,)), manifest).cause is cause


def _receipt(outcome: Outcome, jit: JitCompiles, reason: str = "") -> Receipt:
    return Receipt(
        cell="s-h200-permute", stack="s", target="h200", probe="permute", outcome=outcome, reason=reason,
        requested="te", jit=jit, seconds={"total": 4.0},
    )  # fmt: skip


def test_the_receipt_of_a_cell_is_read() -> None:
    listed = Told(library="triton", kernel="permute_kernel", shape="bf16 4096", seconds=1.0, when="after")
    jit = JitCompiles(after={"triton": 1}, compiled=(listed,), hits={"triton": 6}, unwatched={"te": "NVRTC in memory"})
    answer = read_receipt_answer(_receipt(Outcome.PASS, jit))
    (one,) = answer.compiled
    assert (one.library, one.kernel, one.shape) == ("triton", "permute_kernel", "bf16 4096")
    assert (answer.hits, answer.failure, answer.missing, answer.seconds) == ({"triton": 6}, "", "", 4.0)
    assert answer.unwatched == ("te: NVRTC in memory",)


def test_a_count_without_a_list_is_a_compile() -> None:
    answer = read_receipt_answer(_receipt(Outcome.PASS, JitCompiles(warm_up={"deep_gemm": 2})))
    assert [one.library for one in answer.compiled] == ["deep_gemm", "deep_gemm"]


@pytest.mark.parametrize(
    ("outcome", "good", "ran"),
    [
        (Outcome.PASS, True, True), (Outcome.EXPECTED_UNSUPPORTED, True, True), (Outcome.FAIL, False, True),
        (Outcome.ERROR, False, True), (Outcome.TIMEOUT, False, True), (Outcome.IMPORT_ERROR, False, True),
        (Outcome.NOT_RUN, True, False), (Outcome.BLOCKED, True, False),
    ],
)  # fmt: skip
def test_only_a_good_cell_is_evidence(outcome: Outcome, good: bool, ran: bool) -> None:
    answer = read_receipt_answer(_receipt(outcome, JitCompiles(), "because"))
    assert (answer.failure == "", answer.missing == "") == (good, ran)


def test_a_kernel_that_nobody_told_of_is_found(tmp_path: Path) -> None:
    folder, _ = make_sealed(tmp_path)
    before = {seen.path: seen for seen in list_files(folder)}
    put(folder / "deep_gemm" / "cache" / "kernel.x" / "kernel.cubin", b"new")
    put(folder / "inductor" / "fxgraph" / "ab" / "fab" / "cde", b"a graph")
    put(folder / "triton" / "KEY" / "kernel.json", b"no kernel")
    put(folder / "cuda" / "6" / "a" / "fa3a0d85", b"of a process that could not work on a copy")
    put(folder / "cuda" / "index", b"no kernel")
    after = list_files(folder)
    silent = judge_task(TASK, Answer(), read_manifest(folder)[0])
    assert find_unreported(before, after, [silent]) == (
        "cuda/6/a/fa3a0d85", "deep_gemm/cache/kernel.x/kernel.cubin", "inductor/fxgraph/ab/fab/cde",
    )  # fmt: skip
    told = silent.model_copy(update={"compiled": (JitCompile(library="inductor", kernel="graph"),)})
    assert find_unreported(before, after, [told]) == ("cuda/6/a/fa3a0d85", "deep_gemm/cache/kernel.x/kernel.cubin")
    found = {seen.path: seen for seen in after}
    touched = [replace(seen, mtime_ns=1) for seen in after]
    assert find_unreported(found, touched, [told]) == (
        CACHED_BY_DEEP_GEMM, "deep_gemm/cache/kernel.x/kernel.cubin", OBJECT,
    ), "the driver may touch what it finds, and the others do not"  # fmt: skip


EXCUSED = JitCompile(library="cuda", kernel="rmsnorm_to_e4m3", shape="0/e/f557")


UNWATCHED = "cuda: whose compiles its files are is not known: /r/cuda has 600 MiB, too much to be copied"


def test_what_appears_where_nobody_could_watch_is_told_and_closes_nothing() -> None:
    """A driver's cache that is too large to be copied: of what RMSNorm compiles there in every process, too."""
    found = [f"cuda/0/e/f55{number}" for number in range(6)]
    closing, notes = set_unwatched_apart([*found, CACHED_BY_DEEP_GEMM], ["te: NVRTC in memory", UNWATCHED])
    assert closing == (CACHED_BY_DEEP_GEMM,)
    (said,) = notes
    for words in ("6 file(s) appeared", "cuda/0/e/f550, cuda/0/e/f551", "and 2 more", "is not proven"):
        assert words in said
    assert _result(WARM, unreported=closing).exit is Exit.CLOSED
    for nothing in ([], ["triton: its hook failed: x"], ["cudnn: in memory"]):
        assert set_unwatched_apart(found, nothing) == (tuple(found), ())
    assert set_unwatched_apart([], [UNWATCHED]) == ((), ())


def _result(*rows: JitVerifyRow, **more: object) -> JitVerifyResult:
    blank = JitVerifyResult(
        tool="t", target="h200", architecture="sm_90a", folder="/r/sm_90a", mode="nvcc", manifest="sha256:0",
        interpreter="python", rows=rows,
    )  # fmt: skip
    return blank.model_copy(update=more)


def _row(verdict: JitVerdict, *compiled: JitCompile, cause: JitCause | None = None) -> JitVerifyRow:
    return JitVerifyRow(task="fa4_d128", verdict=verdict, compiled=compiled, cause=cause, known=("fwd: bf16 d128",))


WARM = _row(JitVerdict.WARM)
COLD = _row(JitVerdict.COMPILED, MISSED, cause=JitCause.OTHER_KEY)
DIFFERS = StackDifference(what="torch", recorded="2.11.0", observed="2.13.0", matters="inductor")


@pytest.mark.parametrize(
    ("result", "code"),
    [
        (_result(WARM), Exit.OPEN),
        (_result(), Exit.EVIDENCE_MISSING),
        (_result(WARM, COLD), Exit.CLOSED),
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
