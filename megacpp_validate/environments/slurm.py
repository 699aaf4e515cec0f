"""Cells as jobs of a Slurm, through submitit: submitted, watched, run again after a fault of the cluster, brought home.

Nothing is known beside what is there. A receipt is a cell done. A job on its way is found by its name, which holds the
cell, the folder of the receipts and the order; its folder holds what it wrote. So the tool may be killed at any time,
and the same command goes on. Each job writes into a folder of its own, and its receipt is copied from there.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field, StringConstraints, ValidationError

from ..diagnosis.rows import JOB_ENDS
from ..errors import InfrastructureFailed, WrongArguments
from ..evidence.receipt import Receipt, write_receipt
from ..evidence.store import ReceiptInvalid, read_receipt
from ..evidence.values import Frozen
from ..evidence.whole_file import write_whole
from ..process import Processes, run_command
from .cell import Cell, answers, bring_home
from .fleet import Event, Progress
from .identity import hash_parts
from .interpreter import PACKAGE
from .restart import find_done, find_fault, receipt_of_given_up
from .schedule import count_cores

WORK_FOLDER: Final = ".matrix.work"
_OVER: Final = frozenset({"COMPLETED", "FAILED", "", *JOB_ENDS})  # "": Slurm does not know the job any more
# A node that has no room, or not the shared folder, ends each job at once, and so is the first to be free for the next.
_ACCUSES_NODE: Final = ("disk-full", "not-started", "no-receipt", "boot-fail")
_TOOL_LIMIT_S: Final = 60.0
_FIRST_PAUSE_S: Final = 0.2
_LAST_WORDS: Final = 400  # characters
# One word of an option: Slurm reads it to the end, and none begins another option.
_Word = Annotated[str, StringConstraints(pattern=r"^[\w.:,+&|()\[\]@=/*!-]*$")]
_OWN: Final = frozenset({"job-name", "output", "error", "array", "wrap", "requeue", "no-requeue", "test-only"})
_WEEK_S, _WEEK_MINUTES = 604_800, 10_080  # more is a typing error


class JobOptions(Frozen):
    """Options of `sbatch`; what is empty or 0 is left to the cluster.

    Attributes:
        gres: with {gpus} where the number of GPUs belongs; used where a cell needs one.
        cpus, memory_mib: of a job.
        minutes: of a job; without it, what the cell may take and what a start may take.
        extra: further options, such as "--exclusive"; none that this tool sets itself.
    """

    partition: _Word = ""
    account: _Word = ""
    qos: _Word = ""
    constraint: _Word = ""
    reservation: _Word = ""
    gres: Annotated[str, StringConstraints(pattern=r"^[\w.:,]*(\{gpus\})?[\w.:,]*$")] = "gpu:{gpus}"
    cpus: int = Field(default=0, ge=0)
    memory_mib: int = Field(default=0, ge=0)
    minutes: int = Field(default=0, ge=0, le=2 * _WEEK_MINUTES)
    extra: tuple[Annotated[str, StringConstraints(pattern=r"^--[a-z][a-z-]*(=[^\s]+)?$")], ...] = ()


class Cluster(Frozen):
    """How jobs are given to a Slurm, and how long the tool waits for it: a TOML file of the site's own.

    Attributes:
        all: options of every job.
        target: options by target; they take the place of what `all` says.
        retries: of one cell, after infrastructure faults.
        poll_s: between two looks at the queue.
        grace_s: that a receipt may take to arrive after its job is over: a shared file system is late.
        patience_s: that the scheduler may be silent while jobs are on their way.
        start_minutes: that a job may take beside its cell: an image that is pulled, a cold disk.
    """

    all: JobOptions = JobOptions()
    target: dict[str, JobOptions] = Field(default_factory=dict)
    retries: int = Field(default=2, ge=0, le=20)
    poll_s: float = Field(default=5.0, gt=0, le=_WEEK_S)
    grace_s: float = Field(default=15.0, ge=0, le=_WEEK_S)
    patience_s: float = Field(default=600.0, ge=0, le=_WEEK_S)
    start_minutes: int = Field(default=15, ge=1, le=_WEEK_MINUTES)


def read_cluster(path: Path | None, targets: Sequence[str]) -> Cluster:
    """The settings of a file; those of a cluster with defaults where there is none.

    Raises:
        WrongArguments: with every fault of the file.
    """
    if path is None:
        return Cluster()
    try:
        cluster = Cluster.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
        faults = [f"target.{name}: there is no such target" for name in cluster.target if name not in targets]
        extra = [word for options in (cluster.all, *cluster.target.values()) for word in options.extra]
        faults += [f"extra: this tool sets {word} itself" for word in extra if word[2:].partition("=")[0] in _OWN]
    except ValidationError as invalid:
        faults = [f"{'.'.join(map(str, e['loc']))}: {e['msg']} (found {e['input']!r:.60})" for e in invalid.errors()]
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as fault:
        faults = [f"cannot be read: {fault}"]
    if not faults:
        return cluster
    lines = "\n".join(f"  {path.name}: {fault}" for fault in faults)
    raise WrongArguments(
        f"the settings of the cluster have {len(faults)} fault(s):\n{lines}\nNext step: mend each line named above."
    )


def plan_job(cluster: Cluster, target: str, *, gpus: int, limit_s: float) -> dict[str, Any]:
    """The parameters of a job, under submitit's names.

    Args:
        cluster: settings of the site.
        target: whose options are taken.
        gpus: that the cell needs.
        limit_s: seconds that the cell may take.
    """
    own = cluster.target.get(target, JobOptions())
    options = cluster.all.model_copy(update=own.model_dump(include=own.model_fields_set))
    wanted = {
        # A few minutes more than the cell may take: its own limit reports where it hung, Slurm's reports nothing.
        "time": options.minutes or math.ceil(limit_s / 60) + cluster.start_minutes,
        "gres": options.gres.format(gpus=gpus) if gpus else "",
        "cpus_per_task": options.cpus,
        "mem": f"{options.memory_mib}M" if options.memory_mib else "",
        **options.model_dump(include={"partition", "account", "qos", "constraint"}),
    }
    extra: dict[str, str | bool] = {"reservation": options.reservation} if options.reservation else {}
    for word in options.extra:
        name, _, value = word.removeprefix("--").partition("=")
        extra[name] = value or True
    # Slurm does not start a job again by itself: the receipt would not count it.
    more = {"no-requeue": True, "export": "ALL", **extra}
    return {**{name: value for name, value in wanted.items() if value}, "additional_parameters": more}


def list_options(parameters: Mapping[str, Any]) -> tuple[str, ...]:
    """The parameters of a job as options of `sbatch`."""
    flat = {**parameters, **parameters["additional_parameters"]}
    del flat["additional_parameters"]
    return tuple(f"--{name.replace('_', '-')}" + ("" if v is True else f"={v}") for name, v in flat.items())


@dataclass(frozen=True)
class Job:
    """A cell as a job; its cell's folder is that of the receipts."""

    cell: Cell
    gpus: int


