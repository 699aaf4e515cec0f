"""Jobs through a Slurm that is there: one `sbatch` a cell, looked after by `squeue`, and by `sacct` where it keeps one.

A tool of Slurm that does not answer in time is a scheduler that does not answer. `sacct` may be absent or switched off:
then a job that has left the queue is told by what it left behind.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...evidence.whole_file import write_whole
from .cluster import Cluster
from .launcher import JobHeld, JobRefused, Phase, SchedulerAbsent, SchedulerDown, Seen, Try, Work
from .shipped import write_job
from .slurm_words import (
    ACCOUNT_FORMAT,
    QUEUE_FORMAT,
    choose_options,
    is_for_later,
    is_not_there,
    missing_of,
    read_account,
    read_number,
    read_queue,
    render_script,
    say_absent,
    say_down,
    say_refused,
    say_unnumbered,
)


@dataclass
class SlurmLauncher:
    """A Slurm.

    Attributes:
        cluster: what the site wants to be told.
        variables: environment variables of the user, which the jobs have too.
        python: interpreter of this tool, as the nodes see it.
    """

    cluster: Cluster
    variables: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    python: str = sys.executable

    @property
    def survives(self) -> bool:
        """The jobs are the scheduler's."""
        return True

    def takes(self, work: Work, running: int) -> bool:  # noqa: ARG002
        """Whether the queue may have one more of this run."""
        return not self.cluster.at_a_time or running < self.cluster.at_a_time

    def submit(self, work: Work, attempt: Try) -> str:
        """Give it to the queue."""
        write_job(work, attempt.folder, self.variables)
        script = attempt.folder / "batch"
        write_whole(script, render_script(attempt.folder, self.python))
        options = choose_options(
            self.cluster,
            target=work.order.target.id,
            gpus=work.gpus,
            limit_s=work.limit_s,
            name=attempt.name,
            folder=attempt.folder,
        )
        avoid = (f"--exclude={','.join(attempt.avoid)}",) if attempt.avoid else ()
        done = self._call("sbatch", *options, *avoid, str(script))
        if avoid and done.returncode and not is_not_there(done.stderr):
            done = self._call("sbatch", *options, str(script))  # where there is no other node, the same one again
        if done.returncode == 0:
            return read_number(done.stdout) or self._find_number(attempt, done.stdout)
        said = f"{done.stderr} {done.stdout}".strip()
        if is_not_there(said):
            raise SchedulerDown(say_down("sbatch", said))
        if is_for_later(said):
            raise JobHeld(" ".join(said.split())[-400:])
        raise JobRefused(say_refused(options, said))

    def _find_number(self, attempt: Try, said: str) -> str:
        """The number of a job that was taken, where `sbatch` does not tell it: a site's own words came in its place.

        Raises:
            SchedulerDown: the queue does not have it; its name will tell at the next start.
        """
        try:
            seen = self.look([attempt])[attempt.name]
        except SchedulerAbsent as fault:  # of `squeue`: `sbatch` is there
            raise SchedulerDown(say_unnumbered(said)) from fault
        if not seen.id:
            raise SchedulerDown(say_unnumbered(said))
        return seen.id

    def look(self, attempts: Sequence[Try]) -> dict[str, Seen]:
        """Ask the queue, which tells of ended jobs for some minutes; then the accounts, where there are any."""
        done = self._call("squeue", "--noheader", "--states=all", f"--user={os.getuid()}", f"--format={QUEUE_FORMAT}")
        if done.returncode:
            raise SchedulerDown(say_down("squeue", done.stderr))
        found = read_queue(done.stdout)
        if missing := missing_of(attempts, found):
            found |= self._ask_accounts(missing)
        return {attempt.name: found.get(attempt.name, Seen(Phase.GONE)) for attempt in attempts}

    def cancel(self, attempts: Sequence[Try]) -> None:
        """Ask for the numbers of those that have none yet, and cancel all."""
        seen = self.look(attempts) if any(not attempt.id for attempt in attempts) else {}
        numbers = [attempt.id or seen[attempt.name].id for attempt in attempts]
        if numbers := [number for number in numbers if number]:
            done = self._call("scancel", "--quiet", *numbers)
            if done.returncode and is_not_there(done.stderr):
                raise SchedulerDown(say_down("scancel", done.stderr))

    def close(self) -> None:
        """Nothing is held."""

    def _ask_accounts(self, missing: Sequence[Try]) -> dict[str, Seen]:
        """What is known of jobs that have left the queue; nothing where no accounts are kept, or they do not answer."""
        numbers = ",".join(attempt.id for attempt in missing)
        try:
            done = self._call(
                "sacct", "--noheader", "--parsable2", "--allocations", f"--format={ACCOUNT_FORMAT}", f"--jobs={numbers}"
            )
        except SchedulerDown:
            return {}
        return read_account(done.stdout) if done.returncode == 0 else {}

    def _call(self, tool: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a tool of Slurm. An interrupt of the terminal does not reach it: a job is given whole, or not.

        Raises:
            SchedulerAbsent: it is not here, or cannot be started.
            SchedulerDown: it does not answer in time.
        """
        path = shutil.which(tool, path=self.variables.get("PATH", os.defpath))
        if path is None:
            raise SchedulerAbsent(say_absent(tool))
        try:
            return subprocess.run(
                [path, *words], capture_output=True, text=True, errors="replace", check=False, start_new_session=True,
                stdin=subprocess.DEVNULL, env=dict(self.variables), timeout=self.cluster.client_s,
            )  # fmt: skip
        except subprocess.TimeoutExpired as fault:
            raise SchedulerDown(say_down(tool, f"nothing within {self.cluster.client_s:g} s")) from fault
        except OSError as fault:
            raise SchedulerAbsent(say_absent(tool)) from fault
