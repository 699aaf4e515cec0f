"""A session of FP8: a receipt a cell, the loss gate's verdicts, and what the policy says of presets."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final, Literal

from ..catalog.bridge import Catalog, Fp8Cell
from ..environments.host_session import Progress, SessionOptions, run_session
from ..environments.plan import choose_fp8_cells, find_target, plan_fp8
from ..environments.session_result import SessionResult
from ..evidence.receipt import Outcome
from ..probes.order import Order
from .fp8_policy import PolicyResult, decide_policy
from .loss import LossOutcome, LossVerdict, decide_curves

_TRAINING: Final = "fp8.loss"  # code of the cells that leave curves


class Fp8Result(SessionResult):
    """One session.

    Attributes:
        loss: the loss gate's verdict on each recipe that was trained.
        loss_missing: why there is none, where training was selected; empty where there is one.
        policy: what the policy of low precision says of the presets.
    """

    schema_id: Literal["megacpp-validate/fp8/1"] = "megacpp-validate/fp8/1"
    loss: tuple[LossVerdict, ...] = ()
    loss_missing: str = ""
    policy: PolicyResult | None = None

    @property
    def holds(self) -> bool:
        """Whether every selected cell ran and is good, and so is every verdict on what was trained."""
        verdicts = all(verdict.outcome is LossOutcome.PASS for verdict in self.loss)
        policy = self.policy is None or self.policy.holds
        return super().holds and verdicts and policy and not self.loss_missing

    @property
    def breaks(self) -> bool:
        """Whether anything ran and is not good; curves that cannot be compared are lost evidence."""
        policy = self.policy is not None and not self.policy.holds
        return super().breaks or policy or any(verdict.outcome is LossOutcome.FAIL for verdict in self.loss)


def run_fp8(catalog: Catalog, matrix: Path | None, options: SessionOptions, progress: Progress) -> Fp8Result:
    """Run the cells, and judge the curves that training left beside their receipts. Raises as `run_session`.

    Args:
        matrix: folder of the matrix; the project's own without it.
    """
    options.require_cells()
    target = find_target(catalog, options.target)

    def plan(blank: Order) -> tuple[Order, ...]:
        return plan_fp8(catalog, blank, options.probes or ())

    rows = choose_fp8_cells(catalog, options.probes or ())
    policy = decide_policy(matrix)  # first: a file of the matrix that is wrong must not cost a session
    session = run_session(target, options, plan, progress, rows)
    verdicts, absent = _judge_losses(session, rows)
    return Fp8Result(**dict(session), loss=verdicts, loss_missing=absent, policy=policy)


def _judge_losses(session: SessionResult, rows: Iterable[Fp8Cell]) -> tuple[tuple[LossVerdict, ...], str]:
    """The verdicts on the curves that this session's training left, and which curves are absent."""
    wanted = {row.id: row.settings.get("recipes", "").split() for row in rows if row.code == _TRAINING}
    trained = {receipt.cell: receipt for receipt in session.receipts if receipt.probe in wanted}
    if not any(receipt.outcome in (Outcome.PASS, Outcome.FAIL) for receipt in trained.values()):
        return (), ""  # not selected, or it did not come to an end: the cell says so
    verdicts = tuple(verdict for verdict in decide_curves(Path(session.folder)) if verdict.of in trained)
    judged = {(verdict.of, verdict.recipe) for verdict in verdicts}
    absent = []
    for cell, receipt in trained.items():
        silent = [recipe for recipe in wanted[receipt.probe] if (cell, recipe) not in judged]
        if silent and receipt.outcome is Outcome.PASS:
            absent.append(f"{cell} left no curve of {', '.join(silent)}")
    return verdicts, "; ".join(absent)
