"""The table of damaged installs is whole, each row asks for an answer to act on, and each action damages."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from megacpp_validate.canary.firewall.damage import (
    ACTIONS,
    CannotBuild,
    Install,
    build_stand_ins,
    edit,
    lay_out,
    rename_string,
)
from megacpp_validate.canary.firewall.run import plan_firewall
from megacpp_validate.catalog.bridge import read_catalog
from megacpp_validate.catalog.planted import read_damages

CATALOG = read_catalog()
ROWS = {row.id: row for row in read_damages(CATALOG)}
CORE, EXTENSION = "libtransformer_engine*.so*", "transformer_engine_torch*.so"


def test_every_row_names_an_action_and_an_undamaged_install() -> None:
    assert {row.do[0] for row in ROWS.values() if row.do} == ACTIONS.keys()
    assert {row.baseline for row in ROWS.values()} <= {"", *ROWS}


def test_a_selected_case_brings_the_undamaged_install_it_leans_on() -> None:
    assert [row.id for row in plan_firewall(CATALOG, ["flash-attn-4-without-cutedsl"])] == [
        "undamaged-2.17.1",
        "flash-attn-4-without-cutedsl",
    ]
    assert [row.id for row in plan_firewall(CATALOG, ["absent"])] == ["absent"]


# --- the actions --------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return build_stand_ins(tmp_path_factory.mktemp("stand-ins"))
    except CannotBuild as fault:
        pytest.skip(f"not-run: {fault}")


@pytest.fixture
def laid_out(stand_ins: Path, wheel_of: Callable[[str], Path], tmp_path: Path) -> Install:
    site = tmp_path / "site"
    site.mkdir()
    install = Install("2.20.2", tmp_path, site, lambda version, _: wheel_of(version), stand_ins)
    lay_out(install, ("core", "extension"))
    return install


def versions(install: Install) -> dict[str, str]:
    return {found.metadata["Name"]: found.version for found in metadata.distributions(path=[str(install.site)])}


def test_a_layout_is_what_pip_leaves(laid_out: Install, wheel_of: Callable[[str], Path]) -> None:
    assert versions(laid_out) == {
        "transformer_engine": "2.20.2",
        "transformer_engine_cu12": "2.20.2",
        "transformer_engine_torch": "2.20.2",
    }
    with zipfile.ZipFile(wheel_of("2.20.2")) as archive:
        assert all((laid_out.site / name).exists() for name in archive.namelist())
    assert laid_out.find(CORE).parent.name == laid_out.find(EXTENSION).parent.name == "wheel_lib"


def do(install: Install, case: str) -> None:
    name, *words = ROWS[case].do
    ACTIONS[name](install, *words)


def test_a_damage_that_changes_nothing_is_an_error(laid_out: Install) -> None:
    with pytest.raises(LookupError, match="nothing of what was to be damaged"):
        edit(laid_out, "pytorch/__init__.py", "no_such_name", "x")


def test_a_library_is_damaged_in_a_copy(laid_out: Install, tmp_path: Path) -> None:
    real = tmp_path / "real.so"
    shutil.move(laid_out.find(CORE), real)
    content = real.read_bytes()
    place = laid_out.package / "wheel_lib" / "libtransformer_engine.so"
    place.symlink_to(real)
    do(laid_out, "missing-library")
    assert real.read_bytes() == content
    assert not place.is_symlink()
    assert place.read_bytes() != content


def test_one_name_in_a_library_is_changed(laid_out: Install) -> None:
    before = laid_out.find(EXTENSION).read_bytes()
    rename_string(laid_out, EXTENSION, r"nvte_\w+", "Q")
    assert laid_out.find(EXTENSION).read_bytes() == before.replace(b"_loaded\0", b"_loadeQ\0", 1)
    with pytest.raises(LookupError, match="has no string nothing"):
        rename_string(laid_out, CORE, "nothing", "Q")
