"""The posture of a run as typed values: the reader of `postures.toml`, and what a posture says to the smoke run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, cast

from pydantic import Field, model_validator

from ..errors import WrongArguments
from .file import Row, Text, read_rows

FILE: Final = "postures.toml"
TABLES: Final = ("speed_defaults", "experimental_taxes", "observability")

Table = Literal["speed_defaults", "experimental_taxes", "observability", "further"]
Need = Literal["gpu", "te", "one-rank", "own-experts"]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]+(_[a-z0-9]+)*$")]
Coefficient = Annotated[float, Field(ge=0, lt=1)]


class UnknownFeature(WrongArguments):
    """A feature that has no row, or no switch; the text names those that have."""


class SizeChanges(Row):
    """Numbers of a size, by the names of `training.sizes.Size`."""

    attention: Literal["gqa", "mla"] | None = None
    mtp: bool | None = None
    trajectory_coefficient: Coefficient | None = None
    aux_coefficient: Coefficient | None = None
    z_coefficient: Coefficient | None = None


class FeatureFlags(Row):
    """A preset and flags, by the names of `bridge.features.Features`."""

    preset: Literal["production", "experts", "dense", "off"] | None = None
    attention: bool | None = None
    native_block: bool | None = None
    linear: bool | None = None
    expert_gemm: bool | None = None
    permute: bool | None = None
    mamba_in_projection: bool | None = None
    mlp: bool | None = None
    norm: bool | None = None


class FormChanges(Row):
    """Forms, by the names of `training.forms.Forms`."""

    moe: Literal["bridge", "padded", "jagged"] | None = None
    compiled_scan: bool | None = None
    fused_residual_norm: bool | None = None
    fused_mla_ingress: bool | None = None
    recompute: bool | None = None
    graphs: bool | None = None
    expert_backends: list[Literal["te", "deep_gemm", "native"]] | None = Field(default=None, min_length=1)
    low_precision_experts: bool | None = None


class Settings(Row):
    """Part of an order of the smoke run; what is None is left as it is.

    Attributes:
        changes, features, forms, precision, audit, watch, profile: as `training.smoke.order.SmokeOrder` has them.
    """

    changes: SizeChanges = SizeChanges()
    features: FeatureFlags = FeatureFlags()
    forms: FormChanges = FormChanges()
    precision: Literal["fp32", "bf16", "delayed", "current", "block", "mxfp8", "nvfp4"] | None = None
    audit: bool | None = None
    watch: bool | None = None
    profile: bool | None = None

    @property
    def as_order(self) -> dict[str, Any]:
        """Fields of an order, as JSON has them; only what is set."""
        said = self.model_dump(mode="json", exclude_none=True, exclude={"parts"})
        return {key: value for key, value in said.items() if value != {}}


class Arm(Settings):
    """One arm of an ablation.

    Attributes:
        parts: pattern of the names of parts -> the backends that each of them may have been seen on.
    """

    parts: dict[Text, list[Text]] = Field(default_factory=dict)


class Feature(Row):
    """What can be turned on and off, with its plain form.

    Attributes:
        table: of the posture that its switch stands in; "further" has none.
        plain: what is done without it.
        needs: what must be there to compare it: a GPU; Transformer Engine; one rank; experts that are not shared out.
        both: what both arms of its ablation have; the posture does not.
        off, on: the two arms.
        source: where it is defined.
    """

    id: Name
    table: Table = "further"
    title: Text
    plain: Text
    needs: list[Need] = Field(default_factory=list)
    both: Settings = Settings()
    off: Arm
    on: Arm
    source: Text

    @model_validator(mode="after")
    def _require_two_arms(self) -> Feature:
        """Both arms set the same keys, to different values."""
        off, on = (set(_keys(arm.as_order)) for arm in (self.off, self.on))
        wrong = [f"{key} is set in one arm alone: the other has whatever it had before" for key in sorted(off ^ on)]
        both = sorted(off & set(_keys(self.both.as_order)))
        wrong += [f"{key} is set for both arms, and again in each" for key in both]
        if self.off.as_order == self.on.as_order:
            wrong.append("off and on are the same: there is nothing to compare")
        if self.id == "all":
            wrong.append("the name 'all' stands for all of them")
        if wrong:
            raise ValueError("; ".join(wrong))
        return self


class Posture(Row):
    """The file.

    Attributes:
        speed_defaults, experimental_taxes, observability: feature -> whether it is on without being asked for.
        features: all that have a row, in the order in which their settings are put together.
    """

    speed_defaults: dict[Name, bool]
    experimental_taxes: dict[Name, bool]
    observability: dict[Name, bool]
    features: list[Feature] = Field(validation_alias="feature", min_length=1)

    @property
    def switches(self) -> dict[str, bool]:
        """Those of all three tables."""
        return {**self.speed_defaults, **self.experimental_taxes, **self.observability}

    def find(self, name: str) -> Feature:
        """The row of a feature.

        Raises:
            UnknownFeature: there is none.
        """
        for feature in self.features:
            if feature.id == name:
                return feature
        known = ", ".join(feature.id for feature in self.features)
        raise UnknownFeature(f"there is no feature {name!r}. Next step: choose of {known}, or say all.")


def read_postures(folder: Path | None = None) -> Posture:
    """The posture in `folder`.

    Args:
        folder: of the matrix; the project's own without it.

    Raises:
        MatrixInvalid: with every fault of the file.
    """
    (posture,) = read_rows(folder, {FILE: Posture}, find=_find_faults)
    return cast("Posture", posture)


def settings_of(posture: Posture, changed: Mapping[str, bool] | None = None) -> dict[str, Any]:
    """What a posture says to a smoke run: fields of its order, to be merged into it with `merge_orders`.

    A tax that is off says nothing: the numbers are those of the size.

    Args:
        posture: whose switches hold.
        changed: feature -> on or off, where it is to be other than the switch; the "further" ones too.

    Raises:
        UnknownFeature: `changed` names one that has no row.
    """
    for name in changed or {}:
        posture.find(name)
    switches = {**posture.switches, **(changed or {})}
    order: dict[str, Any] = {}
    for feature in posture.features:
        if switches.get(feature.id):
            order = merge_orders(order, feature.on.as_order)
        elif feature.id in switches and feature.table != "experimental_taxes":
            order = merge_orders(order, feature.off.as_order)
    return order


def merge_orders(order: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """An order with the settings of another on top; objects in them are merged key by key."""
    merged = dict(order)
    for key, value in more.items():
        held = merged.get(key)
        merged[key] = {**held, **value} if isinstance(held, dict) and isinstance(value, dict) else value
    return merged


def _find_faults(posture: Posture) -> Iterator[str]:
    """Switches without a row, rows without a switch."""
    for table in TABLES:
        switches = set(getattr(posture, table))
        rows = {feature.id for feature in posture.features if feature.table == table}
        yield from (f"{FILE}: {table} switches {name!r}, which has no row there" for name in sorted(switches - rows))
        yield from (f"{FILE}: feature {name!r} has no switch in {table}" for name in sorted(rows - switches))


def _keys(order: Mapping[str, Any]) -> Iterator[str]:
    for key, value in order.items():
        yield from (f"{key}.{name}" for name in value) if isinstance(value, dict) else (key,)
