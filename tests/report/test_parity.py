"""A parity session in every format: no red is left out, each says what was seen, allowed, why, and what to do."""

from __future__ import annotations

import math
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest

from megacpp_validate.environments.session_result import ParityResult, SupportGrid, build_support
from megacpp_validate.evidence.receipt import (
    Backend,
    Check,
    Failure,
    Library,
    Machine,
    Outcome,
    Package,
    Part,
    Receipt,
)
from megacpp_validate.gate.fp8_session import Fp8Result
from megacpp_validate.gate.loss_result import LossOutcome, LossVerdict
from megacpp_validate.report import machine
from megacpp_validate.report.github.annotations import render_step_summary
from megacpp_validate.report.words.parity import find_worst, say_next_step, say_worst, summarize_session
from tests.report.reading import (
    READERS,
    flat,
    print_terminal,
    read_json,
    read_summary,
    write_annotations,
    write_html,
    write_junit,
)

H200 = Machine(gpu="NVIDIA H200", capability="9.0", driver="580.159.03", cuda="13.0", torch="2.11.0", python="3.12.3")
UNDEFINED = (
    "Transformer Engine cannot be used: OSError: undefined symbol: cublasLtGroupedMatrixLayoutInit_internal. Likely "
    "cause: cuBLAS is older than this release wants. Next step: upgrade nvidia-cublas. Found: release 2.14.1."
)


def part(name: str, observed: float | None, bound: float | None, why: str = "2 x sqrt(8) x 2^-8") -> Part:
    passed = observed is not None and bound is not None and observed <= bound
    return Part(name, observed, bound, passed, why)


def check(name: str, *parts: Part, detail: str = "") -> Check:
    return Check(name, all(part.passed for part in parts), parts, detail)


HELD = check("bf16.gqa4.forward", part("relative-error", 1e-3, 2e-3), part("bound-discriminates", 2e-3, 2e-3))
OUT = check("bf16.gqa4.grad.key", part("relative-error", 0.51234, 2e-3), part("factor", 1e-4, 1e-3, "unbiased"))
BACKEND = Check("attention.bf16.soft_cap.backend", False, detail="requested te, claimed sdpa, seen sdpa")


def receipt(probe: str, outcome: Outcome, reason: str = "", **more: object) -> Receipt:
    values: dict[str, object] = {"requested": "te", "seconds": {"total": 12.34}, "machine": H200, **more}
    cell = f"te2.20.2-h200-{probe}"
    return replace(Receipt(cell, "te2.20.2", "h200", probe, outcome, reason, "te"), **values)  # type: ignore[arg-type]


GOOD = receipt("imports", Outcome.PASS, checks=(HELD,), backends=(Backend("linear", "te", "te", ("te",)),))
FAIL = receipt("attention", Outcome.FAIL, "1 of 2 checks failed: bf16.gqa4.grad.key", checks=(HELD, OUT))
FALLBACK = receipt(
    "permute",
    Outcome.FAIL,
    "1 of 2 checks failed: attention.bf16.soft_cap.backend",
    checks=(HELD, BACKEND),
    backends=(Backend("attention.bf16.soft_cap", "te", "sdpa", ("sdpa",), ("te: soft-capped logits have no kernel",)),),
)
ERROR = receipt(
    "native_block",
    Outcome.ERROR,
    "RuntimeError: cuDNN Error: set_attribute on a reshape operation",
    checks=(HELD,),
    failure=Failure("RuntimeError", "cuDNN", "transformer_engine/pytorch/cpp_extensions/fused_attn.py:310 in fwd", "T"),
)
TIMEOUT = receipt("expert_gemm", Outcome.TIMEOUT, "killed after 300 s in deep_gemm/jit.py:10 in build")
IMPORT = receipt("linear_walker", Outcome.IMPORT_ERROR, UNDEFINED)
BLOCKED = receipt(
    "layer_spec", Outcome.BLOCKED, f"blocked by cell-of-imports: {UNDEFINED}", blocked_by="cell-of-imports"
)
NOT_RUN = receipt(
    "fp8",
    Outcome.NOT_RUN,
    "the target h200 wants sm_90, and there is none. Next step: run it there.",
    machine=Machine(),
)
UNSUPPORTED = receipt("gb10", Outcome.EXPECTED_UNSUPPORTED)
REDS = (FAIL, FALLBACK, ERROR, TIMEOUT, IMPORT, BLOCKED)


