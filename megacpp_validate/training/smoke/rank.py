"""One rank of a smoke run: trains its part, and leaves its receipt, also of a run that fails.

    torchrun --nproc-per-node 2 -m megacpp_validate.training.smoke.rank ORDER

ORDER is a file of `order.SmokeOrder`.
"""

from __future__ import annotations

import math
import resource
import socket
import statistics
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import torch

from ...jit.monitor import compiles_since, describe_jit, start_compiling
from ..gate_audit import see_quantizers
from ..parallel.goodput import PEAK, Goodput, Ledger, process_began_ns, training_flops
from ..parallel.non_finite import NonFinite
from ..parallel.ranks import Rank, join_ranks
from ..parallel.replicas import ReplicaDiverged
from .audit import Audit
from .order import SmokeOrder, read_order
from .same_bits import keep_bits
from .trainer import WARM, NotFinite, SmokeTrainer, as_json


def train_rank(order: SmokeOrder, rank: Rank) -> None:
    """Train, and leave a receipt.

    A run that fails in its steps leaves what was seen until then. One that fails before there is a model has no
    receipt: the launcher tells what was raised.

    Raises:
        TrainingError, BridgeError: whatever ended the run early.
    """
    ledger = Ledger(began_ns=process_began_ns(), memory=_memory_of(order.device))
    with ledger.phase("start-up"):
        trainer = SmokeTrainer(order, rank, ledger)
    try:
        with ledger.phase("start-up"):
            planted = _plant(order.fault, trainer)
        trainer.run(planted)
    except Exception as fault:
        with suppress(Exception):  # the fault is what counts, whatever of the trainer can still be read
            found = fault.found if isinstance(fault, NotFinite) else None
            rank.write_receipt(make_receipt(trainer, ledger, found=found, fault=fault))
        raise
    rank.write_receipt(make_receipt(trainer, ledger, found=None, fault=None))


