"""`nox -s lock` as a whole: on a project of a few files, with a registry in this process and a folder for an index."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megacpp_validate.images.tools import find_program
from tests.command_line import Run, Said, make_run
from tests.images.fake_tools import FakeRegistry, install
from tests.images.small_project import write_project, write_shelf, write_wheel

OPEN, CLOSED, WRONG, NO_ENVIRONMENT, INFRASTRUCTURE = 0, 1, 2, 5, 6
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


def accept_claim(run: Run) -> Said:
    """The claimed digest of the small project is none that a registry gives."""
    return run("lock", "--accept", "1")


def test_from_nothing_to_fresh(root: Path, run: Run) -> None:
    assert run("lock", "--check").code == CLOSED
    assert kept(root) == {}  # to look writes nothing
    said = accept_claim(run)
    assert said.code == OPEN, said
    assert f"Written: {', '.join((PINS, *LOCKS, BAKE))}." in said.out
    before = kept(root)
    assert set(before) == {*LOCKS, PINS, BAKE}
    pinned = json.loads(before[PINS])["pins"][0]["index_digest"]
    assert pinned in before[BAKE]
    again = run("lock")
    assert (again.code, kept(root)) == (OPEN, before)
    assert "Written: nothing" in again.out
    fresh = run("lock", "--check")
    assert (fresh.code, kept(root)) == (OPEN, before)
    assert "Pins and locks are what the matrix says." in fresh.out
    (root / BAKE).write_text(before[BAKE].replace(pinned, "sha256:" + "e" * 64))
    edited = run("lock", "--check")
    assert edited.code == CLOSED
    assert f"{BAKE} does not match the matrix, the pins and the locks" in edited.flat
    (root / BAKE).write_text(before[BAKE])
    for name in LOCKS:  # a digit of a hash, or of a version where there are no hashes
        digit = before[name].rindex("0")
        (root / name).write_text(before[name][:digit] + "1" + before[name][digit + 1 :])
        edited = run("lock", "--check")
        assert edited.code == CLOSED, name
        assert "edited by hand" in edited.flat
        assert BAKE not in edited.out, "the file that was edited is named, and no other"
        if name == LOCKS[0]:  # nor does anything that reads it take it, whatever is written beside it
            built = run("images", "h200")
            assert built.code == CLOSED
            assert f"{LOCKS[0]} was edited by hand" in " ".join(built.err.split())
        (root / name).write_text(before[name])
    assert run("lock", "--check").code == OPEN


@pytest.mark.thorough
def test_then_another_file_under_the_same_version_is_refused(root: Path, run: Run) -> None:
    """As a digest that changed under its tag is. A lock that nobody edited had another file of leaf 1.0."""
    accept_claim(run)
    before = kept(root)
    write_wheel(root / "shelf", "leaf", "1.0", "tool")
    said = run("lock", "h200")
    assert (said.code, kept(root)) == (CLOSED, before)
    assert "the index no longer has files of leaf 1.0," in said.out
    assert "--upgrade leaf" in said.out
    assert run("lock", "h200", "--upgrade", "leaf").code == OPEN
    assert kept(root)[LOCKS[0]] != before[LOCKS[0]]


@pytest.mark.thorough
def test_then_a_lock_older_than_the_matrix(root: Path, run: Run) -> None:
    accept_claim(run)
    text = (root / "pyproject.toml").read_text()
    (root / "pyproject.toml").write_text(text.replace('"tool>=1"', '"tool>=1", "leaf>=0.1"'))
    said = run("lock", "--check")
    assert said.code == CLOSED
    assert f"Older than the matrix: {LOCKS[0]}, {LOCKS[1]}." in said.out
    assert run("lock", "h200").code == OPEN
    assert f"Older than the matrix: {LOCKS[1]}." in run("lock", "--check").out


def test_a_digest_that_changed_under_its_tag(root: Path, run: Run, registry: FakeRegistry) -> None:
    refused = run("lock")
    assert refused.code == CLOSED
    assert "the matrix claims it (somebody says so)" in refused.flat
    assert kept(root) == {}
    accept_claim(run)
    before = kept(root)
    pinned = json.loads(before[PINS])["pins"][0]["index_digest"]
    new = registry.put_index("1", salt="pushed again")
    write_wheel(root / "shelf", "leaf", "1.1")
    said = run("lock", "--upgrade", "all")
    assert said.code == CLOSED
    assert pinned in said.out
    assert new in said.out
    assert "--accept 1" in said.out
    assert kept(root) == before  # not the locks either
    assert run("lock", "--accept", "1").code == OPEN
    assert json.loads((root / PINS).read_text())["pins"][0]["index_digest"] == new


@pytest.mark.thorough
def test_then_a_registry_that_is_down(root: Path, run: Run, registry: FakeRegistry) -> None:
    Path(registry.root, "down").touch()
    said = run("lock")
    assert said.code == OPEN
    assert "No registry has confirmed the digest of stack yet." in said.out
    assert json.loads((root / PINS).read_text())["pins"] == []
    assert "sha256:" + "1" * 64 in (root / BAKE).read_text(), "the claim of the matrix counts"


@pytest.mark.thorough
def test_then_a_base_without_any_digest_is_not_fine(root: Path, run: Run, registry: FakeRegistry) -> None:
    rows = (root / "matrix" / "images.toml").read_text()
    at = rows.index("[[claim]]")
    (root / "matrix" / "images.toml").write_text(rows[:at] + rows[rows.index("[[image]]") :])
    Path(registry.root, "down").touch()
    said = run("lock")
    assert said.code == INFRASTRUCTURE
    assert "There is no digest of stack" in said.out
    assert "connection refused" in said.flat
    assert kept(root) == {}


@pytest.mark.thorough
def test_then_what_does_not_fit_is_not_written(root: Path, run: Run) -> None:
    rows = (root / "matrix" / "images.toml").read_text()
    rows = rows.replace('["cublas", "13.6"]', '["cublas", "13.1"]')
    rows = rows.replace("requirements = [", 'requirements = ["transformer-engine==2.14.1", ')
    (root / "matrix" / "images.toml").write_text(rows)
    said = run("lock", "--accept", "1")
    assert said.code == CLOSED
    assert "Transformer Engine 2.14.1 does not fit" in said.out
    assert "install nvidia-cublas>=13.2" in said.out
    assert kept(root) == {}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["x100"], "no image for x100"),
        (["--check", "--upgrade", "all"], "--check takes neither"),
    ],
)
def test_wrong_arguments(run: Run, arguments: list[str], says: str) -> None:
    said = run("lock", *arguments)
    assert said.code == WRONG
    assert says in said.err
