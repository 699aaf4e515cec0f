"""Runs with planted faults, and the same without: the findings of every check, which the matrix is compared with.

The judgement is the checks': errors of ranks, their receipts, and whether losses and gradient norms follow those of one
rank (`reproduce`). Here each finding is put into words that can be compared: step, ranks, module, tensor.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from ..bench import Bench
from .composition import train_reference
from .reproduce import Reference, compare_trajectories, follows, locate_departure
from .runs import Run, Runs, Trajectory, check_parts, open_runs

SAVED_AT: Final = 3  # step of the checkpoint that runs are resumed from
LIMIT_S: Final = 120.0
SILENT_S: Final = 20.0  # building a tiny model takes 2 s of a core that ranks of other runs may share
# How a run that a fault is planted in differs from the cell's order; checkpoints lie in "saved".
WAYS: Final[dict[str, dict[str, Any]]] = {
    "train": {},
    "evaluate": {"validate_every": 2},
    "save": {"checkpoint_folder": "saved", "steps": SAVED_AT},
    "resume": {"checkpoint_folder": "saved", "resume": True},
}


@dataclass(frozen=True)
class Planted:
    """One fault of a cell: its id, how it is planted, and in which of the cell's runs (`WAYS`)."""

    id: str
    fault: str
    way: str


@dataclass(frozen=True)
class Finding:
    """A finding of one check: `named` has step, ranks, module, tensor and the like."""

    check: str
    named: Mapping[str, Any]
    words: str


def probe(bench: Bench) -> None:
    """Run the cell without a fault, then with each; no fault is judged here, but no check may find anything before."""
    faults = read_faults(bench.setting("faults"))
    with open_runs(bench, limit_s=LIMIT_S, silent_s=SILENT_S) as runs:
        cell = FaultCell(bench, runs)
        ways = dict.fromkeys(["train", *("save" if one.way == "resume" else one.way for one in faults)])
        clean = [cell.run(Planted(way, "", way)) for way in ways]
        for found in clean:
            said = "; ".join(f"{finding['check']}: {finding['words']}" for finding in found["findings"])
            bench.check(f"clean.{found['run']}", found["ending"] == "done" and not said, said or found["ending"])
        faulty = [cell.run(one) for one in faults]
    left = {"cell": bench.order.probe, "clean": clean, "faulty": faulty}
    bench.artefact("found.json").write_text(json.dumps(left, indent=1), encoding="utf-8")


def read_faults(text: str) -> tuple[Planted, ...]:
    """From "ID=FAULT@WAY ..."."""
    return tuple(Planted(*re.split("[=@]", word)) for word in text.split())


class FaultCell:
    """The runs of one cell, all of one plan and seed.

    Args:
        bench: whose order has the settings.
        runs: of the cell.
    """

    def __init__(self, bench: Bench, runs: Runs) -> None:
        self._runs, self._order = runs, runs.order(watch=True)
        self._reference = None if bench.setting("reference") == "none" else train_reference(self._order)
        self._whole = Trajectory((), ())  # of the run without a fault, which comes first
        self._checkpoints, self._saved = runs.folder / "saved", runs.folder / "saved-well"

    def run(self, one: Planted) -> dict[str, Any]:
        """Run it, and report what the checks find: fields of `canary.dynamic.planting.RunFound`."""
        began = time.monotonic()
        if one.way in ("save", "resume"):
            shutil.rmtree(self._checkpoints, ignore_errors=True)
        if one.way == "resume":
            shutil.copytree(self._saved, self._checkpoints)
        run, findings = self._train(one)
        if one.way == "save" and run.end.ending == "done":  # such a fault shows in the run that goes on from there
            if not one.fault:
                shutil.copytree(self._checkpoints, self._saved)
            run, more = self._train(Planted(f"{one.id}-resumed", "", "resume"))
            findings += more
        return {
            "run": one.id,
            "fault": one.fault,
            "ending": run.end.ending,
            "findings": [asdict(finding) for finding in findings],
            "seconds": round(time.monotonic() - began, 2),
        }

    def _train(self, one: Planted) -> tuple[Run, list[Finding]]:
        changes = dict(WAYS[one.way])
        if "checkpoint_folder" in changes:
            changes["checkpoint_folder"] = str(self._checkpoints)
        run = self._runs.train(one.id, replace(self._order, fault=one.fault, **changes))
        findings, seen = find_raised(run) + find_silent_experts(run), run.trajectory
        if one.way != "train":
            bits = {"evaluate": "validate", "resume": "resume"}.get(one.way)
            return run, findings + (find_other_bits(bits, seen, self._whole) if bits else [])
        if not one.fault:
            self._whole = seen
            self._runs.record(run)
            check_parts(self._runs.bench, run)  # a silent fallback would let every fault below be found without TE
        if self._reference is not None:
            # Values that are not finite follow nothing, and the watch has reported them.
            steps = next((int(one.named["step"]) for one in findings if one.check == "watch"), len(seen.losses))
            findings += find_departure(seen.cut(0, steps), self._reference, parts=not findings)
        return run, findings


