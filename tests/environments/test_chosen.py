"""The environment of a release, and what a person may write instead."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from megacpp_validate.catalog.bridge import Stack
from megacpp_validate.environments import chosen
from megacpp_validate.environments.chosen import (
    Means,
    Spec,
    is_same_release,
    make_environment,
    read_spec,
    resolve_environment,
)
from megacpp_validate.environments.environment import NoEnvironment
from megacpp_validate.environments.installed import find_environments
from megacpp_validate.environments.interpreter import InterpreterEnvironment
from megacpp_validate.errors import WrongArguments
from tests.environments.site_folders import make_package, make_te

DIGEST = f"nvcr.io/nvidia/pytorch@sha256:{'a' * 64}"

SPECS: dict[str, tuple[str, Spec]] = {
    "overlay": ("new=overlay:/a:/b", Spec("new", "overlay", "/a:/b")),
    "lock": ("te2.20.2=venv:locks/te.txt", Spec("te2.20.2", "venv", "locks/te.txt")),
    "image": (f"ngc=image:{DIGEST}", Spec("ngc", "image", DIGEST)),
    "registry-with-a-port": ("x=image:127.0.0.1:5000/a@sha256:0", Spec("x", "image", "127.0.0.1:5000/a@sha256:0")),
    "interpreter": ("mine=python:/opt/a=b/bin/python3", Spec("mine", "python", "/opt/a=b/bin/python3")),
}


@pytest.mark.parametrize(("text", "spec"), SPECS.values(), ids=SPECS)
def test_what_a_person_writes(text: str, spec: Spec) -> None:
    assert read_spec(text) == spec


@pytest.mark.parametrize(
    "text",
    ["", "2.20.2", "overlay:/a", "=overlay:/a", "x=overlay:", "x=conda:env", "a/b=python:p", "x=", "../x=python:p"],
)
def test_what_is_no_environment_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(WrongArguments, match=r"NAME=overlay:DIR.*NAME=image:REPOSITORY@sha256"):
        read_spec(text)


def means(tmp_path: Path, **variables: str) -> Means:
    own = {"PATH": os.defpath, "MEGACPP_ENVIRONMENTS": str(tmp_path / "envs"), **variables}
    return Means(own, sys.executable, gpus=False, door=tmp_path / "door")


def test_an_overlay_as_it_was_written(tmp_path: Path) -> None:
    te, base = make_te(tmp_path / "te", "2.14.1"), make_package(tmp_path / "base", "einops", "0.8.2")
    made = make_environment(read_spec(f"x=overlay:{te}:{base}"), means(tmp_path))
    assert isinstance(made, InterpreterEnvironment)
    assert made.folders == (te, base)


def test_an_interpreter_as_it_was_written(tmp_path: Path) -> None:
    made = make_environment(read_spec(f"x=python:{sys.executable}"), means(tmp_path))
    assert made.shown == sys.executable
    with pytest.raises(NoEnvironment, match="python9"):
        make_environment(read_spec("x=python:python9"), means(tmp_path))


def test_a_release_that_the_host_has_is_taken_before_what_could_be_made(tmp_path: Path) -> None:
    asked = means(tmp_path)
    te = make_te(tmp_path / "te", "2.14.1")
    found = find_environments([te], asked.variables, asked.python, asked.door)
    row = Stack(id="te2.14.1", te="2.14.1", lock="locks/none.txt")
    made = resolve_environment("2.14.1", found, [row], asked)
    assert isinstance(made, InterpreterEnvironment)
    assert made.folders == (te,)


def test_a_release_that_nothing_provides_says_what_there_is_and_how_to_provide_it(tmp_path: Path) -> None:
    asked = means(tmp_path)
    damaged = make_te(tmp_path / "te-2.20.2", "2.20.2")
    (damaged / "transformer_engine" / "__init__.py").unlink()
    roots = [make_te(tmp_path / "te", "2.14.1"), damaged]
    found = find_environments(roots, asked.variables, asked.python, asked.door)
    with pytest.raises(NoEnvironment) as told:
        resolve_environment("2.20.2", found, [Stack(id="te2.20.2", te="2.20.2")], asked)
    for word in ("2.14.1", str(damaged), "not unpacked to the end", "--overlays", "stacks.toml", "NAME=venv:LOCK"):
        assert word in str(told.value)


def test_a_row_that_names_a_lock_or_an_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image pins what lies below Python too; where no docker is, a lock still does."""
    made: list[Spec] = []
    monkeypatch.setattr(chosen, "make_environment", lambda spec, _: made.append(spec))
    docker = tmp_path / "bin" / "docker"
    docker.parent.mkdir()
    docker.write_text("#!/bin/sh\n")
    docker.chmod(0o755)
    lock = Stack(id="a", te="2.1", lock="locks/a.txt")
    both = Stack(id="b", te="2.1", lock="locks/a.txt", image=DIGEST)
    image = Stack(id="c", te="2.1", image=DIGEST)
    bare, with_docker = means(tmp_path, PATH=""), means(tmp_path, PATH=str(docker.parent))
    for row, asked in ((lock, with_docker), (both, bare), (both, with_docker), (image, bare)):
        resolve_environment("2.1", (), [Stack(id="other", te="2.2"), row], asked, tmp_path)
    assert [(spec.name, spec.way) for spec in made] == [("a", "venv"), ("b", "venv"), ("b", "image"), ("c", "image")]
    assert made[0].value == str(tmp_path / "locks" / "a.txt")
    assert made[2].value == DIGEST


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [("2.12", "2.12.0", True), ("2.12.0+cu13", "2.12", True), ("2.12.0", "2.12.1", False), ("mine", "mine", False)],
)
def test_a_release_is_the_same_however_it_is_spelled(one: str, other: str, same: bool) -> None:
    assert is_same_release(one, other) is same
