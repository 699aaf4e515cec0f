"""Training runs in words: a row a run, and whether low precision costs time instead of saving some."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from megacpp_validate.evidence.receipt import Receipt, TrainingRecord

from ..curves import draw_training
from ..document import Block, Content, Details, Paragraph, Table
from ..marks import mark_of, risk

_COLUMNS: Final = ("cell", "", "plan", "precision", "step", "tokens/s", "MFU", "goodput", "memory", "loss", "model")
_OF_PLAN: Final = {
    "data": "data",
    "expert_parallel": "experts",
    "tensor_parallel": "tensor",
    "sequence_parallel": "sequence",
    "accumulate": "passes",
}
_REFERENCE: Final = "bf16"
_SLOW: Final = risk("slower than bf16")
_SLOWER: Final = 1.05  # times the step of bf16 from which a run in low precision is marked

Run = tuple[Content, Receipt, TrainingRecord]
"""What a row is called, the receipt of the cell, and the run."""


def find_main_runs(receipts: Iterable[Receipt]) -> tuple[tuple[Receipt, TrainingRecord], ...]:
    """The run that each cell is about, which it trains first."""
    return tuple((receipt, run) for receipt in receipts for run in receipt.training if run.name == "plan")


def describe_training(runs: Iterable[Run]) -> tuple[Block, ...]:
    """A table of runs, a risk for each that is slower than the same plan in bf16, and a drawing of each.

    Wall time is that of rank 0; memory that of the rank that took most. MFU is relative to the peak in bf16.
    """
    listed = tuple(runs)
    base = {_key(receipt, run): run.step_median for _, receipt, run in listed if run.precision == _REFERENCE}
    rows: list[tuple[Content, ...]] = []
    slower: list[Block] = []
    for name, receipt, run in listed:
        ratio = run.step_median / base.get(_key(receipt, run), run.step_median) if run.step_median else 1.0
        is_slow = run.precision not in (_REFERENCE, "fp32", "fp64") and ratio > _SLOWER
        if is_slow:
            text = f"{receipt.cell} takes {ratio - 1:.0%} more time a step than the same plan in bf16."
            slower.append(Paragraph(text, _SLOW))
        mark = _SLOW if is_slow and receipt.outcome.is_good else mark_of(receipt.outcome)
        rows.append((name, mark, *_show(run)))
    figures = (
        Details(f"{receipt.cell}, run {run.name}: {_describe_state(run)}", (draw_training(run),))
        for _, receipt, run in listed
    )
    numeric, optional = frozenset(range(4, 9)), frozenset({7, 8, 9, 10})
    return (*((Table(_COLUMNS, tuple(rows), "Training runs", numeric, optional),) if rows else ()), *slower, *figures)


def _key(receipt: Receipt, run: TrainingRecord) -> tuple[object, ...]:
    return receipt.stack, receipt.target, run.model, run.ranks, tuple(sorted(run.topology.items()))


def _show(run: TrainingRecord) -> tuple[str, ...]:
    plan = [
        f"{word} {run.topology[name]}".removesuffix(" True") for name, word in _OF_PLAN.items() if name in run.topology
    ]
    finite = [step for step in run.steps if step.loss is not None and step.perfect is not None]
    return (
        ", ".join([f"ranks {run.ranks}", *(part for part in plan if not part.endswith((" 1", " False")))]),
        run.precision,
        f"{1000 * run.step_median:.1f} ms",
        f"{run.tokens_per_second:,.0f}",
        "" if run.flop_utilisation is None else f"{run.flop_utilisation:.1%}",
        f"{run.goodput:.1%}",
        f"{max(run.peak_bytes.values(), default=0) / 2**30:.1f} GiB",
        f"{finite[0].loss:.3f} to {finite[-1].loss:.3f} of {finite[-1].perfect:.3f}" if finite else "",
        f"{run.model}, {run.parameters:.3g} parameters",
    )


def _describe_state(run: TrainingRecord) -> str:
    """Where the time went, the longest phase first; features and forms."""
    spent = sorted(run.phases_ns.items(), key=lambda phase: -phase[1])
    settings = (f"{name} {value}" for name, value in (*run.features.items(), *run.forms.items()))
    return "; ".join([", ".join(f"{name} {ns / 1e9:.1f} s" for name, ns in spent if ns), ", ".join(settings)])
