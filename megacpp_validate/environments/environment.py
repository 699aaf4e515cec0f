"""What every way to make a stack usable yields: how a process of this project is started in it.

There are four: an interpreter, and site folders put before its own packages (`interpreter`), a virtual environment made
from a lock with hashes (`venv`), and a container image by digest (`container`). Nothing above this file knows which one
it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from ..errors import NoEnvironment
from ..process import Call

__all__ = ["Environment", "NoEnvironment"]


class Environment(Protocol):
    """A stack that is ready."""

    @property
    def variables(self) -> Mapping[str, str]:
        """Environment variables of its processes, whole."""

    @property
    def because(self) -> str:
        """Where it comes from and why it was chosen, in words."""

    @property
    def shown(self) -> str:
        """What a person may type to start its interpreter; for messages."""

    @property
    def identity(self) -> str:
        """A hash of what it is made of: files, lock or image, and the variables that change what runs.

        Two environments of one identity give one answer, so a receipt that carries it may be used again.
        """

    def call(self, module: str, *arguments: str, shares: tuple[Path, ...] = ()) -> Call:
        """How a module of this project is started there, off the working folder (-P) and unbuffered (-u).

        Args:
            module: dotted name.
            arguments: its arguments; a path in them must lie in one of `shares`.
            shares: folders that it reads and writes, reachable there under the same path.
        """
