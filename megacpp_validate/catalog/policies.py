"""Policies as typed values: what receipts must show before a release, and what may run in low precision.

Reader of gate.toml, gate_waivers.toml and checks.json; and of fp8_policy.toml and fp8_presets.toml.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from datetime import date
from enum import StrEnum
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field, TypeAdapter, model_validator

from ..errors import WrongArguments
from .bridge import Catalog, Target, Targets
from .bridge import Recipe as RecipeName
from .file import MatrixInvalid, Names, Row, Text, read_rows

GATE: Final = "gate.toml"
GATE_WAIVERS: Final = "gate_waivers.toml"
CHECKS: Final = "checks.json"
POLICY: Final = "fp8_policy.toml"
PRESETS: Final = "fp8_presets.toml"
IMPORTS: Final = "imports"  # the module that every other one stands on

Name = Annotated[str, Field(pattern=r"^[a-z0-9]+([-_][a-z0-9]+)*$")]
Words = Annotated[str, Field(pattern=r"[^\s\p{C}]")]  # something to read
Ratio = Annotated[float, Field(gt=1.0, allow_inf_nan=False)]
Release = Annotated[str, Names("release")]
Count = Annotated[int, Field(ge=0)]
Size = Annotated[int, Field(ge=1)]
Parts = Annotated[list[str], Names("part")]


# --- The release gate. ---


class GateRule(StrEnum):
    """What a receipt must satisfy. A broken rule that is not one of `BREAKAGES` is a lack of evidence."""

    MISSING = "missing"  # no receipt of a required cell
    UNREADABLE = "unreadable"  # truncated, changed after it was sealed, of another schema, contradicting itself
    NAME = "name"  # a name that no cell has, or a file under the name of another cell
    STACK = "stack"  # of another stack than is judged, or loaded from another release than its name says
    TARGET = "target"  # of another target than is judged, or run on another GPU than the target has
    NOT_REQUIRED = "not-required"
    CLOCK = "clock"  # no time of start, or one after the decision
    AGE = "age"
    CODE = "code"  # produced by other code than the checkout's
    CHECKS = "checks"  # fewer checks than the cell makes
    REQUESTED = "requested"  # native requested where Transformer Engine is judged, or the other way round
    ENVIRONMENT = "environment"  # cells of more than one environment, or a machine that is not on record
    COMMIT = "commit"
    IMAGE = "image"
    LOCK = "lock"
    SIGNATURE = "signature"  # edited, added or lost since the folder was signed
    SUPERSEDED = "superseded"  # older than another receipt of its cell
    NOT_RUN = "not-run"
    ONLY_TIMED = "only-timed"  # a second run for the noise of the card, which judges nothing
    BASELINE = "baseline"  # nothing to compare speed and memory with
    UNWATCHED = "unwatched"  # a library compiled where nobody could see it
    OUTCOME = "outcome"
    CONTRADICTED = "contradicted"  # an older receipt of the same commit and environment is red, or its words deny it
    SLOWER = "slower"
    MEMORY = "memory"
    JIT = "jit"  # compiled after warm-up
    SECOND_COPY = "second-copy"
    FALLBACK = "fallback"
    PRESET = "preset"  # a training run in an FP8 preset that the policy refuses


BREAKAGES: Final = frozenset({
    GateRule.OUTCOME, GateRule.CONTRADICTED, GateRule.SLOWER, GateRule.MEMORY, GateRule.JIT, GateRule.SECOND_COPY,
    GateRule.FALLBACK, GateRule.PRESET,
})  # fmt: skip


class ReleaseKind(Row):
    """What every receipt of one kind of release must satisfy.

    Attributes:
        counts: outcomes that let a cell through; only good ones can be written.
        others: what a red receipt of the judged stack does whose cell is not required: "list" or "close".
        commit: "one": the same in all; "clean": and no file of the checkout differed from it.
        environment: "one": the same in all.
        image, lock: "one": recorded, and the same in all.
        baseline: whether speed and memory must be compared.
        slowdown, memory: largest ratio to the baseline.
        memory_floor_mib: of GPU memory; what a peak may rise by in any case.
    """

    id: Name
    says: Words
    counts: list[Literal["pass", "expected-unsupported"]] = Field(min_length=1)
    others: Literal["list", "close"]
    max_age_days: int = Field(ge=1, le=3660)
    commit: Literal["one", "clean"]
    environment: Literal["one", "any"]
    image: Literal["one", "any"]
    lock: Literal["one", "any"]
    baseline: Literal["required", "any"]
    slowdown: Ratio
    memory: Ratio
    memory_floor_mib: float = Field(ge=0.0, allow_inf_nan=False)


class Requirement(Row):
    """The cells that one kind of release requires of one target.

    Attributes:
        requested: what each of them must have requested.
        groups: of the catalog, whatever is in them.
        probes: others.
        unsupported: those that may be unsupported.
    """

    release: Release
    target: Annotated[str, Names("target")]
    requested: Literal["te", "native"]
    groups: list[Literal["modules", "compositions", "fp8"]] = Field(default_factory=list)
    probes: Annotated[list[str], Names("probe")] = Field(default_factory=list)
    unsupported: list[str] = Field(default_factory=list)
    named_by: ClassVar = ("release", "target")

    @model_validator(mode="after")
    def _require_something(self) -> Requirement:
        if not (self.groups or self.probes):
            raise ValueError("it requires nothing, and would be open for anything")
        return self


class Allowance(Row):
    """What a rule lets pass, as a warning.

    Attributes:
        rule: the rule; others let nothing pass.
        shows: pattern, with * and ?, of what `gate.rules` shows to the rule.
        probes: all where none is named.
    """

    rule: Literal["image", "unwatched", "jit", "second-copy", "fallback"]
    shows: Words
    releases: Annotated[list[str], Names("release")] = Field(min_length=1)
    targets: Targets
    probes: Annotated[list[str], Names("probe")] = Field(default_factory=list)
    reason: Words
    source: str = ""


class ReleaseWaiver(Row):
    """Leave to release with a breakage of one cell until a day.

    Attributes:
        owner: who answers for it.
        link: where that was decided.
        expires: the last day on which it holds, UTC.
    """

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
        if self.rule not in BREAKAGES:
            raise ValueError("evidence that is missing cannot be waived into being")
        if self.rule in (GateRule.OUTCOME, GateRule.CONTRADICTED) and self.cell.endswith(f"-{IMPORTS}"):
            raise ValueError("an import cannot be waived: every module stands on it")
        return self


class _GateFile(Row):
    release: list[ReleaseKind] = Field(min_length=1)
    require: list[Requirement] = Field(min_length=1)
    allow: list[Allowance] = Field(default_factory=list)
    shows: dict[str, list[str]]


class _GateWaiverFile(Row):
    waiver: list[ReleaseWaiver]


class CellEvidence(Row):
    """What every good run of a cell leaves, as recorded.

    Attributes:
        checks: name -> number of parts that it is measured by.
        backends: paths of the module of which the backend that ran is recorded.
    """

    checks: dict[str, Count]
    backends: list[str]


class GateRules(Row):
    """What one kind of release requires of one target.

    Attributes:
        probes: required, in the order of the matrix.
        shows: claimed backend -> other names under which it may be observed.
        stacks: id -> release of Transformer Engine, of every stack that the matrix has.
        evidence: probe -> what its cell leaves; a probe that has not run on the target yet is not there.
        low_precision: the policy that FP8 presets of training runs must meet.
    """

    kind: ReleaseKind
    target: Target
    requested: Literal["te", "native"]
    probes: tuple[str, ...]
    unsupported: tuple[str, ...]
    allowances: tuple[Allowance, ...]
    shows: dict[str, list[str]]
    waivers: tuple[ReleaseWaiver, ...]
    stacks: dict[str, str]
    evidence: dict[str, CellEvidence]
    low_precision: Fp8Policy

    @property
    def sha256(self) -> str:
        """Of all of it: a decision names the rules by which it was made."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()


