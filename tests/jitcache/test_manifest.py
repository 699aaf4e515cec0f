"""What a manifest holds, what it is refused for, and in what a stack may differ from it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from megacpp_validate.jitcache.layout import MANIFEST, MANIFEST_HASH
from megacpp_validate.jitcache.manifest import (
    CacheChanged,
    CompilerOf,
    Manifest,
    ManifestInvalid,
    StackSeen,
    compare_stack,
    compare_variables,
    hash_line,
    hash_manifest,
    hash_variables,
    list_files,
    parse_manifest,
    read_manifest,
)
from tests.sealed_caches import CUBIN, GROUP, OBJECT, STACK, fill, make_sealed


def test_locks_and_what_is_half_written_do_not_count(tmp_path: Path) -> None:
    assert [seen.path for seen in list_files(fill(tmp_path / "sm_90a"))] == [
        "deep_gemm/cache/kernel.fp8_gemm.abc/kernel.cubin", OBJECT, "inductor/fxgraph/oq/foq/e7n4", GROUP, CUBIN,
    ]  # fmt: skip


def test_a_link_is_no_file_of_a_cache(tmp_path: Path) -> None:
    folder = fill(tmp_path / "sm_90a")
    (folder / "triton" / "away").symlink_to("/etc")
    with pytest.raises(CacheChanged, match="triton/away"):
        list_files(folder)


def test_a_name_that_is_no_text_is_none_of_a_cache(tmp_path: Path) -> None:
    """A manifest could not hold it."""
    folder = fill(tmp_path / "sm_90a")
    Path(os.fsdecode(os.fsencode(folder / "triton") + b"/\xff")).touch()
    with pytest.raises(CacheChanged, match="name in UTF-8"):
        list_files(folder)


@pytest.mark.parametrize("name", [MANIFEST, MANIFEST_HASH])
def test_a_pipe_in_its_place_is_not_waited_for(tmp_path: Path, name: str) -> None:
    folder, _ = make_sealed(tmp_path)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(ManifestInvalid, match="has no manifest"):
        read_manifest(folder)


def test_it_says_what_is_there(tmp_path: Path) -> None:
    folder, digest = make_sealed(tmp_path)
    manifest, found = read_manifest(folder)
    assert found == digest
    assert {size.library: size.files for size in manifest.sizes} == {
        "deep_gemm": 1, "fa4": 1, "inductor": 1, "triton": 2,
    }  # fmt: skip
    assert [file.path for file in manifest.files if file.names_root] == [GROUP], "Triton's group names its folder"
    assert manifest.shapes_of("fa4", "fwd") == ("bf16 d128",)
    assert manifest.missing == ("deep_gemm_small",)


def _damage(folder: Path, change: dict[str, Any] | None = None, text: str = "") -> tuple[bytes, bytes]:
    """A manifest with other contents, under a hash that is right."""
    data = json.loads((folder / MANIFEST).read_bytes())
    raw = (text or json.dumps({**data, **(change or {})})).encode()
    return raw, hash_line(hash_manifest(raw)).encode()


def _file(path: str) -> dict[str, Any]:
    return {"path": path, "bytes": 1, "sha256": "0" * 64, "mtime_ns": 0}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema_id": "megacpp-validate/jit-manifest/9"}, "schema_id"),
        ({"surprise": 1}, "surprise"),
        ({"files": [_file("triton/../../etc/passwd")]}, "leads elsewhere"),
        ({"files": [_file("/etc/passwd")]}, "leads elsewhere"),
        ({"files": [_file("triton//a")]}, "leads elsewhere"),
        ({"files": [_file("passwd")]}, "leads elsewhere"),
        ({"files": [_file("triton/a"), _file("triton/a")]}, "twice"),
        ({"files": [{**_file("triton/a"), "bytes": -1}]}, "bytes"),
        ({"files": [{**_file("triton/a"), "mtime_ns": 10**40}]}, "mtime_ns"),
        ({"files": [{**_file("triton/a"), "mtime_ns": -(10**40)}]}, "mtime_ns"),
    ],
)
def test_what_no_prewarm_writes_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    folder, _ = make_sealed(tmp_path)
    with pytest.raises(ManifestInvalid, match=said):
        parse_manifest(*_damage(folder, change), "here")


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    folder, _ = make_sealed(tmp_path)
    return read_manifest(folder)[0]


def _with(**versions: str) -> StackSeen:
    return STACK.model_copy(update={"versions": {**STACK.versions, **versions}})


def test_the_same_stack_does_not_differ(manifest: Manifest) -> None:
    assert compare_stack(manifest, STACK, "sm_90a", "nvcc") == ()


@pytest.mark.parametrize(
    ("stack", "architecture", "mode", "what", "pair"),
    [
        (STACK, "sm_100a", "nvcc", "architecture", ("sm_90a", "sm_100a")),
        (STACK, "sm_90a", "nvrtc", "compiler mode", ("nvcc", "nvrtc")),
        (STACK.model_copy(update={"machine": "aarch64"}), "sm_90a", "nvcc", "machine", ("x86_64", "aarch64")),
        (_with(torch="2.13.0"), "sm_90a", "nvcc", "torch", ("2.11.0+cu130", "2.13.0")),
        (_with(triton="3.7.1"), "sm_90a", "nvcc", "triton", ("3.6.0", "3.7.1")),
        (_with(cutlass="4.5.2"), "sm_90a", "nvcc", "cutlass", ("4.8.1", "4.5.2")),
        (_with(gpu="NVIDIA H200 NVL"), "sm_90a", "nvcc", "gpu", ("NVIDIA H200", "NVIDIA H200 NVL")),
        (_with(python="3.13.0"), "sm_90a", "nvcc", "python", ("3.12", "3.13")),
        (
            STACK.model_copy(update={"compiler": CompilerOf(version="13.2.1")}),
            "sm_90a", "nvcc", "compiler", ("13.0.88", "13.2.1"),
        ),
        (
            STACK.model_copy(update={"include_paths": ("/usr/local/cuda/include",)}), "sm_90a", "nvcc", "include path",
            ("/opt/stack/deep_gemm/include:/usr/local/cuda/include", "/usr/local/cuda/include"),
        ),
    ],
)  # fmt: skip
def test_what_differs_is_named(
    manifest: Manifest, stack: StackSeen, architecture: str, mode: str, what: str, pair: tuple[str, str]
) -> None:
    (difference,) = compare_stack(manifest, stack, architecture, mode)
    assert (difference.what, difference.recorded, difference.observed) == (what, *pair)
    assert difference.matters


def test_what_no_key_there_holds_does_not_matter(manifest: Manifest) -> None:
    """No file of the CUDA driver's cache, no torch extension; the patch release of Python is in no key."""
    stack = _with(driver="610.43.02", python="3.12.9", **{"c++": "g++ 14"})
    assert compare_stack(manifest, stack, "sm_90a", "nvcc") == ()


def test_a_variable_of_a_compiler_that_differs_is_told_and_its_value_is_not() -> None:
    secret = "redis://user:password@host"
    one, two = (
        hash_variables({"HOME": "/root", "TRITON_CACHE_DIR": root, "TRITON_DEBUG": debug, **more})
        for root, debug, more in (
            ("/one", "1", {"TORCHINDUCTOR_REDIS_URL": secret, "NVTE_FUSED_ATTN": "0"}),
            ("/two", "0", {"DG_JIT_DEBUG": "1", "NVTE_FUSED_ATTN": "0"}),
        )
    )
    assert secret not in str(one)
    assert [said.partition(":")[0] for said in compare_variables(one, two)] == [
        f"{name} differs from when the cache was filled"
        for name in ("DG_JIT_DEBUG", "TORCHINDUCTOR_REDIS_URL", "TRITON_DEBUG")
    ]
    assert compare_variables(one, one) == compare_variables(None, two) == ()
