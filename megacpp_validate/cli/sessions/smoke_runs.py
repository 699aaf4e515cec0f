"""The verb of the smoke run: what it runs, and the exit code of each answer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import typer

from ...catalog.bridge import Catalog, read_catalog
from ...environments.environment import NoEnvironment
from ...environments.facts import Facts, read_facts
from ...environments.fleet import Expected
from ...environments.interpreter import own_interpreter, read_commit
from ...environments.plan import UnknownTarget, choose_smoke_cells, choose_target, find_target, plan_blank, plan_smoke
from ...environments.restart import FolderTaken
from ...environments.session_result import SmokeSession
from ...probes.order import Order
from ...process import Processes
from ..app import TOOL, Exit, Format, foreseen, refuse
from ..telling import tell
from .session_runs import Asked, run_session

_WITHOUT_A_GPU = "cpu"


@dataclass(frozen=True)
class Chosen:
    """What is asked: the arguments of a session, only cells of so many ranks (0: all), and what starts ranks."""

    asked: Asked
    ranks: int
    launcher: str


@foreseen({
    UnknownTarget: Exit.WRONG_ARGUMENTS, NoEnvironment: Exit.NO_ENVIRONMENT, FolderTaken: Exit.INFRASTRUCTURE,
})  # fmt: skip
def run_moe_smoke(matrix: Path | None, chosen: Chosen, fmt: Format, output: Path | None, *, verbose: bool) -> None:
    """A session; closed where anything is red, and not open where anything did not run."""
    if chosen.asked.probes == ():
        refuse("no cell is selected. Next step: name one, or leave --cells out for all.", Exit.NOTHING_SELECTED)
    result = observe_smoke(read_catalog(matrix), chosen)
    tell(result, fmt, output, verbose=verbose)
    if result.breaks:
        raise typer.Exit(Exit.CLOSED)
    raise typer.Exit(Exit.OPEN if result.holds else Exit.EVIDENCE_MISSING)


def observe_smoke(catalog: Catalog, chosen: Chosen) -> SmokeSession:
    """Run the cells one after the other. Raises as `run_session`."""
    asked = chosen.asked
    target = find_target(catalog, asked.target or _target_here(catalog))
    every = choose_smoke_cells(catalog, target.id, asked.probes or ())
    rows = [row for row in every if chosen.ranks in (0, row.ranks)]
    if not rows:
        refuse(
            f"no cell that is selected takes {chosen.ranks} rank(s). Next step: choose --ranks from "
            f"{', '.join(sorted({str(row.ranks) for row in every}))}, or other --cells.",
            Exit.NOTHING_SELECTED,
        )
    names = [row.id for row in rows]

    def plan(facts: Facts, variables: Mapping[str, str]) -> tuple[Order, ...]:
        blank = plan_blank(target, facts, variables, seed=asked.seed, tool=TOOL, commit=read_commit())
        orders = plan_smoke(catalog, blank, names)
        return tuple(replace(order, settings={**order.settings, "launcher": chosen.launcher}) for order in orders)

    expected = {row.id: Expected(row.seconds, row.limit_s) for row in rows}
    session = run_session(target, replace(asked, target=target.id), plan, expected)
    return SmokeSession(**dict(session))


def _target_here(catalog: Catalog) -> str:
    """The target of the GPU that is here; `cpu` without one."""
    facts = read_facts(own_interpreter(os.environ), Processes())
    return _WITHOUT_A_GPU if facts.gpu is None else choose_target(catalog, [facts]).id
