"""What a run of many jobs knows, in a file that is written aside and renamed: a second start goes on from it.

The receipts say which cells are done; the state says which jobs are on their way, and what went wrong with earlier
ones. It has no suffix of JSON, because every such file in a folder of receipts is taken for one.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Final, Literal

from pydantic import Field, ValidationError

from ...evidence.values import Frozen
from ...evidence.whole_file import write_whole
from .launcher import Try

# A node that has no room, or not the shared folder, ends each job at once, and so is the first to be free for the next.
_OF_A_NODE: Final = frozenset({"disk-full", "not-started", "no-receipt", "boot-fail"})
STATE_FILE: Final = ".matrix.state"
WORK_FOLDER: Final = ".matrix.work"


class StateDamaged(RuntimeError):
    """The file of the state is none; nothing is guessed from it."""


class Fault(Frozen):
    """An infrastructure fault that ended an attempt.

    Attributes:
        name: of the kind of fault.
        says: what happened.
        counts: towards the limit of retries; an end of this tool itself does not.
        node: where, as far as it is known.
    """

    name: str
    says: str
    counts: bool = True
    node: str = ""

    @property
    def accuses_node(self) -> bool:
        """Whether another attempt is better made elsewhere; a node that is down is avoided by the scheduler itself."""
        return bool(self.node) and self.name in _OF_A_NODE

    def __str__(self) -> str:
        return f"{self.name}: {self.says}"


class Attempt(Frozen):
    """A job on its way: its number in the cell, its name, and the scheduler's number once it is known."""

    number: int = Field(ge=1)
    name: str
    id: str = Field(default="", pattern=r"^([0-9][0-9_+]*)?$")  # it is given to `scancel`


class JobState(Frozen):
    """What is known of one cell.

    Attributes:
        asked: hash of what its probe is told; a job that was told something else answers nothing.
        attempt: on its way now.
        tries: attempts so far; the one on its way is the last of them.
        faults: what ended earlier ones.
    """

    asked: str
    attempt: Attempt | None = None
    tries: int = Field(default=0, ge=0)
    faults: tuple[Fault, ...] = ()


class StateFile(Frozen):
    """The whole file."""

    schema_id: Literal["megacpp-validate/matrix-state/1"] = "megacpp-validate/matrix-state/1"
    run: str = Field(pattern=r"^[0-9a-f]{8}$")
    launcher: str
    jobs: dict[str, JobState] = Field(default_factory=dict)


def hash_order(order: object) -> str:
    """A name for what a probe is told."""
    return sha256(repr(order).encode()).hexdigest()


@dataclass
class State:
    """The state of a run, and its file.

    Attributes:
        folder: of the receipts.
        run: eight digits that tell its jobs from those of other runs.
        launcher: that its jobs were given to.
        jobs: by cell.
    """

    folder: Path
    run: str
    launcher: str
    jobs: dict[str, JobState] = field(default_factory=dict)
    _written: str = ""

    def keep(self) -> None:
        """Write it down.

        Raises:
            OSError: it cannot be written; the file of before is whole.
        """
        whole = StateFile(run=self.run, launcher=self.launcher, jobs=self.jobs)
        text = whole.model_dump_json(indent=1) + "\n"
        if text != self._written:
            write_whole(self.folder / STATE_FILE, text)
            self._written = text

    def work_of(self, cell: str, number: int) -> Path:
        """Folder of one attempt."""
        return self.folder / WORK_FOLDER / self.run / f"{cell}.{number}"

    def name_of(self, cell: str, number: int) -> str:
        """Of the job of one attempt."""
        return f"{cell}.{self.run}.{number}"

    def put_attempt(self, cell: str, attempt: Attempt | None) -> None:
        """What is on its way of a cell now."""
        self.jobs[cell] = self.jobs[cell].model_copy(update={"attempt": attempt})

    def try_of(self, cell: str, attempt: Attempt) -> Try:
        """An attempt as a launcher takes it; nodes that ended earlier ones are avoided."""
        avoid = dict.fromkeys(fault.node for fault in self.jobs[cell].faults if fault.accuses_node)
        return Try(attempt.name, attempt.id, self.work_of(cell, attempt.number), tuple(avoid))


def open_state(folder: Path, launcher: str) -> State:
    """The state of an earlier start, or a new one.

    Raises:
        StateDamaged: it cannot be read, contradicts itself, or jobs of another launcher are on their way.
    """
    path = folder / STATE_FILE
    try:
        found = StateFile.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return State(folder, secrets.token_hex(4), launcher)
    except (OSError, ValidationError) as fault:
        raise StateDamaged(_say_damaged(path, f"cannot be read: {_say_fault(fault)}")) from fault
    if found.launcher != launcher and any(job.attempt for job in found.jobs.values()):
        raise StateDamaged(
            f"{path} has jobs on their way that were given to the launcher {found.launcher}. Next step: start it again "
            f"with --launcher {found.launcher}, or give this run another folder with --receipts."
        )
    state = State(folder, found.run, launcher, dict(found.jobs))
    for cell, job in state.jobs.items():
        # A name that is not the job's own would be asked of the scheduler, and its answer believed.
        if job.attempt and (job.attempt.number, job.attempt.name) != (job.tries, state.name_of(cell, job.tries)):
            says = f"attempt {job.attempt.number}, {job.attempt.name!r}, is not try {job.tries} of {cell}"
            raise StateDamaged(_say_damaged(path, f"contradicts itself: {says}"))
    return state


def _say_fault(fault: OSError | ValidationError) -> str:
    if isinstance(fault, OSError):
        return str(fault)
    first = fault.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}"


def _say_damaged(path: Path, what: str) -> str:
    return (
        f"{path} {what}. Likely cause: it was edited, or is of another version. Next step: see that no job of the run "
        "is left (`squeue --me`), remove the file, and start again: receipts that are there are kept."
    )
