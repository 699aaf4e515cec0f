"""`nox -s lock` as a whole: on a project of a few files, with a registry in this process and a folder for an index."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from megacpp_validate.images.tools import find_program
from tests.command_line import Run, make_run
from tests.images.fake_tools import FakeRegistry, install
from tests.images.small_project import write_project, write_shelf, write_wheel

OPEN, CLOSED, WRONG, INFRASTRUCTURE = 0, 1, 2, 6
LOCKS = ("containers/locks/h200.txt", "containers/locks/cpu.txt", "containers/locks/releases.txt")
PINS = "containers/pins.json"
BAKE = "containers/docker-bake.json"


@pytest.fixture(autouse=True)
def _uv() -> None:
    if find_program("uv", os.environ) is None:
        pytest.skip("not-run: there is no uv")


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeRegistry:
    variables = install(tmp_path / "bin", "docker", MEGACPP_REGISTRY_MIRROR="mirror.invalid")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    one = FakeRegistry(Path(variables["FAKE_REGISTRY"]), "mirror.invalid/stack")
    one.put_index("1")
    return one


@pytest.fixture
def root(tmp_path: Path, registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_project(tmp_path)
    write_shelf(tmp_path / "shelf")
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path / "shelf"))
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://index.invalid")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
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


def pin(root: Path) -> str:
    return str(json.loads((root / PINS).read_text())["pins"][0]["index_digest"])


def test_from_nothing_to_fresh(root: Path, run: Run) -> None:
    assert stale(lock(run, CLOSED, "--check")) == list(LOCKS)
    assert kept(root) == {}  # to look writes nothing
    # The claimed digest of the small project is none that a registry gives.
    assert lock(run, OPEN, "--accept", "1")["written"] == [PINS, *LOCKS, BAKE]
    before = kept(root)
    assert pin(root) in before[BAKE]
    assert (lock(run, OPEN)["written"], kept(root)) == ([], before)
    assert (stale(lock(run, OPEN, "--check")), kept(root)) == ([], before)
    (root / BAKE).write_text(before[BAKE].replace(pin(root), "sha256:" + "e" * 64))
    assert BAKE in lock(run, CLOSED, "--check")["refusals"][0]
    (root / BAKE).write_text(before[BAKE])
    for name in LOCKS:  # a digit of a hash, or of a version where there are no hashes
        digit = before[name].rindex("0")
        (root / name).write_text(before[name][:digit] + "1" + before[name][digit + 1 :])
        edited = lock(run, CLOSED, "--check")
        assert (stale(edited), edited["refusals"]) == ([name], []), "the file that was edited is named, and no other"
        if name == LOCKS[0]:  # nor does anything that reads it take it, whatever is written beside it
            assert run("images", "h200").code == CLOSED
        (root / name).write_text(before[name])


@pytest.mark.thorough
def test_another_file_under_the_same_version_is_refused(root: Path, run: Run) -> None:
    """As a digest that changed under its tag is. A lock that nobody edited had another file of leaf 1.0."""
    lock(run, OPEN, "--accept", "1")
    before = kept(root)
    write_wheel(root / "shelf", "leaf", "1.0", "tool")
    assert "no longer has files of leaf 1.0," in lock(run, CLOSED, "h200")["refusals"][0]
    assert kept(root) == before
    lock(run, OPEN, "h200", "--upgrade", "leaf")
    assert kept(root)[LOCKS[0]] != before[LOCKS[0]]


def test_a_digest_that_changed_under_its_tag(root: Path, run: Run, registry: FakeRegistry) -> None:
    assert "the matrix claims it (somebody says so)" in lock(run, CLOSED)["refusals"][0]
    assert kept(root) == {}
    lock(run, OPEN, "--accept", "1")
    before, pinned = kept(root), pin(root)
    new = registry.put_index("1", salt="pushed again")
    write_wheel(root / "shelf", "leaf", "1.1")
    (refusal,) = lock(run, CLOSED, "--upgrade", "all")["refusals"]
    assert all(text in refusal for text in (pinned, new, "--accept 1"))
    assert kept(root) == before  # not the locks either
    lock(run, OPEN, "--accept", "1")
    assert pin(root) == new


@pytest.mark.thorough
@pytest.mark.parametrize(("change", "code"), [("no claim", INFRASTRUCTURE), ("does not fit", CLOSED)])
def test_what_is_not_written(root: Path, run: Run, registry: FakeRegistry, change: str, code: int) -> None:
    file = root / "matrix" / "images.toml"
    rows = file.read_text()
    if change == "no claim":  # a base without any digest
        file.write_text(rows[: rows.index("[[claim]]")] + rows[rows.index("[[image]]") :])
        Path(registry.root, "down").touch()
    else:
        rows = rows.replace('["cublas", "13.6"]', '["cublas", "13.1"]')
        file.write_text(rows.replace("requirements = [", 'requirements = ["transformer-engine==2.14.1", '))
    lock(run, code, "--accept", "1")
    assert kept(root) == {}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["x100"], "no image for x100"), (["--check", "--upgrade", "all"], "--check takes neither")],
)
def test_wrong_arguments(run: Run, arguments: list[str], says: str) -> None:
    said = run("lock", *arguments)
    assert (said.code, says in said.err) == (WRONG, True)
