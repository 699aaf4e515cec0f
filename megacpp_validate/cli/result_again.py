"""A result that was written as JSON, told again as a table: `python -m megacpp_validate.cli.result_again FILE`.

The entry point of an image lets a verb write its JSON into the folder of receipts, and shows people this.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ..report.machine import read_json
from .app import Exit, Format, refuse, spell_out_characters
from .telling import tell


def show(file: Path) -> None:
    """Print a result as a table; a file that holds none is refused."""
    try:
        result = read_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as fault:
        refuse(f"{file} cannot be told again: {fault}. Next step: run its session again.", Exit.WRONG_ARGUMENTS)
    tell(result, Format.TABLE, None)


if __name__ == "__main__":
    spell_out_characters()
    show(Path(sys.argv[1]))
