"""Sessions of parity, FP8 and the training smoke, the loss gate, training runs, and a run of many cells."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from ...environments.host_session import SessionResult, SmokeSession
from ...environments.matrix import MatrixPlan, MatrixRun
from ...evidence.receipt import Machine, Outcome, Receipt, TrainingRecord
from ...gate.fp8 import Fp8Result
from ...gate.loss import LossGateResult, LossOutcome, LossVerdict
from ...text import clean_line, count, first_sentence
from ..curves import draw_loss_curves, draw_training
from ..document import Block, Content, Details, Diagnostic, Document, Paragraph, Preformatted, Table
from ..marks import Tone, bad, mark_exit, mark_of, missing, quiet, risk
from .receipt import (
    describe_check,
    describe_machine,
    describe_receipt,
    find_cause,
    find_doubles,
    find_fallbacks,
    show_worst,
    tabulate_checks,
)  # fmt: skip
from .words import list_cases, sum_up, tabulate

_PLAN: Final = ("data", "expert_parallel", "tensor_parallel", "sequence_parallel", "accumulate")
_COLUMNS: Final = ("cell", "", "plan", "precision", "step", "tokens/s", "MFU", "goodput", "memory", "loss")


def describe_session(result: SessionResult) -> Document:
    """A row a probe, then everything that is not good, then what training did."""
    name = "MoE smoke" if isinstance(result, SmokeSession) else "FP8" if isinstance(result, Fp8Result) else "Parity"
    group = f"{name.lower()}.{result.stack.replace('.', '_')}.{result.target}"
    receipts = result.receipts
    machine = next((one.machine for one in receipts if one.machine.python), Machine())
    cases = [describe_receipt(receipt, group=group) for receipt in receipts]
    extra = list(_describe_extra(result, group))
    unmet = [case for case in extra if case.mark.tone is not Tone.GOOD]
    shown = [
        case
        for receipt, case in zip(receipts, cases, strict=True)
        if not receipt.outcome.is_good or find_fallbacks(receipt)
    ]
    nothing_ran = all(receipt.outcome is Outcome.NOT_RUN for receipt in receipts)
    curves = [verdict for verdict in result.loss if verdict.series] if isinstance(result, Fp8Result) else []
    trained = receipts if isinstance(result, SmokeSession) else ()
    blocks: tuple[Block, ...] = (
        Paragraph(f"Requested: {result.requested}. {result.requested_because}."),
        Paragraph(f"{describe_machine(machine)}; seed {result.seed}."),
        *(Paragraph(double, risk("second copy")) for double in find_doubles(receipts)),
        _tabulate(receipts),
        *describe_training((receipt.probe, receipt, run) for receipt in trained for run in find_main_runs(receipt)),
        *(shown[:1] if nothing_ran else shown),  # one machine, one reason
        *unmet,
        Details("Loss curves of FP8 beside BF16", tuple(map(draw_loss_curves, curves))),
        *(Details(f"{one.probe}: {count(one.checks, 'check')}", (tabulate_checks(one.checks),)) for one in receipts),
        Paragraph(f"{result.interpreter}; {result.seconds:.1f} s. Receipts and logs: `{result.folder or 'not kept'}`."),
    )
    mark = mark_exit(result.exit, open_="holds", closed="fails", otherwise="not run")
    if not receipts:
        summary = "has no probe to run: nothing is known"
    elif nothing_ran:
        summary = f"did not run: {first_sentence(find_cause(receipts[0])).rstrip('.')}"
    else:
        summary = f"{'does not hold' if result.exit else 'holds'}: {clean_line(sum_up([*cases, *unmet]))}"
    title = f"{name} of {result.stack} on {result.target}"
    return Document(title, f"{name} {summary}.", mark, blocks, (*cases, *extra))


def _tabulate(receipts: Iterable[Receipt]) -> Table:
    rows = []
    for one in receipts:
        seen = sorted({name for backend in one.backends for name in backend.observed})
        backends = f"{one.requested}: {', '.join(seen)}" if seen else one.requested
        checks = f"{sum(check.passed for check in one.checks)}/{len(one.checks)}" if one.checks else ""
        seconds = f"{one.seconds.get('total', 0.0):.1f}"
        rows.append((one.probe, mark_of(one.outcome), backends, checks, show_worst(one), seconds))
    columns = ("probe", "outcome", "requested: seen", "checks", "worst", "seconds")
    return Table(columns, tuple(rows), numeric=frozenset({3, 4, 5}))


def _describe_extra(result: SessionResult, group: str) -> Iterator[Diagnostic]:
    """What a session judges beside its cells."""
    if not isinstance(result, Fp8Result):
        return
    yield from (replace(_describe_verdict(verdict), group=group) for verdict in result.loss)
    if result.loss_missing:
        yield Diagnostic("loss gate", missing("no verdict"), group, f"Left no curve: {', '.join(result.loss_missing)}.")
    if result.policy is not None and result.policy.breaks:
        message = "The FP8 policy and its presets disagree."
        yield Diagnostic("policy", bad("fail"), group, message, help="run `megacpp-validate fp8-policy`")


def describe_losses(result: LossGateResult) -> Document:
    """Each verdict with what failed and its curves; every check is folded."""
    cases = tuple(map(_describe_verdict, result.verdicts))
    blocks: list[Block] = []
    for verdict, case in zip(result.verdicts, cases, strict=True):
        blocks += [case, draw_loss_curves(verdict)] if verdict.series else [case]
        blocks.append(Details(f"{case.name}: {count(verdict.checks, 'check')}", (tabulate_checks(verdict.checks),)))
    answer = f"FP8 recipes beside BF16: {sum_up(cases) or 'none: no loss curve is here; `nox -s fp8` writes them'}."
    mark = mark_exit(result.exit.value, otherwise="not comparable")
    return Document(f"Loss gate on {result.folder}", answer, mark, tuple(blocks), cases)


def _describe_verdict(verdict: LossVerdict) -> Diagnostic:
    gaps = [abs(gap) for each in verdict.series for gap in each.gap[len(each.gap) // 2 :]]
    bar = "" if verdict.bar is None else f", bar {verdict.bar:.4f}"
    return Diagnostic(
        name=f"{verdict.of} {verdict.recipe or 'without a recipe'}".strip(),
        mark=missing("not comparable") if verdict.outcome is LossOutcome.REFUSED else mark_of(verdict.outcome),
        group="loss_gate",
        message="; ".join(verdict.refusals),
        fields=(
            ("out", tuple(describe_check(check) for check in verdict.checks if not check.passed)),
            ("gap, second half", f"{max(gaps):.4f} nats{bar}" if gaps else ""),
        ),
    )


def find_main_runs(receipt: Receipt | None) -> list[TrainingRecord]:
    """The run that a cell is about, which it trains first."""
    return [run for run in receipt.training if run.name == "plan"] if receipt else []


def describe_training(runs: Iterable[tuple[Content, Receipt, TrainingRecord]]) -> tuple[Block, ...]:
    """A table of runs, and a drawing of each; `runs` as `tabulate_training` takes them."""
    listed = tuple(runs)
    figures = (
        Details(f"{receipt.cell}, run {run.name}: {_describe_phases(run)}", (draw_training(run),))
        for _, receipt, run in listed
    )
    return tabulate_training(listed), tabulate_productivity(listed), *figures


def tabulate_productivity(runs: Iterable[tuple[Content, Receipt, TrainingRecord]]) -> Table:
    """Tokens a GPU-hour, and how many of BF16 lead to the same loss; runs without a twin in BF16 are left out.

    Args:
        runs: as `tabulate_training` takes them.
    """
    listed = [(name, run, run.tokens_to_goal) for name, _, run in runs]
    twins = {(run.model, run.ranks): tokens for _, run, tokens in listed if run.precision == "bf16"}
    rows = []
    for name, run, tokens in listed:
        if twin := twins.get((run.model, run.ranks)):
            worth = f"{run.tokens_per_gpu_hour * twin / tokens:,.0f}" if tokens else "goal not reached"
            needed = f"{tokens:,}" if tokens else ""
            rows.append((name, run.precision, f"{run.tokens_per_gpu_hour:,.0f}", f"{run.goal:.3f}", needed, worth))
    columns = ("cell", "precision", "tokens/GPU-h", "goal, nats", "tokens to it", "BF16 tokens/GPU-h to the same loss")
    return Table(columns, tuple(rows), "Productivity", frozenset(range(2, 6)))


def tabulate_training(runs: Iterable[tuple[Content, Receipt, TrainingRecord]]) -> Table:
    """A row a run. Wall time is that of rank 0; memory that of the rank that took most; MFU is of the peak in bf16.

    Args:
        runs: what a row is called, the receipt of the cell, and the run.
    """
    rows = tuple((name, mark_of(receipt.outcome), *_show_run(run)) for name, receipt, run in runs)
    return Table(_COLUMNS, rows, "Training runs", frozenset(range(4, 9)))


def _show_run(run: TrainingRecord) -> tuple[str, ...]:
    values = {name.removesuffix("_parallel"): run.topology.get(name, "1") for name in _PLAN}
    plan = (f"{name} {value}".removesuffix(" True") for name, value in values.items() if value not in ("1", "False"))
    finite = [step for step in run.steps if step.loss is not None and step.perfect is not None]
    return (
        ", ".join([run.model, f"ranks {run.ranks}", *plan]),
        run.precision,
        f"{1000 * run.step_median:.1f} ms",
        f"{run.tokens_per_second:,.0f}",
        "" if run.flop_utilisation is None else f"{run.flop_utilisation:.1%}",
        f"{run.goodput:.1%}",
        f"{max(run.peak_bytes.values(), default=0) / 2**30:.1f} GiB",
        f"{finite[0].loss:.3f} to {finite[-1].loss:.3f} of {finite[-1].perfect:.3f}" if finite else "",
    )


def _describe_phases(run: TrainingRecord) -> str:
    """Where the time went, the longest phase first; features and forms."""
    spent = sorted(run.phases_ns.items(), key=lambda phase: -phase[1])
    settings = (f"{name} {value}" for name, value in (*run.features.items(), *run.forms.items()))
    return "; ".join([", ".join(f"{name} {ns / 1e9:.1f} s" for name, ns in spent if ns), ", ".join(settings)])


def describe_matrix(run: MatrixRun) -> Document:
    """Every cell, and each that is not good in full."""
    cases = list_cases(run.cells, "matrix", "cell", "outcome")
    blocks: tuple[Block, ...] = (
        tabulate(run.cells, "cell outcome node seconds kept retries"),
        *(case for case, cell in zip(cases, run.cells, strict=True) if not cell.outcome.is_good),
        Paragraph(f"Receipts and logs: `{run.folder}`; {run.seconds:.1f} s."),
    )
    mark = mark_exit(run.exit, otherwise="incomplete")
    return Document("Matrix", f"{count(run.cells, 'cell')}: {sum_up(cases)}.", mark, blocks, cases)


def describe_matrix_plan(plan: MatrixPlan) -> Document:
    """Every cell that would be run, and the options of the jobs of each target."""
    options = {cell.target: cell.asks for cell in plan.cells if cell.asks}
    blocks: tuple[Block, ...] = (
        tabulate(plan.cells, "cell gpus seconds limit_s"),
        *(Preformatted(f"{target}: sbatch {' '.join(words)}") for target, words in options.items()),
    )
    summary = f"{count(plan.cells, 'cell')} would run with the launcher {plan.launcher}."
    return Document("Matrix, planned", summary, quiet("plan"), blocks)
