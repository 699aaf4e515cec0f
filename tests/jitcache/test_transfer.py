"""A cache carried elsewhere: the same, whole, or not at all."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from megacpp_validate.errors import InfrastructureFailed, WrongArguments
from megacpp_validate.jitcache.layout import MANIFEST, MANIFEST_HASH
from megacpp_validate.jitcache.manifest import CacheChanged
from megacpp_validate.jitcache.prewarm import open_prewarm
from megacpp_validate.jitcache.seal import check_sealed, is_sealed, unseal
from megacpp_validate.jitcache.transfer import export_cache, import_cache, read_carried
from tests.sealed_caches import CUBIN, OBJECT, flip_a_bit, make_manifest, make_sealed, put, small_disk

FORMS = (".tar", ".tar.gz", ".tar.zst")


@pytest.mark.parametrize("form", [*FORMS, ""])
def test_there_and_back(tmp_path: Path, form: str) -> None:
    if form.endswith(".zst") and shutil.which("zstd") is None:
        pytest.skip("not-run: there is no zstd here")
    folder, digest = make_sealed(tmp_path / "one")
    source = Path(export_cache(folder, tmp_path / f"jit{form}").archive) if form else folder
    assert read_carried(source)[1] == digest
    back = import_cache(source, tmp_path / "two")
    assert (back.folder, back.manifest, back.kept) == (str(tmp_path / "two" / "sm_90a"), digest, False)
    assert is_sealed(Path(back.folder))
    assert check_sealed(Path(back.folder)).extra == ()
    one, two = (place / CUBIN for place in (folder, Path(back.folder)))
    assert one.read_bytes() == two.read_bytes()
    assert one.stat().st_mtime_ns == two.stat().st_mtime_ns, "ninja builds again what looks old"
    assert not list((tmp_path / "two").glob(".import-*"))


@pytest.mark.parametrize("form", FORMS[:2])
def test_the_same_cache_gives_the_same_bytes(tmp_path: Path, form: str) -> None:
    folder, _ = make_sealed(tmp_path / "one")
    first, second = (export_cache(folder, tmp_path / f"{name}{form}") for name in ("a", "b"))
    assert first.archive_hash == second.archive_hash != ""


def test_a_layer_lies_where_the_image_looks(tmp_path: Path) -> None:
    folder, digest = make_sealed(tmp_path / "one")
    layer = export_cache(folder, tmp_path / "layer.tar", prefix="/opt/megacpp/jit")
    with tarfile.open(layer.archive) as archive:
        names = archive.getnames()
        assert all(member.isreg() and member.uid == 0 for member in archive)
    assert names[:2] == [f"opt/megacpp/jit/sm_90a/{MANIFEST}", f"opt/megacpp/jit/sm_90a/{MANIFEST_HASH}"]
    assert all(name.startswith("opt/megacpp/jit/sm_90a/") for name in names)
    assert import_cache(Path(layer.archive), tmp_path / "two").manifest == digest


def test_another_one_is_there(tmp_path: Path) -> None:
    folder, digest = make_sealed(tmp_path / "one")
    archive = Path(export_cache(folder, tmp_path / "jit.tar").archive)
    other, _ = make_sealed(tmp_path / "two")  # the same files in another folder, whose path stands in them
    with pytest.raises(WrongArguments, match=f"holds another cache .*, and not {digest}"):
        import_cache(archive, tmp_path / "two")
    assert import_cache(archive, tmp_path / "two", replace=True).manifest == digest
    assert check_sealed(other).digest == digest
    assert [path.name for path in (tmp_path / "two").iterdir()] == ["sm_90a"]


def test_a_prewarm_that_works_keeps_its_folder(tmp_path: Path) -> None:
    """Whatever may be replaced: its tasks write there."""
    folder, _ = make_sealed(tmp_path / "one")
    archive = Path(export_cache(folder, tmp_path / "jit.tar").archive)
    with open_prewarm(tmp_path / "two" / "sm_90a", make_manifest(folder), (), {}) as progress:
        kernel = progress.folder / "triton" / "KEY" / "a.cubin"
        put(kernel, b"half")
        with pytest.raises(InfrastructureFailed, match="another prewarm works in"):
            import_cache(archive, tmp_path / "two", replace=True)
        assert kernel.read_bytes() == b"half"
    assert not import_cache(archive, tmp_path / "two", replace=True).kept
    assert [path.name for path in (tmp_path / "two").iterdir()] == ["sm_90a"]


def test_what_is_not_sealed_is_not_exported(tmp_path: Path) -> None:
    folder, _ = make_sealed(tmp_path / "one")
    unseal(folder)
    with pytest.raises(WrongArguments, match="is not sealed"):
        export_cache(folder, tmp_path / "jit.tar")


def test_what_was_changed_is_not_exported(tmp_path: Path) -> None:
    folder, _ = make_sealed(tmp_path / "one")
    flip_a_bit(folder / OBJECT)
    with pytest.raises(CacheChanged, match=OBJECT):
        export_cache(folder, tmp_path / "jit.tar")
    assert not (tmp_path / "jit.tar").exists()


@pytest.mark.parametrize("plant", [os.mkfifo, lambda place: place.symlink_to("/etc/passwd"), lambda place: None])
def test_a_folder_is_looked_at_before_anything_of_it_is_opened(tmp_path: Path, plant: Callable[[Path], None]) -> None:
    """A pipe would be waited for, for ever."""
    folder, _ = make_sealed(tmp_path / "one")
    (folder / CUBIN).unlink()
    plant(folder / CUBIN)
    with pytest.raises(CacheChanged, match=CUBIN):
        import_cache(folder, tmp_path / "two")
    assert list((tmp_path / "two").iterdir()) == []


def _rewrite(source: Path, target: Path, change: Callable[[str, bytes], tuple[str, bytes] | None]) -> Path:
    """An archive with other members; `change` gives name and content, or None to leave one out."""
    with tarfile.open(source) as archive, tarfile.open(target, "w") as out:
        for member in archive:
            reader = archive.extractfile(member)
            assert reader is not None
            if (pair := change(member.name, reader.read())) is not None:
                info = tarfile.TarInfo(pair[0])
                info.size = len(pair[1])
                out.addfile(info, io.BytesIO(pair[1]))
    return target


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
        (lambda n, c: (n, c + b"x") if n.endswith(CUBIN) else (n, c), CacheChanged, CUBIN),
        (lambda n, c: None if n.endswith(OBJECT) else (n, c), CacheChanged, OBJECT),
        (lambda n, c: ("sm_90a/../../etc/evil", c) if n.endswith(CUBIN) else (n, c), WrongArguments, "etc/evil"),
        (lambda n, c: ("/etc/evil", c) if n.endswith(CUBIN) else (n, c), WrongArguments, "/etc/evil"),
        (lambda n, c: (f"sm_100a/{CUBIN}", c) if n.endswith(CUBIN) else (n, c), WrongArguments, "sm_100a"),
        (lambda n, c: (n, _bit(c)) if n.endswith(MANIFEST) else (n, c), CacheChanged, "its hash"),
        (lambda n, c: None if n.endswith(MANIFEST_HASH) else (n, c), WrongArguments, "not an archive of a JIT cache"),
    ],
)
def test_a_damaged_archive_is_refused_by_name(
    tmp_path: Path,
    archive: Path,
    change: Callable[[str, bytes], tuple[str, bytes] | None],
    kind: type[Exception],
    said: str,
) -> None:
    bad = _rewrite(archive, tmp_path / "bad.tar", change)
    with pytest.raises(kind, match=said):
        import_cache(bad, tmp_path / "two")
    assert not (tmp_path / "two" / "sm_90a").exists()
    assert not list((tmp_path / "two").glob(".import-*")) if (tmp_path / "two").exists() else True


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.CHRTYPE])
def test_no_link_is_unpacked(tmp_path: Path, archive: Path, kind: bytes) -> None:
    with tarfile.open(archive) as reader, tarfile.open(tmp_path / "bad.tar", "w") as out:
        for member in reader:
            if member.name.endswith(CUBIN):
                link = tarfile.TarInfo(member.name)
                link.type, link.linkname = kind, "/etc/passwd"
                out.addfile(link)
            else:
                out.addfile(member, reader.extractfile(member))
    with pytest.raises(WrongArguments, match=CUBIN):
        import_cache(tmp_path / "bad.tar", tmp_path / "two")


@pytest.mark.parametrize("form", FORMS)
def test_one_that_was_cut_short_is_refused(tmp_path: Path, form: str) -> None:
    if form.endswith(".zst") and shutil.which("zstd") is None:
        pytest.skip("not-run: there is no zstd here")
    folder, _ = make_sealed(tmp_path / "one")
    place = Path(export_cache(folder, tmp_path / f"jit{form}").archive)
    content = place.read_bytes()
    place.write_bytes(content[: len(content) // 4])
    with pytest.raises((WrongArguments, CacheChanged), match=r"cut short|damaged"):
        import_cache(place, tmp_path / "two")
    assert not (tmp_path / "two" / "sm_90a").exists()


def test_what_is_no_archive(tmp_path: Path) -> None:
    (tmp_path / "jit.tar").write_bytes(b"no tar")
    with pytest.raises(WrongArguments, match="cannot be unpacked"):
        import_cache(tmp_path / "jit.tar", tmp_path / "two")
    with pytest.raises(WrongArguments, match="there is no archive"):
        import_cache(tmp_path / "nothing.tar", tmp_path / "two")


def test_a_full_disk_in_the_middle_of_an_import(tmp_path: Path) -> None:
    folder = tmp_path / "one" / "sm_90a"
    put(folder / "triton" / "KEY5" / "large.cubin", bytes(300_000))
    make_sealed(tmp_path / "one")
    archive = Path(export_cache(folder, tmp_path / "jit.tar").archive)
    with small_disk() as disk:
        with pytest.raises(OSError, match="No space left"):
            import_cache(archive, disk)
        assert list(disk.iterdir()) == []
