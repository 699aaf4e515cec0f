"""Exit codes, and the errors that end a verb with one message. Standard library only.

A message says what happened, the likely cause and the next step. Code that cannot go on raises one of these; only
`cli.app.main` catches them.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import ClassVar


class Exit(IntEnum):
    """Exit codes by class of outcome."""

    OPEN = 0
    CLOSED = 1
    WRONG_ARGUMENTS = 2
    NOTHING_SELECTED = 3
    EVIDENCE_MISSING = 4
    NO_ENVIRONMENT = 5
    INFRASTRUCTURE = 6
    INTERRUPTED = 130


def exit_for(*, breaks: bool, lacks: bool = False) -> Exit:
    """The exit code of a result: a breakage is worse than evidence that is missing, and that is never a pass."""
    return Exit.CLOSED if breaks else Exit.EVIDENCE_MISSING if lacks else Exit.OPEN


class ToolError(Exception):
    """A verb ends here; the message is for its user."""

    exit: ClassVar[Exit] = Exit.INFRASTRUCTURE


class WrongArguments(ToolError):
    """An argument, a matrix file or an input file is wrong."""

    exit = Exit.WRONG_ARGUMENTS


class NothingSelected(ToolError):
    """What was asked for selects nothing."""

    exit = Exit.NOTHING_SELECTED


class EvidenceMissing(ToolError):
    """There are no results to judge by."""

    exit = Exit.EVIDENCE_MISSING


class FileInvalid(EvidenceMissing):
    """A file that is not what it should be.

    Attributes:
        file: which one.
        reason: what is wrong with it, every fault named.
    """

    kind: ClassVar[str]
    next_step: ClassVar[str]

    def __init__(self, file: Path, reason: str) -> None:
        self.file = file
        self.reason = reason
        super().__init__(
            f"{file} is not a valid {self.kind}: {reason}. Likely cause: the file was edited, cut short, or written by "
            f"another version. Next step: {self.next_step}."
        )


class NoEnvironment(ToolError):
    """Sources or an environment cannot be made."""

    exit = Exit.NO_ENVIRONMENT


class InfrastructureFailed(ToolError):
    """An engine, a disk, a network or a lock failed."""

    exit = Exit.INFRASTRUCTURE


@contextmanager
def writing_to(folder: Path, content: str, option: str) -> Iterator[None]:
    """Report a folder that cannot be written as a wrong argument; a full disk stays an `OSError`.

    Args:
        folder: where the block writes.
        content: what it writes, in the plural: "receipts".
        option: that named the folder.

    Raises:
        WrongArguments: the folder cannot be written.
    """
    try:
        yield
    except OSError as fault:
        if fault.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise WrongArguments(
            f"{content} cannot be written to {folder}: {fault.strerror or fault}. Likely cause: it is a file, or you "
            f"may not write there. Next step: give {option} a folder that you can write."
        ) from fault
