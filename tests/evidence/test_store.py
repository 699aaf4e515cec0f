"""Receipts: written whole or not at all, read back unchanged, and refused where they contradict themselves."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megacpp_validate.evidence.receipt import (
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
    receipt_text,
    write_receipt,
)
from megacpp_validate.evidence.store import ReceiptInvalid, parse_receipt, read_receipt, read_receipts, receipt_schema
from megacpp_validate.probes.stopwatch import new_timing

ROOT = Path(__file__).parents[2]
FULL = Receipt(
    cell="te2.20.2-h200-attention",
    stack="te2.20.2",
    target="h200",
    probe="attention",
    outcome=Outcome.FAIL,
    reason="1 of 2 checks failed: bf16",
    requested="te",
    checks=(
        Check("fine", True, (Part("relative-error", 1e-3, 2e-3, True, "2 x ..."),)),
        Check("bf16", False, (Part("relative-error", 0.5, 2e-3, False, "2 x ..."),), "seen"),
    ),
    backends=(Backend("attention.bf16", "te", "sdpa", ("sdpa",), ("te: soft cap",)),),
    packages=(Package("torch", "2.11.0", "/site/torch/__init__.py", ("/other/torch/__init__.py",)),),
    libraries=(Library("libcudart", "13.0", ("/a", "/b")),),
    machine=Machine(gpu="NVIDIA H200", capability="9.0"),
    jit=JitCompiles(
        {"triton": 3}, {}, (JitCompile("triton", "gate", "up:*bf16", 0.5, "warm-up"),), {"inductor": 2}, root="/jit"
    ),
    failure=Failure("RuntimeError", "text", "te.py:1 in f", "Traceback"),
    seed=3,
    seconds={"total": 1.5},
    retries=("lost driver",),
)
NAME = f"{FULL.cell}.json"


def test_a_receipt_comes_back_as_it_was_written(tmp_path: Path) -> None:
    write_receipt(FULL, tmp_path / "new" / NAME)
    assert read_receipt(tmp_path / "new" / NAME) == FULL
    assert [path.name for path in (tmp_path / "new").iterdir()] == [NAME]


texts = st.text(max_size=30)
numbers = st.none() | st.floats(allow_nan=False, allow_infinity=False)


@given(reason=texts, observed=numbers, bound=numbers, seconds=st.dictionaries(texts, st.floats(0, 1e6), max_size=3))
def test_any_text_and_number_comes_back(
    reason: str,
    observed: float | None,
    bound: float | None,
    seconds: dict[str, float],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    holds = observed is not None and bound is not None and observed <= bound
    checks = (Check(reason, False, (Part(reason, observed, bound, holds, reason),), reason),)
    receipt = dataclasses.replace(FULL, reason=reason, checks=checks, seconds=seconds)
    place = tmp_path_factory.mktemp("any") / NAME
    write_receipt(receipt, place)
    assert read_receipt(place) == receipt


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_what_json_cannot_hold_is_null_and_half_a_character_costs_nothing(number: float, tmp_path: Path) -> None:
    checks = (Check("x", False, (Part("relative-error", number, 1.0, False, "d"),), "a \udcff b"),)
    write_receipt(dataclasses.replace(FULL, checks=checks), tmp_path / NAME)
    (check,) = read_receipt(tmp_path / NAME).checks
    assert check.parts[0].observed is None
    assert check.detail == r"a \udcff b"


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_receipt(FULL, tmp_path / NAME)

    def full_disk(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_receipt(dataclasses.replace(FULL, seed=4), tmp_path / NAME)
    assert read_receipt(tmp_path / NAME).seed == 3
    assert os.listdir(tmp_path) == [NAME]  # noqa: PTH208 - hidden files too


def changed(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data.update(values)


def good_outcome(data: dict[str, Any]) -> None:
    data["outcome"] = "pass"


def green_check(data: dict[str, Any]) -> None:
    data["checks"][1]["passed"] = True


def part(check: int = 0, **values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data["checks"][check]["parts"][0].update(values)


def passed(**values: Any) -> Callable[[dict[str, Any]], None]:
    """The same cell as one that passed on another backend than Transformer Engine, which it requested."""
    own = {"outcome": "pass", "failure": None, "backends": []} | values
    return lambda data: data.update(checks=data["checks"][:1], **own)


def passed_on(**of_backend: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: passed(backends=[data["backends"][0] | of_backend])(data)


def timed(*rows: Timing) -> Callable[[dict[str, Any]], None]:
    return lambda data: data.update(timings=[dataclasses.asdict(row) for row in rows])


SLOW = new_timing("forward", "cuda-events", (3.0, 3.75, 4.5), 10)
FAULTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "pass-over-a-failed-check": (good_outcome, "outcome pass with the failed check bf16"),
    "pass-over-a-failure": (passed(failure={"type": "RuntimeError", "message": ""}), "pass over the failure Runt"),
    "pass-and-blocked": (passed(blocked_by="te2.20.2-h200-imports"), "pass, and blocked by te2.20.2-h200-imports"),
    "check-over-a-failed-part": (green_check, "check bf16: its part relative-error failed, and the check passed"),
    "pass-without-checks": (changed(outcome="pass", checks=[]), "no check at all"),
    "fail-without-failed-check": (changed(checks=[]), "without a failed check"),
    "blocked-by-nothing": (changed(outcome="blocked"), "not by which cell"),
    "unknown-outcome": (changed(outcome="fine"), "outcome"),
    "unknown-key": (changed(colour="green"), "colour"),
    "unknown-key-of-the-machine": (lambda data: data["machine"].update(colour="green"), "machine.colour"),
    "another-cell": (changed(cell="te2.20.2-h200-permute"), "joined"),
    "another-stack": (changed(stack="te2.17.1"), "joined"),
    "another-schema": (changed(schema_id="megacpp-validate/receipt/6"), "megacpp-validate/receipt/6'"),
    "a-number-as-text": (changed(seed="3"), "seed"),
    "a-truth-as-number": (lambda data: data["checks"][0].update(passed=1), "passed"),
    "part-over-its-bound": (part(observed=0.2), "check fine: its part relative-error passed, and 0.2 is beyond"),
    "part-below-its-floor": (part(at_least=True), "check fine: its part relative-error passed, and 0.001 is beyond"),
    "part-within-its-bound": (part(1, observed=1e-3), "relative-error failed, and 0.001 is within"),
    "part-without-a-number": (part(observed=None), "check fine: its part relative-error has no number"),
    "part-without-a-bound": (part(bound=None), "check fine: its part relative-error has no number"),
    "part-of-nan": (part(observed=math.nan), "the number NaN"),
    "part-of-no-end": (part(bound=math.inf), "the number Infinity"),
    "a-bound-that-lets-zeros-pass": (part(bound=1.0), "zeros would pass"),
    "te-requested-and-never-seen": (passed_on(), "attention.bf16 requested te, claims sdpa, shows sdpa"),
    "te-claimed-and-never-seen": (passed_on(claimed="te"), "attention.bf16 requested te, claims te, shows sdpa"),
    "te-seen-and-not-claimed": (passed_on(observed=["te"]), "attention.bf16 requested te, claims sdpa, shows te"),
    "native-requested-and-te-seen": (
        lambda data: (passed_on(claimed="te", observed=["te"])(data), changed(requested="native")(data)),
        "where native was requested, and the path attention.bf16",
    ),
    "less-than-no-kernel": (lambda data: data["jit"]["warm_up"].update(triton=-1), "jit.warm_up.triton is -1"),
    "less-than-no-hits": (lambda data: data["jit"]["hits"].update(inductor=-2), "jit.hits.inductor is -2"),
    "less-than-no-memory": (changed(peak_memory_mib=-0.5), "peak_memory_mib is -0.5"),
    "less-than-no-time": (changed(seconds={"total": -0.001}), "seconds.total is -0.001"),
    "a-library-twice": (
        lambda data: data["libraries"].append({"name": "libcudart", "version": "12.8", "files": []}),
        "the library libcudart is listed 2 times",
    ),
    "a-median-divided": (timed(dataclasses.replace(SLOW, median_ms=1.25)), "the median of its 3 rounds is 3.75"),
    "a-median-of-no-rounds": (timed(dataclasses.replace(SLOW, rounds_ms=())), "of its 0 rounds"),
    "timed-twice": (timed(SLOW, SLOW), "time of forward by cuda-events is listed 2 times"),
    "missing-key": (lambda data: data.pop("outcome"), "outcome"),
}  # fmt: skip


@pytest.mark.parametrize(("fault", "word"), FAULTS.values(), ids=FAULTS)
def test_what_was_edited_is_no_evidence(fault: Callable[[dict[str, Any]], object], word: str, tmp_path: Path) -> None:
    data = json.loads(receipt_text(FULL))
    fault(data)
    (tmp_path / NAME).write_text(json.dumps(data))
    with pytest.raises(ReceiptInvalid) as refused:
        read_receipt(tmp_path / NAME)
    assert word in refused.value.reason
    assert NAME in str(refused.value)
    assert "Next step" in str(refused.value)


# Of an even number the median is a mean of two, rounded after; a small one lies below what is rounded away.
ROUNDS = ((1.2345678,), (0.1234565, 0.1234575), (1 / 3, 2 / 3, 1 / 7, 1 / 9), (4e-7, 6e-7), (50.1, 50.2, 50.3, 49.9))
GOOD: dict[str, Callable[[dict[str, Any]], object]] = {
    "te": passed_on(claimed="te", observed=["te"]),
    "a-path-that-requests-another": passed_on(requested="sdpa"),
    "native-of-a-te-stack": lambda data: (passed_on(requested="native")(data), changed(requested="native")(data)),
    "at-its-bound": part(observed=2e-3),
    "at-its-floor": part(observed=2e-3, at_least=True),
    "no-number-in-a-failed-check": part(1, observed=None, bound=None),
    "a-floor-under-infinity-in-a-failed-check": lambda data: data["checks"][1]["parts"].append(
        {"name": "ran", "observed": None, "bound": 1.0, "passed": True, "derivation": "", "at_least": True}
    ),
    **{f"rounds-{rounds}": timed(new_timing("forward", "cuda-events", rounds, 9)) for rounds in ROUNDS},
}


@pytest.mark.parametrize("change", GOOD.values(), ids=GOOD)
def test_what_a_probe_can_write_is_read(change: Callable[[dict[str, Any]], object], tmp_path: Path) -> None:
    data = json.loads(receipt_text(FULL))
    change(data)
    (tmp_path / NAME).write_text(json.dumps(data))
    assert read_receipt(tmp_path / NAME).cell == FULL.cell


@pytest.mark.parametrize("key", ["outcome", "passed", "total"])
def test_a_key_that_is_there_twice_is_refused_at_every_depth(key: str, tmp_path: Path) -> None:
    text = receipt_text(FULL)
    line = next(line.strip().rstrip(",") for line in text.splitlines() if line.strip().startswith(f'"{key}"'))
    (tmp_path / NAME).write_text(text.replace(line, f"{line}, {line}", 1))
    with pytest.raises(ReceiptInvalid, match=f"the key '{key}' appears twice"):
        read_receipt(tmp_path / NAME)


def test_every_receipt_that_is_published_is_read() -> None:
    every = (ROOT / "docs" / "evidence").rglob("*.json")
    places = [path for path in every if "cell" in json.loads(path.read_text(encoding="utf-8"))]
    assert len(places) > 40
    for place in places:
        assert read_receipt(place).cell == place.stem


def test_a_renamed_file_is_no_evidence_for_its_name(tmp_path: Path) -> None:
    write_receipt(FULL, tmp_path / "te2.20.2-h200-permute.json")
    with pytest.raises(ReceiptInvalid, match="its name does not say"):
        read_receipt(tmp_path / "te2.20.2-h200-permute.json")


@given(cut=st.floats(0, 1, exclude_max=True))
def test_a_file_that_was_cut_short_is_refused(cut: float, tmp_path_factory: pytest.TempPathFactory) -> None:
    place = tmp_path_factory.mktemp("cut") / NAME
    text = receipt_text(FULL).rstrip()
    place.write_text(text[: int(len(text) * cut)])
    with pytest.raises(ReceiptInvalid):
        read_receipt(place)


def test_a_folder_is_read_with_invalid_files_apart(tmp_path: Path) -> None:
    write_receipt(FULL, tmp_path / NAME)
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "te2.20.2-h200-attention.log").write_text("words")
    receipts = read_receipts(tmp_path)
    assert list(receipts.found) == [FULL.cell]
    assert [fault.file.name for fault in receipts.unreadable] == ["broken.json", "folder.json"]
    with pytest.raises(ReceiptInvalid, match="no such folder"):
        read_receipts(tmp_path / "nowhere")


def test_training_is_read_back_unchanged(tmp_path: Path) -> None:
    steps = (TrainingStep(0, 3.4, 2.0, 1.0, 0.5), TrainingStep(1, None, 2.0, None, 0.25))
    record = TrainingRecord(
        "plan", "tiny", "AMEAR", 40_000, 2, {"data": "2"}, "fp32", {"preset": "off"}, {"moe": "bridge"}, 2.0, 3.47,
        steps, 20, {"start-up": 5, "step": 15}, 512, 1000.0, None, {"step": 2**20},
    )  # fmt: skip
    full = dataclasses.replace(FULL, training=(record,))
    write_receipt(full, tmp_path / NAME)
    assert read_receipt(tmp_path / NAME) == full
    for change, word in (({"whole_ns": 21}, "phases sum to 20"), ({"steps": steps[::-1]}, "do not follow each other")):
        write_receipt(dataclasses.replace(full, training=(dataclasses.replace(record, **change),)), tmp_path / NAME)
        with pytest.raises(ReceiptInvalid, match=word):
            read_receipt(tmp_path / NAME)


def test_the_published_schema_is_fresh() -> None:
    """Written by `python -m megacpp_validate.cli receipt-schema >docs/schema/receipt.json`."""
    published = (ROOT / "docs" / "schema" / "receipt.json").read_text(encoding="utf-8")
    assert json.loads(published) == receipt_schema()


def test_one_edited_word_makes_no_committed_receipt_good() -> None:
    red = [
        path
        for path in sorted((ROOT / "docs" / "evidence" / "h200").glob("te*/*.json"))
        if json.loads(path.read_text()).get("outcome") in ("error", "import-error", "blocked")
    ]
    assert len(red) >= 8
    for path in red:
        outcome = json.loads(path.read_text())["outcome"]
        text = path.read_text().replace(f'\n  "outcome": "{outcome}"', '\n  "outcome": "pass"').encode()
        with pytest.raises(ReceiptInvalid, match=r"over the failure|blocked by|no check at all|failed check"):
            parse_receipt(text, path)
