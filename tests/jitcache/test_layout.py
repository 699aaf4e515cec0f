"""One root, one folder an architecture, and every library told of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megacpp_validate.errors import WrongArguments
from megacpp_validate.jitcache.layout import LIBRARIES, arch_folder, cache_variables


def test_every_cache_lies_below_root_and_architecture() -> None:
    said = cache_variables(Path("/opt/megacpp/jit"), "sm_90a", nvrtc=False)
    folders = {value for value in said.values() if value.startswith("/opt/megacpp/jit/sm_90a/")}
    assert folders == {f"/opt/megacpp/jit/sm_90a/{name}" for name in LIBRARIES}
    assert said["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "1", "it is off by default"
    assert (said["MEGACPP_JIT_ROOT"], said["MEGACPP_JIT_ARCH"]) == ("/opt/megacpp/jit", "sm_90a")


def test_the_mode_is_said_to_deep_gemm_and_to_receipts() -> None:
    for nvrtc, flag, mode in ((True, "1", "nvrtc"), (False, "0", "nvcc")):
        said = cache_variables("/r", "sm_90a", nvrtc=nvrtc)
        assert (said["DG_JIT_USE_NVRTC"], said["MEGACPP_JIT_MODE"]) == (flag, mode)


@pytest.mark.parametrize("arch", ["", "..", "sm_90a/..", "../sm_90a", "/etc", "sm_", "sm_90x"])
def test_what_is_no_architecture_is_no_folder(arch: str) -> None:
    with pytest.raises(WrongArguments, match="not an architecture"):
        arch_folder(Path("/r"), arch)


def test_a_relative_root_is_refused() -> None:
    with pytest.raises(WrongArguments, match="relative"):
        cache_variables("jit", "cpu", nvrtc=False)
