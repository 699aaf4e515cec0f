"""Cells as jobs of a Slurm, through submitit: the back end of `fleet.run_cells` on a cluster, and its settings."""

from __future__ import annotations

import glob
import math
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Final, cast

from pydantic import Field, StringConstraints

from ..catalog.file import Names, read_rows
from ..diagnosis.diagnose import find_retry_fault
from ..diagnosis.rows import JOB_ENDS
from ..errors import InfrastructureFailed
from ..evidence.receipt import Receipt
from ..evidence.store import ReceiptInvalid, read_receipt
from ..evidence.values import Frozen
from ..process import Processes, run_command
from .cell import Cell, answers, bring_home
from .fleet import Attempt, Attempted, count_cores
from .interpreter import PACKAGE, hash_parts

WORK_FOLDER: Final = ".matrix.work"
_OVER: Final = frozenset({"COMPLETED", "FAILED", "", *JOB_ENDS})  # "": Slurm does not know the job any more
_TOOL_LIMIT_S: Final = 60.0
_START_MINUTES: Final = 15  # that a job may take beside its cell: an image that is pulled, a cold disk
_LAST_WORDS: Final = 400  # characters
# Options of `sbatch` by their long names; Slurm reads a value to the end of its line.
Options = dict[Annotated[str, StringConstraints(pattern=r"^[a-z][a-z-]*$")],
               bool | int | Annotated[str, StringConstraints(pattern=r"^\S+$")]]  # fmt: skip


class Cluster(Frozen):
    """How jobs are given to a Slurm: a TOML file of the site's own.

    Attributes:
        all: options of every job, as `sbatch` names them; {gpus} is the number of GPUs that the cell needs, and an
            option with it is left out where the cell needs none.
        target: options by target, which take the place of those of `all`.
        retries: of one cell, after infrastructure faults.
        poll_s: between two looks at the queue.
        grace_s: that a receipt may take to arrive after its job is over: a shared file system is late.
    """

    all: Options = Field(default_factory=dict)
    target: Annotated[dict[str, Options], Names("target")] = Field(default_factory=dict)
    retries: int = Field(default=1, ge=0, le=20)
    poll_s: float = Field(default=5.0, gt=0)
    grace_s: float = Field(default=15.0, ge=0)


def read_cluster(path: Path | None, targets: Sequence[str]) -> Cluster:
    """The settings of a file; those of a cluster with defaults where there is none.

    Raises:
        MatrixInvalid: with every fault of the file.
    """
    if path is None:
        return Cluster()

    place = path.absolute()
    (cluster,) = read_rows(place.parent, {place.name: Cluster}, {"target": targets})
    return cast("Cluster", cluster)


def plan_job(cluster: Cluster, target: str, *, gpus: int, limit_s: float) -> dict[str, str | bool]:
    """The options of a job, as `sbatch` names them.

    Args:
        cluster: settings of the site.
        target: whose options are taken.
        gpus: that the cell needs.
        limit_s: seconds that the cell may take.
    """
    # A few minutes more than the cell may take: its own limit reports where it hung, Slurm's reports nothing. Slurm
    # does not start a job again by itself: the receipt would not count it.
    own = {"time": math.ceil(limit_s / 60) + _START_MINUTES, "no-requeue": True, "export": "ALL", "gres": "gpu:{gpus}"}
    wanted = own | cluster.all | cluster.target.get(target, {})
    return {
        name: value if value is True else str(value).replace("{gpus}", str(gpus))
        for name, value in wanted.items()
        if value is not False and (gpus or "{gpus}" not in str(value))
    }


def list_options(parameters: Mapping[str, str | bool]) -> tuple[str, ...]:
    """The options of a job as words."""
    return tuple(f"--{name}" if value is True else f"--{name}={value}" for name, value in parameters.items())


@dataclass(frozen=True)
class QueuedJob:
    """What Slurm reports of a job: its state in Slurm's word, its node and Slurm's reason."""

    word: str = ""
    node: str = ""
    because: str = ""


