"""`te-watch`: new releases of Transformer Engine, each judged once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from .app import Context, Result, say, verb

if TYPE_CHECKING:
    from ..canary.upgrade import UpgradeResult


@verb("upgrade:describe_watch")
def te_watch(
    context: Context,
    state: Annotated[Path, "Folder of the issue texts; a release with a text is judged."] = Path(".megacpp/te_watch"),
) -> Result:
    """Is there a new release on the index? Judge each one once, without a GPU, and write an issue text for it,
    with what its wheels need of NVIDIA's libraries.

    Exit code 0: nothing new breaks the bridge, 1: a new release breaks it, 4: a new release has no verdict yet, 5: the
    index does not answer, 6: another run holds the folder.
    """
    from ..canary.requirements import run_requirements
    from ..canary.upgrade import list_releases
    from ..canary.watch import run_watch
    from ..report.describe.upgrade import describe_release
    from ..report.render.markdown import render_markdown

    catalog, matrix = context.catalog, context.matrix

    def render(found: UpgradeResult, release: str) -> str:
        page = describe_release(found, release, run_requirements(catalog, release, matrix, note=say))
        return f"# {page.title}\n\n{render_markdown(page)}"

    return run_watch(catalog, state, list_releases(), render, context.progress, matrix=matrix)
