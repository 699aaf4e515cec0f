"""The gate on a store that is green throughout, with other code, fewer checks, other orders; and its verbs.

The same store with one edit each, each option and each signature are scenarios of `tests.replay`.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import shutil
import subprocess
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from megacpp_validate.catalog.bridge import Catalog, matrix_folder, read_catalog
from megacpp_validate.catalog.policies import GateRule
from megacpp_validate.evidence.receipts_manifest import MANIFEST
from megacpp_validate.evidence.store import read_store
from megacpp_validate.gate.release import GateDecision
from megacpp_validate.gate.release_folder import GateOptions, decide_folder
from tests.command_line import Run, Said, make_run
from tests.gate import fuzz
from tests.gate.fuzz import own
from tests.replay.gate import copy_matrix
from tests.replay.receipts import (
    AT,
    AT_WORDS,
    CODE,
    JIT,
    PROBES,
    STACK,
    TARGET,
    fill,
    good,
    package,
    place,
    put,
    raised,
    red,
)
from tests.report.sessions import record

H200 = Path(__file__).parents[2] / "docs" / "evidence" / "h200"
OPEN, CLOSED, WRONG, MISSING, INFRASTRUCTURE = 0, 1, 2, 4, 6


def decide(store: Path, matrix: Path | None = None, **options: Any) -> GateDecision:
    given: dict[str, Any] = {
        "target": TARGET,
        "stack": STACK,
        "at": AT,
        "accept_code": (CODE,),
        "unsigned": True,
    } | options
    return decide_folder(read_catalog(matrix), GateOptions(store, "te-upgrade", **given))


def test_receipts_of_this_code_open_and_those_of_other_code_only_where_it_is_accepted(
    catalog: Catalog, tmp_path: Path
) -> None:
    put(tmp_path / "own", *(own(catalog, probe) for probe in PROBES))
    decision = decide(tmp_path / "own", accept_code=())
    assert (decision.exit, decision.codes) == (OPEN, ())
    fill(tmp_path / "other")
    decision = decide(tmp_path / "other", accept_code=())
    assert decision.exit == MISSING
    assert {cell.rules for cell in decision.required} == {(GateRule.CODE,)}
    for accepted in (CODE, CODE[:12]):
        decision = decide(tmp_path / "other", accept_code=(accepted,))
        assert (decision.exit, decision.codes) == (OPEN, (CODE,))
    fill(tmp_path / "unknown", code="")
    assert decide(tmp_path / "unknown").exit == MISSING
    assert decide(tmp_path / "unknown", accept_code=("unknown",)).codes == ("unknown",)


def test_no_mutated_receipt_opens_the_gate_wrongly() -> None:
    """One of each class; `nox -s gate_fuzz` makes more."""
    found = fuzz.run(each=1, seed=0)
    assert [row for row in found["rows"] if row["opened"] and not row["right"]] == []
    assert found["classes"] >= 80


def test_the_order_of_files_never_matters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = fill(tmp_path / "store")
    put(store, red("attention", hours=5.0), good("permute", hours=9.0), run="older")
    first, mixed = decide(store), read_store(store)
    for seed in range(5):
        files = random.Random(seed).sample(mixed.files, len(mixed.files))
        shuffled = type(mixed)(store, tuple(files))
        monkeypatch.setattr("megacpp_validate.gate.release_folder.read_store", lambda _, of=shuffled: of)
        assert decide(store) == first


def test_where_others_close_a_cell_that_is_not_required_must_be_good_too(tmp_path: Path) -> None:
    matrix = copy_matrix(tmp_path, ('others = "list"', 'others = "close"'))
    for name, receipts in {
        "red": [red("fp8_delayed")],
        "red, and good an hour later": [red("fp8_delayed", hours=3.0), good("fp8_delayed", hours=2.0)],
        "good": [good("fp8_delayed")],
        "a fault of the host, and good an hour later": [
            raised("fp8_delayed", "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered", hours=3.0),
            good("fp8_delayed", hours=2.0),
        ],
        "of another commit": [red("fp8_delayed", commit="b" * 40)],
    }.items():
        store = fill(tmp_path / name)
        for number, receipt in enumerate(receipts):
            put(store, receipt, run=f"run-{number}")
        assert decide(store).open
        closing = [cell.cell for cell in decide(store, matrix).closing]
        assert closing == ([f"{STACK}-{TARGET}-fp8_delayed"] if name.startswith("red") else [])
    place(store, "permute").with_name(f"{STACK}-{TARGET}-fp8_block.json").write_text("{")
    assert not decide(store, matrix).open


CAST = "_Z31cast_transpose_optimized_kernelPK13__nv_bfloat16PKfP13__nv_fp8_e4m3S5_S3_PfS6_mm"


@pytest.mark.parametrize(("image", "kernel", "opens"), [("", CAST, True), ("sha256:1", CAST, False), ("", "g", False)])
def test_rows_let_images_lack_and_a_kernel_be_late(image: str, kernel: str, opens: bool, tmp_path: Path) -> None:
    edits = ('image = "any"', 'image = "one"'), ('["release"]', '["te-upgrade"]'), ("smoke_scaled_delayed_2", "permute")
    late = {"library": "cuda", "kernel": kernel, "shape": "", "seconds": 0.0, "when": "after", "rank": 0}
    store = fill(tmp_path / "store", image_digest="")
    put(store, good("permute", image_digest=image, jit={**JIT, "compiled": [late]}))
    assert decide(store, copy_matrix(tmp_path, *edits)).open is opens


# --- The verbs. ---


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    call = make_run(capfd, monkeypatch)

    def run(*arguments: object, verb: str = "release-gate", at: str = AT_WORDS) -> Said:
        more = ["--at", at, "--accept-code", CODE, "--unsigned"] if verb == "release-gate" else []
        return call(verb, *arguments, *more)

    return run


def test_a_store_that_is_none_or_of_several_stacks(run: Run, tmp_path: Path) -> None:
    assert run(Path(__file__)).code == WRONG
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "te2.20.2-h200-permute.json").write_text("{")
    damaged = run(tmp_path / "damaged")
    assert (damaged.code, "te2.20.2-h200-permute.json: the file: Invalid JSON" in damaged.err) == (MISSING, True)
    shutil.rmtree(tmp_path / "damaged")
    said = run(H200)
    assert (said.code, "--stack" in said.err) == (WRONG, True)
    fill(tmp_path)
    put(tmp_path, good("attention", target="b200", hours=3.0))
    assert (run(tmp_path).code, run(tmp_path, "--target", "h200").code) == (WRONG, OPEN)
    assert run(tmp_path, "--target", "h200", "--accept-code", "abc").code == WRONG


def test_a_day_alone_is_over_when_it_is_judged(run: Run, tmp_path: Path) -> None:
    store = fill(tmp_path)
    assert run(store, at="2026-11-22").code == OPEN  # it was run at eleven
    assert run(store, at="2026-11-21").code == MISSING
    assert run(store, at="yesterday").code == WRONG


def test_a_baseline_is_of_one_stack_older_and_of_other_receipts(run: Run, tmp_path: Path) -> None:
    store = fill(tmp_path / "store")
    before = fill(tmp_path / "before", stack="te2.12.0", packages=[package("2.12.0")])
    assert run(store, "--baseline", before).code == OPEN
    put(before, good("attention", stack="te2.17.1"))
    assert run(store, "--baseline", before).code == WRONG
    assert run(store, "--baseline", store).code == WRONG
    shared = fill(tmp_path / "shared", hours=3.0)
    assert run(store, "--baseline", shared).code == OPEN
    shutil.copy(place(store, "attention"), place(shared, "attention"))  # one of them is judged
    assert run(store, "--baseline", shared).code == WRONG
    assert run(store, "--baseline", fill(tmp_path / "later", stack="te2.12.0", hours=-24 * 1000)).code == WRONG
    assert run(H200 / "te2.20.2", "--baseline", H200 / "native").code == WRONG  # requested native
    assert run(store, "--baseline", H200 / "te2.14.1").code == MISSING  # nothing good in it


def test_a_lock_that_is_pinned_and_not_there_is_not_dropped(run: Run, tmp_path: Path) -> None:
    """As in a package, which has the matrix and not the locks."""
    matrix, content = tmp_path / "matrix", b"a == 1 --hash=sha256:0"
    shutil.copytree(matrix_folder(), matrix)
    with (matrix / "stacks.toml").open("a") as stream:
        stream.write('\n[[stack]]\nid = "locked"\nte = "2.20.2"\nlock = "containers/locks/locked.txt"\n')
    digest = sha256(content).hexdigest()
    store = fill(tmp_path / "store", stack="locked", packages=[package("2.20.2")], lock_hash=digest)
    assert run(store, "--matrix", matrix).code == WRONG
    assert run(store, "--matrix", matrix, "--lock", "0" * 64).code == MISSING
    assert run(store, "--matrix", matrix, "--lock", digest).code == OPEN


@pytest.mark.parametrize("held", ["store/.lock", "store/deep/er/.lock", ".lock"])
def test_a_run_is_noticed_wherever_it_writes(held: str, run: Run, tmp_path: Path) -> None:
    store, lock = fill(tmp_path / "store"), tmp_path / held
    lock.parent.mkdir(parents=True, exist_ok=True)
    lock.touch()
    handle = os.open(lock, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert run(store).code == INFRASTRUCTURE
        fcntl.flock(handle, fcntl.LOCK_SH)  # as another gate that looks
        assert run(store).code == OPEN
    finally:
        os.close(handle)


@pytest.mark.skipif(not shutil.which("ssh-keygen"), reason="not-run: there is no ssh-keygen")
def test_what_cannot_be_signed(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, key = fill(tmp_path / "store"), tmp_path / "key"
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(key)]
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
    for number, code in ((errno.ENOSPC, INFRASTRUCTURE), (errno.EROFS, WRONG)):
        fault = OSError(number, os.strerror(number))
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", lambda _, fault=fault: (_ for _ in ()).throw(fault))
            assert run(store, "--key", key, verb="receipts-sign").code == code
    place(store, "attention").write_text(json.dumps(good("attention"), indent=2))
    assert run(store, "--key", key, verb="receipts-sign").code == MISSING
    assert not (store / MANIFEST).exists()


@pytest.mark.parametrize(
    ("preset", "precision", "code"), [("every-layer", "delayed", CLOSED), ("every-layer", "bf16", OPEN)]
)
def test_a_receipt_of_a_preset_that_was_rolled_back_closes(
    tmp_path: Path, preset: str, precision: str, code: int
) -> None:
    """Also where no rule requires its cell."""
    fill(tmp_path)
    run = json.loads(json.dumps(asdict(record(precision, steps=3)))) | {"features": {"preset": preset}}
    put(tmp_path, good("smoke_small_delayed", training=[run]))
    decision = decide(tmp_path)
    assert decision.exit == code
    assert [one.rules for one in decision.closing] == [(GateRule.PRESET,)] * code
    assert [(one.module, one.cause.value) for one in decision.culprits] == [("smoke_small_delayed", "numerics")] * code
