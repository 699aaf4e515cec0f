"""One rank of a smoke run: trains its part, and leaves its receipt, also of a run that fails.

    torchrun --nproc-per-node 2 -m megacpp_validate.training.smoke.rank ORDER

ORDER is a file of `order.SmokeOrder`.
"""

from __future__ import annotations

import functools
import gc
import itertools
import json
import math
import os
import resource
import socket
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import torch

from ...evidence.loss_curve import curve_text
from ...evidence.receipt import write_whole
from ...jit.monitor import after_import, compiles_since, describe_jit, start_compiling
from ..parallel.checks import CheckFailed
from ..parallel.goodput import PEAK, Ledger, process_began_ns, training_flops
from ..parallel.ranks import Rank, join_ranks
from ..quantizers import see_quantizers
from .gate import GateTrainer
from .order import SmokeOrder
from .trainer import WARM, SmokeTrainer


def main() -> None:
    """Read the order, join the others, train."""
    order = SmokeOrder(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    if order.device == "cpu":
        torch.set_num_threads(1)  # ranks stand side by side
    if order.checkpoint_folder:
        order = replace(order, checkpoint_folder=str(Path(order.checkpoint_folder).absolute()))
    start_compiling()  # before anything is compiled
    if order.deterministic:
        keep_bits()
    with join_ranks("nccl" if order.device == "cuda" else "gloo") as rank:
        train_rank(order, rank)


def train_rank(order: SmokeOrder, rank: Rank) -> None:
    """Train, and leave a receipt.

    A run that fails in its steps leaves its receipt up to then. One that fails before there is a model has no receipt:
    the launcher reports the exception.

    Raises:
        TrainingError, BridgeError: the fault that ended the run early.
    """
    ledger = Ledger(began_ns=process_began_ns(), memory=_memory_of(order.device))
    with ledger.phase("start-up"):
        trainer = make_trainer(order, rank, ledger)
    try:
        if order.fault:
            from .faults import plant  # and FSDP2 with it

            plant(order.fault, trainer)
        trainer.run()
    except Exception as fault:
        with suppress(Exception):  # the fault is what counts, whatever of the trainer can still be read
            rank.write_receipt(make_receipt(trainer, ledger, fault))
        raise
    rank.write_receipt(make_receipt(trainer, ledger))


def make_trainer(order: SmokeOrder, rank: Rank, ledger: Ledger) -> SmokeTrainer:
    """The trainer of the order's task."""
    kind = GateTrainer if order.task == "gate" else SmokeTrainer
    return kind(order, rank, ledger)


def _memory_of(device: str) -> Callable[[], int]:
    if device == "cpu":  # of the process so far: the kernel keeps no other
        return lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def peak() -> int:
        most = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return int(most)

    return peak


# --- receipt


def make_receipt(trainer: SmokeTrainer, ledger: Ledger, fault: Exception | None = None) -> dict[str, Any]:
    """The receipt of a rank, JSON values only, a number that is not finite as text; read from what ran."""
    order, size, audit = trainer.order, trainer.size, trainer.audit
    failed = fault if isinstance(fault, CheckFailed) else None
    where = {} if failed is None else {"step": trainer.done, **failed.where}
    return {
        "rank": trainer.rank.rank,
        "check": "" if failed is None else failed.check,  # that failed, and what it names
        "where": where,
        "culprits": where.get("ranks", []),  # all ranks raise the fault, so who ended first is unimportant
        "fault": "" if fault is None else f"{type(fault).__name__}: {fault}",
        "steps": [{name: _number(value) for name, value in vars(record).items()} for record in trainer.records],
        "goodput": _account(trainer, ledger),
        "flop_utilisation": _utilisation(trainer),
        "choices": {part: asdict(one) for part, one in trainer.model.choices().items() if one is not None},
        "replicas": audit and audit.replicas,
        "dispatches": audit and audit.dispatches,
        "experts_without_gradient": audit and audit.experts_without_gradient(),
        "part_norms": audit and _series(audit.part_norms),
        "stream_norms": audit and _series(audit.stream_norms),
        "scales": audit and audit.scales,
        "alike": audit and audit.alike,
        "unmoved": audit and audit.unmoved(),
        "quantizers": None if order.recipe is None else [asdict(row) for row in see_quantizers(trainer.model)],
        "topology": {
            "host": socket.gethostname(),
            "device": torch.cuda.get_device_name() if order.device == "cuda" else "cpu",
        },
        "forms": asdict(order.read_forms()),
        "features": asdict(order.read_features()),
        "model": {
            "pattern": size.pattern,
            "parameters": trainer.parameters,
            "size": asdict(size),
        },
        "curve": json.loads(curve_text(trainer.curve())) if isinstance(trainer, GateTrainer) else None,
        "jit": _jit(trainer.warm_at),
    }


def _jit(warm_at: int | None) -> dict[str, Any]:
    """Kernels that this rank compiled just in time, and whether in its first steps or after them."""
    every = compiles_since()
    warm = len(every) - (0 if warm_at is None else len(compiles_since(warm_at)))
    names = ("library", "kernel", "shape", "seconds")
    rows = [{name: getattr(one, name) for name in names} for one in every]
    for place, row in enumerate(rows):
        row["when"] = "warm-up" if place < warm else "after"
    return {"compiled": rows, **describe_jit()}


def _account(trainer: SmokeTrainer, ledger: Ledger) -> dict[str, Any]:
    """The account of the time, with what only counters tell given to its phase.

    A wait is on the CPU the time that the record of collectives has for each step, and on a GPU that of the profiled
    step in every step; without a profile it is unknown there and stays in the steps. The time of the first step beyond
    the median of those after it, waits left aside, is compilation and warm-up.
    """
    seconds = [record.seconds for record in trainer.records]
    waits = trainer.waited if trainer.order.device == "cpu" else [trainer.exposed or 0.0] * len(seconds)
    waited = list(map(min, waits, seconds))
    own = [one - wait for one, wait in zip(seconds, waited, strict=True)]
    ledger.move("step", "communication wait", math.fsum(waited))
    ledger.move("step", "compile", own[0] - statistics.median(own[1:]) if own[1:] else 0.0)
    return ledger.close()


def _utilisation(trainer: SmokeTrainer) -> float | None:
    """Model FLOP utilisation of the median step, against the peak of bf16; None where the device's is not known.

    Chowdhery et al. 2022, PaLM, arXiv:2204.02311, appendix B: recomputed operations do not count.
    """
    peak = PEAK.get(trainer.order.target, {}).get("bf16")
    if peak is None or len(trainer.records) <= WARM:
        return None
    rate = trainer.tokens / statistics.median(record.seconds for record in trainer.records[WARM:])
    return rate * training_flops(trainer.size) / (peak * trainer.plan.world)


def _series(norms: dict[str, list[float]]) -> dict[str, list[Any]]:
    return {part: list(map(_number, values)) for part, values in norms.items()}


def _number(value: Any) -> Any:
    return value if not isinstance(value, float) or math.isfinite(value) else repr(value)


# --- two arms in turn

BEFORE: Final = 8  # steps of an arm before its first pair: they compile and tune, the later half shows the spread
MOST_STEPS: Final = 8  # of a block


def compare_features(
    arms: Mapping[str, Mapping[str, Mapping[str, Any]]], folder: str, device: str, looks: Mapping[str, float],
    least: float, seconds: float,
) -> None:  # fmt: skip
    """Compare the arms of features one after the other in this process; each answer is FOLDER/FEATURE.json.

    Args:
        arms: feature -> "off" and "on" -> order.
        folder: of the answers.
        device: of all orders.
        looks: number of pairs -> Student's t of the look after them; the last is the budget of pairs.
        least: logarithm of the ratio that must be seen.
        seconds: budget of all features together, of which each has its share of what is left.
    """
    ends = time.monotonic() + seconds
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
    with join_ranks("nccl" if device == "cuda" else "gloo") as rank:
        for place, (feature, orders) in enumerate(arms.items()):
            if (left := ends - time.monotonic()) <= 0:
                return
            until = time.monotonic() + left / (len(arms) - place)
            try:
                answer = compare_arms(orders, rank, looks, least, until)
            except Exception as fault:  # it is this feature's, and the others are compared all the same
                answer = {"fault": f"{type(fault).__name__}: {fault}"}
            write_whole(Path(folder, f"{feature}.json"), json.dumps(answer))
            gc.unfreeze()
            gc.collect()  # layers that hold one another
            if device == "cuda":
                torch.cuda.empty_cache()


def compare_arms(
    orders: Mapping[str, Mapping[str, Any]], rank: Rank, looks: Mapping[str, float], least: float, until: float
) -> dict[str, Any]:
    """Blocks of steps without and with a feature, A B B A, until the interval decides or the budget ends.

    A block has as many steps as its median needs to lie within the effect that must be seen.

    Returns:
        pairs: [off, on] median seconds of a step; steps: of a block; arms: the receipt of each, with `peak_bytes`.
    """
    trainers, peaks, spread = dict[str, SmokeTrainer](), dict[str, int](), list[float]()
    for arm, order in orders.items():
        made = SmokeOrder(**order)
        made.refuse()
        memory = _memory_of(made.device)
        memory()  # and with it the peak of others goes
        held = torch.cuda.memory_allocated() if made.device == "cuda" else 0
        trainer = make_trainer(made, rank, Ledger(began_ns=process_began_ns(), memory=memory))
        if trainers:
            trainer.language = trainers["off"].language  # which keeps the batch that both arms read
        else:
            trainer.language.batch = functools.lru_cache(2 * MOST_STEPS)(trainer.language.batch)  # type: ignore[method-assign]
        times = [trainer.step().seconds for _ in range(BEFORE)]
        peaks[arm] = max(trainer.ledger.close()["peak_bytes"].values()) - held
        spread += [abs(math.log(one / statistics.median(times[BEFORE // 2 :]))) for one in times[BEFORE // 2 :]]
        trainers[arm] = trainer
    # 1.5 median deviations are a standard deviation, and a step that compiles among them does not count.
    steps = min(MOST_STEPS, max(2, math.ceil((1.5 * statistics.median(spread) / least) ** 2)))
    gc.collect()
    gc.freeze()  # else the collector walks both models in the middle of a step
    pairs: list[list[float]] = []
    while True:
        for turn in (("off", "on"), ("on", "off")):
            took = {arm: _take_block(trainers[arm], steps) for arm in turn}
            pairs.append([took["off"], took["on"]])
        if (t := looks.get(str(len(pairs)))) is None:
            continue
        logs = [math.log(on / off) for off, on in pairs]
        mean, half = abs(statistics.fmean(logs)), t * statistics.stdev(logs) / math.sqrt(len(logs))
        if mean > half or mean + half < least or str(len(pairs) + 2) not in looks or time.monotonic() > until:
            break
    receipts = {arm: {**make_receipt(one, one.ledger), "peak_bytes": peaks[arm]} for arm, one in trainers.items()}
    return {"pairs": pairs, "steps": steps, "arms": receipts}


def _take_block(trainer: SmokeTrainer, steps: int) -> float:
    """Median seconds of a step, after what the other arm left to the device is done."""
    on_gpu = trainer.order.device == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
    take = trainer.profile_step if on_gpu and trainer.order.profile else trainer.step
    for _ in range(steps):
        take()
    return statistics.median(record.seconds for record in trainer.records[-steps:])


# --- same bits
#
# On an H200 a step repeated in one process had the same bits, and two processes had not: Triton's autotuner measures
# how long each configuration takes and keeps the fastest, so that each process sums in an order of its own. Transformer
# Engine's backward pass of unpermute is such a kernel (`transformer_engine/common/triton/permutation.py`, 2.17.1 and
# 2.20.2: gradients of the router's probabilities are sums over blocks whose width is tuned).


def keep_bits() -> None:
    """In this process nothing is chosen by its time, and sums have a fixed order where there is such a kernel.

    `order.SAME_BITS` must have been set when the process began. A part of torch without such a kernel warns.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    after_import("triton.runtime.autotuner", _take_the_first)


def _take_the_first(module: Any) -> None:
    """Of the configurations that the kernel can run with, the autotuner takes the first, and not the fastest."""
    plain = module.Autotuner._bench
    if hasattr(plain, "__wrapped__"):
        return
    places = itertools.count(1)

    @functools.wraps(plain)
    def place_of(self: Any, *args: Any, **options: Any) -> list[float]:
        measured = plain(self, *args, **options)  # infinite: it does not fit the device
        median = measured[0] if isinstance(measured, list | tuple) else measured
        return [float(next(places)) if math.isfinite(median) else math.inf] * 3

    module.Autotuner._bench = place_of


if __name__ == "__main__":
    main()
