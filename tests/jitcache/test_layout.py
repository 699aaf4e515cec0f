"""One root, one folder an architecture; which files of a cache count."""

from __future__ import annotations

from pathlib import Path

import pytest

from megacpp_validate.errors import WrongArguments
from megacpp_validate.jitcache.layout import CacheChanged, list_files, require_usable
from tests.sealed_caches import CUBIN, GROUP, OBJECT, fill, small_disk


def test_locks_and_what_is_half_written_do_not_count(tmp_path: Path) -> None:
    assert list(list_files(fill(tmp_path / "sm_90a"))) == [
        "deep_gemm/cache/kernel.fp8_gemm.abc/kernel.cubin", OBJECT, "inductor/fxgraph/oq/foq/e7n4", GROUP, CUBIN,
    ]  # fmt: skip


def test_a_link_is_no_file_of_a_cache(tmp_path: Path) -> None:
    folder = fill(tmp_path / "sm_90a")
    (folder / "triton" / "away").symlink_to("/etc")
    with pytest.raises(CacheChanged, match="not a plain file"):
        list_files(folder)


def test_a_folder_from_which_no_library_can_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WrongArguments, match="give --root"):
        require_usable(tmp_path / "file", "--root")
    with small_disk("64k", "noexec") as disk, pytest.raises(WrongArguments, match="mounted noexec"):
        require_usable(disk, "--root")
