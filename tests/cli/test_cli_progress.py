"""What a person sees while many cells run: a table that lives on a terminal, a line a cell in a log."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from megacpp_validate.cli.canary.upgrade_progress import UpgradeProgress
from megacpp_validate.environments.cell import Cell
from megacpp_validate.environments.fleet import Event
from megacpp_validate.environments.interpreter import InterpreterEnvironment
from megacpp_validate.evidence.receipt import Outcome, Receipt
from megacpp_validate.probes.order import Order, Target

MODULES = ("imports", "permute")


def event(probe: str, outcome: Outcome | None, done: int, *, reused: bool = False, again: bool = False) -> Event:
    order = Order(probe, "te2.20.2", Target("h200", "sm_90"), "te", only_times=again)
    receipt = None if outcome is None else Receipt(
        cell=order.cell, stack=order.stack, target="h200", probe=probe, outcome=outcome, reason="", requested="te",
        seconds={"total": 12.3},
    )  # fmt: skip
    return Event(Cell(InterpreterEnvironment(("python3",), {}), order, Path("folder"), 1.0), receipt, reused, done, 28)


def test_a_log_has_a_line_for_each_cell_that_ended() -> None:
    stream = io.StringIO()
    with UpgradeProgress(MODULES, (), Console(file=stream, width=100)) as progress:
        progress(event("imports", Outcome.PASS, 1, reused=True))
        progress(event("permute", None, 1))
        progress(event("permute", Outcome.IMPORT_ERROR, 12))
        progress(event("permute", Outcome.PASS, 28, again=True))
    assert stream.getvalue().splitlines() == [
        "   1/28 pass         te2.20.2-h200-imports (kept)",
        "  12/28 import error te2.20.2-h200-permute (12.3 s)",
        "  28/28 pass         te2.20.2-h200-permute, again (12.3 s)",
    ]


def test_a_terminal_has_a_table_of_stacks_and_modules() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=100, force_terminal=True, color_system=None)
    with UpgradeProgress(MODULES, ("te2.9.0",), console) as progress:
        progress(event("imports", Outcome.FAIL, 1, reused=True))
        progress(event("permute", None, 1))
        progress(event("permute", Outcome.PASS, 2, again=True))
        drawn = io.StringIO()
        Console(file=drawn, width=100).print(progress.table())
    lines = drawn.getvalue().splitlines()
    assert lines[0].split() == ["2/28", "cells"]
    assert lines[1].split() == ["stack", *MODULES]
    assert lines[2].split() == ["te2.9.0", "waits", "waits"]
    assert lines[3].split() == ["te2.20.2", "fail", "(kept)", "0", "s", "..."]
    assert lines[4].split() == ["te2.20.2", "again", "waits", "pass"]


class Gone(io.StringIO):
    """A log that nobody reads any more."""

    def write(self, _: str) -> int:
        raise BrokenPipeError


def test_where_nobody_reads_on_the_run_goes_on() -> None:
    with UpgradeProgress(MODULES, (), Console(file=Gone(), width=100)) as progress:
        progress(event("permute", Outcome.PASS, 1))
