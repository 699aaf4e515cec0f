"""Training step by step: BF16 and FP8 recipes with the same data and seeds, each run a curve beside the receipt.

Runs are processes that share the device: what a step of a small model costs is its launches, not its arithmetic. Here
is checked that every run ended, on what it ran, and what cast; whether FP8 follows BF16 is for the loss gate, on the
host, which judges the curves.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..bench import Bench
from .quantizers import wanted_block

REFERENCE: Final = "bf16"
PROCESS: Final = "megacpp_validate.training.gate_run"
QUICK_STEPS: Final = 30
_LAST_WORDS: Final = 2000


class Job(NamedTuple):
    """One run: what it is given, and where its curve goes."""

    recipe: str
    seed: int
    order: dict[str, Any]
    path: Path

    @property
    def name(self) -> str:
        """As its checks are named."""
        return f"{self.recipe}.seed{self.seed}"


class Ended(NamedTuple):
    """How a run ended: its exit status, what it reported of itself, and the end of what it wrote besides."""

    status: int
    said: dict[str, Any]
    words: str


def probe(bench: Bench) -> None:
    """Train all runs at once, and look at what each left."""
    if _recipes(bench):
        bench.require_te("FP8 recipes")
    jobs = plan_jobs(bench)
    check_runs(bench, jobs, train_side_by_side(jobs))


def plan_jobs(bench: Bench) -> list[Job]:
    """BF16 and each recipe with every seed; seeds by seed, so that what is cut short lacks a seed of all."""
    recipes = (REFERENCE, *_recipes(bench))
    seeds = [int(seed) for seed in bench.setting("seeds", "0 1 2").split()]
    steps = int(bench.setting("steps", "1000"))
    if bench.quick:
        seeds, steps = seeds[:1], QUICK_STEPS
    given = {"steps": steps, "target": bench.order.target.id, "size": bench.setting("size", "gate")}
    given |= {"device": bench.device, "data_seed": bench.order.seed}
    jobs = []
    for seed in seeds:
        for recipe in recipes:
            path = bench.artefact(f"{recipe}-{seed}.curve")
            jobs.append(Job(recipe, seed, {"recipe": recipe, "seed": seed, **given, "path": str(path)}, path))
    return jobs


def _recipes(bench: Bench) -> list[str]:
    return bench.setting("recipes", "delayed current").split()


def train_side_by_side(jobs: Sequence[Job]) -> list[Ended]:
    """Start every run as a process, and wait for all; what is left of an earlier session is removed first."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(_train, jobs))


def _train(job: Job) -> Ended:
    job.path.unlink(missing_ok=True)
    ended = subprocess.run(
        [sys.executable, "-m", PROCESS], input=json.dumps(job.order), check=False, capture_output=True, text=True
    )
    try:
        said = json.loads(ended.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        said = {}
    return Ended(ended.returncode, said if isinstance(said, dict) else {}, ended.stderr.strip()[-_LAST_WORDS:])


def check_runs(bench: Bench, jobs: Sequence[Job], ended: Sequence[Ended]) -> None:
    """What every run left: a whole curve, on the backends that were asked for, with the casts that it shows."""
    for job, end in zip(jobs, ended, strict=True):
        said = f"{end.said.get('seconds', 0):.0f} s, {end.said.get('peak_mib', 0):.0f} MiB"
        bench.check(f"{job.name}.ended", end.status == 0, f"exit {end.status}: {end.words or said}")
        try:
            curve = json.loads(job.path.read_text(encoding="utf-8"))  # as it was written; the host reads it strictly
        except (OSError, ValueError):
            bench.check(f"{job.name}.curve", False, "the run left no curve")
            continue
        planned = job.order["steps"]
        whole = curve["steps"] == list(range(planned))
        finite = all(value is not None and math.isfinite(value) for value in curve["losses"] + curve["gradient_norms"])
        said = f"{len(curve['steps'])} of {planned} steps{'' if finite else ', one of them not finite'}"
        bench.check(f"{job.name}.curve", whole and finite, said)
        # Every part that has a choice took what was asked for, as it says itself.
        backends, wanted = end.said.get("backends", {}), bench.order.requested
        other = sorted(part for part, taken in backends.items() if (taken == "te") is not (wanted == "te"))
        said = f"{len(backends)} parts; not on {wanted}: {', '.join(other) or 'none'}"
        bench.check(f"{job.name}.backends", bool(backends) and not other, said)
        if job.recipe != REFERENCE and job.seed == jobs[0].seed:
            for cast in curve["quantizers"]:
                block, path = wanted_block(job.recipe, cast["tensor"]), f"loss.{job.recipe}.{cast['layer']}"
                bench.saw_quantizer(path, cast["tensor"], cast["kind"], f"float8_{cast['format']}", block)
            bench.check(f"{job.name}.casts", bool(curve["quantizers"]), f"{len(curve['quantizers'])} casts were seen")