@dataclass(frozen=True)
class Seen:
    """What Slurm reports of a job: its number, its state in Slurm's word, its node and Slurm's reason."""

    id: str
    word: str
    node: str = ""
    because: str = ""


def run_cell(cell: Cell, changed: Mapping[str, str], removed: Sequence[str]) -> str:
    """What a job runs on its node: the cell, with the variables that the node adds; its outcome."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # submitit would go on until Slurm kills the job
    cores = os.environ.get("SLURM_CPUS_ON_NODE", "")
    variables = {"OMP_NUM_THREADS": cores if cores.isdigit() else str(count_cores()), **os.environ}
    variables = {name: value for name, value in variables.items() if name not in removed} | dict(changed)
    here = replace(cell, environment=replace(cell.environment, variables=variables))  # type: ignore[type-var]
    with tempfile.TemporaryDirectory(prefix="megacpp-") as scratch:
        return here.run(Path(scratch, "cell"), Processes()).outcome.value


def run_jobs(
    jobs: Sequence[Job], cluster: Cluster, folder: Path, *, at_once: int = 0, fresh: bool = False, wait_s: float = 0.0,
    progress: Progress = lambda _: None,
) -> dict[str, tuple[Receipt, bool, str]]:  # fmt: skip
    """Run every cell that has no receipt; by cell its receipt, whether it is of an earlier run, and its node.

    Args:
        jobs: the cells.
        cluster: settings of the site.
        folder: of the receipts, on a file system that the nodes share.
        at_once: jobs in the queue; 0 for all.
        fresh: run again what has a receipt.
        wait_s: for all cells; those that are not done then are cancelled and left out. 0 for no limit.
        progress: called with what becomes of each cell.

    Raises:
        InfrastructureFailed: Slurm does not answer, or refuses a job. Jobs that it has go on.
        KeyboardInterrupt: the jobs are cancelled.
        OSError: the folder cannot be written.
    """
    if "%" in str(folder) or "\\" in str(folder):
        raise WrongArguments(
            f"the path {folder} has a '%' or a '\\': Slurm reads them as a pattern. Next step: choose other --receipts."
        )
    if shutil.which("sbatch") is None or shutil.which("srun") is None:
        raise InfrastructureFailed(
            "there is no Slurm here: sbatch or srun is not on the PATH. Likely cause: this is no login node of a "
            "cluster. Next step: start it on one, or use --launcher local."
        )
    run = _Run(cluster, folder, {job.cell.order.cell: job for job in jobs}, progress)
    started, pause = time.monotonic(), _FIRST_PAUSE_S
    try:
        run.take_up(fresh=fresh)
        while len(run.ended) < len(jobs):
            run.step(at_once or len(jobs))
            if wait_s and time.monotonic() - started > wait_s:
                run.cancel()
                break
            if len(run.ended) < len(jobs):
                time.sleep(min(pause, cluster.poll_s))
                pause *= 2
    except KeyboardInterrupt:
        run.cancel()
        raise
    with suppress(OSError):  # jobs of other cells that an earlier start submitted stay
        (folder / WORK_FOLDER).rmdir()
    return run.ended


@dataclass
class _Run:
    """One run: cells on their way by the name of their job, and those that have ended."""

    cluster: Cluster
    folder: Path
    jobs: Mapping[str, Job]
    progress: Progress
    active: dict[str, str] = field(default_factory=dict)  # cell by name
    ended: dict[str, tuple[Receipt, bool, str]] = field(default_factory=dict)
    faults: dict[str, list[list[str]]] = field(default_factory=dict)  # by cell: what happened, and on which node
    over: dict[str, float] = field(default_factory=dict)  # when a job was first seen to be over, by name
    given: int = 0
    silent_since: float | None = None

    def take_up(self, *, fresh: bool) -> None:
        """Take receipts that answer, and jobs that an earlier start submitted; cancel those that answer nothing."""
        seen = self._look()
        for name, found in seen.items():
            cell = self._cell_of(name)
            stale = cell in self.jobs and (fresh or not name.startswith(self._prefix(cell)))
            if stale and found.word not in _OVER:
                self._scancel([found.id])
        for cell, job in self.jobs.items():
            receipt = None if fresh else find_done(job.cell.order, job.cell.place)
            if receipt is not None:
                self._end(cell, receipt, reused=True)
                continue
            with suppress(OSError, ValueError):
                self.faults[cell] = [] if fresh else json.loads(self._faults_file(cell).read_bytes())
            if len(self.faults.setdefault(cell, [])) > self.cluster.retries:
                self.faults[cell] = []  # what was given up has a new chance at a new start
            name, work = self._name(cell), self._work(self._name(cell))
            submitted = work.is_dir() and (name in seen or any(work.glob("*_submission.sh")))
            if fresh or not submitted:
                shutil.rmtree(work, ignore_errors=True)  # nobody has taken the job
            else:
                self.active[name] = cell
                self.given += 1

    def step(self, at_once: int) -> None:
        """See what became of every job on its way, and submit what is missing.

        Raises:
            InfrastructureFailed: the scheduler is silent for longer than the settings allow, or was from the start.
        """
        try:
            if self.active:
                seen = self._look()
                for name, cell in tuple(self.active.items()):
                    self._settle(name, cell, seen.get(name, Seen("", "")))
            on_their_way = set(self.active.values())
            for cell in self.jobs:
                if cell not in self.ended and cell not in on_their_way and len(self.active) < at_once:
                    self._submit(cell)
        except InfrastructureFailed as fault:
            now = time.monotonic()
            self.silent_since = self.silent_since or now
            if not self.given or now - self.silent_since >= self.cluster.patience_s:
                raise
            self._report("", note=str(fault))
        else:
            self.silent_since = None

    def cancel(self) -> None:
        """Cancel every job of this folder; none of that counts as a fault."""
        with suppress(InfrastructureFailed):  # what cannot be cancelled is found at the next start
            seen = self._look()
            mine = [name for name in seen if self._cell_of(name) in self.jobs]
            self._scancel([seen[name].id for name in mine if seen[name].word not in _OVER])
            for name in {*mine, *self.active}:
                shutil.rmtree(self._work(name), ignore_errors=True)
            self.active.clear()

    def _submit(self, cell: str) -> None:
        """Submit a cell, away from nodes that ended earlier attempts where there are others."""
        import submitit  # half a second, and used on a cluster alone
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        job, name = self.jobs[cell], self._name(cell)
        work = self._work(name)
        work.mkdir(parents=True, exist_ok=True, mode=0o700)
        own = dict(job.cell.environment.variables)
        changed = {key: value for key, value in own.items() if os.environ.get(key) != value or key == "PYTHONPATH"}
        # The scheduler hands all other variables on.
        bare = replace(job.cell.environment, variables={})  # type: ignore[type-var]
        there = replace(job.cell, environment=bare, folder=work)
        avoid = {node for words, node in self.faults[cell] if node and words.startswith(_ACCUSES_NODE)}
        planned = plan_job(self.cluster, job.cell.order.target.id, gpus=job.gpus, limit_s=job.cell.limit_s)
        parameters = {
            **planned, "job_name": name, "use_srun": False, "stderr_to_stdout": True, "wckey": None,
            "setup": [f'export PYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}"{shlex.quote(str(PACKAGE.parent))}'],
        }  # fmt: skip
        executor = submitit.SlurmExecutor(folder=work)
        words = ""
        for exclude in [",".join(sorted(avoid)), None] if avoid else [None]:
            executor.update_parameters(**parameters, exclude=exclude)
            try:
                executor.submit(run_cell, there, changed, sorted(set(os.environ) - set(own)))
            except (FailedJobError, FailedSubmissionError, OSError) as fault:
                words = " ".join(str(fault).split())[-_LAST_WORDS:]
                continue
            self.active[name] = cell
            self.given += 1
            return
        raise InfrastructureFailed(
            f"sbatch does not take a job: {words}. Its options: {shlex.join(list_options(planned))}. Likely cause: the "
            "controller is down, or the settings of --cluster do not fit this cluster. Next step: `scontrol ping`; "
            f"then the same command again, which finds the {len(self.active)} job(s) that are on their way."
        )

    def _settle(self, name: str, cell: str, seen: Seen) -> None:
        """Bring a receipt home; end an attempt that is over without one."""
        job, work = self.jobs[cell], self._work(name)
        receipt: Receipt | None = None
        with suppress(ReceiptInvalid):
            receipt = read_receipt(work / f"{cell}.json")
        if receipt is not None and answers(job.cell.order, receipt) and not find_fault(receipt):
            receipt = replace(receipt, retries=(*receipt.retries, *(words for words, _ in self.faults[cell])))
            bring_home(receipt, work, self.folder)
            shutil.rmtree(work, ignore_errors=True)
            self._end(cell, receipt, node=seen.node, name=name)
        elif seen.word not in _OVER:
            self.over.pop(name, None)
            self._report(cell, note=seen.node if seen.word == "RUNNING" else "")
        elif time.monotonic() - self.over.setdefault(name, time.monotonic()) >= self.cluster.grace_s:
            self._fail(name, cell, name_fault(seen, receipt, work), seen.node)

    def _fail(self, name: str, cell: str, fault: str, node: str) -> None:
        """Note an infrastructure fault; the cell is run again, or given up."""
        del self.active[name]
        words = [_read(log) for log in (*self._work(name).glob("*_log.out"), self._work(name) / f"{cell}.log")]
        with suppress(OSError):  # a disk that is full costs those words alone
            (self.folder / f"{cell}.attempt-{len(self.faults[cell]) + 1}.log").write_text("".join(words))
        shutil.rmtree(self._work(name), ignore_errors=True)
        self.faults[cell].append([fault, node])
        write_whole(self._faults_file(cell), json.dumps(self.faults[cell]))
        if len(self.faults[cell]) > self.cluster.retries:
            receipt = receipt_of_given_up(self.jobs[cell].cell.order, [words for words, _ in self.faults[cell]])
            write_receipt(receipt, self.jobs[cell].cell.place)
            self._end(cell, receipt, node=node)
        else:
            self._report(cell, note=fault)

    def _end(self, cell: str, receipt: Receipt, *, reused: bool = False, node: str = "", name: str = "") -> None:
        self.active.pop(name, None)
        self._faults_file(cell).unlink(missing_ok=True)
        self.ended[cell] = receipt, reused, node
        self._report(cell, receipt, reused=reused, note=node)

    def _report(self, cell: str, receipt: Receipt | None = None, *, reused: bool = False, note: str = "") -> None:
        job = self.jobs.get(cell) or next(iter(self.jobs.values()))
        self.progress(Event(job.cell, receipt, reused, len(self.ended), len(self.jobs), note))

    def _look(self) -> dict[str, Seen]:
        """Jobs by name, of two of one name the later one; the queue remembers ended jobs for some minutes.

        Raises:
            InfrastructureFailed: Slurm does not answer.
        """
        found: dict[str, Seen] = {}
        user = f"--user={os.getuid()}"
        for line in _ask("squeue", "--noheader", "--states=all", user, "--format=%i|%j|%T|%N|%r").splitlines():
            number, name, word, node, because = [*line.split("|", 4), *[""] * 5][:5]
            before = found.get(name)
            if number.isdigit() and (before is None or int(number) > int(before.id)):
                found[name] = Seen(number, word, "" if node in ("(null)", "n/a") else node, because)
        return found

    def _scancel(self, ids: Sequence[str]) -> None:
        if ids:
            _ask("scancel", "--quiet", *ids)

    def _prefix(self, cell: str) -> str:
        """Of the names of a cell's jobs: those of another order, or of another folder, have another one."""
        order = self.jobs[cell].cell.order
        return f"{cell}.{self._of_folder()}{hash_parts((repr(order),))[:8]}."

    def _of_folder(self) -> str:
        return hash_parts((str(self.folder),))[:8]

    def _cell_of(self, name: str) -> str:
        """The cell of a job of this folder; empty for any other job."""
        cell, key, _ = [*name.rsplit(".", 2), "", ""][:3]
        return cell if key.startswith(self._of_folder()) else ""

    def _name(self, cell: str) -> str:
        return f"{self._prefix(cell)}{len(self.faults[cell]) + 1}"

    def _work(self, name: str) -> Path:
        return self.folder / WORK_FOLDER / name

    def _faults_file(self, cell: str) -> Path:
        return self.folder / WORK_FOLDER / f"{self._prefix(cell)}faults"


