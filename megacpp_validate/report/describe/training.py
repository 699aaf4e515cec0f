"""Training runs in words: a row a run, and whether low precision costs time instead of saving some."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from megacpp_validate.evidence.receipt import Receipt
from megacpp_validate.evidence.training import TrainingRecord

from ..document import Block, Content, Details, Paragraph, Table, risk
from ..drawings.curves import draw_training
from .receipt import MARKS

_COLUMNS: Final = ("cell", "", "plan", "precision", "step", "tokens/s", "MFU", "goodput", "memory", "loss", "model")
_OF_PLAN: Final = {
    "data": "data", "expert_parallel": "experts", "tensor_parallel": "tensor", "accumulate": "passes",
}  # fmt: skip
_REFERENCE: Final = "bf16"
_SLOW: Final = risk("slower than bf16")
_SLOWER: Final = 1.05  # times the step of bf16 from which a run in low precision is marked

Run = tuple[Content, Receipt, TrainingRecord]
"""What a row is called, the receipt of the cell, and the run."""


def find_main_runs(receipts: Iterable[Receipt]) -> tuple[tuple[Receipt, TrainingRecord], ...]:
    """The run that each cell is about, which it trains first."""
    found = ((receipt, next((run for run in receipt.training if run.name == "plan"), None)) for receipt in receipts)
    return tuple((receipt, run) for receipt, run in found if run is not None)


def describe_training(runs: Iterable[Run], *, figures: bool = True) -> tuple[Block, ...]:
    """A table of runs, a risk for each that is slower than the same plan in bf16, and a drawing of each.

    Wall time is that of rank 0; memory that of the rank that took most. MFU is relative to the peak in bf16.
    """
    listed = tuple(runs)
    if not listed:
        return ()
    slower = find_slower([(receipt, run) for _, receipt, run in listed])
    rows = tuple((name, _mark(receipt, run, slower), *_show(run)) for name, receipt, run in listed)
    blocks: list[Block] = [
        Table(_COLUMNS, rows, "Training runs", numeric=frozenset(range(4, 9)), optional=frozenset({7, 8, 9, 10}))
    ]
    for (cell, _), share in slower.items():
        text = f"{cell} takes {share:.0%} more time a step than the same plan in bf16"
        blocks.append(Paragraph(f"{text}: low precision does not pay for itself here.", _SLOW))
    if figures:
        for _, receipt, run in listed:
            summary = f"{receipt.cell}, run {run.name}: {_describe_state(run)}"
            blocks.append(Details(summary, (draw_training(run),)))
    return tuple(blocks)


def find_slower(runs: Iterable[tuple[Receipt, TrainingRecord]]) -> dict[tuple[str, str], float]:
    """(cell, run) in low precision whose median step takes longer than the same plan in bf16, and by which share."""
    listed = list(runs)
    reference = {_key(*pair): pair[1].step_median for pair in listed if pair[1].precision == _REFERENCE}
    found = {}
    for receipt, run in listed:
        base = reference.get(_key(receipt, run), 0.0)
        if run.precision not in (_REFERENCE, "fp32", "fp64") and base and run.step_median > _SLOWER * base:
            found[receipt.cell, run.name] = run.step_median / base - 1
    return found


def _key(receipt: Receipt, run: TrainingRecord) -> tuple[object, ...]:
    return receipt.stack, receipt.target, run.model, run.ranks, tuple(sorted(run.topology.items()))


def _mark(receipt: Receipt, run: TrainingRecord, slower: dict[tuple[str, str], float]) -> Content:
    if receipt.outcome.is_good and (receipt.cell, run.name) in slower:
        return _SLOW
    return MARKS[receipt.outcome]


def _show(run: TrainingRecord) -> tuple[str, ...]:
    peak = max(run.peak_bytes.values(), default=0)
    finite = [step for step in run.steps if step.loss is not None and step.perfect is not None]
    loss = f"{finite[0].loss:.3f} to {finite[-1].loss:.3f} of {finite[-1].perfect:.3f}" if finite else ""
    return (
        _show_plan(run),
        run.precision,
        f"{1000 * run.step_median:.1f} ms",
        f"{run.tokens_per_second:,.0f}",
        "" if run.flop_utilisation is None else f"{run.flop_utilisation:.1%}",
        f"{run.goodput:.1%}",
        f"{peak / 2**30:.1f} GiB" if peak else "",
        loss,
        f"{run.model}, {_show_parameters(run.parameters)}",
    )


def _show_plan(run: TrainingRecord) -> str:
    """Ranks, and what they share out: "4 ranks: data 4, experts 2"."""
    parts = [f"{word} {run.topology[name]}" for name, word in _OF_PLAN.items() if run.topology.get(name, "1") != "1"]
    parts += ["positions split"] if run.topology.get("sequence_parallel") == "True" else []
    ranks = f"{run.ranks} rank{'' if run.ranks == 1 else 's'}"
    return f"{ranks}: {', '.join(parts)}" if parts else ranks


def _show_parameters(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)


def _describe_state(run: TrainingRecord) -> str:
    """Where the time went, the longest phase first; features that are off, and forms."""
    spent = sorted(run.phases_ns.items(), key=lambda phase: -phase[1])
    off = [name for name, value in run.features.items() if value == "False"]
    preset = run.features.get("preset", "")
    parts = [
        ", ".join(f"{name} {ns / 1e9:.1f} s" for name, ns in spent if ns),
        f"preset {preset}" if preset else "",
        f"off: {', '.join(off)}" if off else "",
        ", ".join(f"{name} {value}" for name, value in run.forms.items()),
    ]
    return "; ".join(filter(None, parts))
