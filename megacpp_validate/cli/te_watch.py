"""`te-watch`: new releases of Transformer Engine, each judged once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import TOOL
from .app import Result, verb
from .options import Matrix


@verb("watch:describe_watch")
def te_watch(
    state: Annotated[Path, typer.Option(help="Folder of the issue texts; a release with a text is judged.")] = Path(
        ".megacpp/te_watch"
    ),
    matrix: Matrix = None,
) -> Result:
    """Is there a new release on the index? Judge each one once, without a GPU, and write an issue text for it.

    Exit code 0: nothing new breaks the bridge, 1: a new release breaks it, 4: a new release has no verdict yet, 5: the
    index does not answer, 6: another run holds the folder.
    """
    from ..canary.upgrade import list_releases
    from ..canary.watch import run_watch
    from ..catalog.bridge import read_catalog
    from ..report.describe.watch import describe_release
    from ..report.render.markdown import render_markdown
    from .progress import Progress

    with Progress() as progress:
        return run_watch(
            read_catalog(matrix),
            state,
            list_releases,
            lambda found, release: f"# {(page := describe_release(found, release)).title}\n\n{render_markdown(page)}",
            tool=TOOL,
            matrix=matrix,
            note=progress.say,
        )
