"""`docker run IMAGE SESSION`: what an image starts with, without a container round it."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megacpp_validate.cli import app
from megacpp_validate.images import entry
from megacpp_validate.images.entry import (
    SESSIONS,
    ImageFacts,
    choose_place,
    find_session,
    read_image,
    run_main,
    use_caches,
)  # fmt: skip
from megacpp_validate.jitcache.layout import cache_variables

ROOT = Path(__file__).resolve().parents[2]
H200 = ImageFacts("megacpp-validate h200", "h200", "sm_90", "l", "")
CPU = ImageFacts("megacpp-validate cpu", "cpu", "", "l", "")


@pytest.mark.parametrize(
    ("name", "image", "runs"),
    [("fp8", H200, True), ("fp8", CPU, False), ("h200-parity", H200, True), ("h200_parity", CPU, False),
     ("b200_parity", H200, False), ("te_canary", CPU, True), ("moe_smoke", CPU, True)],
)  # fmt: skip
def test_which_sessions_an_image_has(name: str, image: ImageFacts, runs: bool) -> None:
    assert (find_session(name) in image.sessions) is runs


def test_every_session_is_a_verb() -> None:
    verbs = {row.name or getattr(row.callback, "__name__", "").replace("_", "-") for row in app.app.registered_commands}
    assert {session.verb[0] for session in SESSIONS} <= verbs


def test_what_an_image_has_in_its_variables() -> None:
    said = read_image({"MEGACPP_TARGET": "h200", "MEGACPP_ARCH": "sm_90", "MEGACPP_IMAGE_DIGEST": "sha256:1"})
    assert (said.target, said.arch, said.digest, said.name) == ("h200", "sm_90", "sha256:1", "this image")


@pytest.mark.parametrize(("number", "code"), [(errno.EROFS, 2), (errno.ENOSPC, 6), (errno.EACCES, 2)])
def test_a_folder_that_cannot_be_written(
    number: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert choose_place(tmp_path / "not-mounted") == (tmp_path / "receipts", False)

    def fail(**_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("tempfile.TemporaryFile", fail)
    monkeypatch.setenv("MEGACPP_TARGET", "cpu")
    assert run_main(["doctor"]) == code


# --- JIT caches -------------------------------------------------------------------------------------------------------


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root of caches that may not be written, though root may write everywhere."""
    (tmp_path / "jit/sm_90a/triton/ab").mkdir(parents=True)
    (tmp_path / "jit/sm_90a/triton/ab/k.cubin").write_bytes(b"kernel")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    for name, value in cache_variables(tmp_path / "jit", "sm_90a", nvrtc=True).items():
        monkeypatch.setenv(name, value)
    use_caches()
    assert os.environ["MEGACPP_JIT_ROOT"] == str(tmp_path / "jit"), "caches that can be written are taken as they are"
    monkeypatch.setattr(entry.os, "access", lambda _, how: how != os.W_OK)
    return tmp_path / "jit"


def test_a_cache_that_cannot_be_written_gets_room_beside_it(caches: Path, tmp_path: Path) -> None:
    for _ in range(2):  # a second session finds it made
        os.environ["MEGACPP_JIT_ROOT"] = str(caches)
        use_caches()
        made = cache_variables(tmp_path / "tmp/megacpp-jit", "sm_90a", nvrtc=True)
        assert {name: os.environ[name] for name in made} == made
    link = tmp_path / "tmp/megacpp-jit/sm_90a/triton/ab/k.cubin"
    assert (link.is_symlink(), link.read_bytes()) == (True, b"kernel")


@pytest.mark.parametrize("closed", ["jit", "jit/sm_90a/triton/ab/k.cubin", "tmp"])
def test_caches_that_may_not_be_read_are_not_taken_for_none(
    caches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], closed: str
) -> None:
    monkeypatch.setattr(entry.os, "access", lambda path, how: how != os.W_OK and Path(path) != tmp_path / closed)
    if closed == "tmp":
        (tmp_path / "full").touch()
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "full"))
    assert run_main(["true"]) == 5
    assert "chmod -R a+rX" in capsys.readouterr().err


