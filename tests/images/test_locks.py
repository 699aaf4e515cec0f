"""`nox -s lock`: a small project with a registry and an index in folders; and the locks that are committed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megacpp_validate.catalog.bridge import Catalog, matrix_folder, read_catalog
from megacpp_validate.catalog.images import Image
from megacpp_validate.images import locks
from megacpp_validate.images.locks import gather_inputs, read_image_lock, read_pin, run_lock
from megacpp_validate.images.plan import ImageRows
from megacpp_validate.images.tools import ImageRefused, RegistryUnreachable, find_program, read_digest
from tests.command_line import Run, make_run
from tests.images.fake_tools import FakeRegistry, install
from tests.images.small_project import write_project, write_shelf, write_wheel

OPEN, CLOSED, WRONG = 0, 1, 2
ROOT = matrix_folder().parent
ROWS = ImageRows(read_catalog(), {})
LOCKS = ("containers/locks/h200.txt", "containers/locks/cpu.txt", "containers/locks/releases.txt")


# --- what is committed ------------------------------------------------------------------------------------------------


def test_the_locks_that_are_committed_are_fresh() -> None:
    result = run_lock(ROWS, check=True)
    assert (result.exit, result.refusals) == (0, ()), "run nox -s lock, and commit what it writes"
    assert {ROOT / lock.file for lock in result.locks} == {*(ROOT / "containers/locks").iterdir()}


def test_an_edit_of_any_lock_is_found_and_the_step_is_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    read, file = locks.read_file, "containers/locks/h200-te2.19.0.txt"
    monkeypatch.setattr(locks, "read_file", lambda place: read(place) + "rich==1\n" * (place == ROOT / file))
    assert [lock.file for lock in run_lock(ROWS, check=True).locks if lock.stale] == [file]
    with pytest.raises(ImageRefused, match=r"is edited by hand.*`./nox -s lock -- --te 2\.19\.0`"):
        read_image_lock(ROOT / file)


def test_the_stack_that_is_pinned_is_the_one_that_is_locked(catalog: Catalog) -> None:
    for image in ROWS.images.image:
        lock = read_image_lock(ROOT / image.lock)
        if image.te:
            assert image.te == catalog.pinned.te
            assert lock.packages["transformer-engine-torch"].version == catalog.pinned.te
            assert len(lock.packages["transformer-engine-torch"].hashes) == 1  # a source release, compiled in the image
        else:
            assert lock.packages["torch"].version == "2.13.0+cpu"


# What a lock follows from, changed one at a time: each makes it older than the matrix.
@pytest.mark.parametrize(
    "change",
    [
        lambda image: {"groups": ["torch-cpu"]}, lambda image: {"over": image.over[:1]},
        lambda image: {"base": "debian-bookworm"},
    ],
)  # fmt: skip
def test_a_lock_that_is_older_than_the_matrix(change: Callable[[Image], dict[str, Any]]) -> None:
    image = ROWS.images.image[0]
    changed = gather_inputs(ROWS.images, image.model_copy(update=change(image)), ROOT)
    with pytest.raises(ImageRefused, match=r"older than the matrix.*Next step: `./nox -s lock`"):
        read_image_lock(ROOT / image.lock, changed.hash)
    with pytest.raises(ImageRefused, match=r"is missing.*nox -s lock"):
        read_image_lock(ROOT / "none.txt")


# --- the verb ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeRegistry:
    if find_program("uv", os.environ) is None:
        pytest.skip("not-run: there is no uv")
    variables = install(tmp_path / "bin", "docker", MEGACPP_REGISTRY_MIRROR="mirror.invalid")
    index = {"UV_FIND_LINKS": str(tmp_path / "shelf"), "UV_OFFLINE": "1", "UV_DEFAULT_INDEX": "https://index.invalid"}
    for name, value in {**variables, **index, "UV_CACHE_DIR": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    return FakeRegistry(Path(variables["FAKE_REGISTRY"]), "mirror.invalid/stack")


@pytest.fixture
def root(tmp_path: Path, registry: FakeRegistry) -> Path:
    write_project(tmp_path, registry.put_index("1"))
    write_shelf(tmp_path / "shelf")
    return tmp_path


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, root: Path) -> Run:
    call = make_run(capfd, monkeypatch)
    return lambda *arguments: call(*arguments, "--matrix", root / "matrix")


def kept(root: Path) -> dict[str, str]:
    files = (place for place in sorted((root / "containers").rglob("*")) if place.is_file())
    return {str(place.relative_to(root)): place.read_text() for place in files}


def lock(run: Run, code: int, *words: str) -> dict[str, Any]:
    """The result of the verb, which ends with an exit code."""
    said = run("lock", *words, "--format", "json")
    assert said.code == code, said
    found: dict[str, Any] = json.loads(said.out)
    return found


def stale(result: dict[str, Any]) -> list[str]:
    return [line["file"] for line in result["locks"] if line["stale"]]


def test_from_nothing_to_fresh(root: Path, run: Run) -> None:
    assert stale(lock(run, CLOSED, "--check")) == list(LOCKS)
    assert kept(root) == {}  # to look writes nothing
    made = lock(run, OPEN)
    assert (made["written"], [pin["news"] for pin in made["pins"]]) == ([*LOCKS], ["verified"])
    before = kept(root)
    assert (lock(run, OPEN)["written"], kept(root)) == ([], before)
    assert (stale(lock(run, OPEN, "--check")), kept(root)) == ([], before)
    for name in LOCKS:  # a digit of a hash, or of a version where there are no hashes
        digit = before[name].rindex("0")
        (root / name).write_text(before[name][:digit] + "1" + before[name][digit + 1 :])
        edited = lock(run, CLOSED, "--check")
        assert (stale(edited), edited["refusals"]) == ([name], []), "the file that was edited is named, and no other"
        assert f"`# content:`): {name}. Next step: `./nox -s lock`" in run("lock", "--check").flat
        if name == LOCKS[0]:  # nor does anything that reads it take it, whatever is written beside it
            assert run("images", "h200").code == CLOSED
        (root / name).write_text(before[name])
    write_wheel(root / "shelf", "leaf", "1.1")
    assert lock(run, OPEN, "h200")["written"] == []  # a version is kept until it is named
    assert [run("lock", "h200", "--upgrade", *more).code for more in (["nope"], ["leaf", "--check"])] == [WRONG, WRONG]
    assert lock(run, OPEN, "h200", "--upgrade", "leaf")["written"] == [LOCKS[0]]


def test_a_digest_that_changed_under_its_tag(root: Path, run: Run, registry: FakeRegistry) -> None:
    new = registry.put_index("1", salt="pushed again")
    (refusal,) = lock(run, CLOSED)["refusals"]
    assert (new in refusal, kept(root)) == (True, {})  # not the locks either
    (registry.root / "down").touch()
    assert [pin["news"] for pin in lock(run, OPEN)["pins"]] == ["kept"]


def test_a_stack_that_does_not_fit_is_not_written(root: Path, run: Run) -> None:
    file = root / "matrix" / "images.toml"
    rows = file.read_text().replace('["cublas", "13.6"]', '["cublas", "13.1"]')
    file.write_text(rows.replace("requirements = [", 'requirements = ["transformer-engine-torch==2.14.1", '))
    lock(run, CLOSED)
    assert kept(root) == {}


# --- digests of bases -------------------------------------------------------------------------------------------------


def test_what_a_registry_says_of_a_base(tmp_path: Path) -> None:
    variables = install(tmp_path / "bin", "docker", MEGACPP_REGISTRY_MIRROR="mirror.invalid")
    with pytest.raises(ImageRefused, match=r"has no mirror.invalid/nvidia/pytorch:26\.07-py3"):
        read_pin(ROWS.images.find_base("ngc-26.07"), variables)
    Path(variables["FAKE_REGISTRY"], "down").touch()
    for tools in (variables, {**variables, "PATH": "/nowhere"}):
        assert read_pin(ROWS.images.base[0], tools).news == "kept"
        with pytest.raises(RegistryUnreachable):
            read_digest("mirror.invalid/x:1", tools)
