"""The groups of scenarios."""

from __future__ import annotations

from typing import Final

from . import gate, stacks
from .harness import Group

GROUPS: Final = (
    Group("gate", gate.gates, every=4),
    Group("compare", stacks.compares, every=4),
    Group("blame", stacks.blames, every=4),
    Group("fits", stacks.fits, every=4),
    Group("policy", stacks.policies),
)
