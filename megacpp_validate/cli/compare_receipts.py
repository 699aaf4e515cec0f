"""`compare-receipts`: folders of receipts, judged without a run."""

from pathlib import Path
from typing import Annotated

from .app import Context, Result, verb


@verb("upgrade:describe_upgrade")
def compare_receipts(
    context: Context,
    before: Annotated[Path, "Folder of receipts of the stack in use."],
    after: Annotated[tuple[Path, ...], "Folders of receipts to judge, each beside the one before it."],
    /,
) -> Result:
    """Who is to blame for the steps between folders of receipts? Runs nothing: they may be of another machine."""
    from ..canary.upgrade import compare_receipts as compare

    return compare(context.catalog, (before, *after), context.matrix)
