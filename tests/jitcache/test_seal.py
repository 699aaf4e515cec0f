"""A sealed cache: what changed since is named, and nobody writes to it by accident."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from megacpp_validate.errors import WrongArguments
from megacpp_validate.jitcache.layout import LIBRARIES, LOCKS, MANIFEST, STATE
from megacpp_validate.jitcache.manifest import CacheChanged, read_manifest, require_place
from megacpp_validate.jitcache.seal import check_sealed, is_at_home, is_sealed, open_working, seal, unseal
from tests.sealed_caches import (
    CUBIN,
    GROUP,
    OBJECT,
    as_nobody,
    make_sealed,
    open_to_all,
    put,
    small_disk,
)

NEW = ("cute/new.mlir", "deep_gemm/cache/k/kernel.cubin", "triton/KEY9/new.cubin")


def test_what_is_sealed_is_whole(tmp_path: Path) -> None:
    folder, digest = make_sealed(tmp_path)
    checked = check_sealed(folder)
    assert (checked.digest, checked.extra) == (digest, ())
    assert is_sealed(folder)
    assert not list(folder.rglob("*.lock")), "a lock of root's would stop every other user"
    subprocess.run(["sha256sum", "--quiet", "-c", "manifest.sha256"], cwd=folder, check=True)


def test_every_change_is_named_at_once(tmp_path: Path) -> None:
    folder, _ = make_sealed(tmp_path)
    (folder / OBJECT).unlink()
    (folder / CUBIN).chmod(0o644)
    (folder / CUBIN).write_bytes(b"cut")
    with pytest.raises(CacheChanged, match=f"{OBJECT} is gone, {CUBIN} has 3 bytes instead of 500"):
        check_sealed(folder)


def test_what_appeared_since_is_told_and_is_not_sealed(tmp_path: Path) -> None:
    folder, _ = make_sealed(tmp_path)
    put(folder / "triton" / "KEY3" / "new.cubin", b"new")
    assert check_sealed(folder).extra == ("triton/KEY3/new.cubin",)
    with pytest.raises(CacheChanged, match=r"triton/KEY3/new\.cubin"):
        seal(folder)


def test_unsealed_it_can_be_filled_on(tmp_path: Path) -> None:
    folder, _ = make_sealed(tmp_path)
    unseal(folder)
    assert not is_sealed(folder)
    assert (folder / CUBIN).stat().st_mode & 0o200
    assert not (folder / MANIFEST).exists(), "what is filled on is no longer what the manifest says"


def test_in_an_image_any_user_adds_and_nobody_replaces() -> None:
    with open_to_all() as root:
        folder, _ = make_sealed(root, shared=True)

        def misses() -> str:
            """What libraries do for somebody without rights: a kernel that was missing, a lock; then what must fail."""
            for place in (*NEW, "inductor/locks/a"):
                put(folder / place, b"new")
            (folder / LOCKS / "KEY9").mkdir()
            failed = []
            for deed in (
                lambda: (folder / CUBIN).write_bytes(b"other"),
                (folder / CUBIN).unlink,
                lambda: (folder / "triton/KEY9/new.cubin").replace(folder / CUBIN),
                (folder / MANIFEST).unlink,
            ):
                try:
                    deed()
                except PermissionError:
                    failed.append("refused")
            return " ".join(failed)

        assert as_nobody(misses) == "refused refused refused refused"
        assert check_sealed(folder).extra == NEW


def test_a_cache_under_the_name_of_another_architecture_is_not_whole(tmp_path: Path) -> None:
    """Every hash is right, and whoever looks there takes kernels of another device."""
    folder, _ = make_sealed(tmp_path)
    with pytest.raises(WrongArguments, match="rename it to sm_90a"):
        check_sealed(folder.rename(tmp_path / "sm_100a"))


def test_a_cache_of_another_machine_is_refused(tmp_path: Path) -> None:
    make_sealed(tmp_path)
    with pytest.raises(WrongArguments, match="x86_64, and sm_90a on aarch64"):
        require_place(tmp_path, "sm_90a", "aarch64")


def test_a_root_that_nobody_can_look_into_is_told(tmp_path: Path) -> None:
    """A name that no file system takes; of a folder of another user, which stops nobody who is root, it is the same."""
    with pytest.raises(WrongArguments, match="cannot be reached: File name too long"):
        require_place(tmp_path / ("x" * 300), "sm_90a", "x86_64")


def test_it_can_be_written_and_the_sealed_one_stays(tmp_path: Path) -> None:
    folder, digest = make_sealed(tmp_path / "sealed")
    manifest, _ = read_manifest(folder)
    work = open_working(folder, manifest, tmp_path / "work")
    assert work == tmp_path / "work" / "sm_90a"
    assert sorted(path.name for path in work.iterdir()) == sorted((*LIBRARIES, STATE))
    with (work / CUBIN).open("r+b") as stream:  # in place, as no library should: through a hard link it would hurt
        stream.write(b"other")
    put(work / "triton" / "KEY7" / "new.cubin", b"new")
    assert check_sealed(folder).digest == digest
    assert check_sealed(folder).extra == ()


def test_times_are_those_of_the_manifest(tmp_path: Path) -> None:
    folder, _ = make_sealed(tmp_path / "sealed")
    manifest, _ = read_manifest(folder)
    for file in manifest.files:
        os.utime(folder / file.path, (0, 0))  # as a layer of an image may have it
    work = open_working(folder, manifest, tmp_path / "work")
    assert {(work / file.path).stat().st_mtime_ns for file in manifest.files} == {
        file.mtime_ns for file in manifest.files
    }


def test_a_group_of_tritons_names_its_new_folder(tmp_path: Path) -> None:
    """Triton looks at the paths in it, and passes over what is not there (runtime/cache.py, get_group)."""
    folder, _ = make_sealed(tmp_path / "sealed")
    manifest, _ = read_manifest(folder)
    work = open_working(folder, manifest, tmp_path / "work")
    (child,) = json.loads((work / GROUP).read_text())["child_paths"].values()
    assert child == str(work / CUBIN)
    assert (is_at_home(folder, manifest), is_at_home(work, manifest)) == (True, False)


def test_an_earlier_working_copy_is_not_written_over(tmp_path: Path) -> None:
    folder, _ = make_sealed(tmp_path / "sealed")
    manifest, _ = read_manifest(folder)
    work = open_working(folder, manifest, tmp_path / "work")
    with pytest.raises(WrongArguments, match="exists already"):
        open_working(folder, manifest, tmp_path / "work")
    assert (work / CUBIN).exists()


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    put(tmp_path / "sealed" / "sm_90a" / "fa4" / "large.o", bytes(300_000))
    folder, _ = make_sealed(tmp_path / "sealed")
    manifest, _ = read_manifest(folder)
    with small_disk() as disk:
        with pytest.raises(OSError, match="No space left"):
            open_working(folder, manifest, disk)
        assert list(disk.iterdir()) == []
