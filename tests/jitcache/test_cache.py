"""A sealed cache: changes are named, nobody writes to it by accident, and it is carried whole or not at all."""

from __future__ import annotations

import io
import json
import os
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from megacpp_validate.errors import Exit, WrongArguments
from megacpp_validate.jitcache.cache import check_sealed, export_cache, import_cache, open_working
from megacpp_validate.jitcache.layout import LIBRARIES, MANIFEST, MANIFEST_HASH, CacheChanged, ManifestInvalid
from tests.replay.harness import call
from tests.sealed_caches import CUBIN, GROUP, OBJECT, flip_a_bit, make_sealed, put, small_disk


def test_what_is_sealed_is_whole(tmp_path: Path) -> None:
    folder, digest = make_sealed(tmp_path)
    put(folder / "triton" / "KEY3" / "new.cubin", b"a miss of root's in an image")
    assert check_sealed(folder)[1] == digest
    assert not list(folder.rglob("*.lock")), "a lock of root's would stop every other user"
    subprocess.run(["sha256sum", "--quiet", "-c", "manifest.sha256"], cwd=folder, check=True)


def test_every_change_is_named_at_once(tmp_path: Path) -> None:
    folder, _ = make_sealed(tmp_path)
    (folder / OBJECT).unlink()
    flip_a_bit(folder / CUBIN)
    with pytest.raises(CacheChanged, match=f"{OBJECT} is gone, {CUBIN} has another content"):
        check_sealed(folder)


# --- working copies ---------------------------------------------------------------------------------------------------


def test_it_can_be_written_and_the_sealed_one_stays(tmp_path: Path) -> None:
    folder, _ = make_sealed(tmp_path / "sealed")
    manifest, digest = check_sealed(folder)
    for file in manifest.files:
        os.utime(folder / file.path, (0, 0))  # as a layer of an image may have it
    opened = open_working(folder, tmp_path / "work")
    work = tmp_path / "work" / "sm_90a"
    assert (opened.folder, opened.variables["TRITON_CACHE_DIR"]) == (str(work), str(work / "triton"))
    assert sorted(path.name for path in work.iterdir()) == sorted((*LIBRARIES, MANIFEST))
    times = {file.path: file.mtime_ns for file in manifest.files}
    assert {path: (work / path).stat().st_mtime_ns for path in times} == times
    # Triton looks at the paths in its group, and passes over what is not there (runtime/cache.py, get_group).
    (child,) = json.loads((work / GROUP).read_text())["child_paths"].values()
    assert child == str(work / CUBIN)
    with (work / CUBIN).open("r+b") as stream:  # in place, as no library should: through a hard link it would hurt
        stream.write(b"other")
    assert check_sealed(folder) == (manifest, digest)
    with pytest.raises(WrongArguments, match="exists already"):
        open_working(folder, tmp_path / "work")
    assert (work / CUBIN).exists()


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    put(tmp_path / "sealed" / "sm_90a" / "fa4" / "large.o", bytes(300_000))
    folder, _ = make_sealed(tmp_path / "sealed")
    archive = Path(export_cache(folder, tmp_path / "jit.tar").archive)
    for write in (
        lambda disk: open_working(folder, disk),
        lambda disk: import_cache(archive, disk),
        lambda disk: export_cache(folder, disk / "jit.tar"),
    ):
        with small_disk() as disk:
            with pytest.raises(OSError, match="No space left"):
                write(disk)
            assert list(disk.iterdir()) == []


# --- carried ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [".tar", ".tar.gz"])
def test_there_and_back(tmp_path: Path, form: str) -> None:
    folder, digest = make_sealed(tmp_path / "one")
    first = export_cache(folder, tmp_path / f"a{form}")
    with tarfile.open(first.archive) as archive:
        assert archive.getnames()[:2] == [f"sm_90a/{MANIFEST}", f"sm_90a/{MANIFEST_HASH}"]
    back = import_cache(Path(first.archive), tmp_path / "two")
    assert (back.folder, back.manifest) == (str(tmp_path / "two" / "sm_90a"), digest)
    assert check_sealed(Path(back.folder))[1] == digest
    one, two = (place / CUBIN for place in (folder, Path(back.folder)))
    assert one.read_bytes() == two.read_bytes()
    assert abs(one.stat().st_mtime_ns - two.stat().st_mtime_ns) < 1000, "ninja builds again what looks old"
    assert two.stat().st_mode & 0o777 == 0o444
    with pytest.raises(WrongArguments, match="a cache is there already"):
        import_cache(Path(first.archive), tmp_path / "two")
    assert [path.name for path in (tmp_path / "two").iterdir()] == ["sm_90a"]


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    folder, _ = make_sealed(tmp_path / "one")
    return Path(export_cache(folder, tmp_path / "good.tar").archive)


