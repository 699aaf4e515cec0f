"""What a session observed: one target, one stack, a receipt a probe; and the grid over many stacks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, Literal

from pydantic import Field

from ..errors import Exit, NothingSelected, WrongArguments, exit_for
from ..evidence.receipt import Machine, Outcome, Receipt
from ..evidence.store import ReceiptInvalid, read_receipts
from ..evidence.values import Frozen

NO_RECEIPT: Final = "there is no receipt"


class SessionResult(Frozen):
    """One session, whatever its probes look at.

    Attributes:
        target, stack: what was run where.
        requested: "te" or "native", and why it is that.
        interpreter: that the probes ran in, and why it is that one.
        folder: of the receipts; empty where none was written.
        seconds: wall-clock time of the session.
        receipts: one for every probe that was selected, in their order in the matrix.
    """

    tool: str
    target: str
    stack: str
    requested: str
    requested_because: str
    interpreter: str
    folder: str
    seed: int
    seconds: float
    receipts: tuple[Receipt, ...]

    @property
    def holds(self) -> bool:
        """Whether every selected probe ran and is good."""
        return bool(self.receipts) and all(receipt.outcome.is_good for receipt in self.receipts)

    @property
    def breaks(self) -> bool:
        """Whether anything ran and is not good; what did not run at all is lost evidence, not a breakage."""
        return any(not r.outcome.is_good and r.outcome is not Outcome.NOT_RUN for r in self.receipts)

    @property
    def exit(self) -> Exit:
        """Closed by a breakage; not open where a probe did not run."""
        return exit_for(breaks=self.breaks, lacks=not self.holds)


class ParityResult(SessionResult):
    """A session of the seven bridge modules, in dependency order."""

    schema_id: Literal["megacpp-validate/parity/1"] = "megacpp-validate/parity/1"


class SmokeSession(SessionResult):
    """A session of the smoke run: a receipt a cell, with the training runs in it."""

    schema_id: Literal["megacpp-validate/moe-smoke/1"] = "megacpp-validate/moe-smoke/1"


class SupportCell(Frozen):
    """What is known of one module in one stack on one target.

    Attributes:
        outcome: `not-run` where there is no receipt.
        reason: why, where it is not good.
        passed, total: checks.
    """

    module: str
    outcome: Outcome
    reason: str = ""
    passed: int = 0
    total: int = 0


class SupportRow(Frozen):
    """One stack on one target, and the machine it was seen on."""

    stack: str
    target: str
    machine: Machine
    started: str
    cells: tuple[SupportCell, ...]


class SupportGrid(Frozen):
    """Every stack that some receipts are of.

    Attributes:
        modules: the columns, in dependency order.
        rows: by target, then by stack.
        unreadable: files that are no receipts, with what is wrong with each.
    """

    schema_id: Literal["megacpp-validate/support/1"] = "megacpp-validate/support/1"
    modules: tuple[str, ...]
    rows: tuple[SupportRow, ...]
    unreadable: dict[str, str] = Field(default_factory=dict)

    @property
    def exit(self) -> Exit:
        """A file that cannot be read is evidence that is missing; the grid judges nothing else."""
        return exit_for(breaks=False, lacks=bool(self.unreadable))


def read_support(folders: Sequence[Path], modules: Sequence[str]) -> SupportGrid:
    """The grid of some folders of receipts.

    Raises:
        WrongArguments: there is no such folder.
        NothingSelected: no folder has a receipt.
    """
    try:
        found = [read_receipts(folder) for folder in folders]
    except ReceiptInvalid as fault:
        raise WrongArguments(str(fault)) from fault
    receipts = [receipt for folder in found for receipt in folder.found.values()]
    unreadable = {str(fault.file): fault.reason for folder in found for fault in folder.unreadable}
    if not receipts and not unreadable:
        raise NothingSelected(
            f"there is no receipt in {', '.join(map(str, folders))}. Likely cause: a typing error, or no run wrote "
            "there. Next step: give folders of receipts, such as docs/evidence/h200/*/."
        )
    return build_support(receipts, modules, unreadable)


def build_support(receipts: Iterable[Receipt], modules: Sequence[str], unreadable: dict[str, str]) -> SupportGrid:
    """The grid of stacks x modules; a cell without a receipt is `not-run`, never left out."""
    rows: dict[tuple[str, str], dict[str, Receipt]] = {}
    for receipt in receipts:
        rows.setdefault((receipt.target, receipt.stack), {})[receipt.probe] = receipt
    return SupportGrid(
        modules=tuple(modules),
        rows=tuple(_support_row(*key, rows[key], modules) for key in sorted(rows, key=_natural)),
        unreadable=unreadable,
    )


def _support_row(target: str, stack: str, found: dict[str, Receipt], modules: Sequence[str]) -> SupportRow:
    first = min(found.values(), key=lambda receipt: receipt.started)
    # A probe that died has no machine to tell; any other of the row has.
    machine = max((receipt.machine for receipt in found.values()), key=lambda machine: len(machine.gpu + machine.torch))
    cells = tuple(_support_cell(module, found.get(module)) for module in modules)
    return SupportRow(stack=stack, target=target, machine=machine, started=first.started, cells=cells)


def _support_cell(module: str, receipt: Receipt | None) -> SupportCell:
    if receipt is None:
        return SupportCell(module=module, outcome=Outcome.NOT_RUN, reason=NO_RECEIPT)
    passed = sum(check.passed for check in receipt.checks)
    return SupportCell(
        module=module, outcome=receipt.outcome, reason=receipt.reason, passed=passed, total=len(receipt.checks)
    )


def _natural(key: tuple[str, str]) -> list[tuple[int, str]]:
    """Releases in their order: te2.9.0 before te2.12.0."""
    pieces = re.split(r"(\d+)", "\n".join(key))
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in pieces]
