"""Locks: every file by its hash, nothing of what the base provides, and none that is older than the matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megacpp_validate.catalog.bridge import Catalog, matrix_folder
from megacpp_validate.catalog.images import Images, read_images
from megacpp_validate.images.locking import LockOptions, run_lock
from megacpp_validate.images.locks import (
    ImageLock,
    LockedPackage,
    check_lock,
    gather_inputs,
    parse_lock,
    read_image_lock,
    read_project,
    seal_lock,
)
from megacpp_validate.images.plan import ImageRows
from megacpp_validate.images.tools import ImageRefused

ROOT = matrix_folder().parent
HASH = "--hash=sha256:" + "a" * 64


@pytest.fixture(scope="module")
def images(catalog: Catalog) -> Images:
    return read_images({target.id: target.machine for target in catalog.targets})


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return read_project(ROOT)


def test_the_locks_that_are_committed_are_fresh() -> None:
    result = run_lock(ImageRows(None, "a test", {}), LockOptions(check=True))
    assert (result.exit, result.refusals) == (0, ()), "run nox -s lock, and commit what it writes"


def test_no_lock_installs_again_what_its_base_provides(images: Images, project: dict[str, Any]) -> None:
    for image in images.image:
        lock = read_image_lock(ROOT / image.lock)
        inputs = gather_inputs(images, image, project)
        forbidden = {*inputs.provided, *inputs.excluded}
        assert not forbidden & set(lock.packages), image.target
        if inputs.provided:
            assert {"torch", "triton", "numpy", "nvidia-cublas", "nvidia-cudnn-cu13"} <= forbidden
        brought = [name for name in lock.packages if name.startswith("nvidia-")]
        assert all(name.startswith(("nvidia-cutlass-dsl", "nvidia-cudnn-frontend")) for name in brought), image.target
        assert set(inputs.over) <= set(lock.packages), (
            "what is no more needed over the base is to be taken out of `over`"
        )
        for name, version in inputs.over.items():
            assert lock.packages[name].version != version, f"{name} is the base's own: take it out of `over`"


def test_a_lock_that_does_is_refused(images: Images, project: dict[str, Any]) -> None:
    h200 = images.image[0]
    inputs = gather_inputs(images, h200, project)
    for planted in ("torch", "nvidia-cublas"):
        lock = ImageLock("", inputs.hash, {planted: LockedPackage("1", frozenset({"a" * 64}))})
        with pytest.raises(ImageRefused, match=rf"installs {planted}, which the base ngc-26\.07 provides.*Next step"):
            check_lock(lock, inputs, Path("h200.txt"))


def test_the_stack_that_is_pinned_is_the_one_that_is_locked(catalog: Catalog, images: Images) -> None:
    for image in images.image:
        lock = read_image_lock(ROOT / image.lock)
        if image.te:
            assert image.te == catalog.pinned.te
            assert lock.packages["transformer-engine-torch"].version == catalog.pinned.te
            assert len(lock.packages["transformer-engine-torch"].hashes) == 1  # a source release, compiled in the image
        else:
            assert lock.packages["torch"].version == "2.13.0+cpu"


@pytest.mark.parametrize(
    "line",
    ["leaf==1.0", f"leaf>=1.0 {HASH}", "leaf==1.0 --hash=sha256:abc", f"-e . {HASH}", f"--index-url https://x {HASH}",
     f"leaf==1.0 {HASH}\nLeaf==1.1 {HASH}"],
)  # fmt: skip
def test_a_line_without_a_hash_or_a_package_twice(line: str) -> None:
    with pytest.raises(ImageRefused, match=r"was edited by hand.*nox -s lock"):
        parse_lock(seal_lock(f"# x\n# y\n{line}\n"), Path("lock.txt"))


# What a lock follows from, changed one at a time: each makes it older than the matrix.
CHANGES: dict[str, Any] = {
    "groups": lambda image: image.model_copy(update={"groups": ["torch-cpu"]}),
    "over": lambda image: image.model_copy(update={"over": image.over[:1]}),
    "base": lambda image: image.model_copy(update={"base": "debian-bookworm"}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_lock_that_is_older_than_the_matrix(images: Images, project: dict[str, Any], change: str) -> None:
    image = images.image[0]
    lock = read_image_lock(ROOT / image.lock)
    check_lock(lock, gather_inputs(images, image, project), ROOT / image.lock)
    changed = CHANGES[change](image)
    with pytest.raises(ImageRefused, match=r"older than the matrix.*Next step: `nox -s lock`"):
        check_lock(lock, gather_inputs(images, changed, project), ROOT / image.lock)


def test_a_lock_that_is_missing_was_never_sealed_or_was_edited(tmp_path: Path) -> None:
    with pytest.raises(ImageRefused, match=r"cannot be read.*nox -s lock"):
        read_image_lock(tmp_path / "lock.txt")
    text = seal_lock(f"# x\n# y\nleaf==1.0 {HASH}\n")
    assert parse_lock(text, Path("x")).packages
    for edited in (text.replace("1.0", "1.1"), f"# x\n# y\nleaf==1.0 {HASH}\n", text.replace("content: sha256:", "x")):
        with pytest.raises(ImageRefused, match="was edited by hand"):
            parse_lock(edited, Path("x"))