class GatePolicy(_GateFile, _GateWaiverFile):
    """The files of the gate, and the catalog whose cells they name."""

    catalog: Catalog
    evidence: dict[str, dict[str, CellEvidence]]
    low_precision: Fp8Policy

    def choose(self, release: str, target: str) -> GateRules:
        """What a kind of release requires of a target.

        Raises:
            WrongArguments: there is no such row.
        """
        rows = {(row.release, row.target): row for row in self.require}
        if (release, target) not in rows:
            known = ", ".join(" of ".join(pair) for pair in rows)
            raise WrongArguments(
                f"{GATE} has no [[require]] of the release {release!r} and the target {target!r}, and a release that "
                f"requires nothing would be open for anything. Next step: choose one of {known}, or add the row."
            )
        row = rows[release, target]
        return GateRules(
            kind=next(kind for kind in self.release if kind.id == release),
            target=next(one for one in self.catalog.targets if one.id == target),
            requested=row.requested, probes=tuple(_list_probes(row, self.catalog)), unsupported=tuple(row.unsupported),
            allowances=tuple(one for one in self.allow if release in one.releases and target in one.targets),
            shows=self.shows, waivers=tuple(one for one in self.waiver if one.release == release),
            stacks={stack.id: stack.te for stack in self.catalog.stacks}, evidence=self.evidence.get(target, {}),
            low_precision=self.low_precision,
        )  # fmt: skip


def _list_probes(row: Requirement, catalog: Catalog) -> Iterator[str]:
    """The probes that a row requires: modules in dependency order, then the rest in the catalog's order."""
    for name in ("modules", "compositions", "fp8"):
        if name in row.groups:
            yield from (cell.id for cell in getattr(catalog, name))
    yield from row.probes


