"""The verbs of parity: what they run, and the exit code of each answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import typer

from ...catalog.bridge import Catalog
from ...environments.environment import NoEnvironment
from ...environments.facts import Facts
from ...environments.interpreter import read_commit
from ...environments.plan import UnknownTarget, find_target, plan_blank, plan_parity
from ...environments.restart import FolderTaken
from ...environments.session_result import ParityResult, build_support
from ...evidence.store import ReceiptInvalid, read_receipts
from ...probes.order import Order
from ..app import TOOL, Exit, Format, foreseen, refuse
from ..telling import tell
from .session_runs import Asked, run_session


@foreseen({
    UnknownTarget: Exit.WRONG_ARGUMENTS, NoEnvironment: Exit.NO_ENVIRONMENT, FolderTaken: Exit.INFRASTRUCTURE,
})  # fmt: skip
def run_parity(catalog: Catalog, asked: Asked, fmt: Format, output: Path | None, *, verbose: bool) -> None:
    """A session; closed where anything is red, and not open where anything did not run."""
    target = find_target(catalog, asked.target)
    if asked.probes == ():
        refuse("no probe is selected. Next step: name one, or leave --probes out for all.", Exit.NOTHING_SELECTED)

    def plan(facts: Facts, variables: Mapping[str, str]) -> tuple[Order, ...]:
        blank = plan_blank(target, facts, variables, seed=asked.seed, tool=TOOL, commit=read_commit())
        return plan_parity(catalog, blank, asked.probes or ())

    result = ParityResult(**dict(run_session(target, asked, plan)))
    tell(result, fmt, output, verbose=verbose)
    if result.breaks:
        raise typer.Exit(Exit.CLOSED)
    raise typer.Exit(Exit.OPEN if result.holds else Exit.EVIDENCE_MISSING)


@foreseen({ReceiptInvalid: Exit.WRONG_ARGUMENTS})
def show_support(catalog: Catalog, folders: Sequence[Path], fmt: Format, output: Path | None) -> None:
    """The grid of some folders of receipts; a file that cannot be read is evidence that is missing."""
    found = [read_receipts(folder) for folder in folders]
    receipts = [receipt for folder in found for receipt in folder.found.values()]
    unreadable = {str(fault.file): fault.reason for folder in found for fault in folder.unreadable}
    if not receipts and not unreadable:
        refuse(
            f"there is no receipt in {', '.join(map(str, folders))}. Likely cause: a typing error, or no run wrote "
            "there. Next step: give folders of receipts, such as docs/evidence/h200/*/.",
            Exit.NOTHING_SELECTED,
        )
    tell(build_support(receipts, [module.id for module in catalog.modules], unreadable), fmt, output)
    raise typer.Exit(Exit.EVIDENCE_MISSING if unreadable else Exit.OPEN)