def session(*receipts: Receipt) -> ParityResult:
    return ParityResult(
        tool="megacpp-validate 0.1.0",
        target="h200",
        stack="te2.20.2",
        requested="te",
        requested_because="the target h200 is there for Transformer Engine",
        interpreter="/usr/bin/python3",
        folder=".megacpp/receipts",
        seed=3,
        seconds=61.5,
        receipts=receipts,
    )


ALL = session(GOOD, *REDS, NOT_RUN, UNSUPPORTED)
CLEAN = session(GOOD, UNSUPPORTED)
NOTHING = session(NOT_RUN, replace(NOT_RUN, probe="attention"))


@pytest.mark.parametrize("form", READERS)
def test_no_cell_is_left_out(form: str) -> None:
    text = READERS[form](ALL)
    for row in ALL.receipts:
        assert row.probe in text


@pytest.mark.parametrize("form", ["terminal", "html", "junit", "annotations", "summary"])
def test_every_red_says_why_and_what_to_do(form: str) -> None:
    text = READERS[form](ALL)
    for row in (*REDS, NOT_RUN):
        assert flat(row.reason.partition(" Next step:")[0]).rstrip(".") in text
        assert flat(say_next_step(row)) in text
    assert "cublasLtGroupedMatrixLayoutInit_internal" in text
    assert "bf16.gqa4.grad.key" in text
    assert "soft-capped logits have no kernel" in text


@pytest.mark.parametrize("form", ["terminal", "html", "junit", "summary"])
def test_a_failed_check_shows_what_was_seen_what_was_allowed_and_where_that_comes_from(form: str) -> None:
    text = READERS[form](session(FAIL))
    assert "relative-error 0.512, bound 0.002 = 2 x sqrt(8) x 2^-8" in text


@pytest.mark.parametrize("form", READERS)
def test_a_clean_session_says_so(form: str) -> None:
    text = READERS[form](CLEAN)
    if form != "json":
        assert "Parity holds in 1 probe of te2.20.2 on h200; unsupported there, as expected: gb10." in text


def fp8(*verdicts: LossVerdict, missing: str = "") -> Fp8Result:
    return Fp8Result(**CLEAN.model_dump(exclude={"schema_id"}), loss=verdicts, loss_missing=missing)


def verdict(recipe: str, outcome: LossOutcome, *failed: str, refusals: tuple[str, ...] = ()) -> LossVerdict:
    checks = tuple(Check(name, False, (Part("size", 0.2, 0.01, False, "twice the spread"),)) for name in failed)
    return LossVerdict(recipe=recipe, outcome=outcome, checks=checks, refusals=refusals)


FOLLOWS = verdict("delayed", LossOutcome.PASS)
STRAYS = verdict("current", LossOutcome.FAIL, "gap.settled.seed0")
UNLIKE = verdict("block", LossOutcome.REFUSED, refusals=("seeds 0 and 1 have no twin",))


@pytest.mark.parametrize("form", [form for form in READERS if form != "json"])
def test_a_session_of_fp8_tells_every_verdict_on_what_was_trained(form: str) -> None:
    text = READERS[form](fp8(FOLLOWS, STRAYS, UNLIKE))
    assert "the loss gate fails current; the loss gate cannot compare block" in text
    assert "current does not follow BF16: gap.settled.seed0 out of bounds" in text
    assert "seeds 0 and 1 have no twin" in text
    assert "FP8 holds in 1 probe of te2.20.2 on h200; unsupported there, as expected: gb10." in READERS[form](
        fp8(FOLLOWS)
    )


