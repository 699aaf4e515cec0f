"""The policy of low precision as typed values: the reader of `fp8_policy.toml`, `fp8_presets.toml`, `waivers.toml`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field

from .bridge import Target
from .file import MatrixInvalid, Row, look_at_matrix_file, matrix_folder

POLICY: Final = "fp8_policy.toml"
PRESETS: Final = "fp8_presets.toml"
WAIVERS: Final = "waivers.toml"

RecipeName = Literal["delayed", "current", "block", "mxfp8", "nvfp4"]
Owned = Literal["amax", "graphs", "recompute"]

Name = Annotated[str, Field(pattern=r"^[a-z0-9]+([-_][a-z0-9]+)*$")]
Words = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=0)]
Size = Annotated[int, Field(ge=1)]


class ModelPart(Row):
    """A part of the model that a preset may name.

    Attributes:
        block: letter of the block of the pattern that it lies in; "model" outside of every block.
    """

    id: Name
    block: Literal["A", "M", "E", "R", "model"]
    says: Words


class _Rule(Row):
    """What every rule says.

    Attributes:
        refuses: what it refuses, for a person.
        reason: why.
        source: where that is known from; empty where it is the project's own experience.
        next: what to do instead.
        waivable: whether a waiver may hold it off; not where the hardware itself refuses.
    """

    id: Name
    refuses: Words
    reason: Words
    source: str = ""
    next: Words
    waivable: bool = True


class ZonesRule(_Rule):
    """Low precision without so many of the first and of the last layers in BF16 is refused."""

    kind: Literal["zones"]
    first: Size
    last: Size


class PartsRule(_Rule):
    """Any recipe in one of these parts is refused."""

    kind: Literal["parts"]
    parts: list[str] = Field(min_length=1)


class TogetherRule(_Rule):
    """Low precision, graphs and selective recompute all at once are refused where one of the owners has no name."""

    kind: Literal["together"]
    owners: list[Owned] = Field(min_length=1)


class HistoryRule(_Rule):
    """Delayed scaling with a shorter history is refused."""

    kind: Literal["history"]
    least: Size


class TargetRule(_Rule):
    """A recipe that one of the preset's targets lacks is refused."""

    kind: Literal["target-recipe"]


class MultiplesRule(_Rule):
    """Widths and tokens that a recipe cannot take are refused."""

    kind: Literal["multiples"]


Rule = ZonesRule | PartsRule | TogetherRule | HistoryRule | TargetRule | MultiplesRule


class Multiple(Row):
    """What a recipe wants both widths of a weight, and the tokens of a call, to be a multiple of."""

    recipe: RecipeName
    widths: Size
    tokens: Size
    source: Words


class LowParts(Row):
    """Parts of a preset that run in a recipe, and the widths of their weights, both of each."""

    parts: list[str] = Field(min_length=1)
    recipe: RecipeName
    widths: list[Size] = Field(min_length=1)


class Preset(Row):
    """What of a model runs in low precision. What the policy refuses can be written here, so that it is told by name.

    Attributes:
        targets: that it is for.
        pattern: a letter a layer, over A, M, E and R.
        bf16_first: how many of the first layers stay in BF16.
        bf16_last: how many of the last ones do.
        amax_history: calls that delayed scaling remembers.
        tokens: of a call.
        graphs: whether layers run as captured CUDA graphs.
        recompute: which activations are computed again in the backward pass.
        owners: who reduces amax values, captures graphs, and recomputes.
        low: what runs in low precision; every other part stays in BF16.
        refused_by: rules that must refuse it: it was rolled back, and stands here so that this is told and held to.
    """

    id: Name
    says: Words
    targets: list[str] = Field(min_length=1)
    pattern: str = Field(pattern=r"^[AMER]+$")
    bf16_first: Count
    bf16_last: Count
    amax_history: Count
    tokens: Size
    graphs: bool
    recompute: Literal["none", "selective", "full"]
    owners: dict[Owned, Words] = Field(default_factory=dict)
    low: list[LowParts] = Field(default_factory=list)
    refused_by: list[str] = Field(default_factory=list)


class Waiver(Row):
    """Leave to break a rule for one preset, for a while.

    Attributes:
        owner: who answers for it.
        link: where it was decided.
        expires: the last day on which it holds.
    """

    rule: str
    preset: str
    owner: Words
    reason: Words
    link: str = Field(pattern=r"^https://\S+$")
    expires: date


class _PolicyFile(Row):
    part: list[ModelPart] = Field(min_length=1)
    rule: list[Annotated[Rule, Field(discriminator="kind")]] = Field(min_length=1)
    multiple: list[Multiple] = Field(min_length=1)


class _PresetFile(Row):
    preset: list[Preset] = Field(min_length=1)


class _WaiverFile(Row):
    waiver: list[Waiver]


@dataclass(frozen=True)
class PolicyRules:
    """What presets are held to.

    Attributes:
        recipes: of each target.
    """

    parts: tuple[ModelPart, ...]
    rules: tuple[Rule, ...]
    multiples: tuple[Multiple, ...]
    recipes: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Fp8Policy:
    """The three files."""

    rules: PolicyRules
    presets: tuple[Preset, ...]
    waivers: tuple[Waiver, ...]


