"""The faults by which the smoke run is scored: `matrix/smoke_faults.toml` as typed values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field

from .bridge import SmokeCell
from .file import MatrixInvalid, Row, matrix_folder, read_matrix_file

FILE: Final = "smoke_faults.toml"
CODE: Final = "smoke.faults"

Way = Literal["train", "evaluate", "save", "resume"]
CheckName = Literal["conservation", "replicas", "gradients", "reproduce", "resume", "validate", "watch", "launcher"]
Word = Annotated[str, Field(min_length=1)]
Named = int | Word | list[int] | list[Word]


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
    plan: str
    way: Way = "train"
    says: str = Field(min_length=1)
    caught_by: CheckName
    names: dict[Word, Named] = Field(min_length=1)
    held_out: bool = False


class FaultPlan(SmokeCell):
    """A cell in which faults are planted."""

    code: str = Field(default=CODE, pattern=r"^smoke\.faults$")


class _File(Row):
    plan: list[FaultPlan] = Field(min_length=1)
    fault: list[SmokeFault] = Field(min_length=1)


class SmokeFaults(Row):
    """The whole file.

    Attributes:
        plans: cells, in their order.
        faults: in their order.
    """

    plans: list[FaultPlan]
    faults: list[SmokeFault]

    def of(self, plan: str) -> tuple[SmokeFault, ...]:
        """The faults of one cell."""
        return tuple(fault for fault in self.faults if fault.plan == plan)

    def cells(self) -> tuple[SmokeCell, ...]:
        """A row a cell, as the smoke run takes it, with its faults among its settings: "ID=FAULT@WAY ..."."""
        return tuple(
            plan.model_copy(
                update={
                    "settings": {
                        **plan.settings,
                        "faults": " ".join(f"{one.id}={one.fault}@{one.way}" for one in self.of(plan.id)),
                    }
                }
            )
            for plan in self.plans
        )

    def select(self, ids: Iterable[str]) -> SmokeFaults:
        """These faults alone, and the cells that have any of them."""
        wanted = set(ids)
        faults = [fault for fault in self.faults if fault.id in wanted]
        return SmokeFaults(
            plans=[plan for plan in self.plans if any(one.plan == plan.id for one in faults)], faults=faults
        )


def read_smoke_faults(targets: Iterable[str], folder: Path | None = None) -> SmokeFaults:
    """The cells and the faults.

    Args:
        targets: ids of the matrix.
        folder: of the matrix.

    Raises:
        MatrixInvalid: with every fault of the file.
    """
    path = (folder or matrix_folder()) / FILE
    file = read_matrix_file(path, _File)
    if wrong := [f"{path.name}: {said}" for said in _find_wrong(file, frozenset(targets))]:
        raise MatrixInvalid(wrong)
    return SmokeFaults(plans=file.plan, faults=file.fault)


def _find_wrong(file: _File, targets: frozenset[str]) -> Iterator[str]:
    for kind, rows in (("plan", file.plan), ("fault", file.fault)):
        counts = Counter(row.id for row in rows)
        yield from (f"{kind} {name}: is there more than once" for name, count in counts.items() if count > 1)
    plans = {plan.id for plan in file.plan}
    for plan in file.plan:
        yield from (f"plan {plan.id}: there is no target {name!r}" for name in plan.targets if name not in targets)
        if "faults" in plan.settings:
            yield f"plan {plan.id}: its faults are rows of their own"
        if not any(fault.plan == plan.id for fault in file.fault):
            yield f"plan {plan.id}: no fault is planted in it"
    for fault in file.fault:
        if fault.plan not in plans:
            yield f"fault {fault.id}: there is no plan {fault.plan!r}"