def test_fp8_holds_only_where_every_verdict_does() -> None:
    assert fp8(FOLLOWS).holds
    for result in (fp8(FOLLOWS, STRAYS), fp8(UNLIKE), fp8(missing="the curves were not written")):
        assert not result.holds
    assert fp8(FOLLOWS, STRAYS).breaks
    assert not fp8(FOLLOWS, UNLIKE).breaks
    assert "the curves were not written" in summarize_session(fp8(missing="the curves were not written"))


@pytest.mark.parametrize("result", [ALL, NOTHING, session()], ids=["red", "not-run", "nothing"])
def test_nothing_else_looks_like_success(result: ParityResult) -> None:
    assert not result.holds
    assert 'class="answer good"' not in write_html(result)
    assert "Parity holds" not in summarize_session(result)
    assert "Parity holds" not in write_annotations(result)
    cases = ET.fromstring(write_junit(result).encode()).findall(".//testcase")
    green = [case.get("name") for case in cases if not any(case.find(tag) is not None for tag in TAGS)]
    assert green == (["imports", "gb10"] if result is ALL else [])


TAGS = ("failure", "error", "skipped")
KINDS = {"attention": "failure", "permute": "failure", "native_block": "error", "expert_gemm": "error",
         "linear_walker": "error", "layer_spec": "error", "fp8": "skipped"}  # fmt: skip


def test_junit_tells_failures_errors_and_what_did_not_run_apart() -> None:
    suite = ET.fromstring(write_junit(ALL).encode())
    for case in suite.findall(".//testcase"):
        found = [tag for tag in TAGS if case.find(tag) is not None]
        assert found == ([KINDS[str(case.get("name"))]] if case.get("name") in KINDS else [])
    assert (suite.get("failures"), suite.get("errors"), suite.get("skipped")) == ("2", "4", "1")


def test_annotations_are_errors_for_reds_and_a_warning_for_what_did_not_run() -> None:
    lines = write_annotations(ALL).splitlines()
    assert sum(line.startswith("::error ") for line in lines) == len(REDS)
    assert sum(line.startswith("::warning ") for line in lines) == 1
    assert lines[-1].startswith("::notice ")


def test_breaking_and_missing_evidence_are_told_apart() -> None:
    assert (ALL.breaks, NOTHING.breaks, CLEAN.breaks) == (True, False, False)
    assert summarize_session(NOTHING).startswith("Nothing ran: the target h200 wants sm_90")
    assert print_terminal(NOTHING, verbose=False).count("the target h200 wants sm_90") == 2  # not once a probe


WORST: dict[str, tuple[tuple[Check, ...], str]] = {
    "nothing": ((), ""),
    "detail-only": ((BACKEND,), ""),
    "the-bound-itself-does-not-count": ((HELD,), "0.50"),
    "over": ((HELD, OUT), "256.17"),
    "not-a-number": ((check("x", part("finite", None, 0.0)),), "inf"),
    "zero-held": ((check("x", part("zero", 0.0, 0.0)),), "0.00"),
    "zero-missed": ((check("x", part("zero", 1e-30, 0.0)),), "inf"),
}


@pytest.mark.parametrize(("checks", "told"), WORST.values(), ids=WORST)
def test_the_worst_check(checks: tuple[Check, ...], told: str) -> None:
    assert say_worst(replace(GOOD, checks=checks)) == told


def test_the_worst_check_is_named() -> None:
    worst = find_worst(FAIL)
    assert worst is not None
    assert (worst.check, worst.part) == ("bf16.gqa4.grad.key", "relative-error")
    assert math.isclose(worst.ratio, 256.17)


