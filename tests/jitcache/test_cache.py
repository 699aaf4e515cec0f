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

from megacpp_validate.errors import EvidenceMissing, Exit, WrongArguments
from megacpp_validate.jitcache.cache import (
    Checked,
    check_sealed,
    export_cache,
    import_cache,
    is_sealed,
    open_working,
    seal,
)
from megacpp_validate.jitcache.layout import LIBRARIES, LOCKS, MANIFEST, MANIFEST_HASH, CacheChanged
from tests.jitcache.asking import ask
from tests.sealed_caches import CUBIN, GROUP, OBJECT, as_nobody, flip_a_bit, make_sealed, open_to_all, put, small_disk

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
    flip_a_bit(folder / CUBIN)
    with pytest.raises(CacheChanged, match=f"{OBJECT} is gone, {CUBIN} has another content"):
        check_sealed(folder)


def test_what_appeared_since_is_reported_and_is_not_sealed(tmp_path: Path) -> None:
    folder, _ = make_sealed(tmp_path)
    put(folder / "triton" / "KEY3" / "new.cubin", b"new")
    assert check_sealed(folder).extra == ("triton/KEY3/new.cubin",)
    with pytest.raises(CacheChanged, match=r"triton/KEY3/new\.cubin"):
        seal(folder)


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
                except (PermissionError, WrongArguments):
                    failed.append("refused")
            return " ".join(failed)

        assert as_nobody(misses) == "refused refused refused refused"
        assert check_sealed(folder).extra == NEW


def test_a_cache_under_the_name_of_another_architecture_is_not_whole(tmp_path: Path) -> None:
    """Every hash is right, and whoever looks there takes kernels of another device."""
    folder, _ = make_sealed(tmp_path)
    with pytest.raises(WrongArguments, match="rename it to sm_90a"):
        check_sealed(folder.rename(tmp_path / "sm_100a"))


# --- working copies ---------------------------------------------------------------------------------------------------


@pytest.fixture
def sealed(tmp_path: Path) -> tuple[Path, Checked]:
    folder, _ = make_sealed(tmp_path / "sealed")
    return folder, check_sealed(folder)


def test_it_can_be_written_and_the_sealed_one_stays(sealed: tuple[Path, Checked], tmp_path: Path) -> None:
    folder, checked = sealed
    for file in checked.manifest.files:
        os.utime(folder / file.path, (0, 0))  # as a layer of an image may have it
    opened = open_working(folder, checked, tmp_path / "work")
    work = tmp_path / "work" / "sm_90a"
    assert (opened.folder, opened.variables["TRITON_CACHE_DIR"]) == (str(work), str(work / "triton"))
    assert sorted(path.name for path in work.iterdir()) == sorted((*LIBRARIES, MANIFEST))
    times = {file.path: file.mtime_ns for file in checked.manifest.files}
    assert {path: (work / path).stat().st_mtime_ns for path in times} == times
    # Triton looks at the paths in its group, and passes over what is not there (runtime/cache.py, get_group).
    (child,) = json.loads((work / GROUP).read_text())["child_paths"].values()
    assert child == str(work / CUBIN)
    with (work / CUBIN).open("r+b") as stream:  # in place, as no library should: through a hard link it would hurt
        stream.write(b"other")
    assert check_sealed(folder) == checked
    with pytest.raises(WrongArguments, match="exists already"):
        open_working(folder, checked, tmp_path / "work")
    assert (work / CUBIN).exists()


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    put(tmp_path / "sealed" / "sm_90a" / "fa4" / "large.o", bytes(300_000))
    folder, _ = make_sealed(tmp_path / "sealed")
    archive = Path(export_cache(folder, tmp_path / "jit.tar").archive)
    for write in (
        lambda disk: open_working(folder, check_sealed(folder), disk),
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
    assert is_sealed(Path(back.folder))
    assert check_sealed(Path(back.folder)).extra == ()
    one, two = (place / CUBIN for place in (folder, Path(back.folder)))
    assert one.read_bytes() == two.read_bytes()
    assert one.stat().st_mtime_ns == two.stat().st_mtime_ns, "ninja builds again what looks old"
    assert import_cache(Path(first.archive), tmp_path / "two").manifest == digest, "the same cache is there already"
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
        (lambda n, c: (f"sm_100a/{CUBIN}", c) if n.endswith(CUBIN) else (n, c), WrongArguments, "sm_100a"),
        (lambda n, c: (n, _bit(c)) if n.endswith(MANIFEST) else (n, c), CacheChanged, "does not hash"),
        (
            lambda n, c: None if n.endswith(MANIFEST_HASH) else (n, c),
            WrongArguments,
            "not one sealed cache",
        ),
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
    (folder / "manifest.sha256").unlink()
    with pytest.raises(EvidenceMissing, match="is not sealed"):
        export_cache(folder, archive)
    code, text = ask("jit-cache", "check", "--root", tmp_path / "one")
    assert (code, "Whole, and not sealed: 5 files" in text) == (Exit.OPEN, True), text
    for words, deed in (
        (("seal", "--root", tmp_path / "one"), "seal"),
        (("export", archive, "--root", tmp_path / "one"), "export"),
        (("import", archive, "--root", tmp_path / "two"), "import"),
        (("open", "--root", tmp_path / "two", "--work", tmp_path / "work"), "open"),
    ):
        code, text = ask("jit-cache", *words, "--format", "json")
        assert code == Exit.OPEN, text
        result = json.loads(text)
        assert (result["deed"], result["manifest"], result["sealed"]) == (deed, digest, True)
