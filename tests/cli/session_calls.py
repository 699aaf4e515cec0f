"""A verb called in this process, on a host without a GPU or with an H200: what tests of sessions share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.command_line import Run, make_run_in
from tests.environments.places import make_h200_host

Stack = Callable[[str], None]


def make_session(verb: str, capfd: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch, folder: Path) -> Run:
    """Calls a verb with arguments on a host with no GPU, in a folder."""
    for name in ("MEGACPP_PYTHON", "MEGACPP_DISABLE_TE", "CUDA_VISIBLE_DEVICES", "PYTHONPATH"):
        patch.delenv(name, raising=False)
    patch.setenv("PATH", "/usr/bin:/bin")
    return make_run_in(folder, verb, capfd, patch)


def make_stack(folder: Path, patch: pytest.MonkeyPatch) -> Stack:
    """Lets the host's interpreter see an H200 and Transformer Engine 2.17.1; its probes do what a test says."""

    def make(main: str) -> None:
        host = make_h200_host(folder, main)
        patch.setenv("MEGACPP_PYTHON", str(host / "python3"))
        patch.setenv("PATH", f"{host}:/usr/bin:/bin")

    return make
