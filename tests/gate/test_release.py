"""The gate on a store that is green throughout, and on the same store with one edit: exit code, rules, culprits."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from megacpp_validate.catalog.gate import GateRule
from megacpp_validate.evidence.receipt import READABLE
from megacpp_validate.evidence.store import read_store
from megacpp_validate.gate.decision import GateDecision, WaiverState
from megacpp_validate.gate.release_folder import GateOptions, decide_folder
from tests.replay.gate import copy_matrix, write_waiver
from tests.replay.gate_plants import PLANTS
from tests.replay.receipts import (
    AT,
    PROBES,
    STACK,
    TARGET,
    check,
    fill,
    good,
    jit,
    machine,
    part,
    place,
    put,
    raised,
    red,
    timing,
)  # fmt: skip

H200 = Path(__file__).parents[2] / "docs" / "evidence" / "h200"
CELL = f"{STACK}-{TARGET}-attention"


def decide(store: Path, matrix: Path | None = None, **options: Any) -> GateDecision:
    given: dict[str, Any] = {"release": "te-upgrade", "target": TARGET, "stack": STACK, "at": AT} | options
    return decide_folder(GateOptions(store, **given), matrix)


def closing(decision: GateDecision) -> str:
    """Every rule that a closing cell breaks."""
    return " ".join(sorted({rule.value for cell in decision.closing for rule in cell.rules}))


# Name of an edit -> exit code, rules of the cells that close, modules that are blamed.
EDITS: dict[str, tuple[int, str, str]] = {
    "NaN": (4, "unreadable", ""),
    "a bound that lets zeros pass": (4, "unreadable", ""),
    "a check that contradicts its part": (4, "unreadable", ""),
    "a claim that is not so": (1, "fallback", "attention"),
    "a folder that leads out": (4, "unreadable", ""),
    "a foreign file": (0, "", ""),
    "a hostile name": (0, "", ""),
    "a key twice": (4, "unreadable", ""),
    "a later schema": (4, "missing unreadable", ""),
    "a link": (4, "missing unreadable", ""),
    "a list": (4, "missing unreadable", ""),
    "a new day": (4, "replayed", ""),
    "a number edited": (4, "unreadable", ""),
    "a package twice": (4, "unreadable", ""),
    "a part fell back": (1, "fallback", "attention"),
    "a red cell that is not required": (0, "", ""),
    "a red one as (1)": (4, "name", ""),
    "a red run of many": (1, "contradicted", "attention"),
    "a slow kernel": (0, "", ""),
    "all failed": (1, "outcome", "imports"),
    "all removed": (4, "missing", ""),
    "an old schema": (4, "schema", ""),
    "an older host's fault": (0, "", ""),
    "an older host's fault beside a wrong number": (1, "contradicted", "environment"),
    "another GPU": (4, "target", ""),
    "another card": (4, "target", ""),
    "another cell": (4, "replayed", ""),
    "another commit": (4, "commit", ""),
    "another driver": (4, "environment", ""),
    "another environment": (4, "environment", ""),
    "another name": (4, "missing name", ""),
    "another node": (0, "", ""),
    "another release": (4, "stack", ""),
    "another stack's": (4, "replayed", ""),
    "another torch": (4, "environment", ""),
    "bad over good checks": (4, "unreadable", ""),
    "blocked by a host's fault": (4, "not-run", ""),
    "blocked by the import": (1, "outcome", "attention"),
    "comes and goes": (1, "contradicted", "attention"),
    "comes and goes in another environment": (0, "", ""),
    "comes and goes of another commit": (0, "", ""),
    "compiled": (1, "jit", "attention"),
    "compiled by a rank": (1, "jit", "attention"),
    "compiled, and a negative count": (4, "unreadable", ""),
    "dirty": (4, "commit", ""),
    "edited beside": (4, "duplicate missing", ""),
    "empty file": (4, "missing unreadable", ""),
    "failed": (1, "outcome", "attention"),
    "failed after a good one": (1, "outcome", "attention"),
    "fallback": (1, "fallback", "attention"),
    "fallback that is known": (0, "", ""),
    "good before": (0, "", ""),
    "good over a failed check": (4, "unreadable", ""),
    "good over a failure": (4, "unreadable", ""),
    "import failed": (1, "outcome", "imports"),
    "infinity": (4, "unreadable", ""),
    "just not stale": (0, "", ""),
    "native": (4, "requested", ""),
    "native beside another": (4, "unreadable", ""),
    "nested too deep": (4, "missing unreadable", ""),
    "no GPU": (4, "target", ""),
    "no JSON": (4, "missing unreadable", ""),
    "no commit": (4, "commit", ""),
    "no environment": (4, "environment", ""),
    "no path": (4, "unreadable", ""),
    "no release": (4, "stack", ""),
    "no time": (4, "clock missing", ""),
    "no zone": (4, "clock missing", ""),
    "not run": (4, "not-run", ""),
    "nothing": (0, "", ""),
    "only timed": (4, "missing", ""),
    "others beside": (0, "", ""),
    "raised 0 torch.AcceleratorError: CUDA error: uncorrectable ECC error ": (4, "not-run", ""),
    "raised 1 SIGKILL: nothing": (4, "not-run", ""),
    "raised 10 RuntimeError: NVRM: Xid (PCI:0000:b3:00): 31": (1, "outcome", "permute"),
    "raised 11 RuntimeError: uncorrectable NVLink error detected during the": (4, "not-run", ""),
    "raised 12 RuntimeError: Failed to initialize NVML: Unknown Error": (4, "not-run", ""),
    "raised 13 RuntimeError: slurmstepd: error: *** JOB 7 ON n1 CANCELLED A": (4, "not-run", ""),
    "raised 14 RuntimeError: MPS client failed to connect to the MPS contro": (4, "not-run", ""),
    "raised 15 RuntimeError: NET/IB : mlx5_0: async event : port error": (4, "not-run", ""),
    "raised 16 OSError: [Errno 116] Stale file handle: '/nfs/x'": (4, "not-run", ""),
    "raised 17 OSError: [Errno 5] Input/output error: '/x'": (4, "not-run", ""),
    "raised 18 OSError: [Errno 28] No space left on device": (1, "outcome", "environment"),
    "raised 19 OSError: [Errno 16] Device busy: '/a' -> '/b'": (4, "not-run", ""),
    "raised 2 SIGSEGV: nothing": (1, "outcome", "permute"),
    "raised 20 RuntimeError: CUDA error: an illegal memory access was encou": (1, "outcome", "permute"),
    "raised 21 RuntimeError: ECC: uncorrectable ECC error; device-side asse": (1, "outcome", "environment"),
    "raised 22 RuntimeError: CUDA error: no kernel image is available for e": (1, "outcome", "permute"),
    "raised 23 torch.distributed.DistBackendError: NCCL error: unhandled sy": (1, "outcome", "permute"),
    "raised 24 RuntimeError: rank 1 ended by SIGKILL": (1, "outcome", "permute"),
    "raised 25 torch.OutOfMemoryError: CUDA out of memory. Tried to allocat": (1, "outcome", "permute"),
    "raised 26 torch.OutOfMemoryError: CUDA out of memory. Tried to allocat": (4, "not-run", ""),
    "raised 27 MemoryError: ": (1, "outcome", "environment"),
    "raised 28 TimeoutError: [Errno 110] Connection timed out: '/x'": (4, "not-run", ""),
    "raised 29 RuntimeError: out of bounds by 3 nan": (1, "outcome", "permute"),
    "raised 3 SIGABRT: nothing": (1, "outcome", "permute"),
    "raised 4 exit status 137: nothing": (4, "not-run", ""),
    "raised 5 exit status 139: nothing": (1, "outcome", "permute"),
    "raised 6 exit status 143: nothing": (4, "not-run", ""),
    "raised 7 RuntimeError: CUDA error: CUDA-capable device(s) is/are busy": (4, "not-run", ""),
    "raised 8 RuntimeError: Unexpected error from cudaGetDeviceCount(). Er": (4, "not-run", ""),
    "raised 9 RuntimeError: NVRM: Xid (PCI:0000:b3:00): 79, GPU has fallen": (4, "not-run", ""),
    "removed": (4, "missing", ""),
    "retry ImportError: undefined symbol: foo": (1, "contradicted", ""),
    "retry fail: permute.bf16 out of bounds": (1, "contradicted", ""),
    "retry no-receipt: the job left no receipt; its last words: UserWarning: version mismatch": (0, "", ""),
    "retry node-fail: the node was lost (node n3)": (0, "", ""),
    "retry relative error 0.3, tolerance 0.1": (1, "contradicted", ""),
    "retry rendezvous: connection refused": (0, "", ""),
    "retry the loss was NaN": (1, "contradicted", ""),
    "stale": (4, "age", ""),
    "the future": (4, "clock missing", ""),
    "the future beside": (4, "clock", ""),
    "timed out": (1, "outcome", "attention"),
    "truncated": (4, "missing unreadable", ""),
    "truncated beside": (4, "unreadable", ""),
    "two files": (1, "second-copy", "attention"),
    "two files in all": (1, "second-copy", "environment"),
    "two files of one version": (0, "", ""),
    "two packages": (1, "second-copy", "attention"),
    "unsupported": (1, "outcome", ""),
    "unwatched": (4, "unwatched", ""),
    "unwatched cudnn": (0, "", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTS)
def test_one_edit_of_a_green_store(name: str, tmp_path: Path) -> None:
    store = fill(tmp_path / "store")
    PLANTS[name](store)
    decision = decide(store)
    modules = " ".join(one.module for one in decision.culprits)
    assert (decision.exit_code, closing(decision), modules) == EDITS[name]
    assert decision.exit == decision.exit_code


def test_the_order_of_files_never_matters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = fill(tmp_path / "store")
    put(store, red("attention", hours=5.0), good("permute", hours=9.0), run="older")
    first = decide(store)
    for seed in range(5):
        mixed = read_store(store)
        files = list(mixed.files)
        random.Random(seed).shuffle(files)
        monkeypatch.setattr(
            "megacpp_validate.gate.release_folder.read_store",
            lambda _, files=files, of=mixed: type(of)(store, (*files,)),
        )
        assert decide(store) == first


BAD: tuple[dict[str, Any], ...] = (  # each is no evidence that its cell holds, for a reason of its own
    {"outcome": "timeout", "checks": []}, {"outcome": "not-run", "checks": []}, {"requested": "native"}, {"commit": ""},
    {"started": ""}, {"packages": []}, {"seconds": {"total": 1.0}}, {"jit": jit(after={"triton": 1})},
    {"schema_id": READABLE[0]}, {"outcome": "fail", "checks": [check("x", part(observed=1.0))]},
)  # fmt: skip


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: next(iter(bad)))
@pytest.mark.parametrize("hours", [0.5, 2.0])
def test_a_bad_receipt_never_opens_a_closed_gate(bad: dict[str, Any], hours: float, tmp_path: Path) -> None:
    store = fill(tmp_path / "store")
    place(store, "permute").unlink()
    put(store, good("permute", hours=hours, **bad), run="another")
    decision = decide(store)
    assert not decision.open
    assert not any(cell.accepted for cell in decision.cells if cell.run == "another")


@pytest.mark.parametrize(
    ("before", "after", "rules"),
    [
        ({}, {}, ""),
        ({}, {"timings": [timing(median=1.11)]}, "slower"),
        ({}, {"timings": [timing(median=1.09)]}, ""),
        ({}, {"peak_memory_mib": 2000.0}, "memory"),
        ({}, {"peak_memory_mib": 120.0}, ""),  # beyond the ratio, and less than the floor
        ({"machine": machine(gpu="NVIDIA H100")}, {"timings": [timing(median=9.0)]}, ""),  # of another card
        ({"timings": [timing(clock="perf_counter")]}, {"timings": [timing(median=9.0, clock="perf_counter")]}, ""),
    ],
)
def test_speed_and_memory_beside_a_baseline(
    before: dict[str, Any], after: dict[str, Any], rules: str, tmp_path: Path
) -> None:
    old = {"stack": "te2.12.0", "packages": good("imports", stack="te2.12.0")["packages"], "hours": 30.0}
    fill(tmp_path / "before", **(old | before))
    store = fill(tmp_path / "store")
    put(store, good("attention", **after))
    assert closing(decide(store, baseline=tmp_path / "before")) == rules


def test_a_release_that_requires_a_baseline_is_closed_where_nothing_can_be_compared(tmp_path: Path) -> None:
    decision = decide(fill(tmp_path / "store"), release="release")
    assert {GateRule.BASELINE, GateRule.SIGNATURE} <= {rule for cell in decision.closing for rule in cell.rules}
    assert decision.exit_code == 4


@pytest.mark.parametrize(
    ("receipt", "rule", "expires", "opens", "state"),
    [
        (red("attention"), "outcome", "2026-11-22", True, WaiverState.HOLDS),
        (red("attention"), "outcome", "2026-11-21", False, WaiverState.EXPIRED),
        (red("attention"), "slower", "2026-12-31", False, WaiverState.NOT_NEEDED),
        (good("attention", jit=jit(after={"triton": 1})), "jit", "2026-12-31", True, WaiverState.HOLDS),
        (red("attention", checks=[check("x.finite", part(observed=3.0))]), "outcome", "2026-12-31", False,
         WaiverState.HOLDS),
        (raised("attention", "RuntimeError: the loss is NaN"), "outcome", "2026-12-31", False, WaiverState.HOLDS),
        (raised("attention", "OSError: te.so: undefined symbol: f"), "outcome", "2026-12-31", False, WaiverState.HOLDS),
        (raised("attention", "RuntimeError: a tenant of nano"), "outcome", "2026-12-31", True, WaiverState.HOLDS),
    ],
)  # fmt: skip
def test_a_waiver_holds_off_one_rule_of_one_cell_and_never_an_import_or_nan(
    receipt: dict[str, Any], rule: str, expires: str, opens: bool, state: WaiverState, tmp_path: Path
) -> None:
    store, matrix = fill(tmp_path / "store"), copy_matrix(tmp_path)
    put(store, receipt)
    write_waiver(matrix, rule, expires, CELL)
    decision = decide(store, tmp_path / "matrix")
    (waiver,) = decision.waivers
    assert (decision.open, waiver.state) == (opens, state)
    assert waiver.in_vain is (state is WaiverState.HOLDS and not opens)


def test_committed_receipts_are_judged_as_they_were(tmp_path: Path) -> None:
    at = AT.replace(hour=23)
    assert decide(H200 / "te2.20.2", at=at).open
    for stack, modules in (("te2.17.1", "attention"), ("te2.14.1", "imports")):
        decision = decide(H200 / stack, stack=stack, at=at)
        assert (decision.exit_code, [one.module for one in decision.culprits][:1]) == (1, [modules])
    shutil.copytree(H200 / "te2.20.2", tmp_path / "copy")
    assert decide(tmp_path / "copy", at=at).receipts_sha256 == decide(H200 / "te2.20.2", at=at).receipts_sha256


def test_every_required_cell_has_its_verdict_in_the_order_of_the_matrix(tmp_path: Path) -> None:
    decision = decide(fill(tmp_path / "store"))
    assert [cell.probe for cell in decision.required] == list(PROBES)
    assert all(cell.accepted for cell in decision.required)