# --- runs -------------------------------------------------------------------------------------------------------------


def run_in(folder: Path, patch: pytest.MonkeyPatch, *words: str, child: Callable[[], int] | None = None) -> int:
    """The entry point with a mounted folder; `child` takes the place of its verb."""
    patch.setattr(entry, "choose_place", lambda: (folder, True))
    if child is not None:
        patch.setattr(entry, "run_child", lambda *_: child())
    patch.setenv("MEGACPP_TARGET", "cpu")
    return run_main(words)


def test_a_run_that_is_killed_leaves_no_result_of_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("doctor.run.json", "doctor.json", "te_canary.json"):
        (tmp_path / name).write_text('{"exit_code": 0}')
    seen: list[list[str]] = []

    def look() -> int:
        seen.append(sorted(path.name for path in tmp_path.iterdir()))
        return 0

    assert run_in(tmp_path, monkeypatch, "doctor", "--help", child=look) == 0
    assert run_in(tmp_path, monkeypatch, "doctor", child=look) == 0
    assert seen == [["doctor.json", "te_canary.json"], ["te_canary.json"]]
    told = json.loads((tmp_path / "doctor.run.json").read_text())
    assert (told["exit_code"], told["image"]["target"], told["session"]) == (0, "cpu", "doctor")
    (tmp_path / "doctor.json").mkdir()
    assert run_in(tmp_path, monkeypatch, "doctor", child=lambda: pytest.fail("it was started")) == 6


def start(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "megacpp_validate.images.entry", *words]
    environment = {**os.environ, "TMPDIR": str(folder), **variables}
    environment.pop("MEGACPP_JIT_ROOT", None)
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)


def test_as_a_process(tmp_path: Path) -> None:
    done = start(tmp_path, MEGACPP_TARGET="h200", MEGACPP_ARCH="sm_90")
    assert (done.returncode, "h200_parity" in done.stdout, "b200_parity" in done.stdout) == (0, True, False)
    done = start(tmp_path, "cpu_pariti")
    assert (done.returncode, "there is no session 'cpu_pariti'" in done.stderr, "cpu_parity" in done.stderr) == (
        2, True, True
    )  # fmt: skip
    done = start(tmp_path, "fp8", MEGACPP_TARGET="cpu")
    assert (done.returncode, "a session of the image for a GPU" in done.stderr) == (2, True)
    done = start(tmp_path, "sh", "-c", "echo there; exit 3")
    assert (done.returncode, done.stdout) == (3, "there\n")
    done = start(tmp_path, "fp8_policy", "--preset", "there-is-none", MEGACPP_LOCK_HASH="abc")
    told = json.loads((tmp_path / "receipts/fp8_policy.run.json").read_text())
    assert told["exit_code"] == done.returncode == 2
    assert (told["image"]["lock_hash"], told["arguments"]) == ("abc", ["--preset", "there-is-none"])


# --- the process below process 1 --------------------------------------------------------------------------------------

WAITS = "import sys; from megacpp_validate.images.entry import run_child; sys.exit(run_child(sys.argv[1:]))"


@pytest.mark.parametrize(
    ("script", "number", "code", "says"),
    [
        ("echo up; exit 4", 0, 4, ""),
        ("echo up; kill -9 $$", 0, 6, "megacpp: signal 9 ended the session"),
        ("trap 'exit 9' TERM; echo up; while :; do sleep 0.05; done", signal.SIGTERM, 9, ""),
        ("echo up; exec sleep 60", signal.SIGTERM, 130, ""),
    ],
)
def test_signals_and_the_end(script: str, number: int, code: int, says: str) -> None:
    command = [sys.executable, "-c", WAITS, "sh", "-c", script]
    with subprocess.Popen(command, cwd=ROOT, stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        if number:
            process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, says in errors) == (code, True)
