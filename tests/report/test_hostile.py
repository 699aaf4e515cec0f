"""Findings hold source text of others: nothing in it may become markup, a command or an escape sequence."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest

from megacpp_validate.canary.firewall.result import FirewallCase, FirewallOutcome, FirewallResult
from megacpp_validate.canary.static.findings import (
    ChangeKind,
    Finding,
    Impact,
    ModuleResult,
    ModuleVerdict,
    StaticResult,
    Sweep,
)
from megacpp_validate.environments.session_result import ParityResult, SmokeSession
from megacpp_validate.evidence.receipt import (
    Backend,
    Check,
    Failure,
    JitCompiles,
    Library,
    Machine,
    Outcome,
    Package,
    Part,
    Receipt,
)
from megacpp_validate.evidence.training import TrainingRecord, TrainingStep
from megacpp_validate.evidence.values import Cause
from megacpp_validate.gate.fp8_session import Fp8Result
from megacpp_validate.gate.loss_result import LossOutcome, LossVerdict
from megacpp_validate.report import machine
from megacpp_validate.report.github import annotations as github
from tests.report.reading import (
    READERS,
    Page,
    Result,
    print_terminal,
    read_summary,
    write_annotations,
    write_html,
    write_junit,
)
from tests.report.results import MODULES, at, source

EVIL = (
    "<img src=x onerror=alert(1)></script>\"'&]]>-->|`*_[bold red]x[/]{{7*7}}{%x%}"
    "%0A\r\n::stop-commands::x,y:z"
    "\x1b[31m\x1b]0;x\x07\x00\x0b\x85\u2028\u202e\ufffe\U0001f600"
)
SEEN = "<img src=x onerror=alert(1)></script>\"'&]]>-->|"


def evil(name: str) -> str:
    return f"{name}{EVIL}"


def evil_finding(number: int, kind: ChangeKind, impact: Impact) -> Finding:
    return Finding(
        module=evil("module") if number % 2 else "permute",
        modules=("permute", evil("other")),
        kind=kind,
        impact=impact,
        cause=Cause.API,
        symbol=evil(f"symbol{number}"),
        member=evil("member"),
        parameter=evil("parameter"),
        before=at(evil("before"), 1),
        after=at(evil("after"), 2),
        call_sites=(at(evil("site"), 3),),
        old=evil("old"),
        new=evil("new"),
        suggestion=evil("suggestion"),
        follows=number % 3 == 0,
    )


def evil_static() -> StaticResult:
    kinds = [(kind, impact) for kind in ChangeKind for impact in Impact]
    findings = tuple(evil_finding(number, kind, impact) for number, (kind, impact) in enumerate(kinds))
    rows = [ModuleResult(module=module, verdict=ModuleVerdict.CLEAN) for module in MODULES]
    rows.append(ModuleResult(module=evil("row"), verdict=ModuleVerdict.CASCADE, under=evil("under")))
    side = source("1.0").model_copy(update={"version": evil("v"), "wheel": evil("wheel"), "sha256": evil("sha")})
    return StaticResult(
        tool=evil("tool"),
        old=side,
        new=side,
        downgrade=True,
        modules=tuple(rows),
        findings=findings,
        unchanged_faults=findings[:2],
        not_consumed=1,
        changes_not_consumed=(evil("change"),),
    )


def evil_firewall() -> FirewallResult:
    cases = tuple(
        FirewallCase(
            case=evil(outcome.value),
            damage=evil("damage"),
            release=evil("release"),
            compiled=evil("compiled"),
            outcome=outcome,
            reason=evil("reason"),
            native_paths={evil("path of"): evil("path")},
            ended=evil("ended"),
            problems=() if outcome is FirewallOutcome.PASS else (evil("problem"),),
        )
        for outcome in FirewallOutcome
    )
    return FirewallResult(tool=evil("tool"), python=evil("python"), torch=evil("torch"), cases=cases)


def evil_receipt(outcome: Outcome) -> Receipt:
    return Receipt(
        cell=evil("cell"),
        stack=evil("stack"),
        target=evil("target"),
        probe=evil("probe"),
        outcome=outcome,
        reason=evil("reason"),
        requested="te",
        checks=(Check(evil("check"), False, (Part(evil("part"), 2.0, 1.0, False, evil("why")),), evil("detail")),),
        backends=(Backend(evil("path"), "te", evil("claimed"), (evil("observed"),), (evil("reason"),)),),
        packages=(Package(evil("package"), evil("version"), evil("file"), (evil("copy"),)),),
        libraries=(Library(evil("library"), evil("version"), (evil("one"), evil("two"))),),
        machine=Machine(gpu=evil("gpu"), driver=evil("driver"), python=evil("python"), torch=evil("torch")),
        jit=JitCompiles({evil("jit"): 1}, {evil("later"): 1}),
        failure=Failure(evil("type"), evil("message"), evil("frame"), evil("traceback")),
        blocked_by=evil("blocked by"),
        seconds={evil("phase"): 1.0},
    )


def evil_parity() -> ParityResult:
    return ParityResult(
        tool=evil("tool"),
        target=evil("target"),
        stack=evil("stack"),
        requested=evil("requested"),
        requested_because=evil("because"),
        interpreter=evil("interpreter"),
        folder=evil("folder"),
        seed=0,
        seconds=1.0,
        receipts=tuple(evil_receipt(outcome) for outcome in Outcome),
    )


def evil_fp8() -> Fp8Result:
    loss = LossVerdict(recipe=evil("recipe"), outcome=LossOutcome.REFUSED, refusals=(evil("refusal"),))
    return Fp8Result(**evil_parity().model_dump(exclude={"schema_id"}), loss=(loss,), loss_missing=evil("missing"))


def evil_smoke() -> SmokeSession:
    record = TrainingRecord(
        "plan", evil("model"), evil("pattern"), 1, 1, {evil("plan"): evil("value"), "data": evil("data")},
        evil("precision"), {"preset": evil("preset")}, {evil("form"): evil("value")}, 2.0, 3.0,
        (TrainingStep(0, 3.0, 2.0, 1.0, 0.5),), 1, {evil("phase"): 1}, 1, 1.0, None, {evil("phase"): 1},
    )  # fmt: skip
    made = evil_parity()
    receipts = tuple(replace(receipt, training=(record,)) for receipt in made.receipts)
    return SmokeSession(**{**dict(made), "receipts": receipts, "schema_id": "megacpp-validate/moe-smoke/1"})


STATIC = evil_static()
ALL: dict[str, Result] = {
    "static": STATIC,
    "sweep": Sweep(steps=(STATIC, STATIC), unreadable={evil("release"): evil("reason")}),
    "firewall": evil_firewall(),
    "parity": evil_parity(),
    "fp8": evil_fp8(),
    "smoke": evil_smoke(),
}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("form", READERS)
def test_the_text_is_there_as_text(form: str, name: str) -> None:
    text = READERS[form](ALL[name])
    assert (SEEN if form == "annotations" else SEEN.replace("`", "")) in text


@pytest.mark.parametrize("name", ALL)
def test_html(name: str) -> None:
    page = Page(write_html(ALL[name]))
    tags = [tag for tag, _ in page.tags]
    assert "img" not in tags
    assert tags.count("script") == 1
    assert page.open == []
    for _, attributes in page.tags:
        assert not any(key.startswith("on") for key in attributes)
    assert "{{7*7}}" in page.text
    assert not re.search(r"[\x00-\x08\x0b\x0e-\x1f\x85\u202e]", write_html(ALL[name]))


@pytest.mark.parametrize("name", ALL)
def test_junit(name: str) -> None:
    text = write_junit(ALL[name])
    assert ET.fromstring(text.encode()).tag == "testsuites"
    assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe]", text)
    assert "\U0001f600" in text


@pytest.mark.parametrize("name", ALL)
def test_json(name: str) -> None:
    assert machine.read_json(machine.to_json(ALL[name])) == ALL[name]


@pytest.mark.parametrize("name", ALL)
def test_annotations(name: str) -> None:
    result = ALL[name]
    text = write_annotations(result)
    lines = text.split("\n")
    assert lines.pop() == ""
    assert "\r" not in text
    assert "\x1b" not in text
    for line in lines:
        assert re.match(r"::(error|warning|notice|debug)( |::)", line)
        properties = line.split("::")[1].partition(" ")[2]
        names = [part.partition("=")[0] for part in properties.split(",")] if properties else []
        assert set(names) <= {"file", "line", "title"}
        assert len(names) == len(set(names))
    assert "%250A" in text  # a percent sign of the text is not taken for ours


@pytest.mark.parametrize("name", ALL)
def test_summary(name: str) -> None:
    text = github.render_step_summary(ALL[name])
    tags = {tag for tag, _ in Page(text).tags}
    assert tags <= {"code", "details", "summary"}
    for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        assert len({line.count("|") for line in table.splitlines()}) == 1
    assert "[bold red]" in read_summary(ALL[name])
    assert "[bold" not in text


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("width", [80, 120, 200])
def test_terminal(name: str, width: int) -> None:
    text = print_terminal(ALL[name], width=width)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u202e]", text)
    assert "[bold red]" in "".join(text.split("\n")) or "[bold" in text
    coloured = print_terminal(ALL[name], width=width, colour=True)
    assert "\x1b" not in re.sub(r"\x1b\[[0-9;]*m", "", coloured)
