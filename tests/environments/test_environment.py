"""Two environments of one identity give one answer, so whatever changes the answer changes the identity."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megacpp_validate.canary.static.sources import CACHE_VARIABLE
from megacpp_validate.environments import environment
from megacpp_validate.environments.environment import hash_parts, list_sources, list_variables
from megacpp_validate.environments.interpreter import InterpreterEnvironment, host_interpreter, put_over
from tests.environments.site_folders import make_package, make_te

Change = Callable[[Path], None]


def over(site: Path, **more: str) -> str:
    variables = {"PATH": os.defpath, "PYTHONDONTWRITEBYTECODE": "1", **more}
    return put_over(InterpreterEnvironment((sys.executable,), variables), [site]).identity


def make_site(folder: Path) -> Path:
    site = make_te(folder / "site", "2.20.2")
    (site / "transformer_engine" / "pytorch").mkdir()
    (site / "transformer_engine" / "pytorch" / "attention.py").write_text("scale = 1.0\n")
    return site


def edit(site: Path) -> None:
    (site / "transformer_engine" / "pytorch" / "attention.py").write_text("scale = 2.0\n")


def touch(site: Path) -> None:
    os.utime(site / "transformer_engine" / "__init__.py", ns=(0, 0))


def add_deep(site: Path) -> None:
    (site / "transformer_engine" / "pytorch" / "new.py").write_text("")


def remove(site: Path) -> None:
    (site / "transformer_engine" / "pytorch" / "attention.py").unlink()


CHANGES: dict[str, Change] = {"edited": edit, "replaced": touch, "added": add_deep, "removed": remove}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_file_of_an_overlay_that_changed_is_seen(change: Change, tmp_path: Path) -> None:
    site = make_site(tmp_path)
    before = over(site)
    assert over(site) == before
    change(site)
    assert over(site) != before


VARIABLES: dict[str, tuple[str, bool]] = {
    "an-attention-switch": ("NVTE_FUSED_ATTN", True), "the-loader": ("LD_LIBRARY_PATH", True),
    "a-preload": ("LD_PRELOAD", True), "the-gpus": ("CUDA_VISIBLE_DEVICES", True), "triton": ("TRITON_INTERPRET", True),
    "ours": ("MEGACPP_DISABLE_TE", True), "torch": ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", True),
    "the-allocator": ("PYTORCH_CUDA_ALLOC_CONF", True), "cublas": ("CUBLAS_WORKSPACE_CONFIG", True),
    "where-a-cache-lies": ("TRITON_CACHE_DIR", False), "where-releases-are-kept": (CACHE_VARIABLE, False),
    "where-overlays-lie": ("MEGACPP_OVERLAYS", False),
    "threads": ("OMP_NUM_THREADS", False), "a-shell": ("PS1", False),
}  # fmt: skip


@pytest.mark.parametrize(("name", "counts"), VARIABLES.values(), ids=VARIABLES)
def test_the_variables_that_change_what_runs(name: str, counts: bool) -> None:
    before = hash_parts(tuple(list_variables({"HOME": "/root"})))
    assert (hash_parts(tuple(list_variables({"HOME": "/root", name: "1"}))) != before) is counts


def test_all_that_runs_in_an_environment_counts() -> None:
    """What its rooms take from `evidence`, and what that takes from there in turn."""
    package = Path(environment.__file__).parents[1]
    ahead = [
        file for room in ("bridge", "jit", "native", "probes", "training") for file in (package / room).rglob("*.py")
    ]
    taken: set[str] = set()
    while ahead:
        file = ahead.pop()
        dots = r"\." if file.parent.name == "evidence" else r"\.+evidence\."
        names = set(re.findall(rf"(?m)^ *from {dots}(\w+) import", file.read_text())) - taken
        taken |= names
        ahead += [package / "evidence" / f"{name}.py" for name in names]
    assert len(taken) > 4
    assert {f"evidence/{name}.py" for name in taken} <= set(environment._OURS_THERE)
    assert all((package / name).exists() for name in environment._OURS_THERE)


def test_the_places_of_this_project_have_the_names_that_it_reads() -> None:
    """A variable under another name would make every receipt one of another environment."""
    package = Path(environment.__file__).parents[1]
    read = {word for file in package.rglob("*.py") if file != Path(environment.__file__)
            for word in re.findall(r"MEGACPP_\w+", file.read_text())}  # fmt: skip
    assert {name for name in environment._ONLY_PLACES if name.startswith("MEGACPP_")} <= read


def test_a_package_that_the_interpreter_got_is_seen(tmp_path: Path) -> None:
    """Not a folder that this tool put there: what a user has on PYTHONPATH, or installed into the interpreter."""
    site = make_package(tmp_path / "site", "einops", "0.8.1")
    here = InterpreterEnvironment((sys.executable,), {"PATH": os.defpath, "PYTHONPATH": str(site)})
    before = here.identity
    make_package(site, "einops", "0.8.2")
    again = InterpreterEnvironment((sys.executable,), {"PATH": os.defpath, "PYTHONPATH": str(site)})
    assert again.identity != before


def test_the_sources_of_this_project_that_run_there_count(tmp_path: Path) -> None:
    """And by what is in them: a checkout gives every file a new time."""
    for name in ("bridge/attention.py", "native/mlp.py", "probes/bounds.py", "evidence/receipt.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("bound = 1\n")
    before = list(list_sources(tmp_path))
    assert len(before) == 4
    os.utime(tmp_path / "bridge" / "attention.py", ns=(0, 0))
    assert list(list_sources(tmp_path)) == before
    for line in before:
        file = tmp_path / line.split()[0]
        file.write_text("bound = 2\n")
        assert list(list_sources(tmp_path)) != before
        file.write_text("bound = 1\n")


def test_a_door_in_another_folder_is_the_same_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed tool makes a door a session; its receipts would never be taken again."""
    from megacpp_validate.environments import interpreter

    package = make_package(tmp_path / "tool", "megacpp_validate", "1.0") / "megacpp_validate"
    monkeypatch.setattr(interpreter, "PACKAGE", package)
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    places = (str(tmp_path / name) for name in ("one", "two"))
    doors = (host_interpreter({"PATH": os.defpath, "MEGACPP_ENVIRONMENTS": place}, str(python)) for place in places)
    one, two = doors
    assert one.variables["PYTHONPATH"] != two.variables["PYTHONPATH"]
    assert one.identity == two.identity


def test_links_that_lead_back_are_walked_once(tmp_path: Path) -> None:
    """Two of them double the walk at every level: without an end, as far as anybody waits."""
    site = make_site(tmp_path)
    before = over(site)
    for name in ("one", "two"):
        (site / "transformer_engine" / name).symlink_to(site, target_is_directory=True)
    made = over(site)
    assert made == over(site)
    edit(site)
    assert over(site) != made != before
