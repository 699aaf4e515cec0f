"""The posture of a run as typed values: the reader of `postures.toml`, and what a posture says to the smoke run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from .bridge import Catalog, Recipe
from .file import Names, Row, Text

FILE: Final = "postures.toml"

Table = Literal["speed_defaults", "experimental_taxes", "observability", "further"]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]+(_[a-z0-9]+)*$")]
Value = bool | int | float | str


class Settings(Row):
    """Part of an order of the smoke run: what is not set is left as it is. The run refuses names that it lacks.

    Attributes:
        changes: numbers of a size, by the names of `training.sizes.Size`.
        features: a preset and flags, by the names of `bridge.features.Features`.
        forms: by the names of `training.sizes.Forms`.
        precision, audit, watch, profile: as `training.smoke.order.SmokeOrder` has them.
    """

    changes: dict[Name, Value] = Field(default_factory=dict)
    features: dict[Name, Value] = Field(default_factory=dict)
    forms: dict[Name, Value | list[str]] = Field(default_factory=dict)
    precision: Recipe | Literal["fp32", "bf16"] | None = None
    audit: bool | None = None
    watch: bool | None = None
    profile: bool | None = None

    @property
    def as_order(self) -> dict[str, Any]:
        """Fields of an order, as JSON has them; only what is set."""
        return self.model_dump(mode="json", exclude_defaults=True, exclude={"parts"})


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
        both: what both arms of its ablation have; the posture does not.
        off, on: the two arms.
        source: where it is defined.
    """

    id: Name
    table: Table = "further"
    title: Text
    plain: Text
    both: Settings = Settings()
    off: Arm
    on: Arm
    source: Text


Switches = Annotated[dict[Name, bool], Names("feature")]


class Posture(Row):
    """The file.

    Attributes:
        speed_defaults, experimental_taxes, observability: feature -> whether it is on without being asked for.
        features: all that have a row, in the order in which their settings are put together.
    """

    speed_defaults: Switches
    experimental_taxes: Switches
    observability: Switches
    features: list[Feature] = Field(validation_alias="feature", min_length=1)

    @property
    def switches(self) -> dict[str, bool]:
        """Those of all three tables."""
        return {**self.speed_defaults, **self.experimental_taxes, **self.observability}


def read_postures(catalog: Catalog) -> Posture:
    """The posture of a matrix.

    Raises:
        MatrixInvalid: with every fault of the file.
    """
    return catalog.read(FILE, Posture)


def settings_of(posture: Posture, changed: Mapping[str, bool] | None = None) -> dict[str, Any]:
    """What a posture says to a smoke run: fields of its order, to be merged into it with `merge_orders`.

    A tax that is off says nothing: the numbers are those of the size.

    Args:
        posture: whose switches hold.
        changed: feature -> on or off, where it is to be other than the switch; the "further" ones too.
    """
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
