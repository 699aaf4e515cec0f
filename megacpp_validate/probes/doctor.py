"""One look of the doctor: at the path without importing anything, or at one vendor package by importing it.

python -m megacpp_validate.probes.doctor path ANSWER.json
python -m megacpp_validate.probes.doctor transformer_engine.pytorch ANSWER.json

A package is imported in a process of its own, because an import may end or hang it; then there is no answer, and that
is what was seen. One that is not there is told before anything else is imported, since most are not there: on a machine
of two cores each such process takes its time from the import of torch.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec


def is_there(name: str) -> bool:
    """Whether the path has the top of a package, or cannot be asked; finding it runs none of its code."""
    try:
        return find_spec(name.partition(".")[0]) is not None
    except Exception:  # a damaged install raises what it likes; the whole look tells it
        return True


def main(what: str, answer: str) -> None:
    """Take one look, and write what was seen aside and renamed."""
    if what == "path" or is_there(what):
        from .doctor_look import take_look

        take_look(what, answer)
        return
    aside = f"{answer}.part"
    with open(aside, "w", encoding="utf-8") as out:  # noqa: PTH123 - pathlib is a third of what this process imports
        json.dump({"package": what, "installed": False}, out)
    os.replace(aside, answer)  # noqa: PTH105


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
    sys.stdout.flush()
    os._exit(0)  # a vendor library may end the process again while it is taken down
