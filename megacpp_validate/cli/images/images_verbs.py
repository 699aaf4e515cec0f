"""The verb of images: its arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..app import Format, MatrixOption, OutputOption, app
from ..told_options import PlainFormat, PlainFormatOption


@app.command()
def images(
    targets: Annotated[
        list[str] | None, typer.Argument(help="Targets to build for: h200, b200, gb10, cpu; all for a plan.")
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Say what would be built, and build nothing.")] = False,
    write_bake: Annotated[
        bool, typer.Option("--write-bake", help="Write containers/docker-bake.json anew, and build nothing.")
    ] = False,
    own_base: Annotated[
        str, typer.Option("--base", envvar="MEGACPP_BASE", help="REPOSITORY@sha256:DIGEST in place of the pinned base.")
    ] = "",
    push: Annotated[str | None, typer.Option("--push", help="Registry to push to, as 127.0.0.1:5000.")] = None,
    tag: Annotated[str, typer.Option("--tag", help="In place of the version.")] = "",
    fresh: Annotated[bool, typer.Option("--fresh", help="Take nothing from the engine's cache.")] = False,
    prove: Annotated[
        bool, typer.Option("--prove", help="Push, pull by digest, and run it without a network; cpu alone.")
    ] = False,
    own_engine: Annotated[
        bool, typer.Option("--own-engine", help="Bring up containers/docker_engine first: Debian, as root.")
    ] = False,
    clones: Annotated[
        list[str] | None, typer.Option("--source", help="ID=FOLDER: a clone in place of a repository; repeated.")
    ] = None,
    receipts: Annotated[Path, typer.Option("--receipts", help="Folder for the receipts of builds, and logs.")] = Path(
        ".megacpp/images"
    ),
    fmt: PlainFormatOption = PlainFormat.TABLE,
    output: OutputOption = None,
    matrix: MatrixOption = None,
) -> None:
    """Golden images: what would be built from which digests, built, pushed, and proved.

    Exit code 0: built, or nothing stands in its way; 1: refused, a fault in the recipe, or a proof that does
    not hold; 2: no such target, or a wrong argument; 4: a linter of the plan did not run; 5: no engine, or a build
    that failed; 6: a full disk, or a registry that is down.
    """
    from .images_runs import Asked, run_images

    asked = Asked(
        targets=tuple(targets or ()),
        plan=plan,
        write_bake=write_bake,
        own_base=own_base,
        push=push,
        tag=tag,
        fresh=fresh,
        prove=prove,
        own_engine=own_engine,
        clones=tuple(clones or ()),
        receipts=receipts,
        matrix=matrix,
    )
    run_images(asked, Format(fmt), output)
