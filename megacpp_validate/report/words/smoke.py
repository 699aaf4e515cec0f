"""What training runs of a session did, in words and numbers: a row a run that ended well."""

from __future__ import annotations

from typing import Final, NamedTuple

from megacpp_validate.evidence.receipt import Receipt
from megacpp_validate.evidence.training import TrainingRecord

from ...environments.session_result import SessionResult, SmokeSession, main_record

HEADINGS: Final = ("cell", "model", "plan", "precision", "step", "tokens/s", "MFU", "goodput", "memory", "loss")
COMPARED: Final = ("cell", "plan", "step", "tokens/s", "MFU", "goodput", "memory")  # of one cell with another
_OF_PLAN: Final = {
    "data": "data", "expert_parallel": "experts", "tensor_parallel": "tensor", "accumulate": "passes",
}  # fmt: skip


class Trained(NamedTuple):
    """A cell, and the run that it is about."""

    receipt: Receipt
    record: TrainingRecord


def find_trained(result: SessionResult) -> tuple[Trained, ...]:
    """The run that each cell of a smoke session is about; none of another session."""
    if not isinstance(result, SmokeSession):
        return ()
    found = ((receipt, main_record(receipt)) for receipt in result.receipts)
    return tuple(Trained(receipt, record) for receipt, record in found if record is not None)


def say_row(trained: Trained) -> tuple[str, ...]:
    """A row under `HEADINGS`."""
    receipt, record = trained
    peak = max(record.peak_bytes.values(), default=0)
    return (
        receipt.probe,
        f"{record.model}, {say_parameters(record)}",
        say_plan(record),
        record.precision,
        f"{1000 * record.step_median:.1f} ms",
        f"{record.tokens_per_second:,.0f}",
        "" if record.flop_utilisation is None else f"{record.flop_utilisation:.1%}",
        f"{record.goodput:.1%}",
        f"{peak / 2**30:.1f} GiB" if peak else "",
        say_losses(record),
    )


def say_trained(receipt: Receipt) -> list[str]:
    """Every run of a cell in a line, for a log."""
    return [
        f"{record.name}: " + ", ".join(f"{name} {said}" for name, said in zip(HEADINGS[1:], row, strict=True) if said)
        for record in receipt.training
        for row in (say_row(Trained(receipt, record))[1:],)
    ]


def say_plan(record: TrainingRecord) -> str:
    """Ranks, and what they share out: "4 ranks: data 4, experts 2"."""
    parts = [
        f"{word} {record.topology[name]}" for name, word in _OF_PLAN.items() if record.topology.get(name, "1") != "1"
    ]
    parts += ["positions split"] if record.topology.get("sequence_parallel") == "True" else []
    ranks = f"{record.ranks} rank{'' if record.ranks == 1 else 's'}"
    return f"{ranks}: {', '.join(parts)}" if parts else ranks


def say_parameters(record: TrainingRecord) -> str:
    """How many parameters, in a unit that suits."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if record.parameters >= size:
            return f"{record.parameters / size:.3g}{unit}"
    return str(record.parameters)


def say_losses(record: TrainingRecord) -> str:
    """From the first loss to the last, and what a perfect model would have there."""
    finite = [step for step in record.steps if step.loss is not None and step.perfect is not None]
    if not finite:
        return ""
    return f"{finite[0].loss:.3f} to {finite[-1].loss:.3f} of {finite[-1].perfect:.3f}"


def say_phases(record: TrainingRecord) -> str:
    """Where the time went, the longest first."""
    spent = sorted(record.phases_ns.items(), key=lambda phase: -phase[1])
    return ", ".join(f"{name} {ns / 1e9:.1f} s" for name, ns in spent if ns)


def say_state(record: TrainingRecord) -> str:
    """Features that are off, and forms: what tells this run from another of the same model."""
    off = [name for name, value in record.features.items() if value == "False"]
    forms = [f"{name} {value}" for name, value in record.forms.items()]
    preset = record.features.get("preset", "")
    said = [f"preset {preset}" if preset else "", f"off: {', '.join(off)}" if off else "", ", ".join(forms)]
    return "; ".join(filter(None, said))
