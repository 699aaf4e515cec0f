"""What receipts must show before a release, as typed values: the reader of `gate.toml` and `gate_waivers.toml`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Annotated, ClassVar, Final, Literal, TypeVar

from pydantic import Field, model_validator

from ..errors import WrongArguments
from ..evidence.receipt import READABLE
from .bridge import Catalog, Target, Targets
from .file import Names, Row, ids_of, read_rows

RULES: Final = "gate.toml"
WAIVERS: Final = "gate_waivers.toml"
IMPORTS: Final = "imports"  # the module that every other one stands on

PLAIN: Final = frozenset({"native", "sdpa"})  # what a path of plain PyTorch is claimed as, and seen as

Name = Annotated[str, Field(pattern=r"^[a-z0-9]+([-_][a-z0-9]+)*$")]
Words = Annotated[str, Field(pattern=r"[^\s\p{C}]")]  # something to read
Ratio = Annotated[float, Field(gt=1.0, allow_inf_nan=False)]
Good = Literal["pass", "expected-unsupported"]
Red = Literal["fail", "error", "import-error", "timeout"]
Group = Literal["modules", "compositions", "fp8"]
Versions = Literal["one", "unknown", "differ"]
Release = Annotated[str, Names("release")]


class GateRule(StrEnum):
    """What a receipt is held to. What breaks another rule than `BREAKAGES` is no evidence, of a breakage or not."""

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


BREAKAGES: Final = frozenset({
    GateRule.OUTCOME, GateRule.CONTRADICTED, GateRule.SLOWER, GateRule.MEMORY, GateRule.JIT, GateRule.SECOND_COPY,
    GateRule.FALLBACK,
})  # fmt: skip
# A waiver is leave to ship with a breakage that is known. Evidence that is not there cannot be waived into being.
WAIVABLE: Final = BREAKAGES


class ReleaseKind(Row):
    """What every receipt of one kind of release is held to.

    Attributes:
        says: what is released, for a person.
        counts: outcomes that let a cell through; no other than good ones can be written.
        contradicts: outcomes of an older receipt that its younger one, of the same commit and environment, does not
            take back.
        others: what a red receipt of the judged stack does whose cell is not required: "list" tells it, "close" closes.
        max_age_days: how old a receipt may be.
        clock_skew_s: by how much the clocks of two machines may differ.
        least_schema: oldest version of receipts that tells what is asked.
        commit: "one": the same in all; "clean": and no file of the checkout differed from it.
        environment: "one": the same in all.
        image, lock: "one": there, and the same in all.
        signature: whether the folder must be signed.
        baseline: whether speed and memory must be compared.
        clocks: of the timings that are compared.
        slowdown, memory: largest ratio to the baseline.
        memory_floor_mib: of GPU memory; what a peak may rise by in any case.
        jit_after: kernels that may be compiled after warm-up.
    """

    id: Name
    says: Words
    counts: list[Good] = Field(min_length=1)
    contradicts: list[Red]
    others: Literal["list", "close"]
    max_age_days: int = Field(ge=1, le=3660)
    clock_skew_s: int = Field(ge=0, le=86400)
    least_schema: int = Field(ge=1, le=len(READABLE))
    commit: Literal["one", "clean"]
    environment: Literal["one", "any"]
    image: Literal["one", "any"]
    lock: Literal["one", "any"]
    signature: Literal["required", "any"]
    baseline: Literal["required", "any"]
    clocks: list[Literal["cuda-events", "perf_counter"]]
    slowdown: Ratio
    memory: Ratio
    memory_floor_mib: float = Field(ge=0.0, allow_inf_nan=False)
    jit_after: int = Field(ge=0)


class Requirement(Row):
    """The cells that one kind of release wants of one target.

    Attributes:
        requested: what each of them must have asked for.
        groups: of the catalog, whatever is in them.
        probes: others.
        unsupported: those that may say so.
    """

    release: Release
    target: Annotated[str, Names("target")]
    requested: Literal["te", "native"]
    groups: list[Group] = Field(default_factory=list)
    probes: Annotated[list[str], Names("probe")] = Field(default_factory=list)
    unsupported: list[str] = Field(default_factory=list)
    named_by: ClassVar = ("release", "target")


class _Leave(Row):
    """What a rule lets pass, as a warning, and where.

    Attributes:
        probes: all where none is named.
    """

    releases: Annotated[list[str], Names("release")] = Field(min_length=1)
    targets: Targets
    probes: Annotated[list[str], Names("probe")] = Field(default_factory=list)
    reason: Words
    source: str = ""


class Unwatched(_Leave):
    """A library that may compile unseen."""

    library: Words


class SecondCopy(_Leave):
    """A library that may be mapped from these files, patterns with `*` and `?`, if it answers with these versions."""

    library: Words
    files: list[Words] = Field(min_length=2)
    versions: Versions

    @model_validator(mode="after")
    def _require_library(self) -> SecondCopy:
        if odd := [pattern for pattern in self.files if self.library not in PurePosixPath(pattern).name]:
            raise ValueError(f"{odd[0]!r} fits files other than {self.library}")
        return self


class Fallback(_Leave):
    """A path, a pattern, that may take this in place of what it asks for."""

    path: Words
    requested: Words
    claimed: str
    observed: list[Words] = Field(default_factory=list)


class Kernel(_Leave):
    """A kernel of a vendor that is told where a path, a pattern, ran by it."""

    path: Words
    observed: Words


class Shows(Row):
    """What a claim may be seen as."""

    claimed: Words
    observed: list[Words] = Field(min_length=1)
    named_by: ClassVar = ("claimed",)

    @model_validator(mode="after")
    def _require_no_fallback(self) -> Shows:
        if odd := [name for name in self.observed if (name in PLAIN) is not (self.claimed in PLAIN)]:
            raise ValueError(f"what runs {odd[0]} is a fallback, and not another name of {self.claimed}")
        return self


class ReleaseWaiver(Row):
    """Leave to release with a breakage of one cell, until a day."""

    release: Release
    cell: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+-]{0,255}$")
    rule: GateRule = Field(strict=False)
    owner: Words
    reason: Words
    link: str = Field(pattern=r"^https://\S+$")
    expires: date
    named_by: ClassVar = ("rule", "cell", "release")

    @model_validator(mode="after")
    def _require_waivable(self) -> ReleaseWaiver:
        if self.rule not in WAIVABLE:
            raise ValueError("evidence that is missing cannot be waived into being")
        if self.rule in (GateRule.OUTCOME, GateRule.CONTRADICTED) and self.cell.endswith(f"-{IMPORTS}"):
            raise ValueError("an import cannot be waived: every module stands on it")
        return self


class _RuleFile(Row):
    release: list[ReleaseKind] = Field(min_length=1)
    require: list[Requirement] = Field(min_length=1)
    unwatched: list[Unwatched] = Field(default_factory=list)
    second_copy: list[SecondCopy] = Field(default_factory=list)
    fallback: list[Fallback] = Field(default_factory=list)
    kernel: list[Kernel] = Field(default_factory=list)
    shows: list[Shows] = Field(default_factory=list)


class _WaiverFile(Row):
    waiver: list[ReleaseWaiver]


class GateRules(Row):
    """What one kind of release wants of one target.

    Attributes:
        probes: required, in the order of the matrix.
        stacks: id -> release of Transformer Engine, of every stack that the matrix has.
        order: bridge modules in dependency order.
    """

    kind: ReleaseKind
    target: Target
    requested: Literal["te", "native"]
    probes: tuple[str, ...]
    unsupported: tuple[str, ...]
    unwatched: tuple[Unwatched, ...]
    second_copies: tuple[SecondCopy, ...]
    fallbacks: tuple[Fallback, ...]
    kernels: tuple[Kernel, ...]
    shows: tuple[Shows, ...]
    waivers: tuple[ReleaseWaiver, ...]
    stacks: dict[str, str]
    order: tuple[str, ...]

    @property
    def sha256(self) -> str:
        """Of all of it: a decision names the rules by which it was made."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class GatePolicy:
    """Both files, and the catalog that they name cells of."""

    catalog: Catalog
    file: _RuleFile
    waivers: tuple[ReleaseWaiver, ...]

    def choose(self, release: str, target: str) -> GateRules:
        """What a kind of release requires of a target.

        Raises:
            WrongArguments: there is no such row.
        """
        rows = {(row.release, row.target): row for row in self.file.require}
        if (release, target) not in rows:
            known = ", ".join(" of ".join(pair) for pair in rows)
            raise WrongArguments(
                f"{RULES} has no [[require]] of the release {release!r} and the target {target!r}, and a release that "
                f"requires nothing would be open for anything. Next step: choose one of {known}, or add the row."
            )
        row = rows[release, target]
        return GateRules(
            kind=next(kind for kind in self.file.release if kind.id == release),
            target=next(one for one in self.catalog.targets if one.id == target),
            requested=row.requested,
            probes=tuple(_list_probes(row, self.catalog)),
            unsupported=tuple(row.unsupported),
            unwatched=_of(self.file.unwatched, release, target),
            second_copies=_of(self.file.second_copy, release, target),
            fallbacks=_of(self.file.fallback, release, target),
            kernels=_of(self.file.kernel, release, target),
            shows=tuple(self.file.shows),
            waivers=tuple(waiver for waiver in self.waivers if waiver.release == release),
            stacks={stack.id: stack.te for stack in self.catalog.stacks},
            order=tuple(module.id for module in self.catalog.modules),
        )