def find_raised(run: Run) -> list[Finding]:
    """The fault that ended the run; the launcher names ranks where no check does."""
    if run.end.ending == "done":
        return []
    for receipt in run.receipts:
        if receipt["check"]:
            words = receipt["fault"].partition(" Likely cause")[0]
            return [Finding(receipt["check"], receipt["where"], words)]
    last = {rank["rank"]: rank["last"].partition(" ")[0] for rank in run.end.ranks}
    collectives = ", ".join(sorted({last[rank] for rank in run.end.culprits}))
    named = {"ending": run.end.ending, "ranks": list(run.end.culprits), "collective": collectives}
    return [Finding("launcher", named, run.end.words.partition("\n")[0])]


def find_silent_experts(run: Run) -> list[Finding]:
    """Experts that no step gave a gradient, of a run that ended well."""
    lacking = {expert for receipt in run.receipts for expert in receipt["experts_without_gradient"] or ()}
    if run.end.ending != "done" or not lacking:
        return []
    experts = sorted(lacking)
    return [Finding("gradients", {"experts": experts}, f"no step gave a gradient to {', '.join(experts)}")]


def find_departure(seen: Trajectory, reference: Reference, *, parts: bool = True) -> list[Finding]:
    """Where a run leaves that of one rank, over the steps that it did; nothing where it follows.

    Args:
        seen: the run.
        reference: of one rank.
        parts: whether a single part counts where losses and norms of the whole model follow.
    """
    if not seen.losses:
        return []
    found = compare_trajectories(seen, reference.cut(len(seen.losses)))
    departs = [f"{quantity} {check.detail}" for quantity, check in found.items() if not follows(check)]
    step, module = locate_departure(seen, reference)
    if not departs and not (parts and step >= 0):
        return []
    words = f"{departs[0] if departs else 'a part alone'}; first at step {step}, in {module or 'no part alone'}"
    return [Finding("reproduce", {"step": step, "module": module}, words)]


def find_other_bits(check: str, seen: Trajectory, whole: Trajectory) -> list[Finding]:
    """Where a run that must have the bits of another one has not: losses, gradient norms, and streams of layers."""
    wanted = whole.cut(seen.first, len(whole.losses) - (seen.first - whole.first))
    steps = [
        at
        for name, values in seen.series.items()
        for at, (one, other) in enumerate(zip(values, wanted.series[name], strict=False))
        if one != other
    ]
    if not steps and len(seen.losses) == len(wanted.losses) > 0:
        return []
    if not steps:
        words = f"{len(seen.losses)} steps from step {seen.first} on, and {len(wanted.losses)} were expected"
        return [Finding(check, {"step": seen.first}, words)]
    at = min(steps)
    module = next((name for name, values in seen.streams.items() if values[at] != wanted.streams[name][at]), "")
    step = seen.first + at
    words = f"not the bits of the run without a break, first at step {step}, in {module or 'no layer'}"
    return [Finding(check, {"step": step, "module": module}, words)]
