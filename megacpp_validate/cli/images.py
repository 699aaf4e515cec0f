"""`images`: golden images planned, built, proved."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from .. import TOOL
from .app import Answer, Format, FormatOption, Output, verb, write_error_line
from .options import Base, Matrix, Receipts


@verb("images:describe_build")
def images(
    targets: Annotated[
        list[str] | None, typer.Argument(help="Targets to build for: h200, b200, gb10, cpu; all for a plan.")
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Print what would be built, and build nothing.")] = False,
    own_base: Base = "",
    push: Annotated[str | None, typer.Option(help="Registry to push to, as 127.0.0.1:5000.")] = None,
    tag: Annotated[str, typer.Option(help="In place of the version.")] = "",
    fresh: Annotated[bool, typer.Option("--fresh", help="Take nothing from the engine's cache.")] = False,
    prove: Annotated[
        bool, typer.Option("--prove", help="Push, pull by digest, and run it without a network; cpu alone.")
    ] = False,
    own_engine: Annotated[
        bool, typer.Option("--own-engine", help="Start containers/docker_engine first: Debian, as root.")
    ] = False,
    clones: Annotated[
        list[str] | None, typer.Option("--source", help="ID=FOLDER: a clone in place of a repository; repeated.")
    ] = None,
    receipts: Receipts = Path(".megacpp/images"),
    fmt: FormatOption = Format.TABLE,
    output: Output = None,
    matrix: Matrix = None,
) -> Answer | None:
    """Golden images: what would be built from which digests, built, pushed, and proved.

    Exit code 0: built, or nothing stands in its way; 1: refused, a fault in the recipe, or a proof that does not hold;
    2: no such target, or a wrong argument; 4: a linter of the plan did not run; 5: no engine, or a build that failed;
    6: a full disk, or a registry that is down.
    """
    from ..images import build
    from ..images.plan import ImageRows
    from .output import write_result

    options = build.ImageOptions(tuple(targets or ()), own_base, push, tag, fresh, prove, tuple(clones or ()), receipts)
    rows = ImageRows(matrix, TOOL, dict(os.environ))
    build.check_options(options, rows)
    if own_engine:  # after a wrong argument was reported
        rows, options = build.use_own_engine(rows, options)
    if plan:
        return Answer(build.plan_all(rows, options), "images:describe_plans")
    for built in build.build_all(rows, options, write_error_line):
        if prove:
            from ..images.prove import prove_image

            proof = prove_image(rows.variables, built, receipts / "proof", TOOL)
            return Answer(proof, "images:describe_proof")
        write_result(built, "images:describe_build", output, fmt=fmt)
    return None
