"""A result that was written as JSON, shown as a table: `python -m megacpp_validate.cli.result_again FILE`.

The entry point of an image lets a verb write JSON into the folder of receipts, and shows people this table.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ..errors import Exit
from ..report.reading import describe_result, read_result
from ..report.render.terminal import render_terminal
from .app import refuse, spell_out_characters
from .output import write_text


def show(file: Path) -> None:
    """Print a result as a table; a file that holds none is refused."""
    try:
        result = read_result(file.read_bytes())
    except (OSError, ValueError) as fault:
        refuse(f"{file} cannot be shown: {fault}. Next step: run its session again.", Exit.WRONG_ARGUMENTS)
    write_text(render_terminal(describe_result(result), stream=sys.stdout), None)


if __name__ == "__main__":
    spell_out_characters()
    show(Path(sys.argv[1]))
