"""Runs with planted faults, and the same without: what every check says of each, for the matrix to be held to.

The judgement is the checks': what ranks raised, what they left in their receipts, and whether losses and gradient norms
follow those of one rank (`trajectories`). Here it is put into words that can be compared: step, ranks, module, tensor.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from torch import distributed

from ...training.smoke.faults import refuse_fault
from ...training.smoke.order import SmokeOrder
from ..bench import Bench
from .composition import train_reference
from .runs import Run, Runs, open_runs
from .trajectories import Reference, Trajectory, compare_trajectories, locate_departure

SAVED_AT: Final = 3  # step of the checkpoint that runs are resumed from
LIMIT_S: Final = 120.0
SILENT_S: Final = 20.0  # building a tiny model takes 2 s of a core that ranks of other runs may share


@dataclass(frozen=True)
class Planted:
    """One fault of a cell: its id, how it is planted, and in which of the cell's runs."""

    id: str
    fault: str
    way: str


def probe(bench: Bench) -> None:
    """Run the cell without a fault, then with each; no fault is judged here, but no check may say anything before."""
    faults = read_faults(bench.setting("faults"))
    with open_runs(bench, limit_s=LIMIT_S, silent_s=SILENT_S) as runs:
        cell = FaultCell(bench, runs)
        for one in faults:
            refuse_fault(cell.order_of(one))
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
    return tuple(
        Planted(name, fault, way)
        for word in text.split()
        for name, _, rest in (word.partition("="),)
        for fault, _, way in (rest.partition("@"),)
    )


class FaultCell:
    """The runs of one cell, all of one plan and seed.

    Args:
        bench: whose order has the settings.
        runs: of the cell.
    """

    def __init__(self, bench: Bench, runs: Runs) -> None:
        self._runs = runs
        self._order = runs.order(watch=True)
        self._reference = None if bench.setting("reference") == "none" else make_reference(self._order)
        self._whole: Trajectory | None = None
        self._saved: Path | None = None

    def order_of(self, one: Planted) -> SmokeOrder:
        """The run that the fault is planted in."""
        saved = str(self._runs.folder / "saved")
        ways: dict[str, dict[str, Any]] = {
            "train": {},
            "evaluate": {"validate_every": 2},
            "save": {"checkpoint_folder": saved, "steps": SAVED_AT},
            "resume": {"checkpoint_folder": saved, "resume": True},
        }
        return replace(self._order, fault=one.fault, **ways[one.way])

    def run(self, one: Planted) -> dict[str, Any]:
        """Run it, and report what the checks find: fields of `canary.dynamic.planting.RunFound`."""
        began = time.monotonic()
        look = {"train": self._train, "evaluate": self._evaluate, "save": self._save, "resume": self._resume}[one.way]
        run, findings = look(one)
        return {
            "run": one.id,
            "fault": one.fault,
            "ending": run.ending,
            "findings": [asdict(finding) for finding in findings],
            "seconds": round(time.monotonic() - began, 2),
        }

    def _train(self, one: Planted) -> tuple[Run, list[Finding]]:
        run, findings = self._end(one)
        seen = run.trajectory
        if not one.fault:
            self._whole = seen
            self._runs.record(run)
        if self._reference is not None:
            told = next((int(one.named["step"]) for one in findings if one.check == "watch"), len(seen.losses))
            # What is no number follows nothing, and the watch has said so.
            findings += find_departure(seen.cut(0, told), self._reference, parts=not findings)
        return run, findings

    def _evaluate(self, one: Planted, check: str = "validate") -> tuple[Run, list[Finding]]:
        """A run that must have the bits of the one without a break."""
        run, findings = self._end(one)
        if self._whole is None:
            self.run(Planted("train", "", "train"))
        return run, findings + find_other_bits(check, run.trajectory, self._whole or Trajectory((), ()))

    def _save(self, one: Planted) -> tuple[Run, list[Finding]]:
        """A fault in what is saved shows in the run that goes on from it, which has none."""
        folder = Path(self.order_of(one).checkpoint_folder)
        shutil.rmtree(folder, ignore_errors=True)
        run, findings = self._end(one)
        if not one.fault:
            self._saved = Path(shutil.copytree(folder, self._runs.folder / "saved-well"))
        if run.ending != "done":
            return run, findings
        again, more = self._evaluate(Planted(f"{one.id}-resumed", "", "resume"), "resume")
        return again, findings + more

    def _resume(self, one: Planted) -> tuple[Run, list[Finding]]:
        """A fault in the run that goes on from what was saved well."""
        if self._saved is None:
            self._save(Planted("saved-well", "", "save"))
        folder = Path(self.order_of(one).checkpoint_folder)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self._saved or folder, folder)
        return self._evaluate(one, "resume")

    def _end(self, one: Planted) -> tuple[Run, list[Finding]]:
        run = self._runs.train(one.id, self.order_of(one))
        return run, find_raised(run) + find_silent_experts(run)


