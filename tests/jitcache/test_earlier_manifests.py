"""A cache that an earlier version sealed, with files that pass: it is whole where they are gone, or others by now."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from megacpp_validate.errors import Exit
from megacpp_validate.jitcache.layout import MANIFEST, MANIFEST_HASH
from megacpp_validate.jitcache.manifest import (
    CacheChanged,
    FileSeen,
    compare_stack,
    hash_file,
    read_manifest,
    write_manifest,
)
from megacpp_validate.jitcache.result import JitVerifyResult
from megacpp_validate.jitcache.seal import check_sealed, is_sealed
from megacpp_validate.jitcache.transfer import export_cache, import_cache
from tests.sealed_caches import CUBIN, OBJECT, STACK, fill, flip_a_bit, make_manifest, put

INDEX = "cuda/index"
PASSED = (INDEX, "triton/tmp.0b4f8a52-uuid/kernel.cubin")


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """ROOT/ARCH whose manifest counts the driver's index and what Triton leaves in a folder of its own."""
    folder = fill(tmp_path / "earlier" / "sm_90a")
    manifest = make_manifest(folder)
    rows = [_row(folder, path) for path in PASSED]
    write_manifest(folder, manifest.model_copy(update={"files": (*manifest.files, *rows)}))
    for name in (MANIFEST, MANIFEST_HASH):
        (folder / name).chmod(0o444)
    assert is_sealed(folder)
    return folder


def _row(folder: Path, path: str) -> FileSeen:
    found = (folder / path).stat()
    digest = hash_file(folder / path)
    return FileSeen(path=path, bytes=found.st_size, sha256=digest, mtime_ns=found.st_mtime_ns)


def _leave(folder: Path) -> None:
    """As it was sealed."""


def _lose(folder: Path) -> None:
    for path in PASSED:
        (folder / path).unlink()


def _write_anew(folder: Path) -> None:
    for path in PASSED:
        put(folder / path, b"of the process that was here last, and longer than it was")


@pytest.fixture(params=[_leave, _lose, _write_anew])
def whole(earlier: Path, request: pytest.FixtureRequest) -> Path:
    change: Callable[[Path], None] = request.param
    change(earlier)
    return earlier


def test_it_is_whole(whole: Path) -> None:
    checked = check_sealed(whole)
    assert checked.extra == ()
    assert not {file.path for file in checked.manifest.files} & set(PASSED)
    assert {file.path for file in checked.manifest.files} >= {CUBIN, OBJECT}
    other = STACK.model_copy(update={"versions": {**STACK.versions, "driver": "610.43.02"}})
    assert compare_stack(checked.manifest, other, "sm_90a", "nvcc") == (), "no kernel of the driver's is there"


def test_what_is_really_damaged_is_named_alone(whole: Path) -> None:
    flip_a_bit(whole / CUBIN)
    (whole / OBJECT).unlink()
    with pytest.raises(CacheChanged) as caught:
        check_sealed(whole)
    said = str(caught.value)
    assert f"{CUBIN} has another content" in said
    assert f"{OBJECT} is gone" in said
    assert not any(path in said for path in PASSED)


@pytest.mark.parametrize("form", [".tar", ""])
def test_it_is_carried(whole: Path, tmp_path: Path, form: str) -> None:
    source = Path(export_cache(whole, tmp_path / f"jit{form}").archive) if form else whole
    back = import_cache(source, tmp_path / "two")
    assert check_sealed(Path(back.folder)).digest == read_manifest(whole)[1]
    assert import_cache(source, tmp_path / "two").kept


def _pack(folder: Path, archive: Path) -> Path:
    """As an earlier version did: every file of its manifest."""
    names = [MANIFEST, MANIFEST_HASH, *(file.path for file in read_manifest(folder)[0].files), *PASSED]
    with tarfile.open(archive, "w") as out:
        for name in names:
            out.add(folder / name, f"sm_90a/{name}")
    return archive


def test_an_archive_of_it_is_taken_without_what_passes(earlier: Path, tmp_path: Path) -> None:
    back = import_cache(_pack(earlier, tmp_path / "earlier.tar"), tmp_path / "two")
    assert (Path(back.folder) / CUBIN).read_bytes() == (earlier / CUBIN).read_bytes()
    assert not any((Path(back.folder) / path).exists() for path in PASSED)


def test_committed_evidence_is_read_as_it_was_decided() -> None:
    evidence = Path(__file__).parents[2] / "docs" / "evidence" / "jit"
    manifest, digest = read_manifest(evidence / "h200")
    assert (len(manifest.files), digest[:15]) == (2127, "sha256:4acad092")
    codes = {
        "h200/jit_verify-h200.part": Exit.OPEN,
        "planted/unwarmed_shape": Exit.CLOSED,
        "planted/routing": Exit.CLOSED,
    }
    for name, code in codes.items():
        result = JitVerifyResult.model_validate_json((evidence / f"{name}.json").read_bytes())
        assert result.exit is code
