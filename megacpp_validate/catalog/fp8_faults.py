"""The faults by which the cells of FP8 are scored: `matrix/fp8_faults.toml` and its held-out half as typed values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field

from .file import matrix_folder
from .te_faults import FaultFile, PlantedFault, read_fault_file

FILE: Final = "fp8_faults.toml"
HELD_OUT: Final = "fp8_faults_held_out.toml"

Pattern = Annotated[str, Field(min_length=1)]


class Fp8Fault(PlantedFault):
    """A fault of the low-precision stack, and which checks must see it.

    Attributes:
        cells: of FP8, each of which must turn red.
        checks: names with `*` and `?`; in each of those cells one that fails must bear one of them. Where a probe
            raises, the name is "raised CLASS".
        green: a cell off its path, which must stay green.
        quick: whether the smallest shapes and the fewest steps show it.
    """

    cells: list[str] = Field(min_length=1)
    checks: list[Pattern] = Field(min_length=1)
    green: str
    quick: bool = True

    def wants(self, check: str) -> bool:
        """Whether a check of this name is one that must see it."""
        return any(fnmatchcase(check, pattern) for pattern in self.checks)


def read_fp8_faults(
    cells: Iterable[str], folder: Path | None = None, *, held_out: bool = False
) -> tuple[Fp8Fault, ...]:
    """The faults in their order.

    Args:
        cells: ids of the cells of FP8.
        folder: of the matrix.
        held_out: those that no check was written for.

    Raises:
        MatrixInvalid: with every fault of the file.
    """
    path = (folder or matrix_folder()) / (HELD_OUT if held_out else FILE)
    return read_fault_file(path, FaultFile[Fp8Fault], partial(_find_wrong, frozenset(cells)))


def _find_wrong(cells: frozenset[str], fault: Fp8Fault) -> Iterator[str]:
    named = [*fault.cells, fault.green]
    yield from (f"names {cell!r}, which is no cell of FP8" for cell in dict.fromkeys(named) if cell not in cells)
    if len(set(named)) < len(named):
        yield "names a cell twice, or as one that stays green, too"