def main() -> None:
    """Read the order, join the others, train."""
    order = read_order(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if order.device == "cpu":
        torch.set_num_threads(1)  # ranks stand side by side
    if order.checkpoint_folder:
        order = replace(order, checkpoint_folder=str(Path(order.checkpoint_folder).absolute()))
    start_compiling()  # before anything is compiled: ranks on one cache compile each kernel once
    if order.deterministic:
        keep_bits()
    with join_ranks("nccl" if order.device == "cuda" else "gloo") as rank:
        train_rank(order, rank)


def _plant(fault: str, trainer: SmokeTrainer) -> Callable[[SmokeTrainer], None] | None:
    if not fault:
        return None
    from .faults import plant  # and FSDP2 with it

    return plant(fault, trainer)


def _memory_of(device: str) -> Callable[[], int]:
    if device == "cpu":  # of the process so far: the kernel keeps no other
        return lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def peak() -> int:
        most = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return int(most)

    return peak


# --- receipt
#
# What one rank leaves of a run: numbers that were read from what ran, for whoever judges it.


_AUDITED: Final = (
    "replicas", "dispatches", "experts_without_gradient", "part_norms", "stream_norms", "scales", "alike", "unmoved"
)  # fmt: skip


def make_receipt(
    trainer: SmokeTrainer, ledger: Ledger, *, found: NonFinite | None, fault: Exception | None
) -> dict[str, Any]:
    """The receipt of a rank; JSON values only, a number that is none as text."""
    goodput = _account(trainer, ledger)
    forms = trainer.order.read_forms()
    return {
        "rank": trainer.rank.rank,
        "culprits": _accused(found, fault),
        "fault": "" if fault is None else f"{type(fault).__name__}: {fault}",
        "steps": [{name: _number(value) for name, value in vars(record).items()} for record in trainer.records],
        "validation": {str(step): _number(loss) for step, loss in trainer.validation.items()},
        "floor": trainer.size.floor,
        "without_context": trainer.size.grammar.without_context(),
        "goodput": goodput.as_json(),
        "flop_utilisation": _utilisation(trainer),
        "waits": as_json(trainer.waits),
        "choices": {
            part: _choice(one) for part, one in (trainer.model.choices() | trainer.captured).items() if one is not None
        },
        **_audited(trainer.audit),
        "quantizers": None if trainer.order.recipe is None else [asdict(row) for row in see_quantizers(trainer.model)],
        "topology": _topology(trainer),
        "forms": {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(forms).items()},
        "features": asdict(trainer.order.read_features()),
        "model": {
            "name": trainer.size.name,
            "pattern": trainer.size.pattern,
            "parameters": trainer.parameters,
            "precision": trainer.order.precision,
            "size": asdict(trainer.size),
        },
        "nonfinite": None if found is None else {**vars(found), "words": found.words()},
        "resumed": None if trainer.resumed is None else {"step": trainer.resumed.step, "world": trainer.resumed.world},
        "versions": _versions(),
        "jit": _jit(trainer.warm_at),
    }


def _jit(warm_at: int | None) -> dict[str, Any]:
    """What this rank compiled just in time, and whether in its first steps or after them."""
    every = compiles_since()
    late = 0 if warm_at is None else len(compiles_since(warm_at))
    rows = [
        {
            "library": one.library,
            "kernel": one.kernel,
            "shape": one.shape,
            "seconds": one.seconds,
            "when": "warm-up" if place < len(every) - late else "after",
        }
        for place, one in enumerate(every)
    ]
    return {"compiled": rows, **describe_jit()}


def _audited(audit: Audit | None) -> dict[str, Any]:
    """What was checked; None without an audit."""
    if audit is None:
        return dict.fromkeys(_AUDITED)
    return {
        "replicas": audit.replicas,
        "dispatches": audit.dispatches,
        "experts_without_gradient": audit.experts_without_gradient(),
        "part_norms": {part: list(map(_number, norms)) for part, norms in audit.part_norms.items()},
        "stream_norms": {part: list(map(_number, norms)) for part, norms in audit.stream_norms.items()},
        "scales": audit.scales,
        "alike": audit.alike,
        "unmoved": audit.unmoved(),
    }


def _accused(found: NonFinite | None, fault: Exception | None) -> list[int]:
    """Ranks that the fault itself names; all ranks raise it, so who ended first says nothing."""
    if found is not None:
        return [found.rank]
    return list(fault.ranks) if isinstance(fault, ReplicaDiverged) else []


def _account(trainer: SmokeTrainer, ledger: Ledger) -> Goodput:
    """The account of the time, with what only counters tell given to its phase.

    A wait is on the CPU what the record of collectives says of each step, and on a GPU that of the profiled step in
    every step; without a profile it is unknown there and stays in the steps. What the first step took beyond
    the median of those after it, waits left aside, is compilation and warm-up.
    """
    seconds = [record.seconds for record in trainer.records]
    waits = [0.0] * len(seconds)
    if trainer.waits is not None:
        waits = [min(trainer.waits.exposed, one) for one in seconds]
    elif trainer.order.device == "cpu":
        waits = [min(waited, one) for waited, one in zip(trainer.waited, seconds, strict=True)]
    own = [one - waited for one, waited in zip(seconds, waits, strict=True)]
    compiled = max(0.0, own[0] - statistics.median(own[1:])) if own[1:] else 0.0
    ledger.move("step", "communication wait", math.fsum(waits))
    ledger.move("step", "compile", compiled)
    return ledger.close()


def _utilisation(trainer: SmokeTrainer) -> float | None:
    """Model FLOP utilisation of the median step, against the peak of bf16; None where the device's is not known."""
    peak = PEAK.get(trainer.order.target, {}).get("bf16")
    if peak is None or len(trainer.records) <= WARM:
        return None
    rate = trainer.tokens / statistics.median(record.seconds for record in trainer.records[WARM:])
    return rate * training_flops(trainer.size) / (peak * trainer.plan.world)


def _topology(trainer: SmokeTrainer) -> dict[str, Any]:
    gpu = torch.cuda.get_device_name() if trainer.order.device == "cuda" else "cpu"
    return {
        "host": socket.gethostname(),
        "device": gpu,
        "world": trainer.plan.world,
        "mesh": list(trainer.plan.mesh_shape),
        "plan": asdict(trainer.plan),
        "place": asdict(trainer.plan.place(trainer.rank.rank)),
    }


def _choice(choice: Any) -> dict[str, Any]:
    refusals = [f"{refusal.backend}: {refusal.reason}" for refusal in choice.refusals]
    codes = [refusal.code for refusal in choice.refusals]
    return {"requested": choice.requested, "observed": choice.observed, "refusals": refusals, "codes": codes}


def _number(value: Any) -> Any:
    return value if not isinstance(value, float) or math.isfinite(value) else repr(value)


def _versions() -> dict[str, str]:
    found = {"torch": str(torch.__version__)}
    for package in ("transformer_engine", "triton", "megatron-core"):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


if __name__ == "__main__":
    main()
