"""Receipts are written sealed and whole, read back unchanged, and refused where a byte changed or they contradict.

Other damaged files are scenarios of `tests.replay`.
"""

from __future__ import annotations

import dataclasses
import json
import lzma
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megacpp_validate.errors import WrongArguments
from megacpp_validate.evidence import receipt as receipt_module
from megacpp_validate.evidence.receipt import (
    SCHEMA_ID,
    Backend,
    Check,
    Failure,
    JitCompile,
    JitCompiles,
    Library,
    Machine,
    Outcome,
    Package,
    Part,
    Receipt,
    Timing,
    TrainingRecord,
    TrainingStep,
    hash_code,
    receipt_text,
    write_receipt,
)
from megacpp_validate.evidence.store import (
    ReceiptInvalid,
    json_schema,
    parse_receipt,
    read_receipt,
    read_receipts,
    read_store,
)
from tests.replay.receipts import sealed

ROOT = Path(__file__).parents[2]
STEPS = (TrainingStep(0, 3.4, 2.0, 1.0, 0.5), TrainingStep(1, None, 2.0, None, 0.25))
FULL = Receipt(
    cell="te2.20.2-h200-attention", stack="te2.20.2", target="h200", probe="attention", outcome=Outcome.FAIL,
    reason="1 of 2 checks failed: bf16", requested="te",
    checks=(
        Check("fine", True, (Part("relative-error", 1e-3, 2e-3, True, "2 x ..."),)),
        Check("bf16", False, (Part("relative-error", 0.5, 2e-3, False, "2 x ..."),), "seen"),
    ),
    backends=(Backend("attention.bf16", "te", "sdpa", ("sdpa",), ("te: soft cap",)),),
    packages=(Package("torch", "2.11.0", "/site/torch/__init__.py", ("/other/torch/__init__.py",)),),
    libraries=(Library("libcudart", "13.0", ("/a", "/b")),),
    machine=Machine(gpu="NVIDIA H200", capability="9.0"),
    jit=JitCompiles({"triton": 3}, {}, (JitCompile("triton", "gate", "up:*bf16", 0.5, "warm-up"),), root="/jit"),
    failure=Failure("RuntimeError", "text", "te.py:1 in f", "Traceback"), seed=3, seconds={"total": 1.5},
    retries=("lost driver",), timings=(Timing("forward", "cuda-events", (1.0, 1.5), 1.25, 0.4, 10),),
    training=(TrainingRecord(
        "plan", "tiny", "AMEAR", 40_000, 2, {"data": "2"}, "fp32", {"preset": "off"}, {"moe": "bridge"}, 2.0, 3.47,
        STEPS, 20, {"start-up": 5, "step": 15}, 512, 1000.0, None, {"step": 2**20},
    ),),
)  # fmt: skip
NAME = f"{FULL.cell}.json"


def test_a_receipt_comes_back_as_it_was_written_with_the_code_that_made_it(tmp_path: Path) -> None:
    write_receipt(FULL, tmp_path / "new" / NAME)
    found = read_receipt(tmp_path / "new" / NAME)
    assert (found, found.code) == (FULL, hash_code())
    assert [path.name for path in (tmp_path / "new").iterdir()] == [NAME]
    write_receipt(dataclasses.replace(found, code="1" * 64, seed=4), tmp_path / NAME)  # of another checkout
    assert (read_receipt(tmp_path / NAME).code, read_receipt(tmp_path / NAME).seed) == ("1" * 64, 4)


def test_the_code_hash_changes_with_names_and_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"
    for room in receipt_module.CODE_ROOMS:
        (package / room).mkdir(parents=True)
        (package / room / "a.py").write_text(room)
    monkeypatch.setattr(receipt_module, "__file__", str(package / "evidence" / "receipt.py"))
    hashes = []
    for change in (
        lambda: None,
        lambda: (package / "native" / "a.py").write_text("other"),
        lambda: (package / "native" / "a.py").rename(package / "native" / "b.py"),
        (package / "training" / "deep").mkdir,
        (package / "training" / "deep" / "a.py").touch,
    ):
        change()
        hashes.append(hash_code.__wrapped__())
    assert len(set(hashes)) == 4
    assert hashes[2] == hashes[3]


