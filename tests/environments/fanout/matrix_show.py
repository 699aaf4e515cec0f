"""A run of many cells on a private Slurm of two nodes, to which everything happens that happens to clusters.

    python tests/environments/fanout/matrix_show.py FOLDER [ARGUMENTS OF THE MATRIX]

One job is cancelled, the process of a second is killed, a node is set down while a third runs on it and up again, and
the tool itself is killed and started again. What it prints is docs/examples/matrix_slurm.txt.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests import slurm_cluster

ROOT = Path(__file__).parents[3]
CLUSTER = 'poll_s = 0.5\ngrace_s = 1\npatience_s = 30\ncontainers = "none"\n'
MAIN = "import megacpp_validate.cli.sessions.matrix_verbs; from megacpp_validate.cli import main; main()"
WITHIN = 120.0  # seconds that an event may take to be possible


@dataclass
class Show:
    """One run and what is done to it.

    Attributes:
        slurm: variables with which Slurm's tools reach the cluster.
        folder: for everything.
        words: arguments of the matrix.
        more: settings of the cluster.
        said: what the tool printed, with lines between that say what was done to it.
    """

    slurm: dict[str, str]
    folder: Path
    words: list[str]
    more: str = ""
    said: list[str] = field(default_factory=list)
    hit: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)

    @property
    def receipts(self) -> Path:
        """Folder of the receipts."""
        return self.folder / "receipts"

    @property
    def variables(self) -> dict[str, str]:
        """Of the tool."""
        return {**self.slurm, "PYTHONPATH": str(ROOT), "COLUMNS": "100", "OMP_NUM_THREADS": "1"}

    def start(self) -> subprocess.Popen[str]:
        """Start the tool, its words in a file of this start."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "cluster.toml").write_text(CLUSTER + self.more)
        command = [sys.executable, "-c", MAIN, "matrix", *self.words, "--launcher", "slurm"]
        command += ["--cluster", str(self.folder / "cluster.toml"), "--receipts", str(self.receipts)]
        (self.folder / "said").write_text("")
        with (self.folder / "said").open("a") as said:  # between its lines stand those of what is done to it
            return subprocess.Popen(command, env=self.variables, stdout=said, stderr=said, cwd=ROOT, text=True)

    def take_words(self) -> None:
        """What the last start said."""
        lines = (self.folder / "said").read_text().splitlines()
        self.said += [line.rstrip().replace(str(self.receipts), "RECEIPTS") for line in lines]

    def tell(self, line: str) -> None:
        """A line of what is done to it, where it belongs."""
        with (self.folder / "said").open("a") as said:
            said.write(f"--- {line}\n")

    def tool(self, *words: str) -> str:
        """What a tool of Slurm answers."""
        return subprocess.run(words, env=self.slurm, capture_output=True, text=True, check=True).stdout

    def jobs(self) -> list[list[str]]:
        """Number, name, state and node of every job that the controller remembers."""
        told = self.tool("squeue", "--noheader", "--states=all", "--format=%i|%j|%T|%N").splitlines()
        rows = [line.split("|") for line in told]
        self.names |= {row[1] for row in rows}
        return rows

    def running(self, node: str = "") -> list[str] | None:
        """A job that runs, was not hit yet and has begun its cell; on this node where one is named."""
        for row in self.jobs():
            cell, run, number = row[1].rsplit(".", 2)
            begun = self.receipts / ".matrix.work" / run / f"{cell}.{number}" / "claimed" / "node"
            if row[2] == "RUNNING" and node in ("", row[3]) and row[1] not in self.hit and begun.is_file():
                return row
        return None

    def cancel_one(self) -> None:
        """scancel, as an administrator would."""
        job = until(self.running)
        self.hit.add(job[1])
        self.tool("scancel", job[0])
        self.tell(f"scancel {cell_of(job)}, which ran on {job[3]}")

    def kill_one(self) -> None:
        """kill -9 of what a job runs."""

        def found() -> tuple[list[str], int] | None:
            job = self.running()
            process = process_of(cell_of(job)) if job else 0
            return (job, process) if job and process else None

        job, process = until(found)
        self.hit.add(job[1])
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        self.tell(f"kill -9 of the process of {cell_of(job)}, which ran on {job[3]}")

    def lose_node(self, node: str) -> None:
        """A node set down while a job runs there."""
        job = until(lambda: self.running(node))
        self.hit.add(job[1])
        self.tool("scontrol", "update", f"nodename={node}", "state=down", "reason=lost")
        self.tell(f"node {node} set down, with {cell_of(job)} on it")

    def bring_back(self, node: str) -> None:
        """The node again, once its job is seen to be lost."""
        until(lambda: "node-fail" in (self.folder / "said").read_text())
        with suppress(subprocess.CalledProcessError):  # it has registered again by itself
            self.tool("scontrol", "update", f"nodename={node}", "state=resume")
        until(lambda: "down" not in self.tool("sinfo", "--noheader", f"--nodes={node}", "--format=%T"))
        self.tell(f"node {node} is back")

    def check(self, cells: int) -> None:
        """Nothing is lost, and nothing ran more often than its receipt says.

        Raises:
            AssertionError: it is.
        """
        from megacpp_validate.evidence.store import read_receipts

        self.jobs()
        found = read_receipts(self.receipts)
        assert not found.unreadable, found.unreadable
        assert len(found.found) == cells, sorted(found.found)
        tries = Counter(name.rsplit(".", 2)[0] for name in self.names)
        for cell, receipt in found.found.items():
            assert tries[cell] == 1 + len(receipt.retries), (cell, tries[cell], receipt.retries)


def run_show(folder: Path, words: list[str], cells: int) -> tuple[Show, int]:
    """The whole show; the exit status is that of the last start."""
    with slurm_cluster.run_cluster(2) as slurm:
        show = Show(slurm, folder, words)
        first = show.start()
        show.cancel_one()
        show.lose_node("n1")
        show.bring_back("n1")
        until(show.running)
        first.send_signal(signal.SIGKILL)
        first.wait()
        show.tell("kill -9 of the tool itself; then the same command again")
        show.take_words()
        second = show.start()
        show.kill_one()
        code = second.wait(timeout=600)
        show.take_words()
        show.check(cells)
        return show, code


def until(look: Callable[[], Any]) -> Any:
    """Wait for something to be there."""
    end = time.monotonic() + WITHIN
    while (found := look()) in (None, False, [], ""):
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.05)
    return found


def cell_of(job: list[str]) -> str:
    """The cell of a job."""
    return job[1].rsplit(".", 2)[0]


def process_of(cell: str) -> int:
    """The process of a cell's probe; 0 where there is none."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if b"megacpp_validate.probes" in words and any(word.endswith(f"/{cell}.json".encode()) for word in words):
                return int(entry.name)
    return 0


if __name__ == "__main__":
    given = sys.argv[2:] or ["--targets", "cpu"]
    ended, status = run_show(Path(sys.argv[1]), given, 14)
    sys.stdout.write(f"$ nox -s matrix -- {' '.join(given)} --launcher slurm\n")
    sys.stdout.write("\n".join(ended.said) + "\n")
    sys.stdout.write(f"--- exit status {status}; {len(ended.names)} jobs for 14 cells\n")