Leave = TypeVar("Leave", bound=_Leave)


def _of(rows: Sequence[Leave], release: str, target: str) -> tuple[Leave, ...]:
    return tuple(row for row in rows if release in row.releases and target in row.targets)


def _list_probes(row: Requirement, catalog: Catalog) -> Iterator[str]:
    """The probes that a row requires: modules in dependency order, then what else there is in the catalog's order."""
    groups = {"modules": catalog.modules, "compositions": catalog.compositions, "fp8": catalog.fp8}
    for name, rows in groups.items():
        if name in row.groups:
            yield from ids_of(rows)
    yield from row.probes


def read_gate_policy(catalog: Catalog, folder: Path | None = None) -> GatePolicy:
    """The rules and waivers in `folder`.

    Args:
        catalog: of the same matrix.
        folder: of the matrix; the project's own without it.

    Raises:
        MatrixInvalid: with every fault of both files.
    """
    every = ids_of((*catalog.modules, *catalog.compositions, *catalog.fp8, *catalog.smoke))
    rules, waivers = read_rows(
        folder,
        {RULES: _RuleFile, WAIVERS: _WaiverFile},
        {"target": ids_of(catalog.targets), "probe": every},
        lambda rules, _: _find_faults(rules, catalog),
    )
    return GatePolicy(catalog, rules, tuple(waivers.waiver))


def _find_faults(rules: _RuleFile, catalog: Catalog) -> Iterator[str]:
    """Rules that would open the gate for what nobody has seen."""
    golden = {row.id for row in rules.release if row.image == "one"}
    for copy in rules.second_copy:
        if sealed := sorted(golden & set(copy.releases)):
            yield f"{RULES}: second_copy: {sealed[0]} is a golden image, and none has a library twice"
    recipes = {target.id: target.recipes for target in catalog.targets}
    cells = {cell.id: cell.settings.get("recipe", "") for cell in catalog.fp8}
    for row in rules.require:
        if not any(_list_probes(row, catalog)):
            yield f"{RULES}: require {row.label}: it requires nothing, and would be open for anything"
        for probe in row.unsupported:
            if cells.get(probe) in recipes.get(row.target, ()):
                yield f"{RULES}: require {row.label}: unsupported names {probe}, and {row.target} has {cells[probe]}"
