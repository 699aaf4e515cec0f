"""A host with one release of Transformer Engine, for the verbs that plant faults in copies of it."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "environments"))
from megacpp_validate.canary.dynamic import planting
from megacpp_validate.catalog.bridge import matrix_folder
from megacpp_validate.environments.interpreter import put_over
from megacpp_validate.environments.stacks import Found
from tests.environments.places import LAPTOP, make_probes
from tests.environments.site_folders import make_te


def make_host(folder: Path, probe: str, matrix: dict[str, str], patch: pytest.MonkeyPatch) -> Path:
    """A host whose probes tell what they import.

    Args:
        folder: an empty one; copies, overlays and matrix go there.
        probe: source of every probe, with `{runs}` for the file in which it writes that it ran.
        matrix: files that take the place of the project's own.
        patch: puts everything back.

    Returns:
        The file in which probes write that they ran.
    """
    runs = folder / "runs"
    bare = make_probes(folder, probe.format(runs=runs))
    bare = replace(bare, variables={**bare.variables, "PYTHONDONTWRITEBYTECODE": "1"})
    clean = make_te(folder / "overlays" / "te-2.20.2", "2.20.2")
    (clean / "transformer_engine" / "__init__.py").write_text("WRONG = ''\n")
    found = Found("2.20.2", str(clean), put_over(bare, (clean,)))
    patch.setattr(planting, "host_interpreter", lambda *_: bare)
    patch.setattr(planting, "read_facts", lambda *_: LAPTOP)
    patch.setattr(planting, "find_environments", lambda *_: (found,))
    shutil.copytree(matrix_folder(), folder / "matrix")
    for name, text in matrix.items():
        (folder / "matrix" / name).write_text(text)
    return runs
