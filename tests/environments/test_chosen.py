"""The environment of a release, and what a person may write instead."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megacpp_validate.catalog.bridge import Stack
from megacpp_validate.environments import chosen
from megacpp_validate.environments.chosen import (
    Found,
    Means,
    Spec,
    find_environments,
    is_same_release,
    make_environment,
    read_spec,
    resolve_environment,
)
from megacpp_validate.environments.environment import NoEnvironment
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
    return Means(own, sys.executable, gpus=False)


def test_an_overlay_as_it_was_written(tmp_path: Path) -> None:
    te, base = make_te(tmp_path / "te", "2.14.1"), make_package(tmp_path / "base", "einops", "0.8.2")
    made = make_environment(read_spec(f"x=overlay:{te}:{base}"), means(tmp_path))
    assert isinstance(made, InterpreterEnvironment)
    assert made.folders == (te, base)


def test_a_release_that_the_host_has_is_taken_before_what_could_be_made(tmp_path: Path) -> None:
    asked = means(tmp_path)
    te = make_te(tmp_path / "te", "2.14.1")
    found = find_environments([te], asked.variables, asked.python)
    row = Stack(id="te2.14.1", te="2.14.1", lock="locks/none.txt")
    made = resolve_environment("2.14.1", found, [row], asked)
    assert isinstance(made, InterpreterEnvironment)
    assert made.folders == (te,)


def test_a_release_that_nothing_provides_says_what_there_is_and_how_to_provide_it(tmp_path: Path) -> None:
    asked = means(tmp_path)
    damaged = make_te(tmp_path / "te-2.20.2", "2.20.2")
    (damaged / "transformer_engine" / "__init__.py").unlink()
    roots = [make_te(tmp_path / "te", "2.14.1"), damaged]
    found = find_environments(roots, asked.variables, asked.python)
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
    monkeypatch.setattr(chosen, "matrix_folder", lambda: tmp_path / "matrix")
    for row, asked in ((lock, with_docker), (both, bare), (both, with_docker), (image, bare)):
        resolve_environment("2.1", (), [Stack(id="other", te="2.2"), row], asked)
    assert [(spec.name, spec.way) for spec in made] == [("a", "venv"), ("b", "venv"), ("b", "image"), ("c", "image")]
    assert made[0].value == str(tmp_path / "locks" / "a.txt")
    assert made[2].value == DIGEST


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [("2.12", "2.12.0", True), ("2.12.0+cu13", "2.12", True), ("2.12.0", "2.12.1", False), ("mine", "mine", False)],
)
def test_a_release_is_the_same_however_it_is_spelled(one: str, other: str, same: bool) -> None:
    assert is_same_release(one, other) is same


# --- which releases a host has, read from folders as packers and installers leave them ---


def find(roots: Sequence[Path], tmp_path: Path, **variables: str) -> tuple[Found, ...]:
    variables = {"PATH": os.defpath, "MEGACPP_ENVIRONMENTS": str(tmp_path / "envs"), **variables}
    return find_environments(roots, variables, sys.executable)


def usable(found: Sequence[Found]) -> list[str]:
    return [place.release for place in found if place.environment is not None]


def reasons(found: Sequence[Found]) -> dict[str, str]:
    return {Path(place.place).name: place.reason for place in found if place.environment is None}


def make_host(root: Path) -> Path:
    """As `install.py` of a packer leaves it: releases, common packages, and what it works with."""
    for version in ("2.20.2", "2.9.0", "2.12.0"):
        make_te(root / f"te-{version}", version)
    make_package(root / "base", "einops", "0.8.2")
    make_package(root / "fa4", "flash_attn", "4.0.0b36")
    make_package(root / "zstandard", "zstandard", "0.25.0")
    (root / "inbox").mkdir()
    (root / "inbox" / "zstandard-0.25.0-cp312-cp312-manylinux2014_x86_64.whl").write_bytes(b"")
    (root / "README").write_text("")
    return root


def test_the_releases_of_a_root_oldest_first_each_over_the_common_folders(tmp_path: Path) -> None:
    root = make_host(tmp_path / "gpu-host")
    found = find([root], tmp_path)
    assert usable(found) == ["2.9.0", "2.12.0", "2.20.2"]
    assert reasons(found) == {}
    middle = found[1].environment
    assert middle is not None
    assert [folder.name for folder in middle.folders] == ["te-2.12.0", "base", "fa4", "zstandard"]
    assert "2.12.0" in middle.because
    assert len({place.environment.identity for place in found if place.environment}) == 3


def test_the_variable_names_the_roots_where_nothing_else_does(tmp_path: Path) -> None:
    one, two = make_te(tmp_path / "one", "2.14.1"), make_te(tmp_path / "two", "2.17.1")
    variables = {"MEGACPP_OVERLAYS": f"{one}{os.pathsep}{two}{os.pathsep}"}
    assert usable(find([], tmp_path, **variables)) == ["2.14.1", "2.17.1"]
    assert usable(find([two], tmp_path, **variables)) == ["2.17.1"]
    assert find([], tmp_path) == ()


def test_what_the_interpreter_has_by_itself(tmp_path: Path) -> None:
    site = make_te(tmp_path / "site", "2.13.0")
    found = find([make_host(tmp_path / "host")], tmp_path, PYTHONPATH=str(site))
    assert usable(found) == ["2.9.0", "2.12.0", "2.13.0", "2.20.2"]
    own = next(place for place in found if place.release == "2.13.0")
    assert own.place == sys.executable
    assert own.environment is not None
    assert own.environment.folders == ()


def test_the_first_of_two_places_with_one_release(tmp_path: Path) -> None:
    one, two = make_te(tmp_path / "one", "2.14.1"), make_te(tmp_path / "two", "2.14.1+local")
    found = find([one, two], tmp_path, PYTHONPATH=str(make_te(tmp_path / "three", "2.14.1")))
    assert [(place.release, Path(place.place).name) for place in found if place.environment] == [("2.14.1", "one")]
    said = reasons(found)
    assert set(said) == {"two", Path(sys.executable).name}
    assert all(str(one) in reason for reason in said.values())


def metadata(text: str) -> Callable[[Path], object]:
    return lambda site: (next(site.glob("*.dist-info")) / "METADATA").write_text(text)


EXTENSION = "transformer_engine_torch.cpython-39-aarch64-linux-gnu.so"
UNREADABLE = "names no release, or more than one"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no-metadata": (lambda site: shutil.rmtree(next(site.glob("*.dist-info"))), UNREADABLE),
    "no-init": (lambda site: (site / "transformer_engine" / "__init__.py").unlink(), "not unpacked to the end"),
    "no-version": (metadata("Metadata-Version: 2.1\nName: transformer-engine\n"), UNREADABLE),
    "odd-version": (metadata("Name: transformer-engine\nVersion: main\n"), UNREADABLE),
    "empty-metadata": (metadata(""), UNREADABLE),
    "two-releases": (lambda site: make_te(site, "2.14.1"), UNREADABLE),
    "another-python": (lambda site: (site / EXTENSION).touch(), "built for .cpython-39-aarch64-linux-gnu.so"),
    "pth-that-ends-python": (lambda site: (site / "a.pth").write_text("import os; os._exit(1)\n"), r".pth files"),
}


@pytest.mark.parametrize(("damage", "reason"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_folder_is_told_and_hides_no_other(
    damage: Callable[[Path], object], reason: str, tmp_path: Path
) -> None:
    root = make_host(tmp_path / "host")
    damage(root / "te-2.12.0")
    found = find([root], tmp_path)
    assert usable(found) == ["2.9.0", "2.20.2"]
    assert list(reasons(found)) == ["te-2.12.0"]
    assert reason in reasons(found)["te-2.12.0"]


def test_a_root_that_holds_nothing_is_told(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    said = reasons(find([tmp_path / "empty", tmp_path / "nowhere"], tmp_path))
    assert "no packages" in said["empty"]
    assert "No such file" in said["nowhere"]


@pytest.mark.parametrize("suffix", [sysconfig.get_config_var("EXT_SUFFIX"), ".abi3.so"])
def test_an_extension_for_this_python_among_others(suffix: str, tmp_path: Path) -> None:
    site = make_te(tmp_path / "te", "2.14.1")
    for name in (suffix, ".cpython-39-aarch64-linux-gnu.so"):
        (site / f"transformer_engine_torch{name}").touch()
    assert usable(find([site], tmp_path)) == ["2.14.1"]
