"""The verbs of the upgrade canary: their arguments."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...catalog.bridge import Catalog, read_catalog
from ..app import Exit, Format, FormatOption, MatrixOption, OutputOption, app, refuse, split_names
from . import canary_options as options

if TYPE_CHECKING:
    from .canary_telling import Telling


@app.command()
def te_canary(
    releases: options.Releases = None,
    every: options.Every = False,
    first_bad_in: options.FirstBad = "",
    listing: options.Listing = False,
    tiers: options.Tiers = None,
    all_installed: options.AllInstalled = False,
    target: options.Target = "",
    overlays: options.Overlays = None,
    environments: options.Environments = None,
    python: options.Python = "",
    probes: options.Probes = None,
    receipts: options.Receipts = Path(".megacpp/canary"),
    jobs: options.Jobs = 0,
    gpu_memory: options.GpuMemory = 0.0,
    limit: options.Limit = 600.0,
    fresh: options.Fresh = False,
    no_times: options.NoTimes = False,
    seed: options.Seed = 0,
    verbose: options.Verbose = False,
    fmt: FormatOption = Format.TABLE,
    output: OutputOption = None,
    matrix: MatrixOption = None,
) -> None:
    """Which bridge module does the step from OLD to NEW break, and why?

    Without options from the sources alone: it needs no GPU and no install. Without arguments: from the pinned release
    to the newest on the index. With the gpu tier every module is run in every release.
    """
    from .canary_telling import Telling

    catalog = read_catalog(matrix)
    telling = Telling(fmt, output, verbose)
    given = tuple(releases or ())
    if every or first_bad_in or listing or not (tiers or all_installed or environments or given[2:]):
        _require_sources_alone(given, several=bool(tiers or all_installed or environments))
        return _judge_sources(catalog, given, telling, every=every, first_bad_in=first_bad_in, listing=listing)
    from .upgrade_runs import read_tiers, run_upgrade
    from .upgrade_stacks import DynamicAsked

    asked = DynamicAsked(
        releases=given,
        every_installed=all_installed,
        environments=tuple(environments or ()),
        overlays=tuple(overlays or ()),
        python=python,
        target=target,
        probes=split_names(probes or ()),
        receipts=receipts,
        jobs=jobs,
        gpu_memory_mib=gpu_memory,
        limit_s=limit,
        fresh=fresh,
        times=not no_times,
        seed=seed,
        matrix=matrix,
    )
    default = "gpu" if all_installed or environments else "static"
    run_upgrade(catalog, read_tiers(tiers or default), asked, telling)
    return None


def _require_sources_alone(given: tuple[str, ...], *, several: bool) -> None:
    if several:
        refuse(
            "--all, --first-bad and --list are of the static tier alone. Next step: leave out the rest, or them.",
            Exit.WRONG_ARGUMENTS,
        )
    if len(given) > 2:
        refuse(
            f"{' '.join(given)} are more than two releases. Next step: give the first and the last.",
            Exit.WRONG_ARGUMENTS,
        )


def _judge_sources(
    catalog: Catalog, given: tuple[str, ...], telling: Telling, *, every: bool, first_bad_in: str, listing: bool
) -> None:
    from .canary_runs import judge_step, print_releases, walk_releases

    old, new = (*given, None, None)[:2]
    if listing:
        print_releases()
    elif every or first_bad_in:
        walk_releases(catalog, (old, new), first_bad_in, telling)
    else:
        judge_step(catalog, (old, new), telling)


@app.command()
def import_firewall(
    cases: Annotated[list[str] | None, typer.Argument(help="Cases to run; all without one.")] = None,
    install: Annotated[
        str, typer.Option(help="Damage laid-out wheels, or the install of this interpreter (current).")
    ] = "wheels",
    jobs: Annotated[int, typer.Option(min=1, help="Cases at a time.")] = 2,
    limit: Annotated[float, typer.Option(min=1, help="Seconds that a process may take.")] = 120.0,
    fmt: FormatOption = Format.TABLE,
    output: OutputOption = None,
    matrix: MatrixOption = None,
) -> None:
    """Does the bridge stand, and say why, whatever is wrong with an install of Transformer Engine?"""
    from .canary_runs import run_damaged_installs
    from .canary_telling import Telling

    if install not in {"wheels", "current"}:
        refuse(f"--install takes wheels or current, not {install!r}", Exit.WRONG_ARGUMENTS)
    run_damaged_installs(
        read_catalog(matrix),
        cases or (),
        "current" if install == "current" else "wheels",
        jobs=jobs,
        limit_s=limit,
        telling=Telling(fmt, output),
    )
