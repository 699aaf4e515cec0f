"""Two environments of one identity give one answer, so whatever changes the answer changes the identity."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megacpp_validate.environments import interpreter
from megacpp_validate.environments.interpreter import (
    InterpreterEnvironment,
    hash_parts,
    host_interpreter,
    list_variables,
    put_over,
)
from tests.environments.site_folders import make_package, make_te


def over(site: Path) -> str:
    variables = {"PATH": os.defpath, "PYTHONDONTWRITEBYTECODE": "1"}
    return put_over(InterpreterEnvironment((sys.executable,), variables), [site]).identity


ATTENTION = "transformer_engine/pytorch/attention.py"
CHANGES: dict[str, Callable[[Path], object]] = {
    "edited": lambda site: (site / ATTENTION).write_text("scale = 2.0\n"),
    "replaced": lambda site: os.utime(site / "transformer_engine" / "__init__.py", ns=(0, 0)),
    "added": lambda site: (site / ATTENTION).with_name("new.py").write_text(""),
    "removed": lambda site: (site / ATTENTION).unlink(),
    "linked in a circle, and edited": lambda site: (
        [(site / name).symlink_to(site, target_is_directory=True) for name in ("one", "two")],
        (site / ATTENTION).write_text("scale = 2.0\n"),
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_file_of_an_overlay_that_changed_is_seen(change: Callable[[Path], object], tmp_path: Path) -> None:
    site = make_te(tmp_path / "site", "2.20.2")
    (site / ATTENTION).parent.mkdir()
    (site / ATTENTION).write_text("scale = 1.0\n")
    before = over(site)
    assert over(site) == before
    change(site)
    assert over(site) != before


COUNTS = ("NVTE_FUSED_ATTN", "LD_LIBRARY_PATH", "LD_PRELOAD", "CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET",
          "MEGACPP_DISABLE_TE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG")  # fmt: skip
ANYTHING_ELSE = ("TRITON_CACHE_DIR", "MEGACPP_OVERLAYS", "OMP_NUM_THREADS", "PS1")


@pytest.mark.parametrize("name", [*COUNTS, *ANYTHING_ELSE])
def test_the_variables_that_change_what_runs(name: str) -> None:
    before = hash_parts(tuple(list_variables({"HOME": "/root"})))
    assert (hash_parts(tuple(list_variables({"HOME": "/root", name: "1"}))) != before) is (name in COUNTS)


def test_a_package_that_the_interpreter_got_is_seen(tmp_path: Path) -> None:
    """Not a folder that this tool put there: what a user has on PYTHONPATH, or installed into the interpreter."""
    site = make_package(tmp_path / "site", "einops", "0.8.1")
    variables = {"PATH": os.defpath, "PYTHONPATH": str(site)}
    before = InterpreterEnvironment((sys.executable,), variables).identity
    make_package(site, "einops", "0.8.2")
    assert InterpreterEnvironment((sys.executable,), variables).identity != before


def test_a_link_in_another_folder_is_the_same_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed tool is reached through a link; its receipts would never be taken again."""
    package = make_package(tmp_path / "tool", "megacpp_validate", "1.0") / "megacpp_validate"
    monkeypatch.setattr(interpreter, "PACKAGE", package)
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    made = []
    for name in ("one", "two"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
        made.append(host_interpreter({"PATH": os.defpath}, str(python)))
    one, two = made
    assert one.variables["PYTHONPATH"] != two.variables["PYTHONPATH"]
    assert one.identity == two.identity
