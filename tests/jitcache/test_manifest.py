"""What a manifest holds, what it is refused for, and in what a stack may differ from it."""

from __future__ import annotations

import lzma
import shutil
from pathlib import Path

import pytest

from megacpp_validate.catalog.bridge import read_catalog
from megacpp_validate.catalog.prewarm import read_prewarm
from megacpp_validate.errors import Exit
from megacpp_validate.jitcache.layout import (
    MANIFEST,
    CompilerOf,
    Manifest,
    ManifestInvalid,
    StackSeen,
    compare_stack,
    read_manifest,
)
from megacpp_validate.jitcache.verify import JitVerifyResult
from tests.sealed_caches import GROUP, STACK, make_sealed


def test_it_says_what_is_there(tmp_path: Path) -> None:
    folder, digest = make_sealed(tmp_path)
    manifest, found = read_manifest(folder)
    assert found == digest
    assert [*manifest.sizes] == ["deep_gemm", "fa4", "inductor", "triton"]
    assert [file.path for file in manifest.files if file.names_root] == [GROUP], "Triton's group names its folder"
    assert manifest.missing == ("probe_expert_gemm",)


def test_a_manifest_of_another_version_is_invalid(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text("{}")
    with pytest.raises(ManifestInvalid, match="another version wrote it"):
        read_manifest(tmp_path)


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    folder, _ = make_sealed(tmp_path)
    return read_manifest(folder)[0]


KEYS = read_prewarm(read_catalog()).keys


def _with(**versions: str) -> StackSeen:
    return STACK.model_copy(update={"versions": {**STACK.versions, **versions}})


@pytest.mark.parametrize(
    ("stack", "architecture", "what", "pair"),
    [
        (STACK, "sm_100a", "architecture", ("sm_90a", "sm_100a")),
        (STACK.model_copy(update={"machine": "aarch64"}), "sm_90a", "machine", ("x86_64", "aarch64")),
        (_with(torch="2.13.0"), "sm_90a", "torch", ("2.11.0+cu130", "2.13.0")),
        (_with(python="3.13.0"), "sm_90a", "python", ("3.12", "3.13")),
        (
            STACK.model_copy(update={"compiler": CompilerOf(version="13.2.1")}),
            "sm_90a", "compiler", ("13.0.88", "13.2.1"),
        ),
        (
            STACK.model_copy(update={"include_paths": ("/usr/local/cuda/include",)}), "sm_90a", "include path",
            ("/opt/stack/deep_gemm/include:/usr/local/cuda/include", "/usr/local/cuda/include"),
        ),
    ],
)  # fmt: skip
def test_what_differs_is_named(
    manifest: Manifest, stack: StackSeen, architecture: str, what: str, pair: tuple[str, str]
) -> None:
    (difference,) = compare_stack(manifest, stack, architecture, KEYS)
    assert (difference.what, difference.recorded, difference.observed) == (what, *pair)
    assert difference.matters


def test_what_no_key_there_holds_does_not_matter(manifest: Manifest) -> None:
    """No file of the CUDA driver's cache, no torch extension; the patch release of Python is in no key."""
    stack = _with(driver="610.43.02", python="3.12.9", **{"c++": "g++ 14"})
    for same in (STACK, stack):
        assert compare_stack(manifest, same, "sm_90a", KEYS) == ()


def test_committed_evidence_is_read_as_it_was_decided(tmp_path: Path) -> None:
    evidence = Path(__file__).parents[2] / "docs" / "evidence" / "jit"
    shutil.copy(evidence / "h200" / "manifest.sha256", tmp_path)
    (tmp_path / "manifest.json").write_bytes(lzma.decompress((evidence / "h200" / "manifest.xz").read_bytes()))
    assert read_manifest(tmp_path)[1][:15] == "sha256:83e952bc"
    names = ("h200/jit_verify-h200.part", "planted/unwarmed_shape", "planted/routing")
    read = [JitVerifyResult.model_validate_json((evidence / f"{name}.json").read_bytes()) for name in names]
    assert [result.exit for result in read] == [Exit.OPEN, Exit.CLOSED, Exit.CLOSED]