def name_fault(seen: Seen, receipt: Receipt | None, work: Path) -> str:
    """The fault of an attempt that is over and has no answer."""
    name, words = JOB_ENDS.get(seen.word, ("", ""))
    if not name and receipt is not None and (fault := find_fault(receipt)):
        name, _, words = fault.partition(": ")
    elif not name and not seen.word:
        name, words = "gone", "Slurm does not know the job any more, and it left no receipt"
    elif not name:
        name, words = "no-receipt", f"the job ended ({seen.word}) and left no receipt"
    where = f" (node {seen.node})" if seen.node else ""
    because = f": {seen.because}" if seen.because not in ("", "None") else ""
    last = " ".join("".join(_read(log) for log in work.glob("*_log.out")).split())[-_LAST_WORDS:]
    return f"{name}: {words}{where}{because}" + (f"; its last words: {last}" if last else "")


def _read(log: Path) -> str:
    try:
        return log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _ask(*words: str) -> str:
    """What a tool of Slurm prints.

    Raises:
        InfrastructureFailed: it fails, or does not answer in time.
    """
    try:
        ended = run_command(words, limit_s=_TOOL_LIMIT_S, apart=True)
        if ended.code == 0:
            return ended.words
        said = ended.last_words
    except OSError as fault:
        said = str(fault)
    raise InfrastructureFailed(
        f"the scheduler does not answer: {words[0]}: {said[-_LAST_WORDS:]}. Likely cause: its controller is down or "
        "restarts, or this is no machine of the cluster. Next step: `scontrol ping`; then the same command again: jobs "
        "that were submitted stay, and the run goes on from them."
    )