@pytest.mark.parametrize("form", ["terminal", "html", "summary", "junit"])
def test_second_copies_are_told(form: str) -> None:
    double = replace(
        GOOD,
        libraries=(Library("libcudart", "13.0, 12.8", ("/a/libcudart.so.13", "/b/libcudart.so.12")),),
        packages=(Package("torch", "2.11.0", "/one/torch/__init__.py", ("/two/torch/__init__.py",)),),
    )
    text = READERS[form](session(double, double))
    assert "libcudart is mapped twice: /a/libcudart.so.13, /b/libcudart.so.12" in text
    assert "also there: /two/torch/__init__.py" in text
    assert "mapped twice" not in READERS[form](CLEAN)


def test_a_fallback_of_a_good_cell_is_shown_too() -> None:
    row = Backend("attention.bf16.fa3", "fa3", "sdpa", ("sdpa",), ("fa3: head size 80",))
    assert "fa3: head size 80" in print_terminal(session(replace(GOOD, backends=(row,))), verbose=False)
    native = replace(GOOD, requested="native", backends=(Backend("attention.bf16", "native", "sdpa", ("sdpa",)),))
    assert "fell back" not in print_terminal(session(native), verbose=False)
    wrong = replace(native, outcome=Outcome.FAIL, checks=(Check("attention.bf16.backend", False),))
    assert "fell back" in print_terminal(session(wrong), verbose=False)


def test_every_check_is_listed_where_asked_for() -> None:
    assert "bf16.gqa4.forward" not in print_terminal(CLEAN, verbose=False)
    verbose = print_terminal(CLEAN, verbose=True)
    assert "bf16.gqa4.forward" in verbose
    assert "relative-error 0.001, bound 0.002" in verbose


def test_many_failed_checks_do_not_bury_the_rest() -> None:
    many = replace(FAIL, checks=tuple(check(f"case{n}", part("relative-error", 1.0, 0.1)) for n in range(40)))
    quiet = print_terminal(session(many), verbose=False)
    assert "28 more failed checks (--verbose lists them)" in quiet
    assert "case39" in print_terminal(session(many), verbose=True)
    assert "case39" in read_summary(session(many))


@pytest.mark.parametrize("width", [80, 120, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    for result in (ALL, CLEAN, NOTHING, GRID):
        for line in print_terminal(result, width=width).splitlines():
            assert len(line.rstrip()) <= width


def test_words_stand_beside_every_colour() -> None:
    text = print_terminal(ALL, width=120)
    for words in ("✓ pass", "✗ fail", "✗ error", "✗ timeout", "✗ import error", "↳ blocked", "○ not run"):
        assert words in text


@pytest.mark.parametrize("result", [ALL, CLEAN, NOTHING], ids=["red", "clean", "not-run"])
def test_json_comes_back(result: ParityResult) -> None:
    assert machine.read_json(machine.to_json(result)) == result


GRID: SupportGrid = build_support(
    [GOOD, FAIL, replace(FAIL, stack="te2.17.1", outcome=Outcome.ERROR, started="2026-11-21T10:00:00+00:00")],
    ["imports", "attention", "permute"],
    {"broken.json": "cut short"},
)


def test_the_support_grid() -> None:
    text = print_terminal(GRID)
    for words in ("te2.17.1", "te2.20.2", "✗ error", "✓ pass", "○ not run", "cut short", "NVIDIA H200", "2026-11-21"):
        assert words in text
        assert words in read_summary(GRID)
    assert "0 of 2 stacks hold in every module; 1 file could not be read." in text
    assert "cut short" in read_json(GRID)
    assert machine.read_json(machine.to_json(GRID)) == GRID


def test_the_grid_in_markdown_is_a_table() -> None:
    table = [line for line in render_step_summary(GRID).splitlines() if line.startswith("|")]
    assert {line.count("|") for line in table} == {6}
    assert table[2] == "| te2.17.1 | h200 | ○ not run | ✗ error | ○ not run |"
