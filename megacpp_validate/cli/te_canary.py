"""The verb of the upgrade canary."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from .. import TOOL
from .app import Format, FormatOption, MatrixOption, OutputOption, app, split_names
from .output import finish

_DEVICE = "GPU tier"
_LONGEST_LIMIT_S = 86_400.0  # infinity is no time that a socket can wait


@app.command()
def te_canary(
    releases: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[OLD] [NEW] [MORE]...",
            help="Release in use, release to judge, further ones; for the static tier also a folder that holds "
            "transformer_engine/. Default: the pinned release and the newest on the index.",
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every adjacent pair of releases, as one grid.")] = False,
    first_bad_in: Annotated[
        str, typer.Option("--first-bad", metavar="MODULE", help="The first release that breaks this module.")
    ] = "",
    listing: Annotated[bool, typer.Option("--list", help="List the releases on the index.")] = False,
    tiers: Annotated[
        str | None,
        typer.Option(help="Of static, firewall, gpu, with commas. Default: static; gpu with --all-installed."),
    ] = None,
    all_installed: Annotated[
        bool, typer.Option("--all-installed", help="Every release that this host has, oldest first.")
    ] = False,
    target: Annotated[
        str, typer.Option(help="A row of matrix/targets.toml. Default: that of the GPU here.", rich_help_panel=_DEVICE)
    ] = "",
    overlays: Annotated[
        list[Path] | None,
        typer.Option(
            help="Folder of site folders, one a release; repeated. Default: MEGACPP_OVERLAYS.", rich_help_panel=_DEVICE
        ),
    ] = None,
    environments: Annotated[
        list[str] | None,
        typer.Option(
            "--environment",
            help="NAME=overlay:DIR | python:PATH | venv:LOCK | image:REPOSITORY@DIGEST; repeated.",
            rich_help_panel=_DEVICE,
        ),
    ] = None,
    python: Annotated[
        str, typer.Option(help="Interpreter under the overlays. Default: MEGACPP_PYTHON.", rich_help_panel=_DEVICE)
    ] = "",
    probes: Annotated[
        list[str] | None,
        typer.Option(
            "--probes", help="Modules to run, with commas or repeated. Default: all.", rich_help_panel=_DEVICE
        ),
    ] = None,
    receipts: Annotated[
        Path, typer.Option(help="Folder for receipts and logs; cells with a receipt are kept.", rich_help_panel=_DEVICE)
    ] = Path(".megacpp/canary"),
    jobs: Annotated[
        int, typer.Option(min=0, help="Cells at a time; 0: two less than the cores.", rich_help_panel=_DEVICE)
    ] = 0,
    gpu_memory: Annotated[
        float,
        typer.Option(
            "--gpu-memory", min=0, metavar="MIB", help="For all cells; 0: what is free.", rich_help_panel=_DEVICE
        ),
    ] = 0.0,
    limit: Annotated[
        float, typer.Option(min=1, max=_LONGEST_LIMIT_S, help="Seconds a cell may take.", rich_help_panel=_DEVICE)
    ] = 600.0,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Run cells with a receipt again.", rich_help_panel=_DEVICE)
    ] = False,
    no_times: Annotated[bool, typer.Option("--no-times", help="Time nothing.", rich_help_panel=_DEVICE)] = False,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Of weights and inputs.", rich_help_panel=_DEVICE)
    ] = 0,
    verbose: Annotated[bool, typer.Option("--verbose", help="List harmless changes and consequences, too.")] = False,
    fmt: FormatOption = Format.TABLE,
    output: OutputOption = None,
    matrix: MatrixOption = None,
) -> None:
    """Which bridge module does the step from OLD to NEW break, and why?

    The static tier reads sources alone: it needs no GPU and no install. With the gpu tier every module runs in every
    release.
    """
    from ..canary.upgrade import (
        CanaryOptions,
        Mode,
        compare_every_pair,
        compare_pairs,
        list_releases,
        plan_canary,
        run_upgrade,
    )
    from ..catalog.bridge import read_catalog
    from ..report.describe.static import describe_static, describe_sweep
    from ..report.describe.upgrade import describe_upgrade
    from .canary_progress import ShownProgress

    catalog = read_catalog(matrix)
    options = CanaryOptions(
        releases=tuple(releases or ()),
        every_pair=every,
        first_bad_in=first_bad_in,
        listing=listing,
        tiers=tiers,
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
        verbose=verbose,
    )
    plan = plan_canary(options, catalog)
    if plan.mode is Mode.LIST:
        sys.stdout.write("\n".join(list_releases()) + "\n")
        return
    if plan.mode is Mode.PAIR:
        (pair,) = compare_pairs(catalog, plan.releases, tool=TOOL, verbose=verbose)
        finish(pair, partial(describe_static, verbose=verbose), fmt, output, verbose=verbose)
    if plan.mode is Mode.UPGRADE:
        with ShownProgress() as progress:
            result = run_upgrade(catalog, plan, options, progress.callbacks, tool=TOOL)
        finish(result, partial(describe_upgrade, verbose=verbose), fmt, output, verbose=verbose)
    with ShownProgress() as progress:
        sweep = compare_every_pair(catalog, plan.releases, progress.callbacks, tool=TOOL)
    if first_bad_in and (found := sweep.first_bad(first_bad_in)):
        described = partial(describe_static, verbose=verbose, first_bad_in=first_bad_in)
        finish(found, described, fmt, output, verbose=verbose)
    finish(sweep, partial(describe_sweep, verbose=verbose, first_bad_in=first_bad_in), fmt, output, verbose=verbose)
