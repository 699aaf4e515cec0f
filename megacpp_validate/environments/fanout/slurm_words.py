"""Slurm's options, script and answers as text: pure functions."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from ..interpreter import PACKAGE
from .cluster import Cluster
from .launcher import BATCH_LOG, JOB_FILE, Phase, Seen, Try

QUEUE_FORMAT: Final = "%i|%j|%T|%N|%r"
ACCOUNT_FORMAT: Final = "JobIDRaw,JobName,State,NodeList,Reason"
_MODULE: Final = "megacpp_validate.environments.fanout.one_cell"
_NUMBER: Final = re.compile(r"([0-9]+)(?:;[\w.-]+)?")  # of the job, and the cluster where there are several
_QUEUED: Final = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD"})
_RUNS: Final = frozenset({
    "RUNNING", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED", "SPECIAL_EXIT",
})  # fmt: skip
# What Slurm's tools say where the controller is not there; the text alone tells it from a job that is refused.
_NOT_THERE: Final = re.compile(
    r"unable to contact|connection refused|connection timed out|socket timed out|zero bytes were transmitted|"
    r"could not establish a configuration|failed to fetch config|communication connection failure|"
    r"temporarily (unable|unavailable)|slurmctld.*(down|not responding)|controllers? .* not responding|"
    r"protocol authentication|munge|in standby mode|resource temporarily",
    re.IGNORECASE,
)
# What holds a job off for now, and takes it when others have ended.
_LATER: Final = re.compile(r"submit ?limit|maxsubmit|too many (jobs|submit)|job submit rate", re.IGNORECASE)


def choose_options(
    cluster: Cluster, *, target: str, gpus: int, limit_s: float, name: str, folder: Path
) -> tuple[str, ...]:
    """What `sbatch` is told of one job.

    Args:
        cluster: settings of the site.
        target: whose options are taken.
        gpus: that the cell needs.
        limit_s: seconds that the cell may take.
        name: of the job.
        folder: of the attempt.
    """
    options = cluster.options(target)
    # A few minutes more than the cell may take: its own limit tells where it hung, the scheduler's tells nothing.
    minutes = options.minutes or math.ceil(limit_s / 60) + cluster.start_minutes
    asked = {
        "job-name": name,
        "nodes": "1",
        "ntasks": "1",
        "time": str(minutes),
        "gres": options.gres.format(gpus=gpus) if gpus and options.gres else "",
        "cpus-per-task": str(options.cpus) if options.cpus else "",
        "mem": f"{options.memory_mib}M" if options.memory_mib else "",
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "constraint": options.constraint,
        "reservation": options.reservation,
        "chdir": str(folder),
        "output": os.devnull if _is_pattern(folder) else BATCH_LOG,  # in the folder of `chdir`
        "export": "ALL",
        "open-mode": "truncate",
    }
    # Slurm does not start it again by itself: then nobody would count how often it was.
    return ("--parsable", *(f"--{k}={v}" for k, v in asked.items() if v), "--no-requeue", *options.extra)


def render_script(folder: Path, python: str) -> str:
    """The batch script: one process, which the signals of the scheduler reach.

    It writes its log itself where Slurm would not find the place; then the log lacks what Slurm itself has to say.
    """
    job, path = shlex.quote(str(folder / JOB_FILE)), shlex.quote(str(PACKAGE.parent))
    log = f"exec >{shlex.quote(str(folder / BATCH_LOG))} 2>&1\n" if _is_pattern(folder) else ""
    return (
        f"#!/bin/sh\n{log}"
        f'export PYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}"{path}\n'
        f"exec {shlex.quote(python)} -P -u -m {_MODULE} {job}\n"
    )


def _is_pattern(folder: Path) -> bool:
    r"""Whether Slurm would take the folder of an output for a pattern (sbatch(1), "filename pattern").

    It reads `%` and `\` in the whole path, after it has put the folder of `chdir` before a name; a job whose output
    cannot be opened ends as JobLaunchFailure. How the two are escaped together differs, so they are kept from it.
    """
    return "%" in str(folder) or "\\" in str(folder)


def read_number(text: str) -> str:
    """The number that `sbatch --parsable` tells, among lines that a site adds; empty where none is one."""
    found = (_NUMBER.fullmatch(line.strip()) for line in reversed(text.splitlines()))
    return next((match[1] for match in found if match), "")


def read_queue(text: str) -> dict[str, Seen]:
    """What `squeue` says, by name of the job; of two of one name the later one."""
    found: dict[str, Seen] = {}
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) < 5:
            continue
        number, name, word, node, because = fields[0], fields[1], fields[2], fields[3], "|".join(fields[4:])
        seen = Seen(_phase(word), word, because, "" if node in ("(null)", "n/a") else node, number)
        _take_later(found, name, seen)
    return found


def read_account(text: str) -> dict[str, Seen]:
    """What `sacct` says, by name of the job."""
    found: dict[str, Seen] = {}
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) < 5 or not fields[2]:
            continue
        word = fields[2].split()[0].rstrip("+")
        node = "" if fields[3].startswith("None") else fields[3]
        _take_later(found, fields[1], Seen(_phase(word), word, fields[4], node, fields[0]))
    return found


def _take_later(found: dict[str, Seen], name: str, seen: Seen) -> None:
    """Of two jobs of one name the later: Slurm remembers one that it refused too, and sorts by state."""
    before = found.get(name)
    if before is None or not before.id.isdigit() or (seen.id.isdigit() and int(seen.id) > int(before.id)):
        found[name] = seen


def _phase(word: str) -> Phase:
    if word in _QUEUED:
        return Phase.QUEUED
    return Phase.RUNS if word in _RUNS else Phase.OVER


def is_not_there(said: str) -> bool:
    """Whether a tool of Slurm says that the controller does not answer."""
    return bool(_NOT_THERE.search(said))


def is_for_later(said: str) -> bool:
    """Whether a job is refused only as long as others are in the queue."""
    return bool(_LATER.search(said))


def say_down(tool: str, said: str) -> str:
    """That the scheduler does not answer."""
    return (
        f"the scheduler does not answer: {tool} says: {' '.join(said.split())[-400:] or 'nothing'}. Likely cause: its "
        "controller is down or restarts, or this is no machine of the cluster. Next step: `scontrol ping`; then the "
        "same command again: jobs that were given stay, and the run goes on from them."
    )


def say_absent(tool: str) -> str:
    """That there is no scheduler here."""
    return (
        f"there is no Slurm here: {tool} is not on the PATH. Likely cause: this is no login node of a cluster. Next "
        "step: start it on one, or use --launcher local."
    )


def say_unnumbered(said: str) -> str:
    """That a job was taken, and nobody knows it."""
    return (
        f"sbatch took a job and told no number of it: {' '.join(said.split())[-400:] or 'it says nothing'}; nor is it "
        "found in the queue. Likely cause: sbatch is a script of the site's own, or gives jobs to another cluster. "
        "Next step: `squeue --me`; then the same command again, which looks for the job by its name."
    )


def say_refused(options: Sequence[str], said: str) -> str:
    """That a job is not taken."""
    return (
        f"sbatch refused a job: {' '.join(said.split())[-400:] or 'it says nothing'}. It was given: "
        f"{shlex.join(options)}. Next step: change the settings given with --cluster to what the cluster takes."
    )


def missing_of(attempts: Sequence[Try], found: Mapping[str, Seen]) -> tuple[Try, ...]:
    """Attempts that an answer has nothing of, and that have a number to ask for elsewhere."""
    return tuple(attempt for attempt in attempts if attempt.name not in found and attempt.id)
