"""The loss curves of a folder: those of one session together, and what is no curve told apart."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .loss_curve import LossCurve
from .loss_curve_file import CurveInvalid, read_curve

SUFFIX: Final = ".curve"


class NoFolder(CurveInvalid):
    """A folder of curves that is not there."""

    def __init__(self, folder: Path) -> None:
        self.source, self.reason = str(folder), "there is no such folder"
        ValueError.__init__(
            self,
            f"{folder} is no folder. Likely cause: a typing error, or no session wrote there. Next step: give the "
            "folder of receipts of a session of `fp8`.",
        )


@dataclass(frozen=True)
class CurveSet:
    """The curves that were trained together.

    Attributes:
        of: the cell that trained them; what the names of their files begin with.
        curves: by name of file.
        unreadable: every file of them that is no curve: a run that is lost, not one that passed.
    """

    of: str
    curves: tuple[LossCurve, ...]
    unreadable: tuple[CurveInvalid, ...] = ()


def curve_name(recipe: str, seed: int) -> str:
    """What the name of a curve's file ends with, behind the cell and a dot."""
    return f"{recipe}-{seed}{SUFFIX}"


def read_curves(folder: Path) -> tuple[CurveSet, ...]:
    """Every curve of a folder, a set a cell; files that are not called `[CELL.]RECIPE-SEED.curve` are left alone.

    Raises:
        NoFolder: there is no such folder.
    """
    if not folder.is_dir():
        raise NoFolder(folder)
    curves: dict[str, list[LossCurve]] = {}
    unreadable: dict[str, list[CurveInvalid]] = {}
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        of, _, said = path.name.removesuffix(SUFFIX).rpartition(".")
        try:
            curve = read_curve(path)
            if f"{said}{SUFFIX}" != curve_name(curve.recipe, curve.seed):
                held = f"it holds {curve.recipe} with seed {curve.seed}, which its name does not say"
                raise CurveInvalid(str(path), held)
        except CurveInvalid as fault:
            unreadable.setdefault(of, []).append(fault)
        else:
            curves.setdefault(of, []).append(curve)
    names = sorted(curves.keys() | unreadable.keys())
    return tuple(CurveSet(of, tuple(curves.get(of, ())), tuple(unreadable.get(of, ()))) for of in names)
