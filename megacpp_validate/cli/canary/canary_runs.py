"""The verbs of the upgrade canary that need no GPU: what they run, and the exit code of each answer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import pairwise

import typer
from rich.console import Console

from ...canary.firewall.plan import InstallMode, UnknownCase
from ...canary.firewall.result import FirewallResult
from ...canary.firewall.run import run_firewall
from ...canary.static.derive import BridgeUnreadable
from ...canary.static.findings import StaticResult
from ...canary.static.release import ReleaseUnreadable
from ...canary.static.sources import Sources, SourceUnavailable, UnknownRelease, nearest
from ...canary.static.sweep import OLDEST, first_bad, is_same_release, read_pair, read_surface, run_pair, run_sweep
from ...catalog.bridge import Catalog
from ..app import TOOL, Exit, Format, errors, foreseen, refuse
from .canary_telling import Telling

_FORESEEN = {
    UnknownRelease: Exit.WRONG_ARGUMENTS,
    UnknownCase: Exit.WRONG_ARGUMENTS,
    BridgeUnreadable: Exit.WRONG_ARGUMENTS,
    SourceUnavailable: Exit.NO_ENVIRONMENT,
    ReleaseUnreadable: Exit.NO_ENVIRONMENT,
}
Ends = tuple[str | None, str | None]


@foreseen(_FORESEEN)
def print_releases() -> None:
    """The releases on the index, one a line."""
    sys.stdout.write("\n".join(Sources().versions()) + "\n")


@foreseen(_FORESEEN)
def judge_step(catalog: Catalog, ends: Ends, telling: Telling) -> None:
    """The step from one release to another; closed where it breaks something."""
    sources = Sources()
    old, new = _choose(*ends, catalog, sources)
    surface = read_surface(catalog)
    result = run_pair(*read_pair(sources, old, new), surface, tool=TOOL, verbose=telling.verbose)
    telling(result)
    raise typer.Exit(Exit.CLOSED if result.breaks else Exit.OPEN)


@foreseen(_FORESEEN)
def run_damaged_installs(
    catalog: Catalog, cases: Sequence[str], install: InstallMode, *, jobs: int, limit_s: float, telling: Telling
) -> None:
    """The firewall tier; closed where it fails, and not open where a case was not run."""
    result = damage_installs(catalog, cases, install, jobs=jobs, limit_s=limit_s)
    telling(result)
    if result.holds:
        return
    failed = any(case.outcome.value == "fail" for case in result.cases)
    raise typer.Exit(Exit.CLOSED if failed else Exit.EVIDENCE_MISSING)


@foreseen(_FORESEEN)
def damage_installs(
    catalog: Catalog, cases: Sequence[str], install: InstallMode, *, jobs: int, limit_s: float
) -> FirewallResult:
    """Run the firewall tier; each case is told as it ends."""
    sources = Sources()
    return run_firewall(
        catalog.modules,
        lambda distribution, version: sources.wheel(version, distribution),
        tool=TOOL,
        only=cases,
        install=install,
        limit_s=limit_s,
        jobs=jobs,
        progress=lambda case: errors.print(f"{case.outcome.value:8} {case.case} ({case.seconds:.1f} s)"),
    )


@foreseen(_FORESEEN)
def compare_sources(catalog: Catalog, releases: Sequence[str], *, verbose: bool) -> tuple[StaticResult, ...]:
    """Every step between adjacent releases; of fewer than two, to the newest on the index."""
    sources = Sources()
    if len(releases) < 2:
        releases = _choose(releases[0] if releases else None, None, catalog, sources)
    surface = read_surface(catalog)
    return tuple(
        run_pair(*read_pair(sources, old, new), surface, tool=TOOL, verbose=verbose) for old, new in pairwise(releases)
    )


@foreseen(_FORESEEN)
def walk_releases(catalog: Catalog, ends: Ends, module: str, telling: Telling) -> None:
    """Every step between releases, or the first one that breaks a module."""
    sources = Sources()
    names = [row.id for row in catalog.modules]
    if module and module not in names:
        refuse(
            f"there is no bridge module {module!r}. Next step: choose one of {', '.join(names)}.",
            Exit.WRONG_ARGUMENTS,
        )
    versions = _between(sources.versions(), ends)
    sweep = run_sweep(versions, sources, catalog, tool=TOOL, progress=_progress())
    if not sweep.steps:
        refuse("no two releases could be read: there is nothing to compare", Exit.NOTHING_SELECTED)
    if not module:
        telling(sweep)
        raise typer.Exit(Exit.OPEN)  # the grid is history: it closes nothing
    step = first_bad(sweep, module)
    if step is None:
        if telling.fmt is Format.TABLE and telling.output is None:
            Console().print(f"no release between {versions[0]} and {versions[-1]} breaks {module}")
        else:
            telling(sweep)  # for a program: the steps that show it
        raise typer.Exit(Exit.OPEN)
    if telling.fmt is Format.TABLE and telling.output is None:
        Console().print(
            f"{module} breaks first in [bold]{step.new.version}[/bold] ({step.old.version} is the last good one)\n"
        )
    telling(step)
    raise typer.Exit(Exit.CLOSED)


def _choose(old: str | None, new: str | None, catalog: Catalog, sources: Sources) -> tuple[str, str]:
    """OLD and NEW, from the pin and the index where they are not given."""
    start = catalog.pinned.te if old is None else old
    end = sources.versions()[-1] if new is None else new
    if start == end or is_same_release(start, end):
        if old and new:
            refuse(
                f"OLD and NEW are both {old}: there is nothing to compare. Next step: give two releases.",
                Exit.WRONG_ARGUMENTS,
            )
        refuse(
            f"{start} is the newest release on the index: there is no upgrade to judge. Next step: give two releases, "
            "or --all.",
            Exit.NOTHING_SELECTED,
        )
    return start, end


def _progress() -> Callable[[str], None]:
    """Says which step is done where a person looks on; a log keeps the result only."""
    return (lambda step: errors.print(f"{step:32}", end="\r")) if errors.is_terminal else (lambda _: None)


def _between(versions: list[str], ends: Ends) -> list[str]:
    """The releases from the first to the last of `ends`, the oldest readable one and the newest without."""
    readable = versions[versions.index(OLDEST) :] if OLDEST in versions else versions  # a mirror may start later
    first, last = ends[0] or readable[0], ends[1] or versions[-1]
    for name in (first, last):
        if name not in versions:
            raise UnknownRelease(
                f"there is no Transformer Engine {name} on the index. Nearest: {', '.join(nearest(name, versions))}. "
                "Next step: choose one of them; `--list` shows all."
            )
    one, other = sorted((versions.index(first), versions.index(last)))
    return versions[one : other + 1]
