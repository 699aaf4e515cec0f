"""Scores the static tier on real projects: breaking lines found at the line, missed, and false.

Run as `python -m tests.canary.static.score_projects FOLDER`, where FOLDER holds unpacked wheels as NAME-VERSION.
"""

from __future__ import annotations

import json
import sys
from itertools import groupby
from pathlib import Path

from megacpp_validate.canary.static.findings import Impact
from megacpp_validate.canary.static.sources import Sources
from megacpp_validate.canary.static.sweep import read_pair, read_source, run_pair

TRUTH = Path(__file__).with_name("projects.json")


def score(folder: Path) -> dict[str, int]:
    """Print a line for each project and pair; how many lines were found, missed, and false, together."""
    truth = json.loads(TRUTH.read_text(encoding="utf-8"))
    rows = [((r["project"], r["old"], r["new"]), (r["file"], r["line"], r["symbol"])) for r in truth["breaking"]]
    rows += [(tuple(pair), None) for pair in truth["nothing_breaks"]]
    total = {"found": 0, "missed": 0, "false": 0}
    for (project, old, new), group in groupby(sorted(rows, key=lambda row: row[0]), key=lambda row: row[0]):
        source = read_source([folder / project.replace(" ", "-")])
        result = run_pair(*read_pair(Sources(), old, new), source, tool="score")
        broken = [f for f in result.findings if f.impact is Impact.BREAKING]
        said = {(site.file, site.line, f.symbol) for f in broken for site in f.call_sites}
        true = {line for _, line in group if line is not None}
        counts = {"found": len(true & said), "missed": len(true - said), "false": len(said - true)}
        total = {kind: total[kind] + counts[kind] for kind in total}
        sys.stdout.write(f"{project} {old} -> {new}: {counts} {sorted(said ^ true)}\n")
    sys.stdout.write(f"{total}\n")
    return total


if __name__ == "__main__":
    counts = score(Path(sys.argv[1]))
    sys.exit(bool(counts["missed"] or counts["false"]))
