"""Which releases a host has, read from folders as packers and installers leave them."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest

from megacpp_validate.environments.environment import NoEnvironment
from megacpp_validate.environments.installed import Found, find_environments, read_release
from tests.environments.site_folders import make_package, make_te


def find(roots: Sequence[Path], tmp_path: Path, **variables: str) -> tuple[Found, ...]:
    return find_environments(roots, {"PATH": os.defpath, **variables}, sys.executable, tmp_path / "door")


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


def test_a_root_that_is_a_release_itself_and_common_folders_of_another(tmp_path: Path) -> None:
    te = make_te(tmp_path / "anywhere" / "site", "2.14.1")
    base = make_package(tmp_path / "base", "einops", "0.8.2")
    found = find([te, base], tmp_path)
    assert usable(found) == ["2.14.1"]
    assert found[0].environment is not None
    assert found[0].environment.folders == (te, base)


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


def no_metadata(site: Path) -> None:
    shutil.rmtree(next(site.glob("*.dist-info")))


def no_init(site: Path) -> None:
    (site / "transformer_engine" / "__init__.py").unlink()


def no_version(site: Path) -> None:
    (next(site.glob("*.dist-info")) / "METADATA").write_text("Metadata-Version: 2.1\nName: transformer-engine\n")


def empty_metadata(site: Path) -> None:
    (next(site.glob("*.dist-info")) / "METADATA").write_text("")


def odd_version(site: Path) -> None:
    (next(site.glob("*.dist-info")) / "METADATA").write_text("Name: transformer-engine\nVersion: main\n")


def two_releases(site: Path) -> None:
    make_te(site, "2.14.1")


def another_python(site: Path) -> None:
    (site / "transformer_engine" / "wheel_lib").mkdir()
    (site / "transformer_engine" / "wheel_lib" / "transformer_engine_torch.cpython-39-aarch64-linux-gnu.so").touch()


def broken_pth(site: Path) -> None:
    (site / "a.pth").write_text("import os; os._exit(1)\n")


DAMAGE = {
    "no-metadata": (no_metadata, "without the metadata"),
    "no-init": (no_init, "not unpacked to the end"),
    "no-version": (no_version, "names no version"),
    "empty-metadata": (empty_metadata, "without the metadata"),
    "odd-version": (odd_version, "names no version"),
    "two-releases": (two_releases, "2.12.0, 2.14.1"),
    "another-python": (another_python, "built for .cpython-39-aarch64-linux-gnu.so"),
    "pth-that-ends-python": (broken_pth, r".pth files"),
}


@pytest.mark.parametrize(("damage", "reason"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_folder_is_told_and_hides_no_other(damage: object, reason: str, tmp_path: Path) -> None:
    assert callable(damage)
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


def test_the_release_is_that_of_the_first_folder_that_has_one(tmp_path: Path) -> None:
    folders = [
        make_package(tmp_path / "a", "einops", "1"),
        make_te(tmp_path / "b", "2.1.dev0"),
        make_te(tmp_path / "c", "2"),
    ]
    assert read_release(folders) == "2.1.dev0"
    assert read_release([]) == ""


def test_an_interpreter_that_there_is_not(tmp_path: Path) -> None:
    with pytest.raises(NoEnvironment, match="no interpreter"):
        find_environments([], {"PATH": ""}, "python9", tmp_path)
