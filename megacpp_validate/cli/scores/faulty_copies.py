"""Copies of a release with faults in them, as environments that cells run in; for every verb that plants."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ...canary.dynamic.te_fault_verdict import Troubles
from ...catalog.bridge import Target as TargetRow
from ...catalog.te_faults import EditDoesNotFit, PlantedFault
from ...environments.cell import Cell
from ...environments.environment import Environment, NoEnvironment
from ...environments.facts import Facts, read_facts
from ...environments.faulty_overlay import make_faulty
from ...environments.fleet import Event, Fleet
from ...environments.installed import find_environments, open_host
from ...environments.interpreter import InterpreterEnvironment, put_over
from ...environments.plan import why_not_here
from ...environments.restart import own_folder
from ...environments.schedule import Need, count_cores, plan_jobs, read_room, share_cores
from ...evidence.receipt import Receipt
from ...evidence.store import ReceiptInvalid, read_receipts
from ...process import Processes
from ..app import errors

_MAKERS = 8  # copies that are made at a time: it is the disk that they wait for


@dataclass(frozen=True)
class CopyHost:
    """Where copies run.

    Attributes:
        bare: the interpreter without overlays.
        release: of Transformer Engine.
        clean: the folder that is copied.
        behind: site folders that stand behind it.
        facts: of the clean stack.
        copies: folder for the copies; None for one of this user's below the temporary files.
    """

    bare: InterpreterEnvironment
    release: str
    clean: Path
    behind: tuple[Path, ...]
    facts: Facts
    copies: Path | None = None

    def open(self, name: str, fault: PlantedFault | None, *, copied: bool) -> InterpreterEnvironment:
        """A copy with a fault, or without one, or the clean folder itself.

        Raises:
            EditDoesNotFit: the fault's text does not stand there.
            NoEnvironment, OSError: the copy cannot be made.
        """
        copies = self.copies or Path(tempfile.gettempdir(), f"megacpp-te-copies-{os.getuid()}")
        place = make_faulty(self.clean, self.release, fault, copies) if copied else self.clean
        return put_over(self.bare, (place, *self.behind), f"{name} of Transformer Engine {self.release}")

    def __str__(self) -> str:
        """Where that is, in words."""
        return f"{self.facts.executable}, Transformer Engine {self.release} of {self.clean}"


@dataclass(frozen=True)
class Opened:
    """A copy as an environment, and its identity."""

    environment: Environment
    identity: str


def find_clean(
    bare: InterpreterEnvironment, release: str, overlays: Sequence[Path], variables: Mapping[str, str], python: str,
    copies: Path | None, processes: Processes,
) -> CopyHost:  # fmt: skip
    """The folder of the release that copies are made of.

    Raises:
        NoEnvironment: the release lies in no overlay folder.
    """
    every = find_environments(overlays, variables, python)
    found = next((one for one in every if one.release == release and one.environment is not None), None)
    if found is None or found.environment is None or not found.environment.folders:
        there = ", ".join(sorted({one.release for one in every if one.environment is not None})) or "none"
        raise NoEnvironment(
            f"Transformer Engine {release} lies in no overlay folder of this host (releases that are there: {there}). "
            "Likely cause: no --overlays and no MEGACPP_OVERLAYS, or it is installed into the interpreter itself, "
            "which is not copied. Next step: name with --overlays the folder that holds it, as `pip install --target` "
            "makes one."
        )
    clean, *behind = found.environment.folders
    return CopyHost(bare, release, clean, tuple(behind), read_facts(found.environment, processes), copies)


def open_copies(
    host: CopyHost, runs: Sequence[tuple[str, PlantedFault | None, bool]], troubles: Troubles
) -> dict[str, Opened]:
    """Every copy that can be made, by name of its run; `troubles` has why another cannot.

    Args:
        host: where.
        runs: name, fault, and whether it is a copy or the clean folder itself.
        troubles: that are told of.
    """

    def make(run: tuple[str, PlantedFault | None, bool]) -> Opened | None:
        name, fault, copied = run
        try:
            environment = host.open(name, fault, copied=copied)
            return Opened(environment, environment.identity)
        except EditDoesNotFit as stale:
            troubles.not_planted[name] = str(stale)
        except (NoEnvironment, OSError) as why:
            troubles.not_run[name] = f"its copy cannot be made: {why}"
        return None

    with ThreadPoolExecutor(_MAKERS) as pool:
        made = list(pool.map(make, runs))
    return {name: opened for (name, _, _), opened in zip(runs, made, strict=True) if opened is not None}


@dataclass
class CopyProgress:
    """A line for each copy whose cells have all ended; `cells` is how many each folder has."""

    cells: Mapping[Path, int]
    _ended: dict[Path, int] = field(default_factory=dict)

    def __call__(self, event: Event) -> None:
        """Count a cell that has ended."""
        if event.receipt is None:
            return
        folder = event.cell.folder
        self._ended[folder] = self._ended.get(folder, 0) + 1
        if self._ended[folder] == self.cells[folder]:
            errors.print(f"{event.done:4} of {event.total} cells: {folder.name}", markup=False)


def read_run(folder: Path) -> dict[str, Receipt]:
    """Receipts by probe; one that cannot be believed is one that there is not."""
    try:
        return {receipt.probe: receipt for receipt in read_receipts(folder).found.values()}
    except ReceiptInvalid:
        return {}


class CopyOptions(Protocol):
    """What a person says of where copies run."""

    @property
    def overlays(self) -> tuple[Path, ...]:
        """Folders to look for the release in."""

    @property
    def copies(self) -> Path | None:
        """Folder for the copies; None for one of this user's own."""

    @property
    def jobs(self) -> int:
        """Cells at a time; 0 for what suits the cores."""

    @property
    def python(self) -> str:
        """Interpreter; empty for the host's."""


MakeCells = Callable[[CopyHost], Iterator[tuple[Cell, Need]]]
Waves = Callable[[Sequence[tuple[Cell, Need]]], Iterable[Sequence[tuple[Cell, Need]]]]


def run_copies(
    target: TargetRow, release: str, asked: CopyOptions, folder: Path, troubles: Troubles, make_cells: MakeCells,
    waves: Waves = lambda cells: (cells,),
) -> str:  # fmt: skip
    """Run every cell that has no receipt yet; where that was, or why it was not.

    Args:
        target, release: the machine, and the release that is copied.
        asked: where to look and how many at a time.
        folder: of the receipts; nobody else writes there meanwhile.
        troubles: is told why nothing ran.
        make_cells: the cells on a host, and what each is expected to take.
        waves: parts of the cells that run one after the other.

    Raises:
        NoEnvironment, NoClean: there is no interpreter, or no such release.
        FolderTaken: somebody writes to the folder.
        OSError: it cannot be written.
    """
    processes = Processes()
    variables = share_cores(os.environ, plan_jobs(count_cores(), asked.jobs))
    bare = open_host(variables, asked.python)
    if reason := why_not_here(target, facts := read_facts(bare, processes)):
        troubles.everything = f"not-run: {reason}"
        return troubles.everything
    host = find_clean(bare, release, asked.overlays, variables, asked.python, asked.copies, processes)
    with own_folder(folder):
        cells = list(make_cells(host))
        room = read_room(variables, gpu=bool(target.arch), jobs=asked.jobs)
        fleet = Fleet(room, fresh=False, progress=CopyProgress(Counter(cell.folder for cell, _ in cells)))
        for wave in waves(cells):
            fleet.run(wave, processes)
    return f"{host}, {facts.gpu and facts.gpu.name}"
