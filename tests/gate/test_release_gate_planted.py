"""Faults planted in a store of receipts that is good throughout: each closes the gate, by its own rule and no other."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

from megacpp_validate.evidence.receipt import (
    Backend,
    Failure,
    JitCompile,
    JitCompiles,
    Library,
    Machine,
    Outcome,
    Package,
    Receipt,
)
from megacpp_validate.evidence.receipt_file import receipt_text
from megacpp_validate.evidence.release_gate import GateRule
from tests.gate.release_receipts import OTHER_COMMIT, STACK, TARGET, compiled, fill, good, judge, place, put, red

CELL = f"{STACK}-{TARGET}-attention"
CLOSED, MISSING = 1, 4
TWO_FILES = ("/env/libcudnn.so.9", "/usr/lib/libcudnn.so.9.1.0")
LATE = JitCompile("triton", "permute_kernel", "[64]", 0.1, "after", rank=1)
Deed = Callable[[Path], object]
attention = partial(good, "attention")


@dataclass(frozen=True)
class Planted:
    """A fault in a good store.

    Attributes:
        deed: does it.
        rule: that must name it.
        code: exit code.
        says: in the reason.
    """

    name: str
    deed: Deed
    rule: GateRule
    code: int
    says: str


def change(text: str, into: str) -> Deed:
    """Edit the file of one cell by hand."""

    def deed(folder: Path) -> None:
        path = place(folder, "attention")
        before = path.read_text()
        assert text in before
        path.write_text(before.replace(text, into, 1))

    return deed


def write(receipt: Receipt, run: str = "run") -> Deed:
    return lambda folder: put(folder, receipt, run=run)


def remove(folder: Path) -> None:
    place(folder, "attention").unlink()


def truncate(folder: Path) -> None:
    text = place(folder, "attention").read_text()
    place(folder, "attention").write_text(text[: len(text) // 2])


def truncate_beside(folder: Path) -> None:
    """A damaged file in another run: nobody knows whether it is the newest."""
    put(folder, good("attention"), run="other")
    path = place(folder, "attention", "other")
    path.write_text(path.read_text()[:-40])


def link(folder: Path) -> None:
    path = place(folder, "attention")
    path.rename(folder.parent / path.name)
    path.symlink_to(folder.parent / path.name)


def under_another_name(folder: Path) -> None:
    shutil.copy(place(folder, "attention"), place(folder, "permute"))


def red_under_another_name(folder: Path) -> None:
    """The newest run of a cell, as a browser saves a second file of one name."""
    text = receipt_text(red("attention", hours=0.5))
    (folder / "run" / f"{CELL} (1).json").write_text(text)


def link_out(folder: Path) -> None:
    """A newer run that lies elsewhere."""
    put(folder.parent / "elsewhere", red("attention", hours=0.5))
    (folder / "nightly").symlink_to(folder.parent / "elsewhere")


def as_another_cell(folder: Path) -> None:
    """The observations of one cell under the name of another, every name in it changed."""
    text = place(folder, "attention").read_text().replace("h200-attention", "h200-permute")
    place(folder, "permute").write_text(text.replace('"probe": "attention"', '"probe": "permute"'))


def rejuvenate(folder: Path) -> None:
    """A receipt of last month under another run, its day edited; the store is otherwise good."""
    old = good("attention", hours=24 * 40)
    put(folder, old, run="last-month")
    put(folder, replace(old, started=good("attention", hours=0.5).started), run="today")


def as_another_stack(folder: Path) -> None:
    """A good receipt of the release before, every name in it that of this one."""
    old = good("attention", stack="te2.12.0", hours=3.0)
    put(folder, old, run="before")
    put(folder, replace(good("attention"), seconds=old.seconds))


def say_it_twice(folder: Path) -> None:
    """A good outcome behind a bad one: of a key that is there twice, the last one counts for most readers."""
    text = place(folder, "attention").read_text().replace('"outcome": "pass"', '"outcome": "fail"')
    place(folder, "attention").write_text(text.replace('\n  "backends": ', '\n  "outcome": "pass",\n  "backends": ', 1))


def hide_from_a_glance(folder: Path) -> None:
    """Bad keys where a glance cuts out the checks, good ones where it looks."""
    text = place(folder, "attention").read_text()
    before, _, after = text.partition('\n  "checks": [')
    forged = before.replace('"outcome": "pass"', '"outcome": "fail"') + '\n  "checks": [],'
    place(folder, "attention").write_text(f'{forged}\n  "outcome": "pass",\n  "checks": [{after}')


PLANTED = (
    Planted("removed", remove, GateRule.MISSING, MISSING, "there is no receipt"),
    Planted("truncated", truncate, GateRule.UNREADABLE, MISSING, "EOF"),
    Planted("truncated beside", truncate_beside, GateRule.UNREADABLE, MISSING, "EOF"),
    Planted("a later schema", change("receipt/5", "receipt/9"), GateRule.UNREADABLE, MISSING, "receipt/9"),
    Planted("NaN", change("0.001", "NaN"), GateRule.UNREADABLE, MISSING, "the number NaN"),
    Planted("a number edited", change("0.001", "0.5"), GateRule.UNREADABLE, MISSING, "beyond its bound"),
    Planted("a key twice", say_it_twice, GateRule.UNREADABLE, MISSING, "twice"),
    Planted("a key twice in the checks", hide_from_a_glance, GateRule.UNREADABLE, MISSING, "twice"),
    Planted("a link", link, GateRule.UNREADABLE, MISSING, "link"),
    Planted("another name", under_another_name, GateRule.NAME, MISSING, "lies under the name of"),
    Planted("a red one under another name", red_under_another_name, GateRule.NAME, MISSING, "(1)"),
    Planted("a folder that leads out", link_out, GateRule.UNREADABLE, MISSING, "link"),
    Planted("no environment in all", lambda folder: fill(folder, environment=""), GateRule.ENVIRONMENT, MISSING,
            "names no environment"),
    Planted("another cell", as_another_cell, GateRule.REPLAYED, MISSING, "edited copy of the other"),
    Planted("a new day", rejuvenate, GateRule.REPLAYED, MISSING, "edited copy"),
    Planted("another stack's", as_another_stack, GateRule.REPLAYED, MISSING, "edited copy"),
    Planted("edited beside", write(attention(reason="edited"), "other"), GateRule.DUPLICATE, MISSING, "edited"),
    Planted("the future", write(attention(hours=-1)), GateRule.CLOCK, MISSING, "clock"),
    Planted("the future beside", write(attention(hours=-1), "other"), GateRule.CLOCK, MISSING, "clock"),
    Planted("no time", write(attention(started="")), GateRule.CLOCK, MISSING, "no time"),
    Planted("no zone", write(attention(started="2026-11-22T11:00:00")), GateRule.CLOCK, MISSING, "zone"),
    Planted("stale", write(attention(hours=24 * 31)), GateRule.AGE, MISSING, "31 days"),
    Planted("an old schema", write(attention(schema_id="megacpp-validate/receipt/1")), GateRule.SCHEMA, MISSING,
            "schema is 1"),
    Planted("native", write(attention(requested="native", backends=())), GateRule.REQUESTED, MISSING, "native"),
    Planted("another release", write(attention(packages=(Package("transformer_engine", "2.17.1", "/env"),))),
            GateRule.STACK, MISSING, "2.17.1"),
    Planted("no release", write(attention(packages=())), GateRule.STACK, MISSING, "not loaded"),
    Planted("another GPU", write(attention(machine=Machine(gpu="GB10", capability="12.1"))), GateRule.TARGET, MISSING,
            "sm_121"),
    Planted("no GPU", write(attention(machine=Machine())), GateRule.TARGET, MISSING, "no GPU"),
    Planted("another commit", write(attention(commit=OTHER_COMMIT)), GateRule.COMMIT, MISSING, "bbbb"),
    Planted("no commit", write(attention(commit="")), GateRule.COMMIT, MISSING, "commit"),
    Planted("another environment", write(attention(environment="f" * 64)), GateRule.ENVIRONMENT, MISSING, "ffff"),
    Planted("not run", write(attention(outcome=Outcome.NOT_RUN, reason="no GPU here", checks=())), GateRule.NOT_RUN,
            MISSING, "no GPU here"),
    Planted("unwatched", write(attention(jit=JitCompiles(unwatched={"cuda": "no hook"}))), GateRule.UNWATCHED, MISSING,
            "no hook"),
    Planted("only timed", write(attention(seconds={"speed": 1.0, "total": 9.0})), GateRule.ONLY_TIMED, MISSING,
            "judged nothing"),
    Planted("failed", write(red("attention")), GateRule.OUTCOME, CLOSED, "out of bounds"),
    Planted("failed after a good one", write(red("attention", hours=0.5), "newer"), GateRule.OUTCOME, CLOSED,
            "out of bounds"),
    Planted("unsupported", write(attention(outcome=Outcome.EXPECTED_UNSUPPORTED, reason="no kernel")), GateRule.OUTCOME,
            CLOSED, "no kernel"),
    Planted("timed out", write(attention(outcome=Outcome.TIMEOUT, reason="too long")), GateRule.OUTCOME, CLOSED,
            "too long"),
    Planted("comes and goes", write(red("attention", hours=2.0), "older"), GateRule.CONTRADICTED, CLOSED,
            "comes and goes"),
    Planted("compiled", write(attention(jit=compiled(triton=2))), GateRule.JIT, CLOSED, "triton 2"),
    Planted("compiled by a rank", write(attention(jit=JitCompiles(compiled=(LATE,)))), GateRule.JIT, CLOSED,
            "permute_kernel"),
    Planted("two files", write(attention(libraries=(Library("libcudnn", "9.1.0, 9.2.0", TWO_FILES),))),
            GateRule.SECOND_COPY, CLOSED, "9.1.0, 9.2.0"),
    Planted("two packages", write(attention(packages=(
        Package("transformer_engine", "2.20.2", "/env/te", ("/other/te",)),))), GateRule.SECOND_COPY, CLOSED, "/other"),
    Planted("fallback", write(attention(backends=(Backend("attention.fa3", "fa3", "sdpa", ("sdpa",)),))),
            GateRule.FALLBACK, CLOSED, "fa3"),
    Planted("a part fell back", write(attention(backends=(Backend("attention.x", "te", "te", ("sdpa", "te")),))),
            GateRule.FALLBACK, CLOSED, "ran sdpa, te"),
    Planted("native beside another", write(attention(backends=(
        Backend("attention.x", "te", "te", ("te", "sdpa", "native")),))), GateRule.UNREADABLE, MISSING,
            "shows te, sdpa"),
    Planted("good over a failure", write(attention(failure=Failure("RuntimeError", "cuDNN Error"))),
            GateRule.UNREADABLE, MISSING, "over the failure"),
    Planted("a claim that is not so", write(attention(backends=(Backend("attention.x", "fa3", "fa3", ("sdpa",)),))),
            GateRule.FALLBACK, CLOSED, "ran sdpa"),
)  # fmt: skip


@pytest.mark.parametrize("planted", PLANTED, ids=lambda one: one.name)
def test_a_planted_fault_closes_it_by_its_rule(planted: Planted, tmp_path: Path) -> None:
    store = fill(tmp_path / "store")
    planted.deed(store)
    decision = judge(store)
    assert (decision.open, decision.exit_code) == (False, planted.code)
    named = [row for row in decision.cells if planted.rule in row.rules]
    assert any(planted.says in reason for row in named for reason in row.reasons), decision.closing
    assert not any(row.accepted for row in named)
    rules = {rule for row in decision.closing for rule in row.rules}
    assert rules <= {planted.rule, GateRule.MISSING}


def test_every_rule_has_a_planted_fault() -> None:
    elsewhere = {  # told and not closing, or asked for by a golden image alone: test_release_gate.py
        GateRule.NOT_REQUIRED, GateRule.SUPERSEDED, GateRule.IMAGE, GateRule.LOCK, GateRule.SIGNATURE,
        GateRule.BASELINE, GateRule.SLOWER, GateRule.MEMORY,
    }  # fmt: skip
    assert {one.rule for one in PLANTED} | elsewhere == set(GateRule)
