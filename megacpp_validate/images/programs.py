"""Programs that make and check images and come as wheels: syft, hadolint, shellcheck."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path


def find_program(name: str, variables: Mapping[str, str]) -> str | None:
    """A program beside this interpreter, where a dependency group puts it; else on the PATH of `variables`."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.is_file() else shutil.which(name, path=variables.get("PATH"))
