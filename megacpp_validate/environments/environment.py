"""What every way to make a stack usable yields: how a process of this project is started in it.

There are four: the current interpreter (`interpreter`), folders put before a host's own packages (`overlay`), a virtual
environment made from a lock with hashes (`venv`), and a container image by digest (`container`). Nothing above this
file knows which one it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


class NoEnvironment(RuntimeError):
    """A stack that cannot be made usable; the text says what happened, the likely cause and the next step."""


@dataclass(frozen=True)
class Call:
    """A process that can be started.

    Attributes:
        words: the command.
        variables: its environment variables, whole.
        ends: a command that ends what outlives the killed process group; empty where nothing does. A container goes
            on when the client that started it is gone.
        not_started: exit statuses by which what starts the process says that it could not, or that it lost it. Docker's
            own is 125 (docker-run(1), "Exit Status"); of the process they say nothing.
    """

    words: tuple[str, ...]
    variables: Mapping[str, str] = field(repr=False)
    ends: tuple[str, ...] = ()
    not_started: tuple[int, ...] = ()


class Environment(Protocol):
    """A stack that is ready; making one is the work of the way that yields it."""

    @property
    def because(self) -> str:
        """Where it comes from and why it is this one, in words."""

    @property
    def shown(self) -> str:
        """What a person may type to start its interpreter; for messages."""

    @property
    def identity(self) -> str:
        """A hash of what it is made of: files, lock or image, and the variables that change what runs.

        Two environments of one identity give one answer. So a receipt that carries it may be taken again.
        """

    def call(self, module: str, *arguments: str, shares: tuple[Path, ...] = ()) -> Call:
        """How a module of this project is started there, off the working folder (-P) and unbuffered (-u).

        Args:
            module: dotted name.
            arguments: its arguments; a path in them must lie in one of `shares`.
            shares: folders that it reads and writes, reachable there under the same path.
        """
