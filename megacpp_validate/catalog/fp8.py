"""The policy of low precision as typed values: the reader of `fp8_policy.toml`, `fp8_presets.toml`, `waivers.toml`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field, model_validator

from .bridge import Recipe as RecipeName
from .bridge import Target, Targets
from .file import Names, Row, Text, read_rows

POLICY: Final = "fp8_policy.toml"
PRESETS: Final = "fp8_presets.toml"
WAIVERS: Final = "waivers.toml"

Owned = Literal["amax", "graphs", "recompute"]

Name = Annotated[str, Field(pattern=r"^[a-z0-9]+([-_][a-z0-9]+)*$")]
Count = Annotated[int, Field(ge=0)]
Size = Annotated[int, Field(ge=1)]
Parts = Annotated[list[str], Names("part"), Field(min_length=1)]


class ModelPart(Row):
    """A part of the model that a preset may name.

    Attributes:
        block: letter of the block of the pattern that it lies in; "model" outside of every block.
    """

    id: Name
    block: Literal["A", "M", "E", "R", "model"]
    says: Text


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
    refuses: Text
    reason: Text
    source: str = ""
    next: Text
    waivable: bool = True


class ZonesRule(_Rule):
    """Low precision without so many of the first and of the last layers in BF16 is refused."""

    kind: Literal["zones"]
    first: Size
    last: Size


class PartsRule(_Rule):
    """Any recipe in one of these parts is refused."""

    kind: Literal["parts"]
    parts: Parts


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
    source: Text
    named_by: ClassVar = ("recipe",)


class LowParts(Row):
    """Parts of a preset that run in a recipe, and the widths of their weights, both of each."""

    parts: Parts
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
    says: Text
    targets: Targets
    pattern: str = Field(pattern=r"^[AMER]+$")
    bf16_first: Count
    bf16_last: Count
    amax_history: Count
    tokens: Size
    graphs: bool
    recompute: Literal["none", "selective", "full"]
    owners: dict[Owned, Text] = Field(default_factory=dict)
    low: list[LowParts] = Field(default_factory=list)
    refused_by: Annotated[list[str], Names("rule")] = Field(default_factory=list)

    @model_validator(mode="after")
    def _require_zones(self) -> Preset:
        if self.bf16_first + self.bf16_last > len(self.pattern):
            raise ValueError(f"the first {self.bf16_first} and the last {self.bf16_last} layers overlap")
        return self


class Waiver(Row):
    """Leave to break a rule for one preset, for a while.

    Attributes:
        owner: who answers for it.
        link: where it was decided.
        expires: the last day on which it holds.
    """

    rule: Annotated[str, Names("rule")]
    preset: Annotated[str, Names("preset")]
    owner: Text
    reason: Text
    link: str = Field(pattern=r"^https://\S+$")
    expires: date
    named_by: ClassVar = ("rule", "preset")


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
    recipes = {target.id: tuple(target.recipes) for target in targets}
    policy, presets, waivers = read_rows(
        folder,
        {POLICY: _PolicyFile, PRESETS: _PresetFile, WAIVERS: _WaiverFile},
        {"target": recipes},
        lambda policy, presets, waivers: _find_faults(policy, presets, waivers, recipes),
    )
    rules = PolicyRules(tuple(policy.part), tuple(policy.rule), tuple(policy.multiple), recipes)
    return Fp8Policy(rules, tuple(presets.preset), tuple(waivers.waiver))


def _find_faults(
    policy: _PolicyFile, presets: _PresetFile, waivers: _WaiverFile, recipes: Mapping[str, tuple[str, ...]]
) -> Iterator[str]:
    missing = {recipe for have in recipes.values() for recipe in have} - {row.recipe for row in policy.multiple}
    yield from (f"{POLICY}: there is no multiple of {recipe}, which a target has" for recipe in sorted(missing))
    blocks = {part.id: part.block for part in policy.part}
    for preset in presets.preset:
        for part in (part for low in preset.low for part in low.parts):
            if blocks.get(part, "model") not in ("model", *preset.pattern):
                where = f"{PRESETS}: preset {preset.id}: low names {part}"
                yield f"{where}, and no block of {preset.pattern} is {blocks[part]}"
    fixed = {rule.id for rule in policy.rule if not rule.waivable}
    for waiver in waivers.waiver:
        if waiver.rule in fixed:
            yield f"{WAIVERS}: waiver {waiver.label}: this rule cannot be waived: what it refuses does not run at all"
