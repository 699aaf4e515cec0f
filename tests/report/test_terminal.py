from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from megacpp_validate.canary.static.findings import StaticResult
from megacpp_validate.report.terminal.static_tier import render_static
from tests.report.reading import Result, print_terminal
from tests.report.results import AUTOCAST, CASCADE, EMPTY, EVERYTHING, FIREWALL, PERMUTE, RESULTS, SWEEP

ALL: dict[str, Result] = {**RESULTS, "everything": EVERYTHING, "sweep": SWEEP, "firewall": FIREWALL}
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize("width", [80, 120, 200])
@pytest.mark.parametrize("name", ALL)
def test_no_line_is_wider_than_the_terminal(name: str, width: int, verbose: bool) -> None:
    for line in print_terminal(ALL[name], width=width, verbose=verbose).splitlines():
        # A place and a hash are never cut: in two pieces they can be neither clicked nor searched for.
        is_whole = re.fullmatch(r"    \S+ +\S+:\d+|\S+: \S+ sha256:\S+", line)
        assert len(line.rstrip()) <= width or is_whole


def test_places_are_never_folded() -> None:
    text = print_terminal(PERMUTE, width=40)
    for finding in PERMUTE.findings[:2]:
        for site in finding.call_sites:
            assert re.search(rf"consumed +{re.escape(f'{site.file}:{site.line}')}$", text, re.MULTILINE)


@pytest.mark.parametrize("width", [80, 120])
def test_the_grid_shows_whole_names_and_marks(width: int) -> None:
    text = print_terminal(SWEEP, width=width, verbose=False)
    grid = text.split("\n\n")[1]
    assert "…" not in grid
    rows = [line for line in grid.splitlines() if "→" in line]
    assert len(rows) == 28
    assert all(len(re.findall(r"[✗▲↳·]", row)) == 7 for row in rows)
    red = next(row for row in rows if row.startswith("2.20.0 → 2.21.0"))
    assert re.sub(r" +", " ", red).strip() == "2.20.0 → 2.21.0 ✗ 3 ↳ · · · ↳ ↳"


def test_colour_is_never_the_only_signal() -> None:
    plain = print_terminal(CASCADE, width=120)
    coloured = print_terminal(CASCADE, width=120, colour=True)
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain
    for word in ("✗ breaks", "↳ breaks with its cause", "✓ clean"):
        assert word in plain


def test_an_ascii_log_gets_letters() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    render_static(CASCADE, console=Console(file=stream, width=80, _environ={}))
    stream.seek(0)
    text = stream.read()
    assert "2.20.2 -> 2.21.0" in text
    assert "X breaks" in text


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1", "FORCE_COLOR": "1", "TERM": "xterm"}, {"TERM": "dumb"}, {}])
def test_a_pipe_and_no_color_get_no_colour(environment: dict[str, str]) -> None:
    code = (
        "import results, megacpp_validate.report.terminal.static_tier as t\n"
        "t.render_static(results.CASCADE); t.render_sweep(results.SWEEP); t.render_firewall(results.FIREWALL)"
    )
    paths = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": paths, "PATH": os.environ["PATH"], "PYTHONIOENCODING": "utf-8", **environment},
        capture_output=True,
        check=True,
        text=True,
        encoding="utf-8",
    )
    assert not re.search(r"\x1b\[[0-9;]*(3[0-9]|4[0-9]|38;[0-9;]+)m", done.stdout)
    assert "✗ breaks" in re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)


def test_verdicts_come_first_and_breakage_before_risk() -> None:
    text = print_terminal(PERMUTE, width=120, verbose=False)
    assert text.index("bridge module") < text.index("✗ permute breaks") < text.index("▲ attention at risk")


@pytest.mark.parametrize(
    ("result", "hint"),
    [
        (PERMUTE, "41 API changes that the bridge does not consume (--verbose lists them)."),
        (AUTOCAST, "112 API changes that the bridge does not consume (--verbose lists them)."),
        (EMPTY, "0 API changes that the bridge does not consume."),
    ],
)
def test_the_rest_is_counted(result: StaticResult, hint: str) -> None:
    assert hint in print_terminal(result, width=120, verbose=False)


def test_old_faults_are_not_blamed_on_the_step() -> None:
    text = print_terminal(CASCADE, width=120, verbose=False)
    assert "Failing in 2.20.2 already: not this step's doing" in text
