"""Scores the static tier on real projects: breaking lines found at the line, missed, and false.

Run as `python -m tests.canary.static.score_projects FOLDER`, where FOLDER holds unpacked wheels as NAME-VERSION. The
truth is projects.json. The figures go into projects_score.json beside it: `first` is what the first run against this
truth found and is never overwritten, `now` is the last run.
"""

from __future__ import annotations

import json
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

from megacpp_validate.canary.static.findings import Impact
from megacpp_validate.canary.static.named_rows import read_source
from megacpp_validate.canary.static.sources import Sources
from megacpp_validate.canary.static.sweep import read_pair, run_pair

TRUTH = Path(__file__).with_name("projects.json")
FIGURES = Path(__file__).with_name("projects_score.json")
Line = tuple[str, int]


def score(folder: Path) -> dict[str, Any]:
    """Print a line for each project and pair; every missed and false line, and how many there are together."""
    truth = json.loads(TRUTH.read_text(encoding="utf-8"))
    cells = sorted({_cell(row) for row in truth["breaking"]} | {tuple(cell) for cell in truth["nothing_breaks"]})
    total: dict[str, Any] = {"found": 0, "missed": 0, "false": 0, "cells": len(cells), "lines": []}
    for project, group in groupby(cells, key=lambda cell: cell[0]):
        source = read_source([folder / project.replace(" ", "-")])
        for _, old, new in group:
            result = run_pair(*read_pair(Sources(), old, new), source, tool="score")
            reported: dict[Line, str] = {
                (site.file, site.line): " ".join((finding.kind, finding.symbol, finding.member, finding.parameter))
                for finding in result.findings
                if finding.impact is Impact.BREAKING
                for site in finding.call_sites
            }
            true, either = (_lines(truth[kind], project, old, new) for kind in ("breaking", "either"))
            kinds = {
                "found": true.keys() & reported.keys(),
                "missed": true.keys() - reported.keys(),
                "false": reported.keys() - true.keys() - either.keys(),
            }
            for kind, lines in kinds.items():
                total[kind] += len(lines)
                total["lines"] += [
                    [kind, project, f"{old} -> {new}", f"{file}:{line}", {**true, **reported}[(file, line)]]
                    for file, line in sorted(lines)
                ]
            counts = {kind: len(lines) for kind, lines in kinds.items()}
            sys.stdout.write(f"{project} {old} -> {new}: {counts}\n")
            sys.stdout.flush()
    return total


def _cell(row: dict[str, Any]) -> tuple[str, ...]:
    return (row["project"], row["old"], row["new"])


def _lines(rows: list[dict[str, Any]], *cell: str) -> dict[Line, str]:
    return {(row["file"], row["line"]): row["symbol"] for row in rows if _cell(row) == cell}


def write_figures(total: dict[str, Any]) -> None:
    """Keep the first figures; the last run's stand beside them."""
    kept = json.loads(FIGURES.read_text(encoding="utf-8")) if FIGURES.exists() else {"first": total}
    FIGURES.write_text(json.dumps({"first": kept["first"], "now": total}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    total = score(Path(sys.argv[1]))
    for line in total["lines"]:
        sys.stdout.write("  ".join(line) + "\n")
    sys.stdout.write(f"{ {kind: total[kind] for kind in ('found', 'missed', 'false', 'cells')} }\n")
    write_figures(total)
