"""A project of a few files, with an index of a few wheels: what `nox -s lock` works on, with no network."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

from megacpp_validate.catalog.bridge import matrix_folder

IMAGES = """
everywhere = []

[[base]]
id = "stack"
repository = "registry.invalid/stack"
tag = "1"
digest = "{digest}"
verified = ""
python = "3.11"
glibc = "2.36"
provides = [["torch", "2.13.0a0+abc"], ["cudnn", "9.24"], ["cublas", "13.6"], ["numpy", ""], ["old", "1.0"]]
stands_for = ["nvidia-cublas"]
driver_least = "580"
source = "a test"

[[image]]
target = "h200"
base = "stack"
platform = "linux/amd64"
cache_arch = "sm_90a"
lock = "containers/locks/h200.txt"
groups = ["more"]
requirements = ["top", "old>=2"]
over = [{{ name = "old", why = "a test" }}]
sources = []
steps = ["packages"]
jit = []
user = 1000

[sessions]
lock = "containers/locks/cpu.txt"
python = "3.11"
groups = ["more"]
without = []

[releases]
lock = "containers/locks/releases.txt"
distribution = "transformer-engine"
"""
RELEASES = ("2.12.0", "2.20.2")
STACKS = 'pinned = "te2.20.2"\n' + "".join(f'[[stack]]\nid = "te{one}"\nte = "{one}"\n' for one in RELEASES)
PROJECT = """
[project]
name = "small"
version = "1"
dependencies = ["tool>=1"]

[dependency-groups]
more = ["leaf"]
"""


def write_project(root: Path, digest: str) -> None:
    """A checkout with the project's own matrix, but for images.toml, whose base has a digest."""
    shutil.copytree(matrix_folder(), root / "matrix", dirs_exist_ok=True)
    (root / "matrix" / "images.toml").write_text(IMAGES.format(digest=digest))
    (root / "matrix" / "stacks.toml").write_text(STACKS)
    (root / "pyproject.toml").write_text(PROJECT)


def write_wheel(shelf: Path, name: str, version: str, *requires: str) -> Path:
    shelf.mkdir(parents=True, exist_ok=True)
    stem = f"{name.replace('-', '_')}-{version}"
    place = shelf / f"{stem}-py3-none-any.whl"
    told = "".join(f"Requires-Dist: {one}\n" for one in requires)
    with zipfile.ZipFile(place, "w") as wheel:
        for file, text in {
            f"{stem}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{told}",
            f"{stem}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            f"{stem}.dist-info/RECORD": "",
        }.items():
            wheel.writestr(zipfile.ZipInfo(file), text)
    return place


def write_shelf(shelf: Path) -> Path:
    """What the small project asks for: a tool, a stack over torch, and what the base has already."""
    write_wheel(shelf, "tool", "1.0")
    write_wheel(shelf, "leaf", "1.0")
    write_wheel(shelf, "top", "1.0", "torch>=2.12", "numpy>=1", "nvidia-cublas", "leaf")
    write_wheel(shelf, "old", "2.0")
    write_wheel(shelf, "transformer-engine-torch", "2.14.1")
    for release in (*RELEASES, "2.14.1"):
        write_wheel(shelf, "transformer-engine", release)
    for provided in ("torch", "numpy", "nvidia-cublas"):
        write_wheel(shelf, provided, "99.0")  # an index has them as well, and later
    return shelf
