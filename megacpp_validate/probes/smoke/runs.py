"""Runs of a smoke cell: an order made from the row's settings, and what came of it as a receipt keeps it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from queue import Queue
from typing import Any, Final

import torch

from ...evidence.receipt import Backend, TrainingRecord, TrainingStep
from ...training.parallel.plan import ParallelPlan
from ...training.parallel.verdict import read_end
from ...training.sizes import Forms, Size, read_size
from ...training.smoke.order import SmokeOrder, write_order
from ...training.smoke.run import ORDER, RANK, SILENT_S, environment_of, run_smoke
from ..bench import Bench
from .trajectories import Trajectory, read_number, read_trajectory

LIMIT_S: Final = 300.0
_LAUNCH: Final = "megacpp_validate.training.parallel"
# Refusals that are no fallback: what the order did not ask for, and a bank that no token reached in its last pass.
_AS_ASKED: Final = frozenset({"flag-off", "no-rows"})


@dataclass(frozen=True)
class Run:
    """One run that has ended.

    Attributes:
        name: in the cell.
        order: what was asked for.
        size: of its model.
        ending: "done", or how else.
        words: why it is not done; empty where it is.
        receipts: of each rank that left one, rank 0 first.
        culprits: ranks that the launcher accuses.
        seconds: wall time of its launcher, of starting processes too; 0 where nobody told it.
    """

    name: str
    order: SmokeOrder
    size: Size
    ending: str
    words: str
    receipts: tuple[Mapping[str, Any], ...]
    culprits: tuple[int, ...] = ()
    seconds: float = 0.0

    @property
    def done(self) -> bool:
        """Whether every rank ended well and left a receipt."""
        return self.ending == "done" and len(self.receipts) == self.order.read_plan().world

    @property
    def first(self) -> Mapping[str, Any]:
        """The receipt of the lowest rank that left one, which has the loss of all; empty without any."""
        return self.receipts[0] if self.receipts else {}

    @property
    def trajectory(self) -> Trajectory:
        """What it did in each step."""
        return read_trajectory(self.first)


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
        self.plan = read_plan(bench.setting("plan"))
        self.changes = read_settings(bench.setting("changes"))
        self.size = read_size(bench.setting("size", "tiny"), **self.changes)

    @property
    def launcher(self) -> str:
        """Where torchrun is started: "local" (or "torchrun") on this host, "slurm" in a job."""
        return self.bench.setting("launcher", "local")

    def order(self, **changes: Any) -> SmokeOrder:
        """What the row asks for, with single fields of `SmokeOrder` changed.

        Raises:
            WrongPlan, WrongSize: it cannot be.
        """
        bench, steps = self.bench, int(self.bench.setting("steps", "20"))
        precision = bench.setting("precision", "fp32")
        given: dict[str, Any] = {
            "size": self.size.name,
            "changes": self.changes,
            "plan": asdict(self.plan),
            "steps": steps,
            "seed": bench.order.seed,
            "precision": precision,
            "device": bench.device,
            "target": bench.order.target.id,
            "features": {"preset": bench.setting("features", "production")},
            "forms": read_settings(bench.setting("forms"), tuple(field.name for field in fields(Forms))),
            "schedule_steps": steps,
            "audit": True,
        }
        for name in ("learning_rate", "warm_up", "validate_every", "deterministic", "rehearse"):
            if text := bench.setting(name):
                given[name] = _value(text)
        order = SmokeOrder(**{**given, **changes})
        order.refuse()
        return order

    def run(self, name: str, **changes: Any) -> Run:
        """Train once; where it ended well it goes into the receipt."""
        return self.end(name, self.order(**changes))

    def run_beside(self, asked: Mapping[str, Mapping[str, Any]]) -> list[Run]:
        """Runs of one rank each, as many at a time as there are devices; for what is not timed.

        Args:
            asked: name -> fields of `SmokeOrder` that are changed.
        """
        places: Queue[dict[str, str]] = Queue()
        for place in _places(self.bench.device):
            places.put(place)

        def train(name: str, order: SmokeOrder) -> Run:
            place = places.get()
            try:
                return self.train(name, order, place)
            finally:
                places.put(place)

        orders = {name: self.order(**changes) for name, changes in asked.items()}
        with ThreadPoolExecutor(max(1, places.qsize())) as pool:
            return [self._keep(run) for run in pool.map(train, orders, orders.values())]

    def end(self, name: str, order: SmokeOrder) -> Run:
        """Run an order to its end."""
        return self._keep(self.train(name, order))

    def train(self, name: str, order: SmokeOrder, place: Mapping[str, str] | None = None) -> Run:
        """The same; the receipt keeps nothing of it.

        Args:
            name: of the run.
            order: what is trained.
            place: variables of its ranks.
        """
        cores = {**_share_cores(order.read_plan().world), **(place or {})}
        folder = self.folder / name
        if self.launcher == "slurm":
            return Run(name, order, self.size, *run_as_job(order, folder, self.limit_s, cores))
        end = run_smoke(order, folder, limit_s=self.limit_s, silent_s=self.silent_s, environment=cores)
        receipts = tuple(end.receipts[rank] for rank in sorted(end.receipts))
        return Run(name, order, self.size, end.ending, end.words, receipts, end.culprits, end.seconds)

    def record(self, run: Run) -> None:
        """Let the receipt of the cell keep a run that ended well."""
        if run.done:
            self.bench.training.append(record_of(run))

    def _keep(self, run: Run) -> Run:
        for receipt in run.receipts:
            self.bench.rank_jit.take(receipt)
        self.record(run)
        return run


def run_as_job(
    order: SmokeOrder, folder: Path, limit_s: float, variables: Mapping[str, str]
) -> tuple[str, str, tuple[Mapping[str, Any], ...], tuple[int, ...], float]:
    """Run an order as a Slurm job: its ending, its words, the receipt of each rank, ranks at fault, seconds."""
    order.refuse()
    folder.mkdir(parents=True, exist_ok=True)
    write_order(order, folder / ORDER)
    world = str(order.read_plan().world)
    command = [
        sys.executable, "-m", _LAUNCH, "--slurm", "--nproc-per-node", world, "--folder", str(folder),
        "--limit-s", str(limit_s), "--silent-s", str(min(SILENT_S, limit_s)),
        *(["--gpus-per-host", world] if order.device == "cuda" else []), RANK, str(folder / ORDER),
    ]  # fmt: skip
    given = {**os.environ, **environment_of(order), **variables}
    ended = subprocess.run(command, check=False, capture_output=True, text=True, env=given)
    end = read_end(folder)
    if end is None:
        return "not-started", (ended.stderr or ended.stdout)[-2000:] or f"exit status {ended.returncode}", (), (), 0.0
    receipts = tuple(rank["receipt"] for rank in end["ranks"] if rank["receipt"] is not None)
    return str(end["ending"]), str(end["words"]), receipts, tuple(map(int, end["culprits"])), float(end["seconds"])


def read_plan(text: str) -> ParallelPlan:
    """A plan from "data=2 expert_parallel=2"; the world is what it fills."""
    given = read_settings(text)
    if "sequence_parallel" in given:
        given["sequence_parallel"] = bool(given["sequence_parallel"])
    plan = ParallelPlan(**given)
    return replace(plan, world=plan.data * plan.tensor_parallel)


def require_devices(bench: Bench, ranks: int) -> None:
    """End the probe where there are fewer devices than ranks; gloo on the CPU takes any number.

    Raises:
        CannotRun: with how many there are.
    """
    if bench.device == "cpu":
        return
    if (found := torch.cuda.device_count()) < ranks:
        bench.cannot_run(
            f"this cell takes {ranks} GPUs, and {found} can be seen here. Next step: run it where there are "
            "so many, or look at CUDA_VISIBLE_DEVICES."
        )
    torch.cuda.empty_cache()  # what this process holds is not there for the ranks


@contextmanager
def open_runs(bench: Bench, **limits: float) -> Iterator[Runs]:
    """The runs of a cell.

    Args:
        bench: of the probe.
        limits: as of `Runs`.

    Raises:
        CannotRun: fewer devices than its plan has ranks.
    """
    with tempfile.TemporaryDirectory(prefix="megacpp-smoke-") as folder:
        runs = Runs(bench, Path(folder), **limits)
        require_devices(bench, runs.plan.world)
        yield runs


def record_of(run: Run) -> TrainingRecord:
    """A run as the receipt keeps it: times of rank 0, memory of the rank that took most."""
    first, order, size = run.receipts[0], run.order, run.size
    account, model = first["goodput"], first["model"]
    peaks: dict[str, int] = {}
    for receipt in run.receipts:
        for phase, used in receipt["goodput"]["peak_bytes"].items():
            peaks[phase] = max(peaks.get(phase, 0), int(used))
    changed = " ".join(f"{name}={value}" for name, value in order.changes.items())
    steps = tuple(
        TrainingStep(
            int(step["step"]), read_number(step["loss"]), read_number(step["perfect"]), read_number(step["grad_norm"]),
            float(step["seconds"]),
        )
        for step in first["steps"]
    )  # fmt: skip
    return TrainingRecord(
        name=run.name,
        model=f"{size.name} {changed}".strip(),
        pattern=size.pattern,
        parameters=int(model["parameters"]) if "parameters" in model else int(model["parameters_here"]),
        ranks=order.read_plan().world,
        topology=_texts({**asdict(order.read_plan()), **_mapping(first.get("topology"))}),
        precision=order.precision,
        features=_texts(_mapping(first.get("features"))),
        forms=_texts(_mapping(first.get("forms"))),
        floor=size.floor,
        without_context=size.grammar.without_context(),
        steps=steps,
        whole_ns=sum(map(int, account["phases_ns"].values())),
        phases_ns={phase: int(spent) for phase, spent in account["phases_ns"].items()},
        tokens=int(account["tokens"]),
        tokens_per_second=float(account["tokens_per_second"]),
        flop_utilisation=first.get("flop_utilisation"),
        peak_bytes=peaks,
    )


def backends_of(run: Run, *, wants_te: bool, native: Sequence[str] = ()) -> list[Backend]:
    """Requested and observed backend of every part; ranks that differ from those before them have a row each.

    Args:
        run: that has ended.
        wants_te: whether Transformer Engine is requested.
        native: last words of parts that have no other path in this row, as the matrix says.
    """
    rows: dict[tuple[str, str], Backend] = {}
    for receipt in run.receipts:
        for part, choice in receipt["choices"].items():
            if (part, choice["observed"]) in rows:
                continue
            shown = part if not any(known == part for known, _ in rows) else f"{part}.rank{receipt['rank']}"
            refusals = choice.get("refusals", ())
            switched = not _AS_ASKED.isdisjoint(choice.get("codes", ()))
            off = not wants_te or switched or part.rpartition(".")[2] in native
            asked = "native" if off else choice["requested"]
            taken = choice["observed"]
            rows[part, taken] = Backend(f"{run.name}.{shown}", asked, taken, (taken,), tuple(refusals))
    return list(rows.values())


def _places(device: str) -> list[dict[str, str]]:
    """The variables of a process that is to have one device, or one core, for itself."""
    if device == "cpu":
        return [{"OMP_NUM_THREADS": "1"}] * len(os.sched_getaffinity(0))
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    numbers = seen.split(",") if seen else [str(number) for number in range(torch.cuda.device_count())]
    return [{"CUDA_VISIBLE_DEVICES": number} for number in numbers]


def _share_cores(ranks: int) -> dict[str, str]:
    """Ranks share the cores that this process was given."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    cores = int(given) if given.isdigit() else torch.get_num_threads()
    return {"OMP_NUM_THREADS": str(max(1, cores // ranks))}


def read_settings(text: str, known: Sequence[str] = ()) -> dict[str, Any]:
    """Numbers, truths and words from "name=value ...".

    Raises:
        ValueError: a name that is none of `known`, where these are given.
    """
    found = {name: _value(value) for name, _, value in (word.partition("=") for word in text.split())}
    for name in found:
        if known and name not in known:
            raise ValueError(f"there is no form {name!r}. Next step: choose one of {', '.join(sorted(known))}.")
    return found


def _value(text: str) -> Any:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return {"true": True, "false": False}.get(text, text)


def _mapping(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {str(name): str(value) for name, value in values.items()}
