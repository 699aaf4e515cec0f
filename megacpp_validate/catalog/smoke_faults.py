"""The faults by which the smoke run is scored: `matrix/smoke_faults.toml` as typed values."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Final, Literal, cast

from pydantic import Field

from .bridge import SmokeCell
from .file import Names, Row, Text, read_rows

FILE: Final = "smoke_faults.toml"
CODE: Final = "smoke.faults"

Way = Literal["train", "evaluate", "save", "resume"]
CheckName = Literal["conservation", "replicas", "gradients", "reproduce", "resume", "validate", "watch", "launcher"]
Named = int | Text | list[int] | list[Text]


class SmokeFault(Row):
    """A fault that is planted in a run, which check must see it, and what that must name.

    Attributes:
        id: short and stable.
        fault: NAME or NAME:STEP of `training.smoke.faults`.
        plan: cell that it is planted in.
        way: which of the cell's runs has it.
        says: what goes wrong.
        caught_by: the check that must see it.
        names: what that check must say, word by word.
        held_out: whether it was written before what judges it.
    """

    id: str = Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")
    fault: str = Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*(:\d+)?$")
    plan: Annotated[str, Names("plan")]
    way: Way = "train"
    says: Text
    caught_by: CheckName
    names: dict[Text, Named] = Field(min_length=1)
    held_out: bool = False


class FaultPlan(SmokeCell):
    """A cell in which faults are planted."""

    code: str = Field(default=CODE, pattern=r"^smoke\.faults$")


class SmokeFaults(Row):
    """The whole file.

    Attributes:
        plans: cells, in their order.
        faults: in their order.
    """

    plans: list[FaultPlan] = Field(validation_alias="plan", min_length=1)
    faults: list[SmokeFault] = Field(validation_alias="fault", min_length=1)

    def of(self, plan: str) -> tuple[SmokeFault, ...]:
        """The faults of one cell."""
        return tuple(fault for fault in self.faults if fault.plan == plan)

    def cells(self) -> tuple[SmokeCell, ...]:
        """A row a cell, as the smoke run takes it, with its faults among its settings: "ID=FAULT@WAY ..."."""
        cells = []
        for plan in self.plans:
            planted = " ".join(f"{one.id}={one.fault}@{one.way}" for one in self.of(plan.id))
            cells.append(plan.model_copy(update={"settings": {**plan.settings, "faults": planted}}))
        return tuple(cells)

    def select(self, ids: Iterable[str]) -> SmokeFaults:
        """These faults alone, and the cells that have any of them."""
        chosen = set(ids)
        faults = [fault for fault in self.faults if fault.id in chosen]
        plans = [plan for plan in self.plans if any(one.plan == plan.id for one in faults)]
        return self.model_copy(update={"plans": plans, "faults": faults})


def read_smoke_faults(targets: Iterable[str], folder: Path | None = None) -> SmokeFaults:
    """The cells and the faults.

    Args:
        targets: ids of the matrix.
        folder: of the matrix.

    Raises:
        MatrixInvalid: with every fault of the file.
    """
    (faults,) = read_rows(folder, {FILE: SmokeFaults}, {"target": list(targets)})
    return cast("SmokeFaults", faults)
