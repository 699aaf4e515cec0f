"""The verbs of the release gate: exit codes, forms, signatures, and what is refused by name."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from megacpp_validate.catalog.bridge import matrix_folder
from megacpp_validate.evidence.receipt import Outcome, Package
from megacpp_validate.evidence.receipts_manifest import MANIFEST, NAMESPACE, SIGNATURE
from megacpp_validate.evidence.release_gate import GateDecision, GateRule
from tests.command_line import Run, Said, make_run
from tests.gate.release_receipts import STACK, fill, good, place, put, red

H200 = Path(__file__).parents[2] / "docs" / "evidence" / "h200"
OPEN, CLOSED, WRONG, MISSING, INFRASTRUCTURE = 0, 1, 2, 4, 6
AT = "2026-11-22T12:00:00+00:00"


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    call = make_run(capfd, monkeypatch)

    def run(*arguments: object, verb: str = "release-gate", at: str = AT) -> Said:
        return call(verb, *arguments, *(["--at", at] if verb == "release-gate" else []))

    return run


def test_each_answer_has_its_exit_code(run: Run, tmp_path: Path) -> None:
    store = fill(tmp_path / "store")
    assert run(store).code == OPEN
    assert run(H200 / "te2.17.1").code == CLOSED
    assert run(store, "--release", "weekly").code == WRONG
    assert run(store, "--commit", "abcdef").code == WRONG
    assert run(store, at="2026-11-21T12:00").code == MISSING  # before it was run
    place(store, "attention").unlink()
    assert run(store).code == MISSING
    put(store, red("permute"))
    assert run(store).code == CLOSED


def test_a_store_that_is_none_is_told(run: Run, tmp_path: Path) -> None:
    for nowhere in (tmp_path / "nowhere", Path(__file__), tmp_path / ("x" * 300)):
        assert run(nowhere).code == WRONG
    said = run(tmp_path)
    assert (said.code, "there is no receipt" in said.err) == (MISSING, True)
    said = run(H200)
    assert (said.code, "--stack" in said.err) == (WRONG, True)
    fill(tmp_path)
    put(tmp_path, good("attention", target="b200", hours=3.0))
    said = run(tmp_path)
    assert (said.code, "--target" in said.err) == (WRONG, True)
    assert run(tmp_path, "--target", "h200").code == OPEN


def test_a_damaged_matrix_is_told_with_all_its_faults(run: Run, tmp_path: Path) -> None:
    matrix = tmp_path / "matrix"
    shutil.copytree(matrix_folder(), matrix)
    path = matrix / "gate.toml"
    path.write_text(path.read_text().replace("expected-unsupported", "not-run"))
    said = run(fill(tmp_path / "store"), "--matrix", matrix)
    assert said.code == WRONG
    assert "counts.1" in said.err
    path.write_text((matrix_folder() / "gate.toml").read_text().replace('target = "h200"', 'target = "h300"', 1))
    assert "h300" in run(tmp_path / "store", "--matrix", matrix).err


def test_every_form_is_told_and_written_twice_the_same(run: Run, tmp_path: Path) -> None:
    store = fill(tmp_path / "store")
    for fmt, word in (("table", "✓ Open"), ("json", '"open": true'), ("junit", "<testsuites"), ("github", "::notice"),
                      ("markdown", "## ✓ Release gate open")):  # fmt: skip
        said = run(store, "--format", fmt)
        assert (said.code, word in said.out) == (OPEN, True), fmt
    output = tmp_path / "decision.json"
    assert run(store, "--format", "json", "--output", output).code == OPEN
    first = output.read_bytes()
    assert run(store, "--format", "json", "--output", output).code == OPEN
    assert output.read_bytes() == first
    assert GateDecision.model_validate(json.loads(first)).open
    assert run(store, "--format", "html").code == WRONG
    for name in ("decision.json", "decision.md", "run/receipts.sha256"):
        said = run(store, "--output", store / name, "--format", "json")
        assert (said.code, "lies in the folder" in said.err) == (WRONG, True)


def test_no_receipt_of_a_baseline_is_written_over(run: Run, tmp_path: Path) -> None:
    store, before = fill(tmp_path / "store"), fill(tmp_path / "before", stack="te2.12.0")
    old = next((before / "run").iterdir())
    text = old.read_text()
    said = run(store, "--baseline", before, "--format", "json", "--output", old)
    assert (said.code, "lies in the folder" in said.err, old.read_text() == text) == (WRONG, True, True)


def test_a_lock_that_is_pinned_and_not_there_is_not_dropped(run: Run, tmp_path: Path) -> None:
    """As in a package, which has the matrix and not the locks."""
    matrix = tmp_path / "matrix"
    shutil.copytree(matrix_folder(), matrix)
    with (matrix / "stacks.toml").open("a") as stream:
        stream.write('\n[[stack]]\nid = "locked"\nte = "2.20.2"\nlock = "containers/locks/locked.txt"\n')
    package = (Package("transformer_engine", "2.20.2", "/env"),)
    content = b"a == 1 --hash=sha256:0"
    store = fill(tmp_path / "store", stack="locked", packages=package, lock_hash=sha256(content).hexdigest())
    said = run(store, "--matrix", matrix)
    assert (said.code, "give --lock its SHA-256" in said.err) == (WRONG, True)
    assert run(store, "--matrix", matrix, "--lock", "0" * 64).code == MISSING
    assert run(store, "--matrix", matrix, "--lock", sha256(content).hexdigest()).code == OPEN
    (tmp_path / "containers" / "locks").mkdir(parents=True)
    (tmp_path / "containers" / "locks" / "locked.txt").write_bytes(content)
    assert run(store, "--matrix", matrix).code == OPEN
    (tmp_path / "containers" / "locks" / "locked.txt").write_bytes(b"another")
    assert run(store, "--matrix", matrix).code == MISSING


def test_what_a_receipt_says_steers_no_terminal(run: Run, tmp_path: Path) -> None:
    store = fill(tmp_path / "store")
    put(store, good("attention"), run="odd")
    path = place(store, "attention", "odd")
    path.write_text(path.read_text().replace(f'"stack": "{STACK}"', '"stack": "\\u001b[31mOWNED\\nfake line\\u202e"'))
    said = run(store)
    assert (said.code, "\\x1b[31mOWNED\\nfake line\\u202e" in said.err) == (WRONG, True)
    assert said.err.count("\n") == 1


def test_where_nothing_can_be_told_it_says_so(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = fill(tmp_path / "store")
    monkeypatch.setattr(sys, "stdout", None)
    for fmt in ("table", "json"):
        said = run(store, "--format", fmt)
        assert (said.code, "standard output is closed" in said.err) == (INFRASTRUCTURE, True)
    assert run(store, "--output", tmp_path / "told").code == OPEN


def test_a_baseline_is_of_one_stack(run: Run, tmp_path: Path) -> None:
    store = fill(tmp_path / "store")
    before = fill(tmp_path / "before", stack="te2.12.0")
    assert "compared with te2.12.0" in run(store, "--baseline", before).out
    put(before, good("attention", stack="te2.17.1"))
    assert run(store, "--baseline", before).code == WRONG
    assert run(store, "--baseline", tmp_path / "nowhere").code == WRONG


def test_a_baseline_is_older_and_of_other_receipts(run: Run, tmp_path: Path) -> None:
    store = fill(tmp_path / "store")
    shutil.copytree(store, tmp_path / "copy" / "deeper")
    for itself in (store, store / "run", tmp_path / "copy"):
        said = run(store, "--baseline", itself)
        assert (said.code, "compared with itself" in said.err) == (WRONG, True)
    before = fill(tmp_path / "before", stack="te2.12.0")
    put(before, good("attention", stack="te2.12.0", hours=-24 * 1000), run="later")
    said = run(store, "--baseline", before)
    assert (said.code, "after this decision" in said.err) == (WRONG, True)


def test_a_baseline_asked_for_what_is_judged(run: Run, tmp_path: Path) -> None:
    said = run(H200 / "te2.20.2", "--baseline", H200 / "native")
    assert (said.code, "asked for native, and te is judged" in said.err) == (WRONG, True)
    before = fill(tmp_path / "before", stack="te2.12.0")
    put(before, good("permute", stack="te2.12.0", requested="native", backends=()))
    assert run(fill(tmp_path / "store"), "--baseline", before).code == WRONG


def test_a_day_alone_is_over_when_it_is_judged(run: Run, tmp_path: Path) -> None:
    store = fill(tmp_path)
    assert run(store, at="2026-11-22").code == OPEN  # it was run at eleven
    said = run(store, "--format", "json", at="2026-11-21")
    assert (said.code, "--at names too early" in said.out) == (MISSING, True)
    for odd in ("9999-12-31", "0001-01-01T00:00:00+14:00", "yesterday"):
        assert run(store, at=odd).code == WRONG


def test_a_full_disk_leaves_the_old_decision(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, output = fill(tmp_path / "store"), tmp_path / "decision.json"
    output.write_text("the old one")
    flush = os.fsync

    def full(handle: int) -> None:
        flush(handle)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    said = run(store, "--format", "json", "--output", output)
    assert (said.code, "make room" in said.err) == (INFRASTRUCTURE, True)
    assert output.read_text() == "the old one"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_device_and_a_link_stay_what_they_are(run: Run, tmp_path: Path) -> None:
    store, link = fill(tmp_path / "store"), tmp_path / "link.json"
    assert run(store, "--output", os.devnull).code == OPEN
    link.symlink_to("whole.json")
    assert run(store, "--output", link).code == OPEN
    assert (link.is_symlink(), (tmp_path / "whole.json").is_file()) == (True, True)


def test_a_pipe_in_place_of_a_lock_holds_nobody(run: Run, tmp_path: Path) -> None:
    store = fill(tmp_path)
    os.mkfifo(store / ".lock")
    assert run(store).code == OPEN


@pytest.mark.parametrize("held", [".", ".lock"])
def test_two_at_once_are_told(held: str, run: Run, tmp_path: Path) -> None:
    store = fill(tmp_path / "store")
    (store / ".lock").touch()
    handle = os.open(store / held, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        said = run(store)
    finally:
        os.close(handle)
    assert (said.code, "Next step: wait" in said.err) == (INFRASTRUCTURE, True)
    assert run(store).code == OPEN


@pytest.mark.parametrize("runs", ["store/deep/er", "store", ".", "before/deep/er"])
def test_a_run_is_noticed_wherever_it_writes(
    runs: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, before = fill(tmp_path / "store"), fill(tmp_path / "before", stack="te2.12.0")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "link").symlink_to(store)
    monkeypatch.chdir(store)
    (tmp_path / runs).mkdir(parents=True, exist_ok=True)
    with (tmp_path / runs / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for asked in (".", tmp_path / "elsewhere" / "link"):
            said = run(asked, "--baseline", before)
            assert (said.code, "Next step: wait" in said.err) == (INFRASTRUCTURE, True)
        fcntl.flock(lock, fcntl.LOCK_SH)  # as another gate that looks
        assert run(".", "--baseline", before).code == OPEN


def make_key(key: Path) -> None:
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(key)]
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL)


@pytest.mark.skipif(not shutil.which("ssh-keygen"), reason="not-run: there is no ssh-keygen")
def test_a_signed_store_is_held_to_its_signature(run: Run, tmp_path: Path) -> None:
    store = fill(tmp_path / "store")
    key, signers = tmp_path / "key", tmp_path / "signers"
    make_key(key)
    signers.write_text(f'ci@team namespaces="{NAMESPACE}" {key.with_suffix(".pub").read_text()}')
    asked = (store, "--signers", signers, "--format", "json")
    assert run(*asked).code == MISSING  # not signed yet
    said = run(store, "--key", key, verb="receipts-sign")
    assert (said.code, "7 receipts signed" in said.out) == (OPEN, True)
    said = run(*asked)
    assert (said.code, json.loads(said.out)["signed_by"]) == (OPEN, "ci@team")

    def closed_by(says: str) -> None:
        said = run(*asked)
        decision = GateDecision.model_validate(json.loads(said.out))
        assert said.code == MISSING
        assert any(GateRule.SIGNATURE in row.rules and says in row.reasons[-1] for row in decision.closing)

    text = place(store, "attention").read_text()
    place(store, "attention").write_text(text.replace('"peak_memory_mib": 100.0', '"peak_memory_mib": 99.0'))
    closed_by("it was edited since ci@team signed it")
    place(store, "attention").write_text(text)
    assert run(*asked).code == OPEN
    put(store, good("fp8_delayed"), run="later")
    closed_by("it was not there when ci@team signed")
    shutil.rmtree(store / "later")
    place(store, "attention").rename(tmp_path / "attention.json")
    closed_by("it is not there")
    assert {MANIFEST, SIGNATURE} <= {path.name for path in store.iterdir()}


def test_what_is_no_receipt_is_not_signed(run: Run, tmp_path: Path) -> None:
    store = fill(tmp_path / "store")
    place(store, "attention").write_text("{")
    said = run(store, "--key", tmp_path / "key", verb="receipts-sign")
    assert (said.code, "was not signed" in said.err) == (MISSING, True)
    put(store, good("attention", outcome=Outcome.FAIL))
    said = run(store, "--key", tmp_path / "key", verb="receipts-sign")
    assert (said.code, "without a failed check" in said.err) == (MISSING, True)
    assert not (store / MANIFEST).exists()


@pytest.mark.skipif(not shutil.which("ssh-keygen"), reason="not-run: there is no ssh-keygen")
@pytest.mark.parametrize(("code", "number"), [(INFRASTRUCTURE, errno.ENOSPC), (WRONG, errno.EROFS)])
def test_a_folder_that_cannot_be_written_is_told(
    code: int, number: int, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, key = fill(tmp_path / "store"), tmp_path / "key"
    make_key(key)

    def refuse(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    said = run(store, "--key", key, verb="receipts-sign")
    assert (said.code, os.strerror(number) in said.err, "Next step" in said.err) == (code, True, True)
    assert sorted(path.name for path in store.iterdir()) == ["run"]
