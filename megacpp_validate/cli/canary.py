"""`canary`: which module of a source tree, or of the bridge, an upgrade breaks, and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..errors import Exit, WrongArguments
from .app import Answer, Context, fill, verb
from .options import Fresh, Jobs, Overlays, Probes

if TYPE_CHECKING:
    from ..canary.upgrade import CanaryOptions

_RELEASES = typer.Argument(
    metavar="[OLD] [NEW] [MORE]...",
    help="Release in use, release to judge, further ones; for the static tier also a folder that holds "
    "transformer_engine/. Default: the pinned release and the newest on the index.",
)
_SOURCE = (
    "Folder of the code to judge; repeated. Default: the current folder if it uses Transformer Engine, else the bridge."
)
_ENV = (
    "Environment that NEW is for: cublas=13.1,cudnn=9.14,torch=2.11 | a `pip freeze` file | doctor's JSON | an "
    "interpreter | an NGC tag of the matrix; repeated, the later one counts."
)
_PLACE = "NAME=overlay:DIR | python:PATH | image:REPOSITORY@DIGEST; repeated."


@verb("static:describe_static", runs=("canary", 600.0))
def canary(
    context: Context,
    releases: Annotated[tuple[str, ...], _RELEASES] = (),
    /,
    source: Annotated[tuple[Path, ...], _SOURCE] = (),
    environment: Annotated[tuple[str, ...], typer.Option("--env", help=_ENV)] = (),
    every_pair: Annotated[bool, typer.Option("--all", help="Every adjacent pair of releases, as one grid.")] = False,
    fail_on: Annotated[Literal["break", "risk"], "Exit code 1 for a breakage, or for a risk too."] = "break",
    listing: Annotated[bool, typer.Option("--list", help="List the releases on the index.")] = False,
    tiers: Annotated[str | None, "Of static, firewall, gpu. Default: static; gpu with --all-installed."] = None,
    every_installed: Annotated[
        bool, typer.Option("--all-installed", help="Every release that this host has, oldest first.")
    ] = False,
    target: Annotated[str, "A row of matrix/targets.toml. Default: that of the GPU here."] = "",
    overlays: Overlays = (),
    environments: Annotated[tuple[str, ...], typer.Option("--environment", help=_PLACE)] = (),
    probes: Probes = (),
    jobs: Jobs = 0,
    fresh: Fresh = False,
    no_times: Annotated[bool, "Time nothing."] = False,
) -> Answer | str:
    """Which module does the step from OLD to NEW break, and why? Of your own code, else of the bridge.

    The static tier reads sources alone: no GPU, no install. With the gpu tier every module runs in every release.
    """
    from ..canary.upgrade import CanaryOptions

    options = fill(CanaryOptions, locals(), times=not no_times)
    answer = _judge(context, options)
    if fail_on == "break":
        return answer
    if options.every_pair or isinstance(answer, str):
        raise WrongArguments("--fail-on judges one step, --all and --list none. Next step: give OLD and NEW.")
    results = getattr(answer.result, "static", (answer.result,))
    at_risk = answer.result.exit is Exit.OPEN and any(getattr(one, "risks", False) for one in results)
    return answer._replace(exit=Exit.CLOSED) if at_risk else answer


def _judge(context: Context, options: CanaryOptions) -> Answer | str:
    """The result of the mode that the options select, with its description."""
    from ..canary import upgrade

    catalog, plan = context.catalog, upgrade.plan_canary(options)
    if plan.mode is upgrade.Mode.LIST:
        return "\n".join(upgrade.list_releases())
    if plan.mode is upgrade.Mode.PAIR:
        (pair,) = upgrade.compare_pairs(catalog, plan.releases, options)
        return Answer(pair, "static:describe_static")
    if plan.mode is upgrade.Mode.UPGRADE:
        result = upgrade.run_upgrade(catalog, plan, options, context.progress)
        return Answer(result, "upgrade:describe_upgrade")
    return Answer(
        upgrade.compare_every_pair(catalog, plan.releases, options, context.progress), "static:describe_sweep"
    )
