"""Runs of a smoke cell: an order made from the row's settings, and its end as a receipt keeps it."""

from __future__ import annotations

import itertools
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from ...evidence.receipt import Backend, TrainingRecord, TrainingStep
from ...training.parallel.launch import RunEnd
from ...training.parallel.plan import ParallelPlan
from ...training.sizes import Size, read_size
from ...training.smoke.order import SILENT_S, SmokeOrder, run_smoke
from ..bench import VENDOR_BACKENDS, Bench
from ..fp8.quantizers import wanted_block

LIMIT_S: Final = 300.0
# Refusals that are not fallbacks: what the order left out, what Transformer Engine has no layer for under the order's
# plan or for the kind of attention, and a bank that no token reached in its last pass.
_AS_ORDERED: Final = frozenset({"flag-off", "tensor-parallel", "no-rows", "sampled-tokens", "block-routing"})
# Settings of a row that are fields of an order by themselves.
_FIELDS: Final = ("learning_rate", "warm_up", "validate_every", "deterministic", "rehearse")
ROW: Final = ("layer", "tensor", "kind", "format")  # of `evidence.loss_curve.QuantizerSeen`
Series = Sequence[float | None]


@dataclass(frozen=True)
class Trajectory:
    """What a run did in each step; a number is None or NaN where it was not finite.

    Attributes:
        losses, grad_norms: of the whole model; losses in nats.
        streams: layer -> norm of what it gave.
        parts: part of the model -> norm of its gradients.
        first: number of the first step.
    """

    losses: Series
    grad_norms: Series
    streams: Mapping[str, Sequence[float]] = field(default_factory=dict)
    parts: Mapping[str, Sequence[float]] = field(default_factory=dict)
    first: int = 0

    @property
    def series(self) -> dict[str, Series]:
        """Quantity of the whole model -> its values."""
        return {"loss": self.losses, "grad_norm": self.grad_norms}

    def cut(self, first: int, steps: int) -> Trajectory:
        """So many steps of it from one on, which is counted from 0."""
        part = slice(first - self.first, first - self.first + steps)
        streams, parts = ({name: values[part] for name, values in of.items()} for of in (self.streams, self.parts))
        return Trajectory(self.losses[part], self.grad_norms[part], streams, parts, first)


def read_number(value: Any) -> float | None:
    """A number of a rank's receipt; None where it is not finite, which a receipt has as text."""
    return float(value) if value is not None and math.isfinite(float(value)) else None


@dataclass(frozen=True)
class Run:
    """One run that has ended: its name in the cell, its order, and its end."""

    name: str
    order: SmokeOrder
    end: RunEnd

    @property
    def size(self) -> Size:
        """Of its model."""
        return self.order.read_size()

    @property
    def done(self) -> bool:
        """Whether every rank ended well and left a receipt."""
        return self.end.ending == "done" and len(self.end.receipts) == self.order.read_plan().world

    @property
    def receipts(self) -> tuple[Mapping[str, Any], ...]:
        """Of each rank that left one, the lowest first."""
        return tuple(receipt for _, receipt in sorted(self.end.receipts.items()))

    @property
    def first(self) -> Mapping[str, Any]:
        """The receipt of the lowest rank that left one, which has the loss of all; empty without any."""
        return self.receipts[0] if self.receipts else {}

    @property
    def trajectory(self) -> Trajectory:
        """Its steps; sums over ranks are the same on all of them. Without a step where no rank left a receipt."""
        steps, left = self.first.get("steps", ()), self.first
        losses, norms = (tuple(read_number(step[name]) for step in steps) for name in ("loss", "grad_norm"))
        first = int(steps[0]["step"]) if steps else 0
        return Trajectory(losses, norms, left.get("stream_norms") or {}, left.get("part_norms") or {}, first)


