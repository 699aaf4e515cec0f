"""`canary`: which module of a source tree, or of the bridge, an upgrade breaks, and why."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import TOOL
from ..errors import Exit, WrongArguments
from .app import Answer, split_names, verb
from .options import Env, Fresh, Jobs, Limit, Matrix, Overlays, Probes, Python, Receipts, Seed

if TYPE_CHECKING:
    from ..canary.upgrade import CanaryOptions


class FailOn(StrEnum):
    """What closes with exit code 1."""

    BREAK = "break"
    RISK = "risk"


_Releases = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[OLD] [NEW] [MORE]...",
        help="Release in use, release to judge, further ones; for the static tier also a folder that holds "
        "transformer_engine/. Default: the pinned release and the newest on the index.",
    ),
]
_Sources = Annotated[
    list[Path] | None,
    typer.Option(
        help="Folder of the code that the static tier judges; repeated. Default: the current folder if its code "
        "uses Transformer Engine, else the bridge."
    ),
]
_FailOnOption = Annotated[FailOn, typer.Option(help="Exit code 1 for a breakage, or for a risk too.")]


@verb("static:describe_static", alias="te-canary")
def canary(
    releases: _Releases = None,
    source: _Sources = None,
    env: Env = None,
    every: Annotated[bool, typer.Option("--all", help="Every adjacent pair of releases, as one grid.")] = False,
    first_bad_in: Annotated[
        str, typer.Option("--first-bad", metavar="MODULE", help="The first release that breaks this module.")
    ] = "",
    fail_on: _FailOnOption = FailOn.BREAK,
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
    """Which module does the step from OLD to NEW break, and why? Of your own code, else of the bridge.

    The static tier reads sources alone: no GPU, no install. With the gpu tier every module runs in every release.
    """
    from ..canary.upgrade import CanaryOptions

    options = CanaryOptions(
        releases=tuple(releases or ()), source=tuple(source or ()), environment=tuple(env or ()), every_pair=every,
        first_bad_in=first_bad_in, listing=listing, tiers=tiers, every_installed=all_installed, python=python,
        environments=tuple(environments or ()), overlays=tuple(overlays or ()), target=target, jobs=jobs,
        probes=split_names(probes), receipts=receipts, gpu_memory_mib=gpu_memory, limit_s=limit, fresh=fresh,
        times=not no_times, seed=seed, matrix=matrix, verbose=verbose,
    )  # fmt: skip
    answer = _judge(options)
    return _close_at_risk(options, answer) if fail_on is FailOn.RISK else answer


def _close_at_risk(options: CanaryOptions, answer: Answer | str) -> Answer:
    """The answer, with exit code 1 where it is open and holds a risk.

    Raises:
        WrongArguments: the answer is no judgement on a step.
    """
    if options.every_pair or isinstance(answer, str):
        raise WrongArguments("--fail-on judges one step, --all and --list none. Next step: give OLD and NEW.")
    results = getattr(answer.result, "static", (answer.result,))
    closed = answer.result.exit is Exit.OPEN and any(getattr(one, "risks", False) for one in results)
    return answer._replace(exit=Exit.CLOSED) if closed else answer


def _judge(options: CanaryOptions) -> Answer | str:
    """The result of the mode that the options select, with its description."""
    from ..canary import upgrade
    from ..catalog.bridge import read_catalog
    from .progress import Progress

    catalog = read_catalog(options.matrix)
    plan = upgrade.plan_canary(options)
    if plan.mode is upgrade.Mode.LIST:
        return "\n".join(upgrade.list_releases())
    if plan.mode is upgrade.Mode.PAIR:
        needs = upgrade.read_requirements(catalog, options)
        (pair,) = upgrade.compare_pairs(
            catalog, plan.releases, options.source, tool=TOOL, verbose=options.verbose, requirements=needs
        )
        return Answer(pair, "static:describe_static")
    with Progress() as progress:
        if plan.mode is upgrade.Mode.UPGRADE:
            result = upgrade.run_upgrade(catalog, plan, options, progress.callbacks, tool=TOOL)
            return Answer(result, "upgrade:describe_upgrade")
        sweep = upgrade.compare_every_pair(catalog, plan.releases, options, progress.callbacks, tool=TOOL)
    if options.first_bad_in and (found := sweep.first_bad(options.first_bad_in)):
        return Answer(found, "static:describe_static")
    return Answer(sweep, "static:describe_sweep")
