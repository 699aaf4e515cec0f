"""A working copy: what a library finds in the sealed folder, it finds here, and what it writes here stays here."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megacpp_validate.jitcache.answer import Answer
from megacpp_validate.jitcache.layout import LIBRARIES, STATE
from megacpp_validate.jitcache.manifest import read_manifest
from megacpp_validate.jitcache.progress import open_prewarm
from megacpp_validate.jitcache.seal import check_sealed, is_at_home, open_working
from megacpp_validate.jitcache.working import move_group
from tests.sealed_caches import CUBIN, GROUP, KERNEL, TASK, make_sealed, put, small_disk


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


def test_a_prewarm_goes_on_in_it_and_knows_what_is_there(tmp_path: Path) -> None:
    folder, _ = make_sealed(tmp_path / "sealed")
    work = open_working(folder, read_manifest(folder)[0], tmp_path / "work")
    with open_prewarm(work, "x86_64", {TASK.id: "key"}) as progress:
        progress.keep(TASK, Answer(hits={"fa4": 1}))
        done = progress.kept(TASK)
        assert done is not None
        assert done.compiled == (KERNEL,)


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


def test_paths_elsewhere_stay() -> None:
    text = json.dumps({"child_paths": {"a": "/old/root/a", "b": "/old/rootless/b", "c": "/x"}, "more": 1})
    moved = json.loads(move_group(text, "/old/root", "/new"))
    assert moved == {"child_paths": {"a": "/new/a", "b": "/old/rootless/b", "c": "/x"}, "more": 1}
    with pytest.raises(OSError, match="cannot be read"):
        move_group("{}", "/old", "/new")


def test_an_earlier_working_copy_is_not_written_over(tmp_path: Path) -> None:
    folder, _ = make_sealed(tmp_path / "sealed")
    manifest, _ = read_manifest(folder)
    work = open_working(folder, manifest, tmp_path / "work")
    with pytest.raises(FileExistsError):
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
