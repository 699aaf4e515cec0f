"""Runs with planted faults, and the same without: what every check says of each, for the matrix to be held to."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import distributed

from ...training.parallel.goodput import Ledger
from ...training.parallel.ranks import Rank
from ...training.smoke.faults import refuse_fault
from ...training.smoke.order import SmokeOrder
from ...training.smoke.run import SmokeResult, run_smoke
from ...training.smoke.trainer import SmokeTrainer
from ..bench import Bench
from .runs import Run, Runs, open_runs
from .trajectories import (
    Finding,
    Reference,
    Seen,
    find_departure,
    find_other_bits,
    find_raised,
    find_silent_experts,
    locate_departure,
    read_seen,
)

SAVED_AT: Final = 3  # step of the checkpoint that runs are resumed from
TWINS: Final = (2, 4, 8)
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
    with open_runs(bench) as runs:
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
        self._bench, self._runs = bench, runs
        self._order = runs.order(watch=True)
        self._reference = None if bench.setting("reference") == "none" else make_reference(runs, self._order)
        self._whole: Seen | None = None
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
        """Run it, and say what the checks say: fields of `evidence.smoke_faults.RunFound`."""
        began = time.monotonic()
        look = {"train": self._train, "evaluate": self._evaluate, "save": self._save, "resume": self._resume}[one.way]
        result, findings = look(one)
        return {
            "run": one.id,
            "fault": one.fault,
            "ending": result.ending,
            "findings": [asdict(finding) for finding in findings],
            "seconds": round(time.monotonic() - began, 2),
        }

    def _train(self, one: Planted) -> tuple[SmokeResult, list[Finding]]:
        result, findings = self._end(self.order_of(one), one.id)
        seen = read_seen(result)
        if not one.fault:
            self._whole = seen
            self._remember(one.id, result)
        if self._reference is not None:
            told = next((int(one.named["step"]) for one in findings if one.check == "watch"), len(seen.losses))
            seen = seen.cut(0, told)  # what is no number follows nothing, and the watch has said so
            findings += find_departure(seen, self._reference)
            if not findings and (place := locate_departure(seen, self._reference))[0] >= 0:
                findings.append(
                    Finding("reproduce", dict(zip(("step", "module"), place, strict=True)), "in a part alone")
                )
        return result, findings

    def _evaluate(self, one: Planted) -> tuple[SmokeResult, list[Finding]]:
        result, findings = self._end(self.order_of(one), one.id)
        return result, findings + find_other_bits("validate", read_seen(result), self._without_a_break())

    def _save(self, one: Planted) -> tuple[SmokeResult, list[Finding]]:
        """A fault in what is saved shows in the run that goes on from it, which has none."""
        order = self.order_of(one)
        folder = Path(order.checkpoint_folder)
        shutil.rmtree(folder, ignore_errors=True)
        result, findings = self._end(order, one.id)
        if not one.fault:
            self._saved = Path(shutil.copytree(folder, self._runs.folder / "saved-well"))
        if result.ending != "done":
            return result, findings
        again, more = self._go_on(replace(one, id=f"{one.id}-resumed", fault="", way="resume"))
        return again, findings + more

    def _resume(self, one: Planted) -> tuple[SmokeResult, list[Finding]]:
        """A fault in the run that goes on from what was saved well."""
        if self._saved is None:
            self._save(Planted("saved-well", "", "save"))
        folder = Path(self.order_of(one).checkpoint_folder)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self._saved or folder, folder)
        return self._go_on(one)

    def _go_on(self, one: Planted) -> tuple[SmokeResult, list[Finding]]:
        result, findings = self._end(self.order_of(one), one.id)
        return result, findings + find_other_bits("resume", read_seen(result), self._without_a_break())

    def _without_a_break(self) -> Seen:
        if self._whole is None:
            self.run(Planted("train", "", "train"))
        if self._whole is None:
            raise RuntimeError("the run without a break left nothing")
        return self._whole

    def _end(self, order: SmokeOrder, name: str) -> tuple[SmokeResult, list[Finding]]:
        limit_s = float(self._bench.setting("limit_s", "120"))
        silent_s = float(self._bench.setting("silent_s", str(SILENT_S)))
        result = run_smoke(order, self._runs.folder / name, limit_s=limit_s, silent_s=silent_s)
        return result, find_raised(result) + find_silent_experts(result)

    def _remember(self, name: str, result: SmokeResult) -> None:
        """The run as the receipt keeps it."""
        from .runs import record_of

        receipts = tuple(result.receipts[rank] for rank in sorted(result.receipts))
        run = Run(name, self._order, self._runs.size, result.ending, result.words, receipts)
        if run.done:
            self._bench.training.append(record_of(run))


def make_reference(runs: Runs, order: SmokeOrder) -> Reference:
    """One rank, and its twins without the loss that balances experts, all in this process."""
    plan = {"accumulate": order.read_plan().accumulate}
    quiet = {**order.changes, "aux_coefficient": 0.0}
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        one = _train_alone(replace(order, plan=plan))
        twins = [_train_alone(replace(order, plan={"accumulate": split}, changes=quiet)) for split in (1, *TWINS)]
    finally:
        distributed.destroy_process_group()
    depth = Run("reference", order, runs.size, "", "", ()).depth
    return Reference(one, tuple(twins), order.precision, depth)


def _train_alone(order: SmokeOrder) -> Seen:
    torch.manual_seed(order.seed)
    trainer = SmokeTrainer(order, Rank(0, 1, 0, order.device, None, None), Ledger(began_ns=time.monotonic_ns()))
    trainer.run()
    audit: Any = trainer.audit
    return Seen(tuple(_each(trainer, "loss")), tuple(_each(trainer, "grad_norm")), audit.stream_norms, audit.part_norms)


def _each(trainer: SmokeTrainer, name: str) -> Iterable[float]:
    return (getattr(record, name) for record in trainer.records)
