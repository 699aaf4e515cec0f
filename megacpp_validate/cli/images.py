"""`images`: golden images planned and built."""

from pathlib import Path
from typing import Annotated

from .app import Answer, Context, Receipts, fill, say, verb
from .options import Base


@verb("images:describe_build")
def images(
    context: Context,
    targets: Annotated[tuple[str, ...], "Targets to build for: h200, b200, gb10, cpu; all for a plan."] = (),
    /,
    plan: Annotated[bool, "Print what would be built, and build nothing."] = False,
    own_base: Base = "",
    push: Annotated[str | None, "Registry to push to, as 127.0.0.1:5000."] = None,
    tag: Annotated[str, "In place of the version."] = "",
    receipts: Receipts = Path(".megacpp/images"),
) -> Answer | None:
    """Golden images: what would be built from which digests, built, and pushed.

    Exit code 0: built, or nothing stands in its way; 1: refused; 2: no such target, or a
    wrong argument; 5: no engine, or a build that failed; 6: a full disk, or a registry that is down.
    """
    from ..images import build
    from .output import write_result

    options, rows = fill(build.ImageOptions, locals()), context.images
    build.check_options(options)
    if plan:
        return Answer(build.plan_all(rows, options), "images:describe_plans")
    for built in build.build_all(rows, options, say):
        write_result(built, "images:describe_build", context.output, fmt=context.fmt)
    return None
