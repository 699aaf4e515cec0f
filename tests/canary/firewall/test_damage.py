"""The table of damaged installs is whole, each row asks for an answer to act on, and each action damages."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from megacpp_validate.canary.firewall.damage import (
    DAMAGES,
    PINNED,
    CannotBuild,
    Damage,
    Install,
    build_stand_ins,
    find_compiler,
    lay_out,
    plan_firewall,
    rename,
    take_out,
)  # fmt: skip  # fmt: skip
from megacpp_validate.catalog.bridge import read_catalog
from megacpp_validate.process import Ended

ROWS = {row.id: row for row in DAMAGES}
UNAVAILABLE = [row for row in DAMAGES if not row.available and row.id != "switched-off"]


@pytest.mark.parametrize("row", UNAVAILABLE, ids=lambda row: row.id)
def test_every_reason_must_say_what_why_and_what_next(row: Damage) -> None:
    what, cause, following = row.reason
    assert what
    assert "cause: " in cause
    assert following.startswith("Next step: ") or "Next step: " in following


def test_a_selected_case_brings_the_undamaged_install_it_leans_on() -> None:
    assert [row.id for row in plan_firewall(["flash-attn-4-without-cutedsl"])] == [
        "undamaged-2.17.1",
        "flash-attn-4-without-cutedsl",
    ]
    assert [row.id for row in plan_firewall(["absent"])] == ["absent"]


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
    assert laid_out.core.parent.name == laid_out.extension.parent.name == "wheel_lib"


def test_a_version_is_changed_in_metadata_only(laid_out: Install) -> None:
    ROWS["local-version"].do(laid_out)
    assert versions(laid_out)["transformer_engine_torch"] == "2.20.2+g1a2b3c4"
    assert laid_out.extension.is_file()


def test_one_re_export_is_taken_out_and_no_other(laid_out: Install) -> None:
    init = laid_out.package / "pytorch" / "__init__.py"
    before = init.read_text().splitlines()
    take_out("Linear")(laid_out)
    gone = set(before) - set(init.read_text().splitlines())
    assert gone == {"from transformer_engine.pytorch.module import Linear"}


def test_a_damage_that_changes_nothing_is_an_error(laid_out: Install) -> None:
    with pytest.raises(LookupError, match="nothing of what was to be damaged"):
        take_out("no_such_name")(laid_out)


def test_a_library_is_damaged_in_a_copy(laid_out: Install, tmp_path: Path) -> None:
    real = tmp_path / "real.so"
    shutil.move(laid_out.core, real)
    content = real.read_bytes()
    place = laid_out.package / "wheel_lib" / "libtransformer_engine.so"
    place.symlink_to(real)
    ROWS["missing-library"].do(laid_out)
    assert real.read_bytes() == content
    assert not place.is_symlink()
    assert place.read_bytes() != content


def test_one_name_in_a_library_is_changed(laid_out: Install, stand_ins: Path) -> None:
    size = laid_out.core.stat().st_size
    assert rename(laid_out.core, r"libcublas\w*\.so\.\d+", "99") == ("libcublasLt.so.13", "libcublasLt.so.99")
    assert rename(laid_out.extension, r"nvte_\w+", "Q") == ("nvte_stand_in_is_loaded", "nvte_stand_in_is_loadeQ")
    assert laid_out.core.stat().st_size == size
    with pytest.raises(LookupError, match="has no string nothing"):
        rename(laid_out.core, "nothing", "Q")


def test_no_compiler_is_said_with_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setattr(
        "megacpp_validate.canary.firewall.damage.run_command", lambda *_, **__: Ended("exit", 1, 0.0, "")
    )
    with pytest.raises(CannotBuild, match=r"no C compiler .*Next step: install"):
        find_compiler()


def test_a_compiler_that_fails_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(CannotBuild, match="could not build"):
        build_stand_ins(tmp_path / "built", ["false"])
    with pytest.raises(CannotBuild, match="did not run"):
        build_stand_ins(tmp_path / "built", [str(tmp_path / "absent")])


def test_the_release_that_is_damaged_is_the_pinned_one() -> None:
    assert read_catalog().pinned.te == PINNED