def make_reference(order: SmokeOrder) -> Reference:
    """One rank and its twins, all in this process."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        return train_reference(order)
    finally:
        distributed.destroy_process_group()


# As `training.parallel` words them.
_DIVERGED: Final = re.compile(
    r"^ReplicaDiverged: (\S+)(?: \S+)? is not the same on all ranks.*?Likely cause: an? (.+?) whose", re.S
)
_ACCUSED: Final = re.compile(r"all ranks(?:, the first of \d+)?: rank ([\d, ]+) has other bits")
_UNCOUNTED: Final = re.compile(r"expert (\d+): the router of rank (\d+) gave it")
_UNLIKE: Final = re.compile(r"(dispatch|combine|;)(?::)? rows of expert (\d+) from rank (\d+) to rank \d+")
_LAST: Final = re.compile(r"^rank (\d+) (?:was ended|ended by .*?); last collective: (\w+)", re.M)


@dataclass(frozen=True)
class Finding:
    """What one check said: `named` has step, ranks, module, tensor and the like."""

    check: str
    named: Mapping[str, Any]
    words: str


def find_raised(run: Run) -> list[Finding]:
    """What ended the run; the launcher names ranks where no check does."""
    if run.ending == "done":
        return []
    for receipt in run.receipts:
        fault, begun = receipt["fault"], receipt.get("resumed") or {"step": 0}
        step = int(begun["step"]) + len(receipt["steps"])
        if found := receipt.get("nonfinite"):
            named = {"step": found["step"], "ranks": [found["rank"]]} | {of: found[of] for of in ("module", "tensor")}
            return [Finding("watch", named, found["words"])]
        for error, (check, read) in RAISED.items():
            if fault.startswith(error):
                return [Finding(check, {"step": step, **read(fault)}, _shorten(fault))]
    last = dict(_LAST.findall(run.words))
    collectives = {last.get(str(rank), "") for rank in run.culprits}
    named = {"ending": run.ending, "ranks": list(run.culprits), "collective": ", ".join(sorted(collectives))}
    return [Finding("launcher", named, _shorten(run.words))]


def find_silent_experts(run: Run) -> list[Finding]:
    """Experts that no step gave a gradient, of a run that ended well."""
    lacking = {expert for receipt in run.receipts for expert in receipt.get("experts_without_gradient") or ()}
    if run.ending != "done" or not lacking:
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
    steps = len(seen.losses)
    if not steps:
        return []
    departs = [verdict for verdict in compare_trajectories(seen, reference.cut(steps)) if not verdict.follows]
    step, module = locate_departure(seen, reference)
    if not departs:
        alone = parts and step >= 0
        return [Finding("reproduce", {"step": step, "module": module}, "in a part alone")] if alone else []
    worst = departs[0]
    said = worst.fault or f"{worst.quantity} deviates by {worst.observed:.1e} of {worst.bound:.1e} at step {worst.step}"
    words = f"{said}; first at step {step}, in {module or 'no part alone'}"
    return [Finding("reproduce", {"step": step, "module": module}, words)]


def find_other_bits(check: str, seen: Trajectory, whole: Trajectory) -> list[Finding]:
    """Where a run that must have the bits of another one has not: losses, gradient norms, and what layers give."""
    wanted = whole.cut(seen.first, len(whole.losses) - (seen.first - whole.first))
    steps = [
        seen.first + at
        for name, values in seen.series.items()
        for at, (one, other) in enumerate(zip(values, wanted.series[name], strict=False))
        if one != other
    ]
    if not steps and len(seen.losses) == len(wanted.losses) > 0:
        return []
    if not steps:
        words = f"{len(seen.losses)} steps from step {seen.first} on, and {len(wanted.losses)} were to come"
        return [Finding(check, {"step": seen.first}, words)]
    at = min(steps) - seen.first
    module = next((name for name, values in seen.streams.items() if values[at] != wanted.streams[name][at]), "")
    words = f"not the bits of the run without a break, first at step {min(steps)}, in {module or 'no layer'}"
    return [Finding(check, {"step": min(steps), "module": module}, words)]


def _name_tokens(fault: str) -> dict[str, Any]:
    """Experts and the rank whose rows they are, as far as the message names them."""
    if counted := _UNCOUNTED.findall(fault):
        return {"experts": sorted({int(expert) for expert, _ in counted}), "source": int(counted[0][1])}
    if unlike := _UNLIKE.findall(fault):
        stage, _, source = unlike[0]
        return {"stage": stage, "experts": sorted({int(expert) for _, expert, _ in unlike}), "source": int(source)}
    return {}


def _name_replica(fault: str) -> dict[str, Any]:
    diverged, accused = _DIVERGED.search(fault), _ACCUSED.search(fault)
    named: dict[str, Any] = {"tensor": diverged[1], "kind": diverged[2]} if diverged else {}
    return {**named, "ranks": [int(rank) for rank in accused[1].split(",")]} if accused else named


# Error of a rank -> the check that it is, and what reads the place out of its words.
RAISED: Final[dict[str, tuple[str, Callable[[str], dict[str, Any]]]]] = {
    "TokensNotConserved": ("conservation", _name_tokens),
    "ReplicaDiverged": ("replicas", _name_replica),
}


def _shorten(words: str) -> str:
    """What happened, without cause and next step."""
    return words.partition(" Likely cause")[0].partition("\n")[0]
