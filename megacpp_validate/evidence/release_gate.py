"""Whether receipts let a release through, as typed values: every receipt accepted or rejected with its reasons."""

from __future__ import annotations

from datetime import date
from enum import StrEnum
from typing import Final, Literal

from pydantic import model_validator

from .receipt import Outcome
from .values import Cause, Frozen


class GateRule(StrEnum):
    """What a receipt is held to. `of_evidence`: breaking it says that there is no evidence, not what it would say."""

    MISSING = "missing"  # no receipt of a required cell
    UNREADABLE = "unreadable"  # truncated, NaN, of a later schema, contradicting itself
    NAME = "name"  # a name that no cell has, or a file under the name of another cell, or a link
    STACK = "stack"  # of another stack than is judged, or loaded from another release than its name says
    TARGET = "target"  # of another target than is judged, or run on another GPU than the target has
    NOT_REQUIRED = "not-required"
    CLOCK = "clock"  # no time of start, or one after the decision
    AGE = "age"
    SCHEMA = "schema"  # of a schema that does not tell what is asked
    REQUESTED = "requested"  # asked for native where Transformer Engine is judged, or the other way round
    ENVIRONMENT = "environment"  # cells of more than one environment
    COMMIT = "commit"
    IMAGE = "image"
    LOCK = "lock"
    SIGNATURE = "signature"  # edited, added or lost since the folder was signed
    REPLAYED = "replayed"  # the same bytes, or the same observations, a second time
    DUPLICATE = "duplicate"  # another content from the same start of the same cell
    SUPERSEDED = "superseded"  # older than another receipt of its cell
    NOT_RUN = "not-run"
    ONLY_TIMED = "only-timed"  # a second run for the noise of the card, which judges nothing
    BASELINE = "baseline"  # nothing to compare speed and memory with
    UNWATCHED = "unwatched"  # a library compiled where nobody could see it
    OUTCOME = "outcome"
    CONTRADICTED = "contradicted"  # an older receipt of the same commit and environment is red
    SLOWER = "slower"
    MEMORY = "memory"
    JIT = "jit"  # compiled after warm-up
    SECOND_COPY = "second-copy"
    FALLBACK = "fallback"

    @property
    def of_evidence(self) -> bool:
        """Whether what breaks it is no evidence, of a breakage or of anything else."""
        return self not in BREAKAGES


BREAKAGES: Final = frozenset({
    GateRule.OUTCOME, GateRule.CONTRADICTED, GateRule.SLOWER, GateRule.MEMORY, GateRule.JIT, GateRule.SECOND_COPY,
    GateRule.FALLBACK,
})  # fmt: skip
# A waiver is leave to ship with a breakage that is known. Evidence that is not there cannot be waived into being.
WAIVABLE: Final = BREAKAGES


class CellVerdict(Frozen):
    """One receipt, or one required cell without any.

    Attributes:
        cell: its id, or what its file is called where that cannot be read.
        run: folder below the store that it lies in; "." for the store itself, empty where there is no receipt.
        outcome: None where there is no receipt, or none that can be read.
        required: whether it is what was judged for a cell that the release requires.
        accepted: whether it is evidence that its cell holds; of a required one, whether its cell lets the gate open.
        closes: whether it keeps the gate closed. One that is not required does so where what it says cannot be known
            and may be of a required cell, or where the rules want every cell green.
        rules: that it breaks, in the order of `reasons`; those that a waiver holds off too.
        reasons: why it is rejected, one for each of `rules`.
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


class GateCulprit(Frozen):
    """One cause of a closed gate.

    Attributes:
        module: bridge module or other probe; "environment" where several share it.
        cause: its class.
        component: below Transformer Engine that is at fault: "cuDNN", "cuBLAS"; empty where it is none.
        cascades: modules that are red by it.
        summary: what was seen, in a sentence.
        next_step: what to do.
    """

    module: str
    cause: Cause
    component: str = ""
    cascades: tuple[str, ...] = ()
    summary: str = ""
    next_step: str = ""


class UnreadableReceipt(Frozen):
    """A file that is no receipt; `file` is below the store."""

    file: str
    reason: str
    receipt_sha256: str = ""


class GateWaiver(Frozen):
    """A waiver of this release, and what it does at the time of the decision.

    Attributes:
        cell, rule: what it holds off, and of which cell.
        owner: who answers for it.
        expires: the last day on which it can hold, UTC.
        in_vain: whether it is of an import, of NaN or Inf, which stand although its day has not come.
    """

    cell: str
    rule: GateRule
    owner: str
    reason: str
    link: str
    expires: date
    state: WaiverState
    in_vain: bool = False


class GateDecision(Frozen):
    """Open or closed, and why.

    The same receipts, rules and time give the same decision, byte for byte.

    Attributes:
        release: kind of release, as `matrix/gate.toml` names it.
        stack, target: that is judged.
        open: whether it may be released.
        exit_code: 0 open; 1 closed by a breakage; 4 closed because evidence is missing, and no breakage is seen.
        cells: required ones in the order of the matrix, then every other receipt by its place.
        missing: required cells that no receipt is accepted as evidence of, for want of evidence.
        unreadable: files that are no receipts.
        foreign: receipts of another stack or target, or of a cell that is not required, as "run/cell".
        culprits: whose breakages close it, in dependency order.
        commit, image_digest, lock_hash: that the accepted receipts carry; empty where they carry none.
        signed_by: who signed the folder; empty where that was not asked for.
        baseline: stack that speed and memory were compared with; empty where none was.
        rules_sha256: of the rules that were applied, with their waivers.
        receipts_sha256: of the manifest of the store: the lines that `sha256sum` writes, sorted by file.
        baseline_sha256: the same of the baseline's; empty without one.
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
    unreadable: tuple[UnreadableReceipt, ...] = ()
    foreign: tuple[str, ...] = ()
    waivers: tuple[GateWaiver, ...] = ()
    culprits: tuple[GateCulprit, ...] = ()
    commit: str = ""
    image_digest: str = ""
    lock_hash: str = ""
    signed_by: str = ""
    baseline: str = ""
    rules_sha256: str
    receipts_sha256: str
    baseline_sha256: str = ""
    judged_at: str

    @model_validator(mode="after")
    def _says_one_thing(self) -> GateDecision:
        closing = bool(self.closing)
        if self.exit_code not in (0, 1, 4):
            raise ValueError(f"exit code {self.exit_code} is none of a decision: 0, 1 or 4")
        if not self.open == (self.exit_code == 0) == (not closing):
            word, cells = ("open" if self.open else "closed"), ("a cell closes it" if closing else "no cell closes it")
            raise ValueError(f"it says that the gate is {word}, its exit code is {self.exit_code}, and {cells}")
        if bare := next((cell for cell in self.cells if len(cell.rules) != len(cell.reasons)), None):
            raise ValueError(f"{bare.cell} breaks {len(bare.rules)} rules, and says {len(bare.reasons)} reasons")
        return self

    @property
    def required(self) -> tuple[CellVerdict, ...]:
        """The required cells, in the order of the matrix."""
        return tuple(cell for cell in self.cells if cell.required)

    @property
    def closing(self) -> tuple[CellVerdict, ...]:
        """What keeps the gate closed."""
        return tuple(cell for cell in self.cells if cell.closes)


class WaiverState(StrEnum):
    """What a waiver does on a day."""

    HOLDS = "holds"  # lets its preset through
    EXPIRED = "expired"  # lets nothing through any more
    NOT_NEEDED = "not-needed"  # its rule refuses nothing of its preset
