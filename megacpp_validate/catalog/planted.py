"""Faults that are planted from outside of the process that must find them: rows of the matrix as typed values.

`te_faults.toml` (the blame) and `fp8_faults.toml` with its held-out half (the cells of FP8) are edits of a copy of
Transformer Engine; `smoke_faults.toml` (the smoke run) names faults of `training.smoke.faults`. What is planted inside
of a process is `mutants.toml`, which `catalog.bridge` reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Annotated, Final, Literal

from pydantic import Field

from ..errors import InfrastructureFailed
from ..evidence.values import Cause
from .bridge import Catalog, Planted, SmokeCell
from .file import Names, Row, Text

TE_FILE: Final = "te_faults.toml"
FP8_FILE: Final = "fp8_faults.toml"
FP8_HELD_OUT: Final = "fp8_faults_held_out.toml"
SMOKE_FILE: Final = "smoke_faults.toml"
FIREWALL_FILE: Final = "firewall.toml"
WHOLE: Final = ["core", "extension"]  # compiled parts of an install
SMOKE_CODE: Final = "smoke.faults"
_BELOW: Final = r"^[A-Za-z0-9_]+(/[A-Za-z0-9_]+)*\.py$"  # no "..", no absolute path: nothing outside of the copy

Release = Annotated[str, Field(pattern=r"^\d+(\.\d+)+(\.post\d+)?$")]
StrictCause = Annotated[Cause, Field(strict=False)]


class EditDoesNotFit(InfrastructureFailed):
    """An edit whose text does not stand in a file of Transformer Engine exactly once."""


class Edit(Row):
    """One change to one file: another text for one that is there, text at its end, or the file itself.

    Attributes:
        file: below `transformer_engine/`.
        releases: those that it is for; all of the fault's where there is none.
        old, new: whole lines; `old` stands in the file exactly once. A text begins after its first line break.
        append: lines for the end of the file.
        delete: whether the file is removed.
        rename: where it is moved to, below `transformer_engine/`.
    """

    file: str = Field(pattern=_BELOW)
    releases: list[Release] = Field(default_factory=list)
    old: str = ""
    new: str = ""
    append: str = ""
    delete: bool = False
    rename: str = Field(default="", pattern=rf"^$|{_BELOW}")

    def change(self, text: str) -> str:
        """The text of the file after this edit.

        Raises:
            EditDoesNotFit: `old` stands there never, or more than once.
        """
        if not self.old:
            return text + self.append
        if (count := text.count(self.old)) != 1:
            first = self.old.strip().splitlines()[0]
            raise EditDoesNotFit(
                f"{self.file} has the lines that begin with {first!r} {count} times, and an edit wants them once. "
                "Likely cause: it was written for another release. Next step: give it a text for this one."
            )
        return text.replace(self.old, self.new)


class PlantedFault(Planted):
    """A fault that is planted in a copy of Transformer Engine.

    Attributes:
        releases: of Transformer Engine that it is written for.
        edit: what is changed, in order.
    """

    releases: list[Release] = Field(min_length=1)
    edit: list[Edit] = Field(min_length=1)

    def edits_for(self, release: str) -> tuple[Edit, ...]:
        """Those for one release, in order."""
        return tuple(edit for edit in self.edit if not edit.releases or release in edit.releases)


class TeFault(PlantedFault):
    """A fault by which the blame is scored. What it `says` tells why its module sees it first, too.

    Attributes:
        module: the bridge module that must be blamed: the first in dependency order whose probe can see it.
        cause: the class that must be named.
        accepts: classes that are right as well, where the message of a failure leaves it open.
        also: names that are right as well; "environment" where all modules share it.
    """

    module: Annotated[str, Names("module")]
    cause: StrictCause
    accepts: list[StrictCause] = Field(default_factory=list)
    also: Annotated[list[str], Names("blamed")] = Field(default_factory=list)

    @property
    def names(self) -> frozenset[str]:
        """Who may be blamed."""
        return frozenset({self.module, *self.also})

    @property
    def causes(self) -> frozenset[Cause]:
        """Classes that may be named."""
        return frozenset({self.cause, *self.accepts})


class Fp8Fault(PlantedFault):
    """A fault of the low-precision stack, and which checks must see it.

    Attributes:
        cells: of FP8, each of which must turn red.
        checks: names with `*` and `?`; in each of those cells one that fails must bear one of them. Where a probe
            raises, the name is "raised CLASS".
        green: a cell off its path, which must stay green.
    """

    cells: Annotated[list[str], Names("cell")] = Field(min_length=1)
    checks: list[Text] = Field(min_length=1)
    green: Annotated[str, Names("cell")]

    def wants(self, check: str) -> bool:
        """Whether a check of this name is one that must see it."""
        return any(fnmatchcase(check, pattern) for pattern in self.checks)


class _TeFile(Row):
    fault: list[TeFault] = Field(min_length=1)


class _Fp8File(Row):
    fault: list[Fp8Fault] = Field(min_length=1)


def read_te_faults(catalog: Catalog) -> tuple[TeFault, ...]:
    """The faults in their order.

    Raises:
        MatrixInvalid: with every fault of the file.
    """
    return tuple(catalog.read(TE_FILE, _TeFile).fault)


def read_fp8_faults(catalog: Catalog, *, held_out: bool = False) -> tuple[Fp8Fault, ...]:
    """The faults in their order.

    Args:
        held_out: those that no check was written for.

    Raises:
        MatrixInvalid: with every fault of the file.
    """
    return tuple(catalog.read(FP8_HELD_OUT if held_out else FP8_FILE, _Fp8File).fault)


# --- the firewall -----------------------------------------------------------------------------------------------------


class Damage(Row):
    """One damaged install of Transformer Engine.

    Attributes:
        id: name of the case.
        says: what is done to the install, in words.
        do: name of an action and its arguments; empty where nothing is done.
        reason: patterns that the bridge's reason must match, each of them: the exception, the likely cause, the next
            step. Empty where nothing is wrong, so that there must be no reason.
        release: the release that is laid out; without it the pinned one.
        parts: the compiled parts that are laid out beside the sources.
        torch: whether the damage shows only once TE has imported torch.
        hides_torch: torch is taken away; modules of the bridge that are made of torch may fail then, nothing else.
        available: what `is_te_available()` must answer.
        missing: accessors that give None although TE is available.
    """

    id: Text
    says: Text
    do: list[Text] = Field(default_factory=list)
    reason: list[Text] = Field(default_factory=list)
    release: Release = ""
    parts: list[Text] = WHOLE
    torch: bool = True
    hides_torch: bool = False
    available: bool = False
    missing: list[Text] = Field(default_factory=list)

    @property
    def baseline(self) -> str:
        """The undamaged install that must be available for this case to prove anything; empty where none must."""
        return f"undamaged-{self.release}" if self.do and self.parts == WHOLE and self.torch else ""


class _FirewallFile(Row):
    damage: list[Damage] = Field(min_length=1)


def read_damages(catalog: Catalog) -> tuple[Damage, ...]:
    """The damaged installs in their order; those that name no release are of the pinned one.

    Raises:
        MatrixInvalid: with every fault of the file.
    """
    rows, pinned = catalog.read(FIREWALL_FILE, _FirewallFile).damage, {"release": catalog.pinned.te}
    return tuple(row if row.release else row.model_copy(update=pinned) for row in rows)


# --- the smoke run ----------------------------------------------------------------------------------------------------

Way = Literal["train", "evaluate", "save", "resume"]
CheckName = Literal["conservation", "replicas", "gradients", "reproduce", "resume", "validate", "watch", "launcher"]
Named = int | Text | list[int] | list[Text]


class SmokeFault(Planted):
    """A fault that is planted in a run, which check must see it, and what that must name.

    Attributes:
        fault: NAME or NAME:STEP of `training.smoke.faults`.
        plan: cell that it is planted in.
        way: which of the cell's runs has it.
        caught_by: the check that must see it.
        names: what that check must say, word by word.
        held_out: whether it was written before what judges it.
    """

    fault: str = Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*(:\d+)?$")
    plan: Annotated[str, Names("plan")]
    way: Way = "train"
    caught_by: CheckName
    names: dict[Text, Named] = Field(min_length=1)
    held_out: bool = False


class FaultPlan(SmokeCell):
    """A cell in which faults are planted."""

    code: str = Field(default=SMOKE_CODE, pattern=r"^smoke\.faults$")


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


def read_smoke_faults(catalog: Catalog) -> SmokeFaults:
    """The cells of the smoke run and their faults.

    Raises:
        MatrixInvalid: with every fault of the file.
    """
    return catalog.read(SMOKE_FILE, SmokeFaults)
