"""Which cells a matrix has, decided before anything is started: pure functions of the rows and of what was asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final, Literal

from ...catalog.bridge import BridgeModule, Catalog, Fp8Cell, ProbeCell, SmokeCell
from ...catalog.bridge import Target as TargetRow
from ...evidence.receipt import cell_id
from ..plan import UnknownTarget, find_target

NATIVE: Final = "native"  # the stack without Transformer Engine, as cells name it
Kind = Literal["module", "composition", "fp8", "smoke"]
_WILD: Final = frozenset("*?[")


@dataclass(frozen=True)
class Wish:
    """What a person selects; an empty field selects all that there is.

    Attributes:
        targets: ids of targets.
        stacks: ids of rows of matrix/stacks.toml, `native`, or names of environments; where there is none, the pinned
            stack on targets with a GPU and `native` on others.
        environments: names of environments that the person described.
        probes: ids of bridge modules, compositions, FP8 cells and smoke cells.
        cells: whole cell ids, or patterns of them.
    """

    targets: tuple[str, ...]
    stacks: tuple[str, ...] = ()
    environments: tuple[str, ...] = ()
    probes: tuple[str, ...] = ()
    cells: tuple[str, ...] = ()


@dataclass(frozen=True)
class Planned:
    """One cell of the matrix.

    Attributes:
        row: what the matrix says of its probe.
        kind: of which file the row is.
    """

    stack: str
    target: TargetRow
    row: BridgeModule | ProbeCell
    kind: Kind

    @property
    def probe(self) -> str:
        """Id of its probe."""
        return self.row.id

    @property
    def cell(self) -> str:
        """The join key."""
        return cell_id(self.stack, self.target.id, self.row.id)

    @property
    def gpus(self) -> int:
        """That a machine must have for it: one for each rank that it trains in."""
        ranks = self.row.ranks if isinstance(self.row, SmokeCell) else 1
        return ranks if self.target.arch else 0

    @property
    def stands_on_te(self) -> bool:
        """Whether there is nothing to see where Transformer Engine cannot be imported."""
        needs = self.row.needs_te if isinstance(self.row, Fp8Cell) else True
        return needs and bool(self.target.arch) and self.stack != NATIVE

    def limit_s(self, least: float) -> float:
        """Seconds that it may take."""
        return max(least, self.row.limit_s) if isinstance(self.row, ProbeCell) else least


def choose_cells(catalog: Catalog, wish: Wish) -> tuple[Planned, ...]:
    """The cells that are asked for, by target, then by stack, in the order of the matrix; empty where nothing fits.

    Raises:
        UnknownTarget: a target, stack, probe or whole cell id that there is not.
    """
    targets = [find_target(catalog, name) for name in dict.fromkeys(wish.targets)]
    _refuse_unknown("stack", wish.stacks, [NATIVE, *(row.id for row in catalog.stacks), *wish.environments])
    _refuse_unknown("probe", wish.probes, [row.id for row, _ in _rows(catalog)])
    found = [
        Planned(stack, target, row, kind)
        for target in targets
        for stack in _stacks_on(catalog, target, wish)
        for row, kind in _rows(catalog)
        if _is_there(row, target, stack) and (not wish.probes or row.id in wish.probes)
    ]
    whole = [pattern for pattern in wish.cells if not _WILD.intersection(pattern)]
    _refuse_unknown("cell", whole, [cell.cell for cell in found])
    return tuple(
        cell for cell in found if not wish.cells or any(fnmatchcase(cell.cell, pattern) for pattern in wish.cells)
    )


def _rows(catalog: Catalog) -> Iterator[tuple[BridgeModule | ProbeCell, Kind]]:
    yield from ((row, "module") for row in catalog.modules)
    yield from ((row, "composition") for row in catalog.compositions)
    yield from ((row, "fp8") for row in catalog.fp8)
    yield from ((row, "smoke") for row in catalog.smoke)


def _stacks_on(catalog: Catalog, target: TargetRow, wish: Wish) -> tuple[str, ...]:
    """Stacks of one target: a row of matrix/stacks.toml is Transformer Engine, which has no kernels without a GPU."""
    asked = wish.stacks or wish.environments or (catalog.pinned.id if target.arch else NATIVE,)
    releases = {row.id for row in catalog.stacks} - set(wish.environments)
    return tuple(dict.fromkeys(stack for stack in asked if target.arch or stack not in releases))


def _is_there(row: BridgeModule | ProbeCell, target: TargetRow, stack: str) -> bool:
    match row:
        case SmokeCell():
            return target.id in row.targets
        case Fp8Cell():
            return bool(target.arch) and not (row.needs_te and stack == NATIVE)
        case _:
            return True


def _refuse_unknown(what: str, wanted: Sequence[str], known: Sequence[str]) -> None:
    if unknown := [name for name in wanted if name not in known]:
        raise UnknownTarget(
            f"there is no {what} {', '.join(map(repr, unknown))} here. Likely cause: a typing error, or it is of "
            f"another target or stack. Next step: choose from {', '.join(dict.fromkeys(known)) or 'other --targets'}."
        )