@given(st.data())
def test_no_byte_can_be_changed_added_or_dropped(data: st.DataObject) -> None:
    text = receipt_text(FULL).encode()
    at, new = data.draw(st.integers(0, len(text) - 1)), data.draw(st.binary(max_size=2))
    edited = text[:at] + new + text[at + data.draw(st.integers(0, 3)) :]
    if edited != text:
        with pytest.raises(ReceiptInvalid):
            parse_receipt(edited, Path(NAME))


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_what_json_cannot_hold_is_null_and_half_a_character_costs_nothing(number: float, tmp_path: Path) -> None:
    checks = (Check("x", False, (Part("relative-error", number, 1.0, False, "d"),), "a \udcff b"),)
    write_receipt(dataclasses.replace(FULL, checks=checks), tmp_path / NAME)
    (check,) = read_receipt(tmp_path / NAME).checks
    assert (check.parts[0].observed, check.detail) == (None, r"a \udcff b")


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_receipt(FULL, tmp_path / NAME)

    def full_disk(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_receipt(dataclasses.replace(FULL, seed=4), tmp_path / NAME)
    assert read_receipt(tmp_path / NAME).seed == 3
    assert os.listdir(tmp_path) == [NAME]  # noqa: PTH208 - hidden files too


Change = Callable[[dict[str, Any]], object]


def changed(**values: Any) -> Change:
    return lambda data: data.update(values)


def part(check: int = 0, **values: Any) -> Change:
    return lambda data: data["checks"][check]["parts"][0].update(values)


def passed(**values: Any) -> Change:
    """The same cell as one that passed; without a backend, unless one is given."""
    own = {"outcome": "pass", "failure": None, "backends": [], "training": []} | values
    return lambda data: data.update(checks=data["checks"][:1], **own)


def passed_on(requested_of_cell: str = "te", **of_backend: Any) -> Change:
    return lambda data: passed(backends=[data["backends"][0] | of_backend], requested=requested_of_cell)(data)


def trained(last_step: dict[str, Any]) -> Change:
    """The same cell as one that passed, with another last step of its training run."""

    def change(data: dict[str, Any]) -> None:
        record = data["training"][0]
        steps = [record["steps"][0], record["steps"][1] | {"loss": 3.3, "grad_norm": 1.0} | last_step]
        passed(training=[record | {"steps": steps}])(data)

    return change


FAULTS: dict[str, tuple[Change, str]] = {  # as a broken producer would seal them
    "pass-over-a-failed-check": (changed(outcome="pass"), "outcome pass with the failed check bf16"),
    "pass-over-a-failure": (passed(failure={"type": "RuntimeError", "message": ""}), "pass over the failure Runt"),
    "check-over-a-failed-part": (lambda data: data["checks"][1].update(passed=True), "failed, and the check passed"),
    "pass-over-a-loss-that-is-not-finite": (trained({"loss": None}), "over a training run with a bad step"),
    "pass-over-a-norm-that-is-not-finite": (trained({"grad_norm": None}), "over a training run with a bad step"),
    "pass-over-a-missing-step": (trained({"step": 2}), "over a training run with a bad step"),
    "pass-over-a-step-twice": (trained({"step": 0}), "over a training run with a bad step"),
    "pass-without-checks": (changed(outcome="pass", checks=[]), "no check at all"),
    "another-cell": (changed(cell="te2.20.2-h200-permute"), "joined"),
    "fail-without-failed-check": (changed(checks=[]), "without a failed check"),
    "blocked-by-nothing": (changed(outcome="blocked"), "not by which cell"),
    "unknown-key-of-the-machine": (lambda data: data["machine"].update(colour="green"), "machine.colour"),
    "another-schema": (changed(schema_id="megacpp-validate/receipt/7"), "megacpp-validate/receipt/7'"),
    "a-number-as-text": (changed(seed="3"), "seed"),
    "part-over-its-bound": (part(observed=0.2), "0.2 and its bound 0.002 deny"),
    "part-below-its-floor": (part(at_least=True), "0.001 and its bound 0.002 deny"),
    "part-within-its-bound": (part(1, observed=1e-3), "0.001 and its bound 0.002 deny"),
    "part-without-a-number": (part(observed=None), "has no number"),
    "part-of-nan": (part(observed=math.nan), "nan and its bound 0.002 deny"),
    "a-bound-that-lets-zeros-pass": (part(bound=1.0), "zeros would pass"),
    "te-requested-and-never-seen": (passed_on(), "attention.bf16 requested te, claims sdpa, shows sdpa"),
    "te-claimed-and-never-seen": (passed_on(claimed="te"), "attention.bf16 requested te, claims te, shows sdpa"),
    "te-seen-and-not-claimed": (passed_on(observed=["te"]), "attention.bf16 requested te, claims sdpa, shows te"),
    "native-requested-and-te-seen": (passed_on("native", observed=["te"]), "pass where native was requested"),
    "words-that-deny-the-path": (
        lambda data: (passed_on(claimed="te", observed=["te"])(data),
                      data["checks"][0].update(name="x.backend", detail="requested te, claimed te, seen native")),
        "which no path on record did"),
    "a-backend-that-was-checked-and-is-not-there": (
        lambda data: (passed()(data), data["checks"][0].update(name="bf16.backend")), "no path is on record"),
}  # fmt: skip
GOOD: dict[str, Change] = {
    "te": passed_on(claimed="te", observed=["te"]),
    "a-path-that-requests-another": passed_on(requested="sdpa"),
    "trained": trained({}),
    "native": passed_on("native", requested="native"),
    "at-its-bound": part(observed=2e-3),
    "at-its-floor": part(observed=2e-3, at_least=True),
    "no-number-in-a-failed-check": part(1, observed=None, bound=None),
}


@pytest.mark.parametrize(("fault", "word"), FAULTS.values(), ids=FAULTS)
def test_what_contradicts_itself_is_no_evidence_sealed_or_not(fault: Change, word: str, tmp_path: Path) -> None:
    data = json.loads(receipt_text(FULL))
    fault(data)
    (tmp_path / NAME).write_text(sealed(data))
    with pytest.raises(ReceiptInvalid) as refused:
        read_receipt(tmp_path / NAME)
    assert word in refused.value.reason
    assert NAME in str(refused.value)
    assert "Next step" in str(refused.value)


@pytest.mark.parametrize("change", GOOD.values(), ids=GOOD)
def test_what_a_probe_can_write_is_read_if_it_is_sealed(change: Change, tmp_path: Path) -> None:
    data = json.loads(receipt_text(FULL))
    change(data)
    (tmp_path / NAME).write_text(sealed(data))
    assert read_receipt(tmp_path / NAME).cell == FULL.cell
    (tmp_path / NAME).write_text(json.dumps(data, indent=2) + "\n")
    with pytest.raises(ReceiptInvalid, match="its seal does not fit"):
        read_receipt(tmp_path / NAME)


def test_every_committed_receipt_is_packed_and_read() -> None:
    evidence = ROOT / "docs" / "evidence"
    files = [path for path in evidence.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 5_000_000, "pack receipts with `xz -9`"
    places = [path for path in files if path.name.endswith(".json.xz")]
    assert len(places) > 40
    for place in places:
        assert f"{read_receipt(place).cell}.json.xz" == place.name


def test_a_packed_receipt_is_read_as_the_plain_one_and_refused_cut_short(tmp_path: Path) -> None:
    place, content = tmp_path / f"{NAME}.xz", lzma.compress(receipt_text(FULL).encode())
    place.write_bytes(content)
    (one,) = (store := read_store(tmp_path)).files
    assert one.cell == one.stem == FULL.cell
    assert read_receipt(place) == read_receipts(tmp_path).found[FULL.cell] == store.load(one)
    place.write_bytes(lzma.compress(receipt_text(dataclasses.replace(FULL, seed=4)).encode()))
    with pytest.raises(ReceiptInvalid, match="written while it was read"):
        store.load(one)
    for harm in (content[:-20], lzma.compress(receipt_text(FULL).replace("lost driver", "").encode()), b""):
        place.write_bytes(harm)
        with pytest.raises(ReceiptInvalid):
            read_receipt(place)
        assert len(read_receipts(tmp_path).unreadable) == 1
        (one,) = read_store(tmp_path).files
        assert one.head is None
        assert one.problem


def test_a_folder_is_read_with_invalid_files_apart(tmp_path: Path) -> None:
    write_receipt(FULL, tmp_path / NAME)
    shutil.copy(tmp_path / NAME, tmp_path / "te2.20.2-h200-permute.json")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "te2.20.2-h200-attention.log").write_text("words")
    receipts = read_receipts(tmp_path)
    assert list(receipts.found) == [FULL.cell]
    assert [fault.file.name for fault in receipts.unreadable] == [
        "broken.json", "folder.json", "te2.20.2-h200-permute.json",
    ]  # fmt: skip
    with pytest.raises(WrongArguments, match="no such folder"):
        read_receipts(tmp_path / "nowhere")


def test_the_published_schema_is_fresh() -> None:
    """Written by `python -m megacpp_validate.cli schema receipt >docs/schema/receipt.json`."""
    published = (ROOT / "docs" / "schema" / "receipt.json").read_text(encoding="utf-8")
    assert json.loads(published) == json_schema(Receipt, SCHEMA_ID)
