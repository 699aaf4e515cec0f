"""The environments of a search on a GPU host, and the probes that are run in them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Final

from ...canary.dynamic.bisect_result import TE
from ...canary.dynamic.search.probe_judge import ProbeJudge, find_machine_trouble
from ...catalog.bridge import Catalog, Target
from ...environments.cell import Cell
from ...environments.chosen import Means, resolve_environment
from ...environments.environment import Environment, NoEnvironment
from ...environments.facts import read_facts, require_torch
from ...environments.fleet import Fleet
from ...environments.installed import Found, find_environments
from ...environments.interpreter import InterpreterEnvironment, put_over, read_commit
from ...environments.plan import find_target, plan_blank, plan_parity, why_not_here
from ...environments.restart import find_done
from ...environments.schedule import Need, Room, count_cores, plan_jobs
from ...evidence.receipt import Receipt
from ...process import Processes
from ..app import TOOL
from .bisect_axes import AxisSpec

# torch's own RPATH comes before LD_LIBRARY_PATH, so that another cuDNN or cuBLAS is taken only if it is there first.
_LIBRARY_OF: Final = {
    "cudnn": re.compile(r"libcudnn\w*\.so\.\d+"),
    "cublas": re.compile(r"libcublas(Lt)?\.so\.\d+"),
    "cudart": re.compile(r"libcudart\.so\.\d+"),
    "nccl": re.compile(r"libnccl\.so\.\d+"),
}


class NotHere(RuntimeError):
    """This machine is none of the target."""


@dataclass
class Places:
    """Where a search runs.

    Attributes:
        found: what the host has.
        others: axes beside Transformer Engine.
    """

    catalog: Catalog
    target: Target
    found: tuple[Found, ...]
    others: tuple[AxisSpec, ...]
    means: Means
    processes: Processes
    commit: str = field(default_factory=read_commit)

    @classmethod
    def open(
        cls,
        catalog: Catalog,
        target: str,
        overlays: Sequence[Path],
        python: str,
        others: tuple[AxisSpec, ...],
        processes: Processes,
    ) -> Places:
        """Look at what the host has.

        Raises:
            UnknownTarget: there is no such target.
            NoEnvironment: there is no interpreter.
        """
        row = find_target(catalog, target)
        means = Means(os.environ, python)
        return cls(catalog, row, find_environments(overlays, os.environ, python), others, means, processes)

    @property
    def releases(self) -> tuple[str, ...]:
        """Those that there is an environment for, or a row that says how to make one."""
        here = [found.release for found in self.found if found.environment is not None]
        return (*here, *(row.te for row in self.catalog.stacks if row.lock or row.image))

    def make_judge(self, module: str, receipts: Path, seed: int, limit_s: float) -> ProbeJudge:
        """Who judges a point by the probes that run there.

        Args:
            module: that is asked about.
            receipts: folder for the receipts of every run.
            seed: of the first run of a point; each further one has the next.
            limit_s: seconds that one probe may take.
        """

        def observe(
            environment: Environment, choices: Mapping[str, str], probes: Sequence[str], run: int
        ) -> Sequence[Receipt]:
            facts = read_facts(environment, self.processes)
            if reason := why_not_here(self.target, facts):
                raise NotHere(reason)
            require_torch(facts)
            blank = plan_blank(self.target, facts, self.means.variables, seed=seed + run, tool=TOOL, commit=self.commit)
            folder = receipts / name_folder(choices) / f"{run}-within-{limit_s:g}s"  # a longer one asks anew
            folder.mkdir(parents=True, exist_ok=True)
            cells = [
                (Cell(environment, replace(order, environment=environment.identity), folder, limit_s), Need(0.0, 0.0))
                for order in plan_parity(self.catalog, blank, probes)
            ]
            for cell, _ in cells:
                done = find_done(cell.order, cell.place)
                if done is not None and find_machine_trouble(done):  # it says nothing of the release; see the judge
                    cell.forget()
            room = Room(plan_jobs(count_cores()))
            return [receipt for receipt, _ in Fleet(room, fresh=False).run(cells, self.processes)]

        return ProbeJudge(module, self.catalog.modules, self.make_environment, observe)

    def make_environment(self, choices: Mapping[str, str]) -> Environment:
        """The environment of a point: that of the release, with the folder of each other axis before its own.

        Raises:
            NoEnvironment: there is none.
        """
        environment = resolve_environment(choices[TE], self.found, self.catalog.stacks, self.means)
        chosen = [(spec.axis.name, spec.folders[choices[spec.axis.name]]) for spec in self.others]
        folders = [folder for _, folder in chosen if folder is not None]
        if not folders:
            return environment
        if not isinstance(environment, InterpreterEnvironment):
            raise NoEnvironment(
                f"{environment.shown} is a container, and no folder of --axis can be put over it. Next step: give "
                "the release as an overlay or a lock."
            )
        over = put_over(environment, [*folders, *environment.folders])
        libraries = [file for name, folder in chosen if folder is not None for file in find_libraries(name, folder)]
        if not libraries:
            return over
        before = over.variables.get("LD_PRELOAD", "").split()
        return replace(over, variables={**over.variables, "LD_PRELOAD": ":".join([*map(str, libraries), *before])})


def find_libraries(axis: str, folder: Path) -> tuple[Path, ...]:
    """The shared libraries of a component that have to be loaded before torch looks for its own."""
    pattern = _LIBRARY_OF.get(axis)
    if pattern is None:
        return ()
    return tuple(sorted(file.absolute() for file in folder.rglob("lib*.so.*") if pattern.fullmatch(file.name)))


def name_folder(choices: Mapping[str, str]) -> str:
    """A folder name for a point: readable, and unlike that of any other."""
    text = "\n".join(f"{name}={value}" for name, value in choices.items())
    shown = re.sub(r"[^A-Za-z0-9.+-]", "_", "-".join(choices.values()))[:60]
    return f"{shown}-{sha256(text.encode()).hexdigest()[:8]}"
