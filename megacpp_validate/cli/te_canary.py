"""The verb of the upgrade canary."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import TOOL
from .app import Format, FormatOption, MatrixOption, OutputOption, app, split_names
from .output import finish

if TYPE_CHECKING:
    from ..canary.upgrade import CanaryOptions

_LONGEST_LIMIT_S = 86_400.0  # infinity is no time that a socket can wait
Releases = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[OLD] [NEW] [MORE]...",
        help="Release in use, release to judge, further ones; for the static tier also a folder that holds "
        "transformer_engine/. Default: the pinned release and the newest on the index.",
    ),
]
Every = Annotated[bool, typer.Option("--all", help="Every adjacent pair of releases, as one grid.")]
FirstBad = Annotated[
    str, typer.Option("--first-bad", metavar="MODULE", help="The first release that breaks this module.")
]
Listing = Annotated[bool, typer.Option("--list", help="List the releases on the index.")]
Tiers = Annotated[
    str | None,
    typer.Option(help="Of static, firewall, gpu, with commas. Default: static; gpu with --all-installed."),
]
AllInstalled = Annotated[bool, typer.Option("--all-installed", help="Every release that this host has, oldest first.")]
Target = Annotated[str, typer.Option(help="A row of matrix/targets.toml. Default: that of the GPU here.")]
Overlays = Annotated[
    list[Path] | None,
    typer.Option(help="Folder of site folders, one a release; repeated. Default: MEGACPP_OVERLAYS."),
]
Environments = Annotated[
    list[str] | None,
    typer.Option(
        "--environment",
        help="NAME=overlay:DIR | python:PATH | venv:LOCK | image:REPOSITORY@DIGEST; repeated.",
    ),
]
Python = Annotated[str, typer.Option(help="Interpreter under the overlays. Default: MEGACPP_PYTHON.")]
Probes = Annotated[
    list[str] | None,
    typer.Option("--probes", help="Modules to run, with commas or repeated. Default: all."),
]
Receipts = Annotated[Path, typer.Option(help="Folder for receipts and logs; cells with a receipt are kept.")]
Jobs = Annotated[int, typer.Option(min=0, help="Cells at a time; 0: two less than the cores.")]
GpuMemory = Annotated[
    float,
    typer.Option("--gpu-memory", min=0, metavar="MIB", help="For all cells; 0: what is free."),
]
Limit = Annotated[float, typer.Option(min=1, max=_LONGEST_LIMIT_S, help="Seconds a cell may take.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Run cells with a receipt again.")]
NoTimes = Annotated[bool, typer.Option("--no-times", help="Time nothing.")]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of weights and inputs.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="List harmless changes and consequences, too.")]


@app.command()
def te_canary(
    releases: Releases = None,
    every: Every = False,
    first_bad_in: FirstBad = "",
    listing: Listing = False,
    tiers: Tiers = None,
    all_installed: AllInstalled = False,
    target: Target = "",
    overlays: Overlays = None,
    environments: Environments = None,
    python: Python = "",
    probes: Probes = None,
    receipts: Receipts = Path(".megacpp/canary"),
    jobs: Jobs = 0,
    gpu_memory: GpuMemory = 0.0,
    limit: Limit = 600.0,
    fresh: Fresh = False,
    no_times: NoTimes = False,
    seed: Seed = 0,
    verbose: Verbose = False,
    fmt: FormatOption = Format.TABLE,
    output: OutputOption = None,
    matrix: MatrixOption = None,
) -> None:
    """Which bridge module does the step from OLD to NEW break, and why?

    The static tier reads sources alone: it needs no GPU and no install. With the gpu tier every module runs in every
    release.
    """
    from ..canary.upgrade import CanaryOptions

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
    _answer(options, fmt, output)


def _answer(options: CanaryOptions, fmt: Format, output: Path | None) -> None:
    """Write what is asked for and exit with its code."""
    from ..canary.upgrade import Mode, compare_every_pair, compare_pairs, list_releases, plan_canary, run_upgrade
    from ..catalog.bridge import read_catalog
    from ..report.describe.static import describe_static, describe_sweep
    from ..report.describe.upgrade import describe_upgrade
    from .progress import ShownProgress

    catalog, verbose, module = read_catalog(options.matrix), options.verbose, options.first_bad_in
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
    if module and (found := sweep.first_bad(module)):
        described = partial(describe_static, verbose=verbose, first_bad_in=module)
        finish(found, described, fmt, output, verbose=verbose)
    finish(sweep, partial(describe_sweep, verbose=verbose, first_bad_in=module), fmt, output, verbose=verbose)