class Runs:
    """The runs of one cell: they share its settings, its devices and a folder that is gone afterwards.

    Args:
        bench: whose order has the settings `size`, `plan`, `precision`, `steps` and others of `SmokeOrder`.
        folder: of the runs.
        limit_s, silent_s: of a run, and of its silence, where the row sets none.
    """

    def __init__(self, bench: Bench, folder: Path, *, limit_s: float = LIMIT_S, silent_s: float = SILENT_S) -> None:
        self.bench, self.folder = bench, folder
        self.limit_s = float(bench.setting("limit_s", str(limit_s)))
        self.silent_s = float(bench.setting("silent_s", str(silent_s)))
        self.plan = ParallelPlan(**read_settings(bench.setting("plan")))
        self.changes = read_settings(bench.setting("changes"))
        self.size = read_size(bench.setting("size", "tiny"), **self.changes)

    def order(self, **changes: Any) -> SmokeOrder:
        """The order of the row, with single fields of `SmokeOrder` changed.

        Raises:
            WrongSize: an impossible order.
        """
        bench, steps = self.bench, int(self.bench.setting("steps", "20"))
        given: dict[str, Any] = {
            "size": self.size.name,
            "changes": self.changes,
            "plan": asdict(self.plan),
            "steps": steps,
            "seed": bench.order.seed,
            "precision": bench.setting("precision", "fp32"),
            "device": bench.device,
            "target": bench.order.target.id,
            "features": {"preset": bench.setting("features", "production")},
            "forms": read_settings(bench.setting("forms")),
            "schedule_steps": steps,
            "audit": True,
            **{name: _value(text) for name in _FIELDS if (text := bench.setting(name))},
        }
        order = SmokeOrder(**{**given, **changes})
        order.refuse()
        return order

    def run(self, name: str, **changes: Any) -> Run:
        """Train once; where it ended well it goes into the receipt."""
        return self._keep(self.train(name, self.order(**changes)))

    def run_beside(self, given: Mapping[str, Mapping[str, Any]]) -> list[Run]:
        """Runs of one rank each, as many at a time as there are devices, dealt out in turn; for what is not timed.

        Args:
            given: name -> fields of `SmokeOrder` that are changed.
        """
        orders = {name: self.order(**changes) for name, changes in given.items()}
        return [self._keep(run) for run in self.train_beside(orders, _places(self.bench.device))]

    def train_beside(self, orders: Mapping[str, SmokeOrder], places: Sequence[Mapping[str, str]]) -> list[Run]:
        """Train orders by name, one at a time in each place, which is the variables of its ranks; keep nothing."""
        with ThreadPoolExecutor(max(1, len(places))) as pool:
            return list(pool.map(self.train, orders, orders.values(), itertools.cycle(places)))

    def train(self, name: str, order: SmokeOrder, place: Mapping[str, str] | None = None) -> Run:
        """Run an order to its end; the receipt keeps nothing of it. `place`: variables of its ranks."""
        folder, world = self.folder / name, order.read_plan().world
        given = os.environ.get("OMP_NUM_THREADS", "")
        cores = int(given) if given.isdigit() else torch.get_num_threads()  # ranks share those of this process
        variables = {"OMP_NUM_THREADS": str(max(1, cores // world)), **(place or {})}
        end = run_smoke(order, folder, limit_s=self.limit_s, silent_s=self.silent_s, environment=variables)
        return Run(name, order, end)

    def record(self, run: Run) -> None:
        """Let the receipt of the cell keep a run that ended well."""
        if run.done:
            self.bench.training.append(record_of(run))

    def _keep(self, run: Run) -> Run:
        for receipt in run.receipts:
            self.bench.rank_jit.take(receipt)
        self.record(run)
        return run


@contextmanager
def open_runs(bench: Bench, **limits: float) -> Iterator[Runs]:
    """The runs of a cell; `limits` as of `Runs`.

    Raises:
        CannotRun: fewer GPUs than its plan has ranks; gloo on the CPU takes any number.
    """
    with tempfile.TemporaryDirectory(prefix="megacpp-smoke-") as folder:
        runs = Runs(bench, Path(folder), **limits)
        if bench.device != "cpu":
            if (found := torch.cuda.device_count()) < runs.plan.world:
                bench.cannot_run(
                    f"this cell takes {runs.plan.world} GPUs, and {found} are visible. Next step: run it where there "
                    "are so many, or see CUDA_VISIBLE_DEVICES."
                )
            torch.cuda.empty_cache()  # what this process holds is not there for the ranks
        yield runs


def record_of(run: Run) -> TrainingRecord:
    """A run as the receipt keeps it: times of rank 0, memory of the rank that took most."""
    first, order, size, account = run.first, run.order, run.size, run.first["goodput"]
    peaks: dict[str, int] = {}
    for receipt in run.receipts:
        for phase, used in receipt["goodput"]["peak_bytes"].items():
            peaks[phase] = max(peaks.get(phase, 0), used)
    changed = " ".join(f"{name}={value}" for name, value in order.changes.items())
    numbers = ("loss", "perfect", "grad_norm")
    steps = tuple(
        TrainingStep(step["step"], **{name: read_number(step[name]) for name in numbers}, seconds=step["seconds"])
        for step in first["steps"]
    )
    return TrainingRecord(
        name=run.name,
        model=f"{size.name} {changed}".strip(),
        pattern=size.pattern,
        parameters=first["model"]["parameters"],
        ranks=order.read_plan().world,
        topology=_texts({**asdict(order.read_plan()), **first["topology"]}),
        precision=order.precision,
        features=_texts(first["features"]),
        forms=_texts(first["forms"]),
        floor=size.grammar.floor(size.length + 1),
        without_context=size.grammar.without_context(),
        steps=steps,
        whole_ns=sum(account["phases_ns"].values()),
        phases_ns=account["phases_ns"],
        tokens=account["tokens"],
        tokens_per_second=account["tokens_per_second"],
        flop_utilisation=first["flop_utilisation"],
        peak_bytes=peaks,
    )


def note_casts(bench: Bench, run: Run, path: str) -> None:
    """Put what cast operands of the run's layers into the receipt, once for all ranks."""
    rows = {tuple(row[name] for name in ROW): None for receipt in run.receipts for row in receipt["quantizers"] or ()}
    for layer, tensor, kind, form in rows:
        block = wanted_block(run.order.precision, tensor)
        bench.saw_quantizer(f"{path}.{layer}", tensor, kind, f"float8_{form}", block)


def have_ended(bench: Bench, *runs: Run) -> bool:
    """Whether all of these runs ended well on every rank; a check each."""
    for run in runs:
        world = run.order.read_plan().world
        bench.check(f"{run.name}.ended", run.done, f"{world} rank(s), {run.end.ending}" if run.done else run.end.words)
    return all(run.done for run in runs)


def check_parts(bench: Bench, *runs: Run) -> None:
    """Every part of these runs ran on the requested backend, on every rank; where that is native, on no vendor's."""
    for run in runs:
        rows = _backends_of(bench, run)
        bench.backends.extend(rows)
        bench.check(f"{run.name}.parts", bool(rows), f"{len(rows)} parts report their backend")
        for row in rows:
            right = row.claimed == row.requested if row.requested != "native" else row.claimed not in VENDOR_BACKENDS
            bench.check(f"{row.path}.backend", right, row.detail)


def _backends_of(bench: Bench, run: Run) -> list[Backend]:
    """Requested and observed backend of every part; ranks that differ from those before them have a row each."""
    rows: dict[tuple[str, str], Backend] = {}
    for receipt in run.receipts:
        for part, choice in receipt["choices"].items():
            taken = choice["observed"]
            if (part, taken) in rows:
                continue
            shown = part if not any(known == part for known, _ in rows) else f"{part}.rank{receipt['rank']}"
            refusals = choice["refusals"]
            as_ordered = any(one["code"] in _AS_ORDERED for one in refusals)
            requested = choice["requested"] if bench.wants_te and not as_ordered else "native"
            reasons = tuple(f"{one['backend']}: {one['reason']}" for one in refusals)
            rows[part, taken] = Backend(f"{run.name}.{shown}", requested, taken, (taken,), reasons)
    return list(rows.values())


def _places(device: str) -> list[dict[str, str]]:
    """The variables of a process that is to have one device, or one core, for itself."""
    if device == "cpu":
        return [{"OMP_NUM_THREADS": "1"}] * len(os.sched_getaffinity(0))
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    numbers = seen.split(",") if seen else [str(number) for number in range(torch.cuda.device_count())]
    return [{"CUDA_VISIBLE_DEVICES": number} for number in numbers]


def read_settings(text: str) -> dict[str, Any]:
    """Numbers, truths and words from "name=value ..."."""
    return {name: _value(value) for name, _, value in (word.partition("=") for word in text.split())}


def _value(text: str) -> Any:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return {"true": True, "false": False}.get(text, text)


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {str(name): str(value) for name, value in values.items()}
