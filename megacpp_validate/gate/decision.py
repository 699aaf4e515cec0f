"""What the release gate decided, as typed values: every receipt accepted or rejected with its reasons."""

from __future__ import annotations

from datetime import date
from enum import StrEnum
from typing import Literal

from ..catalog.gate import GateRule
from ..diagnosis.culprits import Culprit
from ..errors import Exit
from ..evidence.receipt import Outcome
from ..evidence.values import Frozen


class WaiverState(StrEnum):
    """What a waiver does on a day."""

    HOLDS = "holds"
    EXPIRED = "expired"
    NOT_NEEDED = "not-needed"  # its rule refuses nothing of its cell


class JudgedWaiver(Frozen):
    """A waiver, and what it does on the day of a decision.

    Attributes:
        rule: what it holds off.
        owner: who answers for it.
        expires: the last day on which it can hold, UTC.
    """

    rule: str
    owner: str
    reason: str
    link: str
    expires: date
    state: WaiverState


class CellVerdict(Frozen):
    """One receipt, or one required cell without any.

    Attributes:
        cell: its id, or what its file is called where that cannot be read.
        run: folder below the store; "." for the store itself, empty where there is no receipt.
        outcome: None where there is no receipt, or an invalid one.
        required: whether it is what was judged for a cell that the release requires.
        accepted: whether it is evidence that its cell holds; of a required one, whether its cell lets the gate open.
        closes: whether it keeps the gate closed.
        rules: that it breaks, in the order of `reasons`; those that a waiver holds off too.
        warnings: what a person should know and no rule refuses.
        waived_by: owner of the waiver that holds off what it breaks; empty where none does.
        receipt_sha256: of its bytes; empty where there are none.
    """

    cell: str
    stack: str = ""
    target: str = ""
    probe: str = ""
    run: str = ""
    outcome: Outcome | None = None
    required: bool = False
    accepted: bool = False
    closes: bool = False
    rules: tuple[GateRule, ...] = ()
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    waived_by: str = ""
    receipt_sha256: str = ""


class GateWaiver(JudgedWaiver):
    """A waiver of one cell of this release.

    Attributes:
        in_vain: whether it is of an import, of NaN or Inf, which stand although its day has not come.
    """

    cell: str
    rule: GateRule
    in_vain: bool = False


class GateDecision(Frozen):
    """Open or closed, and why. The same receipts, rules and time give the same decision, byte for byte.

    Attributes:
        release: kind of release, as `matrix/gate.toml` names it.
        exit_code: 0 open; 1 closed by a breakage; 4 closed because evidence is missing, and no breakage is seen.
        cells: required ones in the order of the matrix, then every other receipt by its place.
        missing: required cells that no receipt is accepted as evidence of, because evidence is missing.
        culprits: whose breakages close it, in dependency order.
        commit, image_digest, lock_hash: that the accepted receipts carry; empty where they carry none.
        signed_by: who signed the folder; empty where no signature was requested.
        baseline: stack that speed and memory were compared with; empty where none was.
        rules_sha256: of the rules that were applied, with their waivers.
        receipts_sha256, baseline_sha256: of the manifests: the lines that `sha256sum` writes, sorted by file.
        judged_at: ISO 8601, UTC.
    """

    schema_id: Literal["megacpp-validate/release-gate/1"] = "megacpp-validate/release-gate/1"
    tool: str
    release: str
    stack: str
    target: str
    open: bool
    exit_code: int
    cells: tuple[CellVerdict, ...]
    missing: tuple[str, ...] = ()
    waivers: tuple[GateWaiver, ...] = ()
    culprits: tuple[Culprit, ...] = ()
    commit: str = ""
    image_digest: str = ""
    lock_hash: str = ""
    signed_by: str = ""
    baseline: str = ""
    rules_sha256: str
    receipts_sha256: str
    baseline_sha256: str = ""
    judged_at: str

    @property
    def exit(self) -> Exit:
        """The code that the verb ends with."""
        return Exit(self.exit_code)

    @property
    def required(self) -> tuple[CellVerdict, ...]:
        """The required cells, in the order of the matrix."""
        return tuple(cell for cell in self.cells if cell.required)

    @property
    def closing(self) -> tuple[CellVerdict, ...]:
        """What keeps the gate closed."""
        return tuple(cell for cell in self.cells if cell.closes)
