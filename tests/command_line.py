"""The command line in this process: what a run of it ended with."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megacpp_validate.cli import main


class Said(NamedTuple):
    """What a run of the command line ended with."""

    code: int
    out: str
    err: str

    @property
    def flat(self) -> str:
        """What was printed, on one line."""
        return " ".join(self.out.split())

    @property
    def told(self) -> Any:
        """What was printed, of a verb that was asked for JSON."""
        return json.loads(self.out)


Run = Callable[..., Said]


def end_of(patch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The exit code of a call."""
    patch.setattr(sys, "argv", ["megacpp-validate", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def make_run(capfd: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch, *opening: object) -> Run:
    """Calls the command line with what it opens with, mostly a verb, and the arguments of a test."""

    def run(*arguments: object) -> Said:
        capfd.readouterr()
        code = end_of(patch, *opening, *arguments)
        return Said(code, *capfd.readouterr())

    return run


def use_bare_host(patch: pytest.MonkeyPatch) -> None:
    """A host with no GPU, no overlays and no interpreter of a stack, whatever the variables of this process say."""
    for name in ("MEGACPP_PYTHON", "MEGACPP_DISABLE_TE", "MEGACPP_OVERLAYS", "CUDA_VISIBLE_DEVICES", "PYTHONPATH"):
        patch.delenv(name, raising=False)
    patch.setenv("PATH", "/usr/bin:/bin")


def make_run_in(folder: Path, verb: str, capfd: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch) -> Run:
    """The same in a folder, on a terminal that is wide and plain."""
    patch.setenv("NO_COLOR", "1")
    patch.setenv("COLUMNS", "160")
    patch.chdir(folder)
    return make_run(capfd, patch, verb)
