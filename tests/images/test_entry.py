"""`docker run IMAGE SESSION`: what an image starts with, without a container round it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megacpp_validate.cli import app
from megacpp_validate.images import entry
from megacpp_validate.images.entry import (
    SESSIONS,
    ImageFacts,
    choose_place,
    plan_session,
    run_main,
    use_caches,
)  # fmt: skip
from megacpp_validate.jitcache.layout import cache_variables

ROOT = Path(__file__).resolve().parents[2]
H200 = ImageFacts("megacpp-validate h200", "h200", "sm_90")
CPU = ImageFacts("megacpp-validate cpu", "cpu", "")


def test_every_session_is_a_verb() -> None:
    verbs = {row.name or getattr(row.callback, "__name__", "").replace("_", "-") for row in app.app.registered_commands}
    assert {session.verb[0] for session in SESSIONS} <= verbs


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
    for name, value in cache_variables(tmp_path / "jit", "sm_90a").items():
        monkeypatch.setenv(name, value)
    use_caches()
    assert os.environ["MEGACPP_JIT_ROOT"] == str(tmp_path / "jit"), "caches that can be written are taken as they are"
    monkeypatch.setattr(entry.os, "access", lambda _, how: how != os.W_OK)
    return tmp_path / "jit"


def test_a_cache_that_cannot_be_written_gets_room_beside_it(caches: Path, tmp_path: Path) -> None:
    for _ in range(2):  # a second session finds it made
        os.environ["MEGACPP_JIT_ROOT"] = str(caches)
        use_caches()
        made = cache_variables(tmp_path / "tmp/megacpp-jit", "sm_90a")
        assert {name: os.environ[name] for name in made} == made
    link = tmp_path / "tmp/megacpp-jit/sm_90a/triton/ab/k.cubin"
    assert (link.is_symlink(), link.read_bytes()) == (True, b"kernel")


def test_without_room_for_temporary_files_nothing_starts(
    caches: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`docker run --read-only IMAGE doctor`: `tempfile` finds no folder; one for receipts is mounted."""
    monkeypatch.setattr("tempfile.gettempdir", (caches / "nowhere").read_text)  # raises FileNotFoundError
    monkeypatch.setattr("os.path.ismount", lambda _: True)
    assert [run_main([name]) for name in ("doctor", "cpu_parity", "true")] == [5, 5, 5]
    monkeypatch.delenv("MEGACPP_JIT_ROOT")  # caches that can be written need no room; a session does
    assert (run_main(["doctor"]), capsys.readouterr().err.count("--tmpfs /tmp")) == (5, 4)


@pytest.mark.parametrize("closed", ["jit", "jit/sm_90a/triton/ab/k.cubin", "tmp"])
def test_caches_that_may_not_be_read_are_not_taken_for_none(
    caches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], closed: str
) -> None:
    monkeypatch.setattr(entry.os, "access", lambda path, how: how != os.W_OK and Path(path) != tmp_path / closed)
    if closed == "tmp":
        monkeypatch.setattr("tempfile.tempdir", __file__)
    assert run_main(["true"]) == 5
    assert "chmod -R a+rX" in capsys.readouterr().err


# --- runs -------------------------------------------------------------------------------------------------------------


def test_the_command_of_a_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "choose_place", lambda: (tmp_path, True))
    result = tmp_path / "doctor.json"
    result.write_text('{"of": "an earlier run"}')
    doctor, moe = (next(one for one in SESSIONS if one.name == name) for name in ("doctor", "moe_smoke"))
    assert "--json" not in plan_session(doctor, ["--help"], CPU)
    assert result.exists()
    assert plan_session(doctor, ["--limit", "9"], CPU)[-7:] == [
        "doctor", "--target", "cpu", "--json", str(result), "--limit", "9",
    ]  # fmt: skip
    assert not result.exists(), "a session that is killed would leave the result of another run"
    assert plan_session(moe, [], H200)[-2:] == ["--receipts", str(tmp_path / "moe_smoke")]
    result.mkdir()
    assert run_main(["doctor"]) == 6


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
    done = start(tmp_path, "fp8_policy", "--preset", "there-is-none")
    assert (done.returncode, "there-is-none" in done.stderr) == (2, True)