def read_fp8_policy(targets: Sequence[Target], folder: Path | None = None) -> Fp8Policy:
    """The policy in `folder`. Whether it lets a preset through, and a waiver holds, is for `gate.fp8_policy` to say.

    Args:
        targets: of the matrix, which presets name.
        folder: of the matrix; the project's own without it.

    Raises:
        MatrixInvalid: with every fault of the three files.
    """
    root = folder or matrix_folder()
    faults: list[str] = []
    policy, _ = look_at_matrix_file(root / POLICY, _PolicyFile, faults)
    presets, _ = look_at_matrix_file(root / PRESETS, _PresetFile, faults)
    waivers, _ = look_at_matrix_file(root / WAIVERS, _WaiverFile, faults)
    rules = None
    if policy is not None:
        recipes = {target.id: tuple(target.recipes) for target in targets}
        rules = PolicyRules(tuple(policy.part), tuple(policy.rule), tuple(policy.multiple), recipes)
        faults += find_policy_faults(rules)
    if presets is not None:
        faults += _twice(PRESETS, "preset", (preset.id for preset in presets.preset))
        if rules is not None:
            faults += [fault for preset in presets.preset for fault in find_preset_faults(preset, rules)]
    if waivers is not None:
        known = None if presets is None else {preset.id for preset in presets.preset}
        faults += _find_waiver_faults(waivers.waiver, None if policy is None else policy.rule, known)
    if faults or rules is None or presets is None or waivers is None:
        raise MatrixInvalid(faults)
    return Fp8Policy(rules, tuple(presets.preset), tuple(waivers.waiver))


def find_policy_faults(rules: PolicyRules) -> Iterator[str]:
    """Ids that are there twice, and parts that there are not."""
    yield from _twice(POLICY, "part", (part.id for part in rules.parts))
    yield from _twice(POLICY, "rule", (rule.id for rule in rules.rules))
    yield from _twice(POLICY, "multiple of", (row.recipe for row in rules.multiples))
    known = {part.id for part in rules.parts}
    for rule in rules.rules:
        named = rule.parts if isinstance(rule, PartsRule) else []
        yield from (
            f"{POLICY}: rule {rule.id}: parts names {part!r}, which there is not" for part in named if part not in known
        )
    missing = {recipe for have in rules.recipes.values() for recipe in have} - {row.recipe for row in rules.multiples}
    yield from (f"{POLICY}: there is no multiple of {recipe}, which a target has" for recipe in sorted(missing))


def find_preset_faults(preset: Preset, rules: PolicyRules) -> Iterator[str]:
    """What a preset names that there is not, or twice."""
    where = f"{PRESETS}: preset {preset.id}"
    for target in preset.targets:
        if target not in rules.recipes:
            yield f"{where}: targets names {target!r}, which there is not"
    known = {rule.id for rule in rules.rules}
    for rule in preset.refused_by:
        if rule not in known:
            yield f"{where}: refused_by names {rule!r}, which there is not"
    blocks = {part.id: part.block for part in rules.parts}
    named = Counter(part for low in preset.low for part in low.parts)
    for part, count in named.items():
        if part not in blocks:
            yield f"{where}: low names the part {part!r}, which there is not"
        elif blocks[part] != "model" and blocks[part] not in preset.pattern:
            yield f"{where}: low names {part}, and no block of {preset.pattern} is {blocks[part]}"
        if count > 1:
            yield f"{where}: low names {part} {count} times"
    if preset.bf16_first + preset.bf16_last > len(preset.pattern):
        yield (
            f"{where}: the first {preset.bf16_first} and the last {preset.bf16_last} of {len(preset.pattern)} layers "
            "overlap"
        )


def _find_waiver_faults(
    waivers: Sequence[Waiver], rules: Sequence[Rule] | None, presets: set[str] | None
) -> Iterator[str]:
    """A file that could not be read is told already: what a waiver names of it is not looked for."""
    waivable = None if rules is None else {rule.id: rule.waivable for rule in rules}
    for waiver in waivers:
        where = f"{WAIVERS}: waiver of {waiver.rule} for {waiver.preset}"
        if waivable is not None and waiver.rule not in waivable:
            yield f"{where}: there is no such rule"
        if waivable is not None and not waivable.get(waiver.rule, True):
            yield f"{where}: this rule cannot be waived: what it refuses does not run at all"
        if presets is not None and waiver.preset not in presets:
            yield f"{where}: there is no such preset"
    counts = Counter((waiver.rule, waiver.preset) for waiver in waivers)
    for (rule, preset), count in counts.items():
        if count > 1:
            yield f"{WAIVERS}: waiver of {rule} for {preset} is there {count} times"


def _twice(file: str, kind: str, ids: Iterable[str]) -> Iterator[str]:
    yield from (f"{file}: {kind} {name!r} is there {count} times" for name, count in Counter(ids).items() if count > 1)
