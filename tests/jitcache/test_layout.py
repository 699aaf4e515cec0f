"""One root, one folder an architecture; which files of a cache count."""

from __future__ import annotations

from pathlib import Path

import pytest

from megacpp_validate.errors import WrongArguments
from megacpp_validate.jitcache.layout import (
    LIBRARIES,
    CacheChanged,
    cache_variables,
    list_files,
    require_usable,
)
from tests.sealed_caches import CUBIN, GROUP, OBJECT, fill, small_disk


def test_every_cache_lies_below_root_and_architecture() -> None:
    said = cache_variables(Path("/opt/megacpp/jit"), "sm_90a", nvrtc=False)
    folders = {value for value in said.values() if value.startswith("/opt/megacpp/jit/sm_90a/")}
    assert folders == {f"/opt/megacpp/jit/sm_90a/{name}" for name in LIBRARIES}
    assert said["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "1", "it is off by default"
    assert (said["MEGACPP_JIT_ROOT"], said["MEGACPP_JIT_ARCH"]) == ("/opt/megacpp/jit", "sm_90a")
    for nvrtc, flag, mode in ((True, "1", "nvrtc"), (False, "0", "nvcc")):
        said = cache_variables("/r", "sm_90a", nvrtc=nvrtc)
        assert (said["DG_JIT_USE_NVRTC"], said["MEGACPP_JIT_MODE"]) == (flag, mode)


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
