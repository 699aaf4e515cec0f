"""What the doors cost: `nox -l`, and every job of the pull-request pipeline, one after the other on this machine.

Writes docs/benchmarks/pipeline.md and .json. Hosts that run each job on a machine of its own wait for the longest job
alone; one machine of two cores waits for the sum.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs" / "benchmarks"
NOX = str(ROOT / "nox")
LISTED = 9


@dataclass(frozen=True)
class Timed:
    """One job: seconds, exit code, and the load of the machine in the minute before."""

    job: str
    runs: str
    seconds: float
    code: int
    load: float


def time_listing() -> list[float]:
    """Seconds of `nox -l`, several times, the first left out."""
    found = []
    for _ in range(LISTED + 1):
        started = time.monotonic()
        subprocess.run([NOX, "-l"], cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
        found.append(time.monotonic() - started)
    return found[1:]


def read_plan(pipeline: str) -> dict[str, Any]:
    """The plan, as CI reads it."""
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "plan.json"
        words = [NOX, "-s", "pipeline", "--", pipeline, "--plan", "--format", "json", "--output", str(file)]
        subprocess.run(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
        plan: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return plan


def time_job(job: dict[str, Any], environments: str) -> Timed:
    """Run one job as CI does."""
    load, started, code = os.getloadavg()[0], time.monotonic(), 0
    shown = []
    for call in job["commands"]:
        arguments = ["--", *call["arguments"]] if call["arguments"] else []
        shown.append(shlex.join(["-s", call["session"], *arguments]))
        words = [NOX, *(["--envdir", environments] if environments else []), "-s", call["session"], *arguments]
        code = code or subprocess.run(words, cwd=ROOT, stdout=subprocess.DEVNULL, check=False).returncode
    return Timed(job["id"], "; ".join(shown), round(time.monotonic() - started, 1), code, round(load, 2))


def render(listing: list[float], rows: list[Timed], *, aim: int, cold: bool) -> str:
    """The rows as Markdown."""
    lines = [
        "<!-- written by benchmarks/pipeline.py -->",
        f"{datetime.now(UTC):%Y-%m-%d}, Python {platform.python_version()}, {os.cpu_count()} cores. Median of {LISTED} "
        f"calls of `nox -l`: **{statistics.median(listing):.2f} s** ({min(listing):.2f} to {max(listing):.2f}).",
    ]
    if not rows:
        return "\n".join(lines) + "\n"
    slowest, total = max(rows, key=lambda row: row.seconds), sum(row.seconds for row in rows)
    made = "made anew" if cold else "as they were"
    lines += [
        "",
        f"Jobs of the pull-request pipeline, one after the other, environments {made}. The longest, which is what a "
        f"host with a machine a job waits for: **{slowest.seconds / 60:.1f} minutes** ({slowest.job}). All of them on "
        f"this one machine: **{total / 60:.1f} minutes**. The aim is {aim}.",
        "",
        "| job | seconds | exit code | load before |",
        "|---|--:|--:|--:|",
        *(f"| {row.job} | {row.seconds:.1f} | {row.code} | {row.load} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listing", action="store_true", help="time `nox -l` alone, and write nothing")
    parser.add_argument("--cold", action="store_true", help="make every environment anew, as a fresh machine does")
    asked = parser.parse_args()
    listing = time_listing()
    if asked.listing:
        sys.stdout.write(render(listing, [], aim=0, cold=False))
        return
    plan = read_plan("pull_request")
    with tempfile.TemporaryDirectory(prefix="megacpp-pipeline-") as folder:
        rows = [time_job(job, folder if asked.cold else "") for job in plan["jobs"]]
    text = render(listing, rows, aim=plan["minutes"], cold=asked.cold)
    sys.stdout.write(text)
    DOCS.mkdir(parents=True, exist_ok=True)
    (DOCS / "pipeline.md").write_text(text, encoding="utf-8")
    data = {"nox_l_seconds": listing, "jobs": [asdict(row) for row in rows], "cold": asked.cold}
    (DOCS / "pipeline.json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
