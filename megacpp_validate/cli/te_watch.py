"""`te-watch`: new releases of Transformer Engine, each judged once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import TOOL
from .app import Result, verb
from .options import Matrix

if TYPE_CHECKING:
    from ..canary.dynamic.upgrade_result import UpgradeResult


@verb("watch:describe_watch")
def te_watch(
    state: Annotated[Path, typer.Option(help="Folder of the issue texts; a release with a text is judged.")] = Path(
        ".megacpp/te_watch"
    ),
    matrix: Matrix = None,
) -> Result:
    """Is there a new release on the index? Judge each one once, without a GPU, and write an issue text for it,
    with what its wheels need of NVIDIA's libraries.

    Exit code 0: nothing new breaks the bridge, 1: a new release breaks it, 4: a new release has no verdict yet, 5: the
    index does not answer, 6: another run holds the folder.
    """
    from ..canary.upgrade import list_releases
    from ..canary.watch import run_watch
    from ..canary.wheel_requirements import run_requirements
    from ..catalog.bridge import read_catalog
    from ..report.describe.requirements import describe_requirements
    from ..report.describe.watch import describe_release
    from ..report.render.markdown import render_markdown
    from .progress import Progress

    catalog = read_catalog(matrix)

    with Progress() as progress:

        def render(found: UpgradeResult, release: str) -> str:
            wheels = run_requirements(catalog, release, matrix, tool=TOOL, note=progress.say)
            pages = describe_release(found, release), describe_requirements(wheels)
            texts = [
                f"{sign} {page.title}\n\n{render_markdown(page)}" for sign, page in zip(("#", "##"), pages, strict=True)
            ]
            return "\n\n".join(texts)

        return run_watch(
            catalog,
            state,
            list_releases,
            render,
            tool=TOOL,
            matrix=matrix,
            note=progress.say,
        )
