"""Which low-precision recipe a target trains in, as data, and whether that target is the machine that is there.

The bridge works where no matrix is, so the few rows that it needs stand here; a test holds them equal to
`matrix/targets.toml`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

import torch

from .errors import UnknownName, WrongTarget

RecipeName = Literal["delayed", "current", "block", "mxfp8", "nvfp4"]
RECIPES: Final[tuple[RecipeName, ...]] = get_args(RecipeName)
# Classes of Transformer Engine.
RECIPE_NAMES: Final[dict[str, RecipeName]] = {
    "DelayedScaling": "delayed",
    "Float8CurrentScaling": "current",
    "Float8BlockScaling": "block",
    "MXFP8BlockScaling": "mxfp8",
    "NVFP4BlockScaling": "nvfp4",
}
# What an FP8 GEMM wants both widths of a weight to be a multiple of: `assert_dim_for_fp8_exec` in TE's utils.py, and
# the block of MXFP8 (`MXFP8_BLOCK_SCALING_SIZE`).
ALIGNMENT: Final[Mapping[RecipeName, int]] = {"delayed": 16, "current": 16, "block": 16, "mxfp8": 32, "nvfp4": 16}

TE_DTYPES: Final = frozenset({torch.float32, torch.float16, torch.bfloat16})
"""Dtypes of the parameters that layers of Transformer Engine take."""


@dataclass(frozen=True)
class TargetRecipes:
    """What one kind of machine can train in.

    Attributes:
        id: name of the target.
        arch: its GPU, as "sm_90"; empty for none.
        recipes: every recipe that holds on it.
        production: the one that is taken where none is named; None where there is none.
    """

    id: str
    arch: str
    recipes: tuple[RecipeName, ...] = ()
    production: RecipeName | None = None


TARGETS: Final[dict[str, TargetRecipes]] = {
    row.id: row
    for row in (
        TargetRecipes("h200", "sm_90", ("delayed", "current", "block"), "delayed"),
        TargetRecipes("b200", "sm_100", ("delayed", "current", "block", "mxfp8", "nvfp4"), "mxfp8"),
        TargetRecipes("gb10", "sm_121"),
        TargetRecipes("cpu", ""),
    )
}


def recipe_for(target: str, name: str | None = None) -> RecipeName | None:
    """The recipe of a target: the one that is named, else its production recipe; None where it has none.

    Args:
        target: id of a target, or its arch ("sm_90"). `detect_target()` gives the one that is there.
        name: a recipe.

    Raises:
        UnknownName: there is no such target or recipe.
        WrongTarget: the target is not the machine that is there, or has no such recipe.
    """
    row = _row(target)
    if name is not None and name not in RECIPES:
        raise UnknownName(f"there is no recipe {name!r}. Next step: choose one of {', '.join(RECIPES)}.")
    _check_machine(row)
    if name is None:
        return row.production
    if name not in row.recipes:
        others = [other.id for other in TARGETS.values() if name in other.recipes]
        whose = f"{' and '.join(others)} {'has' if len(others) == 1 else 'have'} it"
        have = f"take one of {', '.join(row.recipes)}" if row.recipes else "stay in bf16 (name no recipe)"
        raise WrongTarget(
            f"the target {row.id}{f' ({row.arch})' if row.arch else ''} has no recipe {name}. Likely cause: it was "
            f"chosen for another machine; {whose}. Next step: {have}."
        )
    return name


def detect_target() -> str:
    """Id of the target that this machine is; "cpu" without a CUDA device.

    Raises:
        WrongTarget: there is a GPU that is no target.
    """
    found = _present_arch()
    known = {row.arch: row.id for row in TARGETS.values()}
    if found not in known:
        raise WrongTarget(
            f"this GPU is {found}, which is no target. Likely cause: a machine that nobody has validated yet. Next "
            f"step: run on one of {', '.join(f'{row.id} ({row.arch})' for row in TARGETS.values() if row.arch)}, or "
            "add a row for it."
        )
    return known[found]


def _row(target: str) -> TargetRecipes:
    for row in TARGETS.values():
        if target and target in (row.id, row.arch):
            return row
    raise UnknownName(
        f"there is no target {target!r}. Next step: choose one of {', '.join(TARGETS)}, or an arch of "
        f"{', '.join(row.arch for row in TARGETS.values() if row.arch)}."
    )


def _check_machine(row: TargetRecipes) -> None:
    """A target without a GPU of its own (cpu) is right everywhere: there the bridge stays native."""
    if not row.arch:
        return
    found = _present_arch()
    if found != row.arch:
        there = f"this GPU is {found}" if found else "torch sees no CUDA device here"
        raise WrongTarget(
            f"the target {row.id} wants {row.arch}, and {there}. Likely cause: a configuration of another machine, or "
            "a GPU hidden by CUDA_VISIBLE_DEVICES. Next step: name the target that is there (detect_target() tells)."
        )


def _present_arch() -> str:
    """Arch of the current CUDA device, as "sm_90"; empty where there is none."""
    if not torch.cuda.is_available():
        return ""
    return "sm_{}{}".format(*torch.cuda.get_device_capability())
