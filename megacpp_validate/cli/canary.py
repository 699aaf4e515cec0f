"""Releases judged: the canary, its search, its watch, and folders of receipts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..errors import Exit, WrongArguments
from .app import Answer, Context, Limit, Result, fill, say, verb
from .options import Fresh, Jobs, Overlays, Probes

if TYPE_CHECKING:
    from ..canary.upgrade import CanaryOptions, UpgradeResult


_RELEASES = typer.Argument(
    metavar="[OLD] [NEW] [MORE]...",
    help="Release in use, release to judge, further ones; for the static tier also folders that hold the package. "
    "Default: the pinned release (of another library the last but one) and the newest on the index.",
)
_SOURCE = "Folder of the code to judge; repeated. Default: the current folder if it uses the library, else the bridge."
_ENV = (
    "Environment that NEW is for: cublas=13.1,cudnn=9.14,torch=2.11 | a `pip freeze` file | doctor's JSON | an "
    "interpreter | an NGC tag of the matrix; repeated, the later one counts."
)
_LIBRARY = "Of the releases: deep-gemm, flash-attn, flash-attn-3, flash-attn-4, liger-kernel, torchao, triton."
_PLACE = "NAME=overlay:DIR | python:PATH | image:REPOSITORY@DIGEST; repeated."


@verb("static:describe_static", runs=("canary", 600.0))
def canary(
    context: Context,
    releases: Annotated[tuple[str, ...], _RELEASES] = (),
    /,
    source: Annotated[tuple[Path, ...], _SOURCE] = (),
    environment: Annotated[tuple[str, ...], typer.Option("--env", help=_ENV)] = (),
    library: Annotated[str, _LIBRARY] = "transformer-engine",
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

    catalog, plan = context.catalog, upgrade.plan_canary(context.catalog, options)
    if options.listing:
        return "\n".join(upgrade.open_sources("static", options.library).versions())
    if options.every_pair:
        sweep = upgrade.compare_every_pair(catalog, plan.releases, options, context.progress)
        return Answer(sweep, "static:describe_sweep")
    if plan.single:
        (pair,) = upgrade.compare_pairs(catalog, plan.releases, options)
        return Answer(pair, "static:describe_static")
    result = upgrade.run_upgrade(catalog, plan, options, context.progress)
    return Answer(result, "upgrade:describe_upgrade")


@verb("canary:describe_bisect", runs=("bisect", 300.0))
def te_bisect(
    context: Context,
    good: Annotated[str, "Release that is good."],
    bad: Annotated[str, "Release that is bad; the same one where an --axis changes."],
    /,
    module: Annotated[str, "Bridge module that breaks between them."],
    tier: Annotated[
        Literal["static", "gpu"] | None,
        "static: by sources. gpu: by probes. Default: gpu with a target, axis or overlays.",
    ] = None,
    target: Annotated[str, "A row of matrix/targets.toml; of the gpu tier."] = "",
    overlays: Overlays = (),
    axes: Annotated[
        tuple[str, ...],
        typer.Option("--axis", help="NAME=VERSION:DIR,VERSION:DIR: a site folder each, from good to bad; repeated."),
    ] = (),
) -> Result:
    """Which release is the first that breaks a module, and is it Transformer Engine at all?

    The search confirms both ends first. A release that cannot be built or imported is no bad release. With --axis
    (torch, cudnn, cublas, flash-attn, deep-gemm) the answer may be another component.
    """
    from ..canary.dynamic.bisect import BisectOptions, run_bisect
    from ..report.describe.canary import describe_run

    static = tier == "static" or (tier is None and not (target or overlays or axes))
    options = fill(BisectOptions, locals())
    return run_bisect(context.catalog, options, lambda run: say(describe_run(run)))


@verb("upgrade:describe_watch")
def te_watch(
    context: Context,
    state: Annotated[Path, "Folder of the issue texts; a release with a text is judged."] = Path(".megacpp/te_watch"),
) -> Result:
    """Is there a new release on the index? Judge each one once, without a GPU, and write an issue text for it,
    with what its wheels need of NVIDIA's libraries.

    Exit code 0: nothing new breaks the bridge, 1: a new release breaks it, 4: a new release has no verdict yet, 5: the
    index does not answer.
    """
    from ..canary.requirements import run_requirements
    from ..canary.upgrade import open_sources
    from ..canary.watch import run_watch
    from ..report.describe.upgrade import describe_release
    from ..report.render.markdown import render_markdown

    catalog = context.catalog

    def render(found: UpgradeResult, release: str) -> str:
        page = describe_release(found, release, run_requirements(catalog, release, note=say))
        return f"# {page.title}\n\n{render_markdown(page)}"

    return run_watch(catalog, state, open_sources("static").versions(), render, context.progress)


@verb("canary:describe_requirements")
def te_requirements(
    context: Context,
    te: Annotated[str, typer.Argument(metavar="RELEASE", help="Of Transformer Engine.")],
    /,
) -> Result:
    """Which cuBLAS, cuDNN, NCCL and CUDA runtime a release needs: computed from the symbols of the wheels on the index.

    Exit code 0: all wheels were read, 2: no such release, or the matrix is wrong, 4: a wheel could not be read.
    """
    from ..canary.requirements import run_requirements

    return run_requirements(context.catalog, te, note=say)


@verb("canary:describe_firewall")
def import_firewall(
    context: Context,
    only: Annotated[tuple[str, ...], typer.Argument(metavar="[CASE]...", help="Cases to run. Default: all.")] = (),
    /,
    jobs: Annotated[int, typer.Option(min=1, help="Cases at a time.")] = 2,
    limit_s: Limit = 120.0,
) -> Result:
    """Can the bridge be imported, and does it say why, whatever is wrong with an install of Transformer Engine?"""
    from ..canary.firewall.run import run_firewall
    from ..canary.upgrade import open_sources

    wheels, progress = open_sources("firewall").wheel, context.progress.case
    return run_firewall(context.catalog, wheels, only=only, limit_s=limit_s, jobs=jobs, progress=progress)


@verb("upgrade:describe_upgrade")
def compare_receipts(
    context: Context,
    before: Annotated[Path, "Folder of receipts of the stack in use."],
    after: Annotated[tuple[Path, ...], "Folders of receipts to judge, each beside the one before it."],
    /,
) -> Result:
    """Who is to blame for the steps between folders of receipts? Runs nothing: they may be of another machine."""
    from ..canary.upgrade import compare_receipts as compare

    return compare(context.catalog, (before, *after))
