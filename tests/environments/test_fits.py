"""What cannot work is refused before a build, with why and what to do; what is not known is told as that."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.version import Version

from megacpp_validate.catalog.bridge import Catalog, matrix_folder
from megacpp_validate.catalog.images import Images, Needs, read_images, read_needs
from megacpp_validate.environments.fits import FitVerdict, Stack, StackFit, judge_stack, require_known, stack_of_words
from megacpp_validate.errors import WrongArguments
from megacpp_validate.images.locks import ImageLock, LockedPackage, read_image_lock
from megacpp_validate.images.plan import stack_of_image

REFUSED, UNKNOWN, _, FITS = FitVerdict
H200 = ["cublas=13.1.0.3", "cudnn=9.19", "torch=2.11.0", "cuda=13.0", "nccl=2.28.9", "driver=580.95", "python=3.12"]
FRONTEND = "nvidia-cudnn-frontend=1.32.0"
FA4 = "flash-attn-4=4.0.0b36"
CUDA_12 = ["cuda=12.9", "cublas=12.9.1.4", "cudnn=9.19", "torch=2.11.0", "driver=550", "nccl=2.28", "python=3.12"]
CUTE, LAYOUT, TORCH = "flash-attn-4-cute-", "cublas-grouped-layout", "torch-of-one-cuda"
Judge = Callable[..., StackFit]
STEPS = matrix_folder().parent / "containers/steps"


@pytest.fixture(scope="module")
def images(catalog: Catalog) -> Images:
    return read_images(catalog)


@pytest.fixture(scope="module")
def needs(catalog: Catalog) -> Needs:
    return read_needs(catalog)


@pytest.fixture(scope="module")
def judge(catalog: Catalog, images: Images, needs: Needs) -> Judge:
    """A release and words, or a whole stack -> how it fits."""

    def run(stack: str | Stack, words: list[str] | None = None, target: str = "") -> StackFit:
        chosen = stack
        if isinstance(stack, str):
            chosen = require_known(stack_of_words(stack, words or [], needs, target), needs, images.range)
        return judge_stack(chosen, needs, images.range, [row.te for row in catalog.stacks])

    return run


def needs_with(fit: StackFit, verdict: FitVerdict) -> set[str]:
    return {one.need for one in fit.of(verdict)}


# Stack, and what is refused of it; each is known from a run or from a wheel, which its row names. Then what was
# refused, or warned of, wrongly, and what was let through: each side of each bound.
@pytest.mark.parametrize(
    ("te", "parts", "refused"),
    [
        ("2.20.2", [*H200, FRONTEND], set()),
        ("2.17.1", H200, {"cudnn-reshape-mode"}),
        ("2.18.0", [*H200, "nvidia-cudnn-frontend=1.24"], {"cudnn-frontend-2.18"}),
        ("2.20.2", [*H200[2:], "cudnn=9.11", FRONTEND], {"cudnn-least"}),
        ("2.20.2", [*H200, "nvidia-cudnn-frontend=1.28"], {"cudnn-frontend"}),
        ("2.20.2", [*H200[:5], FRONTEND, "driver=570.124"], {"driver-for-cuda-13"}),
        ("2.20.2", [*H200, FRONTEND, "transformer-engine-cu12=2.20.2"], {"cuda-12", "cublas-of-cuda-12"}),
        ("2.20.2", [*H200, FRONTEND, "transformer-engine-cu13=2.19.0"], {"one-release"}),
        (
            "2.20.2",
            [*H200[:3], *H200[4:5], *H200[6:], FRONTEND, "transformer-engine-cu13=2.20.2", "cuda=12.9", "driver=535"],
            {"cuda-13"},
        ),
        ("2.20.2", [*H200, FRONTEND, FA4, "nvidia-cutlass-dsl=4.5.2"], {"flash-attn-4-cute-guarded"}),
        ("2.20.2", [*H200, FRONTEND, FA4, "nvidia-cutlass-dsl=4.8.1", "flash-attn=2.8.3"], {"flash-attn-2-hides-4"}),
        ("2.20.2", [*H200, FRONTEND, "sgl-deep-gemm=0.2.0"], {"build of sgl-deep-gemm"}),
        ("2.20.2", [*H200[:6], FRONTEND, "python=3.9"], {"python-least"}),
        # The core library for CUDA 12 has no symbol of the grouped layout.
        ("2.14.1", [*CUDA_12, "transformer-engine-cu12=2.14.1"], set()),
        ("2.14.1", [*CUDA_12, "transformer-engine-cu13=2.14.1"], {"cuda-13", "cublas-of-cuda-13", LAYOUT}),
        ("2.16.1", ["cublas=13.1.9"], {LAYOUT}),
        ("2.16.1", ["cublas=13.2.0.9"], set()),
        # No core library is for another CUDA.
        ("2.20.2", [*CUDA_12[1:], "cuda=12.0"], {"cuda-known"}),
        ("2.20.2", [*CUDA_12[1:], "cuda=14.0"], {"cuda-known", "driver-for-cuda-13"}),
        # Torch is of the same CUDA as what is compiled against it.
        ("2.20.2", [*H200[:2], *H200[3:], FRONTEND, "torch=2.13.0+cpu"], {TORCH}),
        ("2.20.2", [*H200[:2], *H200[3:], FRONTEND, "torch=2.13.0+cu130"], set()),
        ("2.20.2", [*H200[:2], *H200[3:], FRONTEND, "torch=2.13.0a0+9186a08b2c.nv26.7.59513937"], set()),
        # FlashAttention 4 asks for the CuTe DSL of its own day.
        ("2.20.2", [*H200, FRONTEND, "flash-attn-4=4.0.0b11", "nvidia-cutlass-dsl=4.4.2"], set()),
        ("2.20.2", [*H200, FRONTEND, "flash-attn-4=4.0.0b11", "nvidia-cutlass-dsl=4.4.1"], {CUTE + "b3"}),
        ("2.20.2", [*H200, FRONTEND, "flash-attn-4=4.0.0b20", "nvidia-cutlass-dsl=4.6.0.dev0"], set()),
        ("2.20.2", [*H200, FRONTEND, "flash-attn-4=4.0.0b26", "nvidia-cutlass-dsl=4.6.2"], {CUTE + "b20"}),
        # The names that pip lists.
        ("2.14.1", ["nvidia-cublas=13.1.0.3"], {LAYOUT}),
        ("2.20.2", ["nvidia-cudnn-cu13=9.11", "nvidia-cuda-runtime=13.0.96"], {"cudnn-least"}),
    ],
)  # fmt: skip
def test_stacks(judge: Judge, te: str, parts: list[str], refused: set[str]) -> None:
    fit = judge(te, parts)
    assert needs_with(fit, REFUSED) == refused


@pytest.mark.parametrize("te", ["2.21.0", "3.0", "1.13.0"])
def test_a_release_that_the_rows_do_not_cover(judge: Judge, te: str) -> None:
    fit = judge(te, [*H200, FRONTEND])
    assert "release" in needs_with(fit, UNKNOWN)
    assert "te_canary" in next(one.next_step for one in fit.fits if one.need == "release")


@pytest.mark.parametrize(("word", "near"), [("cudn=9.10", "write cudnn"), ("zzz=1", "leave it out")])
def test_a_name_that_no_row_knows_is_refused_with_the_nearest(
    images: Images, needs: Needs, word: str, near: str
) -> None:
    with pytest.raises(WrongArguments, match=near):
        require_known(stack_of_words("2.20.2", [*H200, FRONTEND, FA4, word], needs), needs, images.range)


def test_images_of_the_matrix_and_what_is_changed_of_them(images: Images, judge: Judge) -> None:
    for image in images.image:
        lock = read_image_lock(matrix_folder().parent / image.lock)
        stack = stack_of_image(images, image, lock, images.find_base(image.base))
        assert not (refused := judge(stack).of(REFUSED)), (image.target, refused)
        brought = {one.brought_by.partition(",")[0] for one in stack.parts.values()}
        assert brought == {f"base {image.base}", f"lock {image.lock}"}
    h200, base = images.image[0], images.find_base(images.image[0].base)
    lock = read_image_lock(matrix_folder().parent / h200.lock)
    kept = h200.model_copy(update={"removes": []})  # FlashAttention 2 stays, and hides 4, in whichever version
    assert needs_with(judge(stack_of_image(images, kept, lock, base)), REFUSED) == {"flash-attn-2-hides-4"}
    older = ImageLock("", dict(lock.packages) | {"nvidia-cutlass-dsl": LockedPackage("4.5.2", frozenset())})
    assert needs_with(judge(stack_of_image(images, h200, older, base)), REFUSED) == {"flash-attn-4-cute-guarded"}
    own = judge(stack_of_image(images, h200, lock, None))
    assert {"cudnn", "torch"} <= {one.component for one in own.of(UNKNOWN)}  # nothing is known of a base of one's own


# What hopper/setup.py of FlashAttention does under releases of CUDA, with the variables of the matrix and
# FLASH_ATTENTION_OFFLINE_BUILD=TRUE, as containers/steps sets it: run for each release on 2026-11-28 with torch 2.13.0.
# Where it fails it raises a FileNotFoundError for third_party/nvidia/backend/bin/nvcc, below 12.3 a RuntimeError.
RELEASES = ("12.2", "12.3", "12.6", "12.8", "12.9", "13.0", "13.3", "13.4")
BUILT = {
    "203b9b3dba39d5d08dffb49c09aa622984dff07d": {"12.8"},
    "0251105a2fb19d2957484b7f023cd8c115286ced": {"12.8", "13.0", "13.3", "13.4"},
}


@pytest.mark.parametrize("commit", [*BUILT, "0" * 40])
def test_a_source_is_held_to_what_its_build_accepts(images: Images, judge: Judge, commit: str) -> None:
    """The pin of 2026-08 could be built under CUDA 12.8 alone, and "fitted" a base with 13.3."""
    pinned = next(row for row in images.source if row.id == "flash-attention-3")
    source = pinned.model_copy(update={"commit": commit})
    verdicts = {}
    for release in RELEASES:
        stack = stack_of_words("2.20.2", [f"cuda={release}", "torch=2.13.0a0+9186a08b2c", "python=3.12"])
        fit = judge(replace(stack, sources=(source,)))
        (verdicts[release],) = (one.verdict for one in fit.fits if one.need == "flash-attention-3-cuda")
    known = {release: FITS if release in BUILT.get(commit, ()) else REFUSED for release in RELEASES}
    assert verdicts == (known if commit in BUILT else dict.fromkeys(RELEASES, UNKNOWN))
    assert "FLASH_ATTENTION_OFFLINE_BUILD=TRUE" in (STEPS / "flash_attention_3.sh").read_text()


# A torch for the CPU has no CUDA_HOME, whatever the variable says.
SET_UP = (
    "import runpy, sys; from torch.utils import cpp_extension; cpp_extension.CUDA_HOME = sys.argv.pop(1); "
    "runpy.run_path('setup.py', run_name='__main__')"
)


@pytest.mark.parametrize("commit", BUILT)
def test_the_real_set_up_accepts_what_its_rows_say(images: Images, commit: str, tmp_path: Path) -> None:
    """hopper/setup.py itself under each release: MEGACPP_FLASH_ATTENTION is a clone of the repository."""
    clone = os.environ.get("MEGACPP_FLASH_ATTENTION") or pytest.skip("not-run: there is no clone of flash-attention")
    unpack = f"git -C '{clone}' archive {commit} README.md hopper | tar -x -C '{tmp_path}'"
    subprocess.run(["sh", "-c", unpack], check=True)
    (tmp_path / "bin").mkdir()
    nvcc, built = tmp_path / "bin/nvcc", set()
    source = next(row for row in images.source if row.id == "flash-attention-3")
    own = {"FLASH_ATTENTION_OFFLINE_BUILD": "TRUE", **source.variables}
    for release in RELEASES:
        nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.0'\n")
        nvcc.chmod(0o755)
        words = [sys.executable, "-c", SET_UP, str(tmp_path), "--name"]
        done = subprocess.run(
            words, cwd=tmp_path / "hopper", env=os.environ | own, capture_output=True, text=True, check=False
        )
        built |= {release} if done.returncode == 0 else set()
        assert not done.returncode or "backend/bin/nvcc" in done.stderr or release == "12.2", done.stderr
    assert built == BUILT[commit]


def test_every_source_says_what_its_build_accepts(images: Images) -> None:
    for image in images.image:
        for source in map(images.find_source, image.sources):
            assert set(source.list_accepted(image.target)) == {"cuda", "torch", "python"}, source.id


def test_every_row_can_fail(images: Images, needs: Needs) -> None:
    """A range that nothing lies outside of, or that nothing lies in, is a typing error."""
    for row in images.range:
        texts = ("0.1", "1.26", "2.8", "2.12.1", "9.99", "12.5", "13.9", "99", "580.1", "524")
        inside = [row.allows(Version(text)) for text in texts]
        assert not all(inside), row.id
        assert any(inside) or row.needs == "<0", row.id
    assert not {row.id for row in images.range} & {row.id for row in needs.need}, "a need is there once"
