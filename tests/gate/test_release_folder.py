"""The verbs of the release gate: runs that write, baselines, locks, and what is refused before anything is judged.

Each option and each signature is a scenario of `tests.replay`.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
from hashlib import sha256
from pathlib import Path

import pytest

from megacpp_validate.catalog.bridge import matrix_folder
from megacpp_validate.evidence.receipts_manifest import MANIFEST
from tests.command_line import Run, Said, make_run
from tests.replay.receipts import AT_WORDS, fill, good, package, place, put

H200 = Path(__file__).parents[2] / "docs" / "evidence" / "h200"
OPEN, CLOSED, WRONG, MISSING, INFRASTRUCTURE = 0, 1, 2, 4, 6
needs_ssh = pytest.mark.skipif(not shutil.which("ssh-keygen"), reason="not-run: there is no ssh-keygen")


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    call = make_run(capfd, monkeypatch)

    def run(*arguments: object, verb: str = "release-gate", at: str = AT_WORDS) -> Said:
        return call(verb, *arguments, *(["--at", at] if verb == "release-gate" else []))

    return run


def test_a_store_that_is_none_or_of_several_stacks(run: Run, tmp_path: Path) -> None:
    for nowhere in (tmp_path / "nowhere", Path(__file__), tmp_path / ("x" * 300)):
        assert run(nowhere).code == WRONG
    assert run(tmp_path).code == MISSING
    said = run(H200)
    assert (said.code, "--stack" in said.err) == (WRONG, True)
    fill(tmp_path)
    put(tmp_path, good("attention", target="b200", hours=3.0))
    said = run(tmp_path)
    assert (said.code, "--target" in said.err) == (WRONG, True)
    assert run(tmp_path, "--target", "h200").code == OPEN


def test_a_day_alone_is_over_when_it_is_judged(run: Run, tmp_path: Path) -> None:
    store = fill(tmp_path)
    assert run(store, at="2026-11-22").code == OPEN  # it was run at eleven
    assert run(store, at="2026-11-21").code == MISSING
    for odd in ("9999-12-31", "0001-01-01T00:00:00+14:00", "yesterday"):
        assert run(store, at=odd).code == WRONG


@pytest.mark.parametrize("fmt", ["table", "json", "html", "markdown", "junit", "github"])
def test_the_same_decision_is_written_twice_the_same_in_every_format(fmt: str, run: Run, tmp_path: Path) -> None:
    store, output = fill(tmp_path / "store"), tmp_path / "decision"
    assert run(store, "--format", fmt, "--output", output).code == OPEN
    first = output.read_bytes()
    assert run(store, "--format", fmt, "--output", output).code == OPEN
    assert output.read_bytes() == first


def test_nothing_is_written_among_the_receipts(run: Run, tmp_path: Path) -> None:
    store, before = fill(tmp_path / "store"), fill(tmp_path / "before", stack="te2.12.0")
    old = place(store, "attention")
    text = old.read_text()
    for name in (old, store / "decision.md", next((before / "run").iterdir())):
        assert run(store, "--baseline", before, "--output", name).code == WRONG
    assert old.read_text() == text


def test_a_baseline_is_of_one_stack_older_and_of_other_receipts(run: Run, tmp_path: Path) -> None:
    store = fill(tmp_path / "store")
    before = fill(tmp_path / "before", stack="te2.12.0", packages=[package("2.12.0")])
    assert run(store, "--baseline", before).code == OPEN
    put(before, good("attention", stack="te2.17.1"))
    assert run(store, "--baseline", before).code == WRONG
    later = fill(tmp_path / "later", stack="te2.12.0", hours=-24 * 1000)
    assert run(store, "--baseline", later).code == WRONG
    assert run(H200 / "te2.20.2", "--baseline", H200 / "native").code == WRONG  # requested native
    assert run(store, "--baseline", H200 / "te2.14.1").code == MISSING  # nothing good in it


def test_a_lock_that_is_pinned_and_not_there_is_not_dropped(run: Run, tmp_path: Path) -> None:
    """As in a package, which has the matrix and not the locks."""
    matrix, content = tmp_path / "matrix", b"a == 1 --hash=sha256:0"
    shutil.copytree(matrix_folder(), matrix)
    with (matrix / "stacks.toml").open("a") as stream:
        stream.write('\n[[stack]]\nid = "locked"\nte = "2.20.2"\nlock = "containers/locks/locked.txt"\n')
    digest = sha256(content).hexdigest()
    store = fill(tmp_path / "store", stack="locked", packages=[package("2.20.2")], lock_hash=digest)
    assert run(store, "--matrix", matrix).code == WRONG
    assert run(store, "--matrix", matrix, "--lock", "0" * 64).code == MISSING
    assert run(store, "--matrix", matrix, "--lock", digest).code == OPEN
    place_of = tmp_path / "containers" / "locks" / "locked.txt"
    place_of.parent.mkdir(parents=True)
    for text, code in ((content, OPEN), (b"another", MISSING)):
        place_of.write_bytes(text)
        assert run(store, "--matrix", matrix).code == code


@pytest.mark.parametrize("held", ["store/.lock", "store/deep/er/.lock", ".lock", "before/deep/.lock"])
def test_a_run_is_noticed_wherever_it_writes(held: str, run: Run, tmp_path: Path) -> None:
    store, before = fill(tmp_path / "store"), fill(tmp_path / "before", stack="te2.12.0")
    place_of = tmp_path / held
    place_of.parent.mkdir(parents=True, exist_ok=True)
    place_of.touch()
    handle = os.open(place_of, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert run(store, "--baseline", before).code == INFRASTRUCTURE
        fcntl.flock(handle, fcntl.LOCK_SH)  # as another gate that looks
        assert run(store, "--baseline", before).code == OPEN
    finally:
        os.close(handle)


def test_a_pipe_in_place_of_a_lock_holds_nobody(run: Run, tmp_path: Path) -> None:
    store = fill(tmp_path)
    os.mkfifo(store / ".lock")
    assert run(store).code == OPEN


def test_what_is_not_a_receipt_is_not_signed(run: Run, tmp_path: Path) -> None:
    store = fill(tmp_path / "store")
    for bad in ("{", json.dumps(good("attention", outcome="fail"), indent=2)):
        place(store, "attention").write_text(bad)
        assert run(store, "--key", tmp_path / "key", verb="receipts-sign").code == MISSING
    assert not (store / MANIFEST).exists()


@needs_ssh
@pytest.mark.parametrize(("code", "number"), [(INFRASTRUCTURE, errno.ENOSPC), (WRONG, errno.EROFS)])
def test_a_folder_that_cannot_be_written(
    code: int, number: int, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, key = fill(tmp_path / "store"), tmp_path / "key"
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(key)]
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL)

    def refuse(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    assert run(store, "--key", key, verb="receipts-sign").code == code
    assert sorted(path.name for path in store.iterdir()) == ["run"]
