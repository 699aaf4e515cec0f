"""Locks beside the real index: what is committed is what it gives, and a wrong hash is caught by who installs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megacpp_validate.catalog.bridge import Catalog, matrix_folder
from megacpp_validate.catalog.images import Images, read_images
from megacpp_validate.environments.environment import NoEnvironment
from megacpp_validate.images.inputs import read_project
from megacpp_validate.images.locking import Asker, make_image_lock, make_releases_lock, make_sessions_lock

ROOT = matrix_folder().parent
SMALL = "mdurl"  # a package without dependencies, of a few kilobytes

pytestmark = pytest.mark.network


def reach(folder: Path, line: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    (folder / "lock.txt").write_text(line)
    words = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--require-hashes",
        "--no-deps",
        "--only-binary",
        ":all:",
    ]
    return subprocess.run(
        [*words, "--dest", str(folder), "-r", str(folder / "lock.txt")], capture_output=True, text=True, check=False
    )


def test_a_planted_hash_is_caught_by_pip(tmp_path: Path) -> None:
    text = (ROOT / "containers" / "locks" / "image-cpu.txt").read_text()
    found = re.search(rf"^{SMALL}==.*?(?=^\S)", text, re.MULTILINE | re.DOTALL)
    assert found
    good = reach(tmp_path / "good", found[0])
    if good.returncode and "hash" not in good.stderr.lower():
        pytest.skip(f"not-run: no index: {good.stderr[-200:]}")
    assert good.returncode == 0, good.stderr
    planted = re.sub(r"sha256:[0-9a-f]{64}", "sha256:" + "0" * 64, found[0])
    caught = reach(tmp_path / "planted", planted)
    assert caught.returncode != 0
    assert "DO NOT MATCH THE HASHES" in caught.stderr


@pytest.fixture(scope="module")
def images(catalog: Catalog) -> Images:
    return read_images({target.id: target.machine for target in catalog.targets})


def test_the_locks_that_are_committed_are_what_the_index_gives(catalog: Catalog, images: Images) -> None:
    """A release that was withdrawn, or a file that was exchanged, shows here."""
    asker = Asker(ROOT, read_project(ROOT), os.environ, tuple(stack.te for stack in catalog.stacks))
    for image in images.image:
        try:
            made = make_image_lock(images, image, asker)
        except NoEnvironment as missing:
            pytest.skip(f"not-run: {missing}")
        gone = [line for line in made.line.packages if not line.files]
        assert not gone, (image.target, gone)
    for made in (make_sessions_lock(images, asker), make_releases_lock(images, asker)):
        assert not made.line.packages, made.line
