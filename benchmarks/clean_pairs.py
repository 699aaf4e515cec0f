"""Clean runs of every probe on the double of Transformer Engine: each pair is compared, and nobody may be named.

    python -m benchmarks.clean_pairs --output docs/evidence/clean_pairs.json [--runs 46] [--seed 1000]
    python -m benchmarks.clean_pairs --output docs/evidence/clean_pairs_h200.json --receipts FOLDER/te2.20.2 ...

It needs torch and what the tool needs (`.nox/tests/bin/python`). Every run has a seed of its own. Half of the runs
share their core with a process that computes and streams memory. Every module is timed, too. 46 runs give 1,035 pairs;
each is judged in both directions. With `--receipts`, the clean copies of runs of `blame_score` (their folders of one
release) are judged instead: pairs of one folder. Exit code 1 where a module is named or evidence is lost.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import permutations
from pathlib import Path
from typing import Any, Final

from megacpp_validate.canary.dynamic.slowdown import compare_timings, measure_noise
from megacpp_validate.canary.dynamic.step import StackReceipts, compare_stacks
from megacpp_validate.catalog.bridge import Catalog, read_catalog
from megacpp_validate.evidence.receipt import hash_code
from megacpp_validate.evidence.selftest import SelftestOrder, SelftestRun
from megacpp_validate.evidence.store import read_receipts
from megacpp_validate.probes.order import Order
from megacpp_validate.selftest.tasks import STACKS, Task, run_tasks

LIMIT_S: Final = 600.0
SUMS: Final[dict[str, Any]] = {"pairs": 0, "steps": 0, "named": [], "lost": []}
LOAD: Final = "held = bytearray(2**28)\nwhile True: held[:] = bytes(2**28); sum(range(10**6))"


@dataclass(frozen=True)
class TimedTask(Task):
    """A task whose probes are timed too."""

    def order(self, probe: str) -> Order:
        """The order of one probe."""
        return replace(super().order(probe), times=True)


def run_clean(catalog: Catalog, runs: int, seed: int) -> tuple[list[SelftestRun], list[SelftestRun]]:
    """Clean runs on one core, a seed each: half of them alone, half of them beside the load."""
    probes = tuple(module.id for module in catalog.modules)
    recipes = SelftestOrder(probes, ()).recipes
    tasks = [TimedTask(probes, "te", seed + number, None, recipes) for number in range(runs)]
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # of every process that is started from here on
    alone = list(run_tasks(tasks[: runs // 2], 1, LIMIT_S))
    with subprocess.Popen([sys.executable, "-c", LOAD]) as load:
        try:
            return alone, list(run_tasks(tasks[runs // 2 :], 1, LIMIT_S))
        finally:
            load.kill()


def judge(catalog: Catalog, stacks: Mapping[str, StackReceipts], target: str) -> dict[str, Any]:
    """Every pair in both directions: how many there are, and which modules are named or lost."""
    sides = {name: {receipt.probe: receipt for receipt in stack.receipts} for name, stack in stacks.items()}
    noise = measure_noise(*list(sides.values())[:2])
    found: dict[str, list[str]] = {"named": [], "lost": []}
    for one, other in permutations(stacks, 2):
        timings = compare_timings(sides[one], sides[other], noise)
        step = compare_stacks(stacks[one], stacks[other], catalog.modules, timings, target=target)
        where = f"{one} to {other}: "
        found["named"] += [f"{where}{culprit.module} ({culprit.cause}): {culprit.summary}" for culprit in step.culprits]
        found["lost"] += [f"{where}{cell}: {why}" for cell, why in step.lost.items()]
    return {"pairs": len(stacks) * (len(stacks) - 1) // 2, "steps": len(stacks) * (len(stacks) - 1), **found}


def judge_copies(catalog: Catalog, folder: Path) -> dict[str, Any]:
    """Pairs of the clean copies in a folder of `blame_score`: the release itself, and copies with another seed each."""
    copies = [folder / "clean", *sorted((folder / "controls").iterdir())]
    stacks = {copy.name: StackReceipts(folder.name, tuple(read_receipts(copy).found.values())) for copy in copies}
    receipts = [receipt for stack in stacks.values() for receipt in stack.receipts]
    return {
        "release": folder.name, "copies": len(copies), **judge(catalog, stacks, receipts[0].target),
        "gpu": receipts[0].machine.gpu, "outcomes": dict(Counter(receipt.outcome.value for receipt in receipts)),
    }  # fmt: skip


def describe(runs: Sequence[SelftestRun]) -> dict[str, Any]:
    """Seeds, outcomes and times of runs."""
    receipts = [receipt for run in runs for receipt in run.receipts]
    times = [row.median_ms for receipt in receipts for row in receipt.timings]
    return {
        "runs": len(runs),
        "seeds": [runs[0].seed, runs[-1].seed],
        "receipts": dict(Counter(receipt.outcome.value for receipt in receipts)),
        "troubles": [run.trouble for run in runs if run.trouble],
        "timed_uses": len(times),
        "mean_ms_of_a_use": round(statistics.mean(times), 2),
        "median_seconds_of_a_run": round(statistics.median(run.seconds for run in runs), 2),
    }


def main() -> int:
    """Run, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=46)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--receipts", type=Path, nargs="+", default=[])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    catalog = read_catalog()
    if options.receipts:
        runs = [judge_copies(catalog, folder) for folder in options.receipts]
        result = {key: sum((run.pop(key) for run in runs), start) for key, start in SUMS.items()} | {"of": runs}
    else:
        alone, beside = run_clean(catalog, options.runs, options.seed)
        stacks = {f"seed {run.seed}": StackReceipts(STACKS["te"], run.receipts) for run in (*alone, *beside)}
        result = judge(catalog, stacks, "cpu")
        result |= {"alone": describe(alone), "beside_load": describe(beside)}
    result["code"] = hash_code()
    result["finished_at"] = datetime.now(UTC).isoformat(timespec="seconds")
    text = json.dumps(result, indent=1) + "\n"
    sys.stdout.write(text)
    if options.output:
        options.output.write_text(text, encoding="utf-8")
    return int(bool(result["named"] or result["lost"]))


if __name__ == "__main__":
    sys.exit(main())