def run_cell(cell: Cell, changed: Mapping[str, str]) -> str:
    """What a job runs on its node: the cell, with the variables that the node adds; its outcome."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # submitit would go on until Slurm kills the job
    cores = os.environ.get("SLURM_CPUS_ON_NODE", "")
    threads = cores if cores.isdigit() else str(count_cores())
    variables = {"OMP_NUM_THREADS": threads, **os.environ, **changed}
    here = replace(cell, environment=replace(cell.environment, variables=variables))
    with tempfile.TemporaryDirectory(prefix="megacpp-") as scratch:
        return here.run(Path(scratch, "cell"), Processes()).outcome.value


@dataclass
class SlurmJobs:
    """Cells as jobs, each with a folder of its own below `WORK_FOLDER`.

    Nothing is known beside what is there: the folder of a job is named after its cell and its order, and holds what
    submitit wrote, the number of the job among it. So the tool may be killed at any time, and the next run finds the
    jobs that are on their way.

    Attributes:
        cluster: settings of the site.
        folder: of the receipts, on a file system that the nodes share.
        at_once: jobs in the queue; 0 for all.
        fresh: cancel the jobs of an earlier run.
    """

    cluster: Cluster
    folder: Path
    at_once: int = 0
    fresh: bool = False
    _jobs: dict[str, Attempt] = field(default_factory=dict)  # by number
    _over: dict[str, float] = field(default_factory=dict)  # when a job was first seen to be over

    def __post_init__(self) -> None:
        """Look for a Slurm.

        Raises:
            InfrastructureFailed: there is no Slurm here, or it does not answer.
        """
        self._look()

    def has_room(self, attempt: Attempt, running: Sequence[Attempt]) -> bool:  # noqa: ARG002
        """Whether there is room in the queue."""
        return not self.at_once or len(running) < self.at_once

    def start(self, attempt: Attempt) -> None:
        """Submit a cell, or take up the job that an earlier run submitted for the same order.

        Raises:
            InfrastructureFailed: Slurm does not take the job.
        """
        cell, work = attempt.cell.order.cell, self._work(attempt)
        for other in work.parent.glob(f"{glob.escape(cell)}.????????"):
            if other != work or self.fresh:
                self._cancel(_read_numbers(other), other)
        numbers = _read_numbers(work)
        if not numbers:  # nobody has taken it
            shutil.rmtree(work, ignore_errors=True)
            numbers = [self._submit(attempt, work)]
        self._jobs[numbers[-1]] = attempt

    def _submit(self, attempt: Attempt, work: Path) -> str:
        """Submit a cell; the number of its job."""
        import submitit  # half a second, and used on a cluster alone
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        cell = attempt.cell
        work.mkdir(parents=True, mode=0o700)
        own = cell.environment.variables
        changed = {key: value for key, value in own.items() if os.environ.get(key) != value or key == "PYTHONPATH"}
        # The scheduler hands all other variables on.
        bare = replace(cell.environment, variables={})
        planned = plan_job(self.cluster, cell.order.target.id, gpus=cell.gpus, limit_s=cell.limit_s)
        executor = submitit.SlurmExecutor(folder=work)
        executor.update_parameters(
            additional_parameters={name: value for name, value in planned.items() if name != "time"},
            time=planned["time"], job_name=cell.order.cell, use_srun=False, stderr_to_stdout=True, wckey=None,
            setup=[f'export PYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}"{shlex.quote(str(PACKAGE.parent))}'],
        )  # fmt: skip
        there = replace(cell, environment=bare, folder=work)
        try:
            return str(executor.submit(run_cell, there, changed).job_id)
        except (FailedJobError, FailedSubmissionError, OSError) as fault:
            words = " ".join(str(fault).split())[-_LAST_WORDS:]
            raise InfrastructureFailed(
                f"sbatch does not take a job: {words}. Its options: {shlex.join(list_options(planned))}. Likely cause: "
                "the controller is down, or the settings of --cluster do not fit this cluster. Next step: `scontrol "
                "ping`; then the same command again, which finds the jobs that are on their way."
            ) from fault

    def wait(self) -> list[Attempted]:
        """Jobs that are over, after a look at the queue.

        Raises:
            InfrastructureFailed: Slurm does not answer; the next run finds the jobs.
        """
        time.sleep(self.cluster.poll_s)
        seen = self._look()
        found = [self._settle(number, seen.get(number, QueuedJob())) for number in tuple(self._jobs)]
        return [ended for ended in found if ended is not None]

    def _settle(self, number: str, seen: QueuedJob) -> Attempted | None:
        """Bring a receipt home, or end an attempt that is over without one; None for a job that goes on."""
        attempt, receipt = self._jobs[number], None
        cell, work = attempt.cell, self._work(attempt)
        with suppress(ReceiptInvalid):
            receipt = read_receipt(work / cell.place.name)
        fault = ""
        if receipt is not None and answers(cell.order, receipt) and not find_retry_fault(receipt):
            bring_home(receipt, work, self.folder)
        elif seen.word not in _OVER:
            self._over.pop(number, None)
            return None
        elif time.monotonic() - self._over.setdefault(number, time.monotonic()) < self.cluster.grace_s:
            return None
        else:
            fault, receipt = name_fault(seen, receipt, work), None
            words = "".join(map(_read, (*work.glob("*_log.out"), work / cell.log.name)))
            with suppress(OSError):  # a disk that is full costs those words alone
                (self.folder / f"{cell.order.cell}.attempt-{len(attempt.faults) + 1}.log").write_text(words)
        del self._jobs[number]
        shutil.rmtree(work, ignore_errors=True)
        return Attempted(attempt, receipt, fault, seen.node)

    def stop(self) -> None:
        """Cancel every job of this run; none of that counts as a fault.

        A job that cannot be cancelled is found at the next start.
        """
        if isinstance(sys.exception(), InfrastructureFailed):
            return  # Slurm does not answer: the jobs go on
        for number, attempt in self._jobs.items():
            with suppress(InfrastructureFailed):
                self._cancel([number], self._work(attempt))

    def _cancel(self, numbers: Sequence[str], work: Path) -> None:
        seen = self._look()
        if going_on := [number for number in numbers if seen.get(number, QueuedJob()).word not in _OVER]:
            _ask("scancel", "--quiet", *going_on)
        shutil.rmtree(work, ignore_errors=True)

    def _work(self, attempt: Attempt) -> Path:
        order = attempt.cell.order
        return self.folder / WORK_FOLDER / f"{order.cell}.{hash_parts((repr(order),))[:8]}"

    def _look(self) -> dict[str, QueuedJob]:
        """Jobs by number; the queue remembers ended jobs for some minutes.

        Raises:
            InfrastructureFailed: Slurm does not answer.
        """
        words = ("squeue", "--noheader", "--states=all", f"--user={os.getuid()}", "--format=%i|%T|%N|%r")
        rows = [line.split("|", 3) for line in _ask(*words).splitlines() if line.count("|") >= 3]
        return {row[0]: QueuedJob(row[1], "" if row[2] in ("(null)", "n/a") else row[2], row[3]) for row in rows}


def _read_numbers(work: Path) -> list[str]:
    """The numbers of the jobs that submitit submitted from a folder."""
    found = (file.name.partition("_")[0] for file in work.glob("*_submission.sh"))
    return sorted((number for number in found if number.isdigit()), key=int)


def name_fault(seen: QueuedJob, receipt: Receipt | None, work: Path) -> str:
    """The fault of an attempt that is over and has no answer."""
    named = JOB_ENDS.get(seen.word) or (find_retry_fault(receipt) if receipt else "")
    if not named and seen.word:
        named = f"no-receipt: the job ended ({seen.word}) and left no receipt"
    named = named or "gone: Slurm does not know the job any more, and it left no receipt"
    where = f" (node {seen.node})" if seen.node else ""
    because = f": {seen.because}" if seen.because not in ("", "None") else ""
    last = " ".join("".join(map(_read, work.glob("*_log.out"))).split())[-_LAST_WORDS:]
    return f"{named}{where}{because}" + (f"; its last words: {last}" if last else "")


def _read(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""


def _ask(*words: str) -> str:
    """What a tool of Slurm prints.

    Raises:
        InfrastructureFailed: it fails, or does not answer in time.
    """
    ended = run_command(words, limit_s=_TOOL_LIMIT_S, apart=True)
    if ended.code == 0:
        return ended.words
    raise InfrastructureFailed(
        f"the scheduler does not answer: {words[0]}: {ended.last_words[-_LAST_WORDS:]}. Likely cause: this host is no "
        "login node of a cluster, or the controller is down. Next step: `scontrol ping`; then the same command again, "
        "which goes on from the jobs that were submitted; or --launcher local."
    )