def _bit(content: bytes) -> bytes:
    return bytes([content[0] ^ 1, *content[1:]])


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        (lambda n, c: (n, _bit(c)) if n.endswith(CUBIN) else (n, c), CacheChanged, CUBIN),
        (lambda n, c: None if n.endswith(OBJECT) else (n, c), CacheChanged, OBJECT),
        (lambda n, c: ("sm_90a/../../etc/evil", c) if n.endswith(CUBIN) else (n, c), WrongArguments, "etc/evil"),
        (lambda n, c: (f"sm_100a/{CUBIN}", c) if n.endswith(CUBIN) else (n, c), CacheChanged, CUBIN),
        (lambda n, c: (n, _bit(c)) if n.endswith(MANIFEST) else (n, c), CacheChanged, "does not hash"),
        (lambda n, c: None if n.endswith(MANIFEST_HASH) else (n, c), ManifestInvalid, "has no sealed cache"),
        (lambda n, c: (n, None) if n.endswith(CUBIN) else (n, c), WrongArguments, CUBIN),  # a link
    ],
)
def test_a_damaged_archive_is_refused_by_name(
    tmp_path: Path,
    archive: Path,
    change: Callable[[str, bytes], tuple[str, bytes | None] | None],
    kind: type[Exception],
    said: str,
) -> None:
    bad = tmp_path / "bad.tar"
    with tarfile.open(archive) as source, tarfile.open(bad, "w") as out:
        for member in source:
            reader = source.extractfile(member)
            assert reader is not None
            if (pair := change(member.name, reader.read())) is not None:
                info = tarfile.TarInfo(pair[0])
                if pair[1] is None:
                    info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
                else:
                    info.size = len(pair[1])
                out.addfile(info, io.BytesIO(pair[1] or b""))
    with pytest.raises(kind, match=said):
        import_cache(bad, tmp_path / "two")
    assert list((tmp_path / "two").iterdir()) == []


def test_a_file_that_its_manifest_does_not_have(archive: Path, tmp_path: Path) -> None:
    with tarfile.open(archive, "a") as out:
        out.addfile(tarfile.TarInfo("sm_90a/evil"))
    with pytest.raises(WrongArguments, match=r"has the file 'sm_90a/evil'"):
        import_cache(archive, tmp_path / "two")


def test_one_that_was_cut_short(tmp_path: Path) -> None:
    folder, _ = make_sealed(tmp_path / "one")
    place = Path(export_cache(folder, tmp_path / "jit.tar.gz").archive)
    place.write_bytes(place.read_bytes()[: place.stat().st_size // 4])
    with pytest.raises(WrongArguments, match="cut short"):
        import_cache(place, tmp_path / "two")


# --- the verb ---------------------------------------------------------------------------------------------------------


def test_carried_and_opened_by_the_verb(tmp_path: Path) -> None:
    folder, digest = make_sealed(tmp_path / "one")
    archive = tmp_path / "jit.tar.gz"
    for words, deed in (
        (("check", "--root", tmp_path / "one"), "check"),
        (("export", archive, "--root", tmp_path / "one"), "export"),
        (("import", archive, "--root", tmp_path / "two"), "import"),
        (("open", "--root", tmp_path / "two", "--work", tmp_path / "work"), "open"),
    ):
        ended = call(map(str, ("jit-cache", *words, "--format", "json")), tmp_path)
        assert ended.code == Exit.OPEN, ended
        assert (ended.data["deed"], ended.data["manifest"]) == (deed, digest)
    (folder / MANIFEST_HASH).unlink()
    ended = call(map(str, ("jit-cache", "export", archive, "--root", tmp_path / "one")), tmp_path)
    assert (ended.code, "has no sealed cache" in ended.err) == (Exit.EVIDENCE_MISSING, True), ended


def test_a_folder_that_cannot_be_written_is_reported_before_anything_runs(tmp_path: Path) -> None:
    """The cache is damaged, and would be reported next."""
    folder, _ = make_sealed(tmp_path / "root")
    flip_a_bit(folder / CUBIN)
    (tmp_path / "file").touch()
    words = ("jit-verify", "--target", "h200", "--root", tmp_path / "root", "--receipts", tmp_path / "file")
    ended = call(map(str, words), tmp_path)
    assert (ended.code, "give --receipts" in ended.err) == (Exit.WRONG_ARGUMENTS, True), ended