def read_gate_policy(catalog: Catalog) -> GatePolicy:
    """The rules, waivers and lists of checks of a matrix.

    Raises:
        MatrixInvalid: with every fault of the files.
    """
    rules, waivers = read_rows(catalog.folder, {GATE: _GateFile, GATE_WAIVERS: _GateWaiverFile}, catalog.known)
    try:
        evidence = _EVIDENCE.validate_json((catalog.folder / CHECKS).read_bytes())
    except (OSError, ValueError) as fault:
        raise MatrixInvalid([f"{CHECKS}: cannot be read: {fault}"]) from fault
    policy = read_fp8_policy(catalog)
    return GatePolicy.model_construct(
        **dict(rules), **dict(waivers), catalog=catalog, evidence=evidence, low_precision=policy
    )


_EVIDENCE: Final = TypeAdapter(dict[str, dict[str, CellEvidence]])


# --- Low precision. ---


class ModelPart(Row):
    """A part of the model that a preset may name.

    Attributes:
        block: letter of the block of the pattern that it lies in; "model" outside of every block.
    """

    id: Name
    block: Literal["A", "M", "E", "R", "model"]
    says: Text


class PolicyRule(Row):
    """What is refused of a preset, by kind; `gate.fp8` has the code of each kind.

    Attributes:
        kind: "zones": low precision without the `first` and `last` layers in BF16; "parts": any recipe in one of
            `parts`; "together": low precision, graphs and selective recompute where one of `owners` has no name;
            "history": delayed scaling with less than `least` steps; "target-recipe": a recipe that a target lacks;
            "multiples": widths and tokens that a recipe cannot take.
        refuses: what it refuses, for a person.
        source: where the reason is known from; empty where it is the project's own experience.
        next: what to do instead.
    """

    id: Name
    kind: Literal["zones", "parts", "together", "history", "target-recipe", "multiples"]
    refuses: Text
    reason: Text
    source: str = ""
    next: Text
    first: Size = 1
    last: Size = 1
    parts: Parts = Field(default_factory=list)
    owners: list[Literal["amax", "graphs", "recompute"]] = Field(default_factory=list)
    least: Size = 1


class Multiple(Row):
    """What a recipe wants both widths of a weight, and the tokens of a call, to be a multiple of."""

    recipe: RecipeName
    widths: Size
    tokens: Size
    source: Text
    named_by: ClassVar = ("recipe",)


class LowParts(Row):
    """Parts of a preset that run in a recipe, and the widths of their weights, both of each."""

    parts: Annotated[Parts, Field(min_length=1)]
    recipe: RecipeName
    widths: list[Size] = Field(min_length=1)


class Preset(Row):
    """What of a model runs in low precision.

    Attributes:
        targets: that it is for.
        pattern: a letter a layer, over A, M, E and R.
        bf16_first, bf16_last: how many of the first and of the last layers stay in BF16.
        amax_history: calls that delayed scaling remembers.
        tokens: of a call.
        graphs: whether layers run as captured CUDA graphs.
        recompute: which activations are computed again in the backward pass.
        owners: who reduces amax values, captures graphs, and recomputes.
        low: what runs in low precision; every other part stays in BF16.
        refused_by: rules that must refuse it: it was rolled back. No run may name it, and the release gate closes on a
            receipt of one.
        measured: why it was rolled back: figure, where it was measured, and when. Empty for a preset that may run.
    """

    id: Name
    says: Text
    targets: Targets
    pattern: str = Field(pattern=r"^[AMER]+$")
    bf16_first: Count
    bf16_last: Count
    amax_history: Count
    tokens: Size
    graphs: bool
    recompute: Literal["none", "selective", "full"]
    owners: dict[Literal["amax", "graphs", "recompute"], Text] = Field(default_factory=dict)
    low: list[LowParts] = Field(default_factory=list)
    refused_by: Annotated[list[str], Names("rule")] = Field(default_factory=list)
    measured: str = ""


class _PolicyFile(Row):
    parts: list[ModelPart] = Field(validation_alias="part", min_length=1)
    rules: list[PolicyRule] = Field(validation_alias="rule", min_length=1)
    multiples: list[Multiple] = Field(validation_alias="multiple", min_length=1)


class _PresetFile(Row):
    presets: list[Preset] = Field(validation_alias="preset", min_length=1)


class Fp8Policy(_PolicyFile, _PresetFile):
    """Both files; `recipes` are those of each target."""

    recipes: dict[str, tuple[str, ...]]


def read_fp8_policy(catalog: Catalog) -> Fp8Policy:
    """The policy of a matrix; `gate.fp8` applies it.

    Raises:
        MatrixInvalid: with every fault of both files.
    """
    recipes = {target.id: tuple(target.recipes) for target in catalog.targets}
    policy, presets = read_rows(catalog.folder, {POLICY: _PolicyFile, PRESETS: _PresetFile}, catalog.known)
    return Fp8Policy.model_construct(**dict(policy), **dict(presets), recipes=recipes)
