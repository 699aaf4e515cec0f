"""`te-canary`: which bridge module an upgrade breaks, and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import TOOL
from .app import Answer, split_names, verb
from .options import Fresh, Jobs, Limit, Matrix, Overlays, Probes, Python, Receipts, Seed

if TYPE_CHECKING:
    from ..canary.upgrade import CanaryOptions


@verb("static:describe_static")
def te_canary(
    releases: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[OLD] [NEW] [MORE]...",
            help="Release in use, release to judge, further ones; for the static tier also a folder that holds "
            "transformer_engine/. Default: the pinned release and the newest on the index.",
        ),
    ] = None,
    source: Annotated[
        list[Path] | None,
        typer.Option(help="Folder of the code that the static tier judges; repeated. Default: the bridge."),
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
    target: Annotated[str, typer.Option(help="A row of matrix/targets.toml. Default: that of the GPU here.")] = "",
    overlays: Overlays = None,
    environments: Annotated[
        list[str] | None,
        typer.Option(
            "--environment", help="NAME=overlay:DIR | python:PATH | venv:LOCK | image:REPOSITORY@DIGEST; repeated."
        ),
    ] = None,
    python: Python = "",
    probes: Probes = None,
    receipts: Receipts = Path(".megacpp/canary"),
    jobs: Jobs = 0,
    gpu_memory: Annotated[float, typer.Option(min=0, metavar="MIB", help="For all cells; 0: what is free.")] = 0.0,
    limit: Limit = 600.0,
    fresh: Fresh = False,
    no_times: Annotated[bool, typer.Option("--no-times", help="Time nothing.")] = False,
    seed: Seed = 0,
    verbose: Annotated[bool, typer.Option("--verbose", help="List harmless changes and consequences, too.")] = False,
    matrix: Matrix = None,
) -> Answer | str:
    """Which module does the step from OLD to NEW break, and why? Of your own code with --source, else of the bridge.

    The static tier reads sources alone: it needs no GPU and no install. With the gpu tier every module runs in every
    release.
    """
    from ..canary.upgrade import CanaryOptions

    options = CanaryOptions(
        releases=tuple(releases or ()), source=tuple(source or ()), every_pair=every, first_bad_in=first_bad_in,
        listing=listing, tiers=tiers, every_installed=all_installed, environments=tuple(environments or ()),
        overlays=tuple(overlays or ()), python=python, target=target, probes=split_names(probes), receipts=receipts,
        jobs=jobs, gpu_memory_mib=gpu_memory, limit_s=limit, fresh=fresh, times=not no_times, seed=seed, matrix=matrix,
        verbose=verbose,
    )  # fmt: skip
    return _judge(options)


def _judge(options: CanaryOptions) -> Answer | str:
    """The result of the mode that the options select, with its description."""
    from ..canary import upgrade
    from ..catalog.bridge import read_catalog
    from .progress import Progress

    catalog = read_catalog(options.matrix)
    plan = upgrade.plan_canary(options, catalog)
    if plan.mode is upgrade.Mode.LIST:
        return "\n".join(upgrade.list_releases())
    if plan.mode is upgrade.Mode.PAIR:
        (pair,) = upgrade.compare_pairs(catalog, plan.releases, options.source, tool=TOOL, verbose=options.verbose)
        return Answer(pair, "static:describe_static")
    with Progress() as progress:
        if plan.mode is upgrade.Mode.UPGRADE:
            result = upgrade.run_upgrade(catalog, plan, options, progress.callbacks, tool=TOOL)
            return Answer(result, "upgrade:describe_upgrade")
        sweep = upgrade.compare_every_pair(catalog, plan.releases, progress.callbacks, tool=TOOL)
    if options.first_bad_in and (found := sweep.first_bad(options.first_bad_in)):
        return Answer(found, "static:describe_static")
    return Answer(sweep, "static:describe_sweep")
