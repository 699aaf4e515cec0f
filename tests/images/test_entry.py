"""`docker run IMAGE SESSION`: what an image starts with, without a container round it."""

from __future__ import annotations

import errno
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from megacpp_validate.images.entry.machine import NOTHING, Gpu, Machine, read_machine
from megacpp_validate.images.entry.receipts import Place, Run, become_owner, choose_place, write_run
from megacpp_validate.images.entry.refusals import ImageFacts, Refusal, read_image, refuse_session
from megacpp_validate.images.entry.sessions import SESSIONS, find_session

from megacpp_validate.cli.app import app
from megacpp_validate.images.entry import __main__ as entry
from megacpp_validate.images.entry import caches
from megacpp_validate.jitcache.layout import cache_variables

ROOT = Path(__file__).resolve().parents[2]
H200 = ImageFacts("megacpp-validate h200", "h200", "sm_90", "580", "l", "")
B200 = ImageFacts("megacpp-validate b200", "b200", "sm_100", "580", "l", "")
CPU = ImageFacts("megacpp-validate cpu", "cpu", "", "", "l", "")
HOPPER = Gpu("NVIDIA H200", "sm_90")


def has(driver: str, *gpus: Gpu, devices: bool = True, library: bool = True) -> Machine:
    return Machine(driver, devices, library, gpus)


@pytest.mark.parametrize(
    ("name", "image", "machine", "code", "words"),
    [
        ("h200_parity", H200, NOTHING, 5, r"no GPU: h200_parity needs one \(sm_90\).*has no NVIDIA driver"),
        ("fp8", H200, has("580.95.05", devices=False, library=False), 5, r"no GPU was handed over.*--gpus all"),
        ("fp8", H200, has("570.124.06", HOPPER), 5, r"driver of this machine is 570.124.06.*needs 580 or newer"),
        ("fp8", H200, has("570.1", devices=False), 5, r"needs 580 or newer"),
        ("fp8", H200, has("580.1", devices=True, library=False), 5, r"can be asked.*NVIDIA_DRIVER_CAPABILITIES"),
        ("fp8", H200, has("580.1", Gpu("NVIDIA B200", "sm_100")), 5, r"another architecture.*B200 \(sm_100\).*b200"),
        ("fp8", B200, has("580.1", Gpu("NVIDIA B300", "sm_103")), 5, r"no image is made for sm_103: take a machine"),
        ("fp8", H200, has("580.1", HOPPER, Gpu("NVIDIA GB10", "sm_121")), 5, r"GB10 \(sm_121\)"),
        (
            "fp8",
            CPU,
            has("580.1", HOPPER),
            2,
            r"needs a GPU, and megacpp-validate cpu is made for machines without one",
        ),
        ("h200_parity", CPU, NOTHING, 2, r"a session of the image for h200, and megacpp-validate cpu is for cpu"),
        ("b200_parity", H200, has("580.1", HOPPER), 2, r"a session of the image for b200"),
        ("moe_smoke", H200, NOTHING, 5, r"no GPU: moe_smoke"),
    ],
)
def test_what_stands_in_the_way_is_said_in_words(
    name: str, image: ImageFacts, machine: Machine, code: int, words: str
) -> None:
    session = find_session(name)
    assert session is not None
    refusal = refuse_session(session, image, machine)
    assert refusal is not None
    assert refusal.code == code
    with pytest.raises(RuntimeError, match=words):
        raise RuntimeError(refusal.words)
    assert "Next step" in refusal.words


@pytest.mark.parametrize(
    ("name", "image", "machine"),
    [
        ("fp8", H200, has("580.95.05", HOPPER)),
        ("h200_parity", H200, has("610.43.02", HOPPER, HOPPER)),
        ("h200_parity", H200, has("580", HOPPER)),
        ("cpu_parity", H200, NOTHING),
        ("te-canary", CPU, NOTHING),
        ("doctor", H200, NOTHING),
        ("moe_smoke", CPU, NOTHING),
    ],
)
def test_what_can_run_is_let_run(name: str, image: ImageFacts, machine: Machine) -> None:
    session = find_session(name)
    assert session is not None
    assert refuse_session(session, image, machine) is None


def test_every_session_is_a_verb() -> None:
    for file in (ROOT / "megacpp_validate/cli").glob("*_verbs.py"):
        importlib.import_module(f"megacpp_validate.cli.{file.stem}")
    verbs = {row.name or getattr(row.callback, "__name__", "").replace("_", "-") for row in app.registered_commands}
    assert {session.verb[0] for session in SESSIONS} <= verbs


@pytest.mark.parametrize(
    "text",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23 10:11:16 UTC 2025\nGCC version: 13\n",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder)\n",
    ],
)
def test_the_driver_is_seen_where_no_gpu_was_handed_over(tmp_path: Path, text: str) -> None:
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text(text)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    assert read_machine(tmp_path, "no-such-library.so") == Machine("580.95.05", devices=False, library=False, gpus=())
    (tmp_path / "dev/nvidia0").touch()
    assert read_machine(tmp_path, "no-such-library.so").devices


def test_a_library_that_is_none_of_nvidias_is_no_gpu(tmp_path: Path) -> None:
    assert read_machine(tmp_path, "libc.so.6").gpus == ()


def test_what_an_image_says_of_itself() -> None:
    said = read_image({"MEGACPP_TARGET": "h200", "MEGACPP_ARCH": "sm_90", "MEGACPP_IMAGE_DIGEST": "sha256:1"})
    assert (said.target, said.arch, said.digest, said.name) == ("h200", "sm_90", "sha256:1", "this image")


# --- receipts ---------------------------------------------------------------------------------------------------------


def test_without_a_mount_receipts_stay_in_the_container(tmp_path: Path) -> None:
    place = choose_place(tmp_path / "not-mounted", tmp_path / "here")
    assert place == Place(tmp_path / "here", mounted=False)


def test_a_place_that_cannot_be_written_says_whose_it_is(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refusal = choose_place(tmp_path / "not-mounted", tmp_path / "file")
    assert isinstance(refusal, Refusal)
    assert refusal.code == 2
    assert f"--user {os.getuid()}:{os.getgid()}" in refusal.words


def test_only_root_becomes_somebody_else_and_only_for_a_mount(tmp_path: Path) -> None:
    assert become_owner(tmp_path) == ""
    assert os.geteuid() == os.getuid()


def test_the_record_of_a_run(tmp_path: Path) -> None:
    run = Run("doctor", ("--jobs", "2"), CPU, "5:5", "", (), "2026-11-22T17:00:00+00:00", 1.5, 4)
    write_run(Place(tmp_path, mounted=True), run)
    told = json.loads((tmp_path / "doctor.run.json").read_text())
    assert (told["exit_code"], told["image"]["target"], told["user"]) == (4, "cpu", "5:5")
    assert [file.name for file in tmp_path.iterdir()] == ["doctor.run.json"]


# --- JIT caches -------------------------------------------------------------------------------------------------------


def test_a_cache_that_cannot_be_written_gets_room_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "jit"
    (kept / "sm_90a/triton/ab").mkdir(parents=True)
    (kept / "sm_90a/triton/ab/k.cubin").write_bytes(b"kernel")
    given = {"A": "1", **cache_variables(kept, "sm_90a", nvrtc=True)}
    assert caches.make_room(given, tmp_path) == given, "one that can be written is taken as it is"
    monkeypatch.setattr(caches.os, "access", lambda _, how: how != os.W_OK)  # whoever is root may write everywhere
    made = caches.make_room(given, tmp_path / "tmp")
    assert made == {"A": "1", **cache_variables(tmp_path / "tmp/megacpp-jit", "sm_90a", nvrtc=True)}
    link = tmp_path / "tmp/megacpp-jit/sm_90a/triton/ab/k.cubin"
    assert link.is_symlink()
    assert link.read_bytes() == b"kernel"
    (link.parent / "new.cubin").write_bytes(b"a miss")
    assert not (kept / "sm_90a/triton/ab/new.cubin").exists()
    assert caches.make_room(given, tmp_path / "tmp") == made, "a second session finds it made"


@pytest.mark.parametrize("closed", ["jit", "jit/sm_90a/triton/ab/k.cubin"])
def test_caches_that_may_not_be_read_are_not_taken_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], closed: str
) -> None:
    (tmp_path / "jit/sm_90a/triton/ab").mkdir(parents=True)
    (tmp_path / "jit/sm_90a/triton/ab/k.cubin").touch()
    for name, value in cache_variables(tmp_path / "jit", "sm_90a", nvrtc=False).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(
        caches.os, "access", lambda path, how: how != os.W_OK and Path(path) != tmp_path / closed
    )  # whoever is root may read everything
    assert entry.main(["true"]) == 5
    said = capsys.readouterr().err
    assert f"{tmp_path / closed}. Likely cause" in said
    assert "chmod -R a+rX" in said


def test_a_folder_that_may_not_be_listed_closes_the_caches() -> None:
    with pytest.raises(caches.CachesClosed, match="/x/jit"):
        caches._close(PermissionError(13, "Permission denied", "/x/jit"))


def test_without_caches_nothing_is_made(tmp_path: Path) -> None:
    assert caches.make_room({"A": "1"}, tmp_path) == {"A": "1"}


# --- as a process -----------------------------------------------------------------------------------------------------


def start(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "megacpp_validate.images.entry", *words]
    environment = {**os.environ, "TMPDIR": str(folder), **variables}
    environment.pop("MEGACPP_JIT_ROOT", None)
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)


def test_help_lists_what_this_image_has(tmp_path: Path) -> None:
    done = start(tmp_path, MEGACPP_TARGET="h200", MEGACPP_ARCH="sm_90")
    assert done.returncode == 0
    assert "h200_parity" in done.stdout
    assert "b200_parity" not in done.stdout
    assert "--gpus all" in done.stdout


def test_an_unknown_session_is_refused_with_the_list(tmp_path: Path) -> None:
    done = start(tmp_path, "cpu_pariti")
    assert done.returncode == 2
    assert "there is no session 'cpu_pariti'" in done.stderr
    assert "cpu_parity" in done.stderr


NOWHERE = (
    "import sys, tempfile; tempfile._candidate_tempdir_list = lambda: ['/nowhere']; "
    "from megacpp_validate.images.entry.__main__ import main; sys.exit(main(sys.argv[1:]))"
)


def test_a_read_only_root_without_a_tmpfs_is_refused_in_words() -> None:
    command = [sys.executable, "-c", NOWHERE, "fp8_policy"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, "Traceback" in done.stderr) == (5, False), done.stderr
    assert "--tmpfs /tmp" in done.stderr


def test_caches_without_room_beside_them_are_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "jit/sm_90a").mkdir(parents=True)
    (tmp_path / "full").touch()
    for name, value in cache_variables(tmp_path / "jit", "sm_90a", nvrtc=False).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(caches.os, "access", lambda _, how: how != os.W_OK)
    monkeypatch.setattr(caches.tempfile, "gettempdir", lambda: str(tmp_path / "full"))
    monkeypatch.setattr(entry.shutil, "which", lambda name: name)
    assert [entry.main([name]) for name in ("true", "fp8_policy")] == [5, 5]
    assert capsys.readouterr().err.count("--tmpfs /tmp") == 2


def test_a_sealed_cache_is_verified_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links to its files would be refused, since they lead out of the cache; the verdict lies with the receipts."""
    given = cache_variables(tmp_path / "jit", "sm_90a", nvrtc=False)
    (tmp_path / "jit/sm_90a").mkdir(parents=True)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    started: dict[str, tuple[list[str], str]] = {}

    def run_child(words: list[str], variables: dict[str, str]) -> int:
        verb = words[words.index("megacpp_validate.cli") + 1]
        started[verb] = words, variables["MEGACPP_JIT_ROOT"]
        return 0

    monkeypatch.setattr(caches.os, "access", lambda _, how: how != os.W_OK)
    monkeypatch.setattr(caches.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(entry, "refuse_session", lambda *_: None)
    monkeypatch.setattr(entry, "choose_place", lambda: Place(tmp_path, mounted=True))
    monkeypatch.setattr(entry, "run_child", run_child)
    monkeypatch.setenv("MEGACPP_TARGET", "h200")
    assert [entry.main([name]) for name in ("jit_verify", "prewarm")] == [0, 0]
    words, root = started["jit-verify"]
    assert (root, words[-1]) == (str(tmp_path / "jit"), str(tmp_path / "jit_verify"))
    assert started["prewarm"][1] == str(tmp_path / "megacpp-jit")


def test_any_other_command_is_run_as_it_is(tmp_path: Path) -> None:
    done = start(tmp_path, "sh", "-c", "echo there; exit 3")
    assert (done.returncode, done.stdout) == (3, "there\n")


def test_a_session_runs_its_verb_and_leaves_a_record(tmp_path: Path) -> None:
    done = start(tmp_path, "fp8_policy", "--preset", "there-is-none", MEGACPP_LOCK_HASH="abc")
    told = json.loads((tmp_path / "receipts/fp8_policy.run.json").read_text())
    assert told["exit_code"] == done.returncode == 2
    assert (told["image"]["lock_hash"], told["arguments"]) == ("abc", ["--preset", "there-is-none"])


def run_in(folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str, child: Callable[[], int] = lambda: 0) -> int:
    """The entry point with a mounted folder, its verb replaced by a function."""
    monkeypatch.setattr(entry, "become_owner", lambda _: "")
    monkeypatch.setattr(entry, "choose_place", lambda: Place(folder, mounted=True))
    monkeypatch.setattr(entry, "run_child", lambda *_: child())
    monkeypatch.setenv("MEGACPP_TARGET", "cpu")
    return entry.main(words)


@pytest.mark.parametrize(("verb", "code"), [(0, 6), (1, 1)])
def test_a_run_without_its_record_has_not_gone_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: int, code: int
) -> None:
    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(entry, "write_run", fill)
    assert run_in(tmp_path, monkeypatch, "doctor", child=lambda: verb) == code
    assert "No space left on device. Likely cause: its disk is full" in capsys.readouterr().err


def test_a_run_that_is_killed_leaves_no_word_of_an_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("doctor.run.json", "doctor.json", "te_canary.json"):
        (tmp_path / name).write_text('{"exit_code": 0}')
    seen: list[str] = []

    def look() -> int:
        seen.extend(sorted(path.name for path in tmp_path.iterdir()))
        return 0

    assert run_in(tmp_path, monkeypatch, "doctor", "--help", child=look) == 0
    assert seen == ["doctor.json", "doctor.run.json", "te_canary.json"], "a question is no run"
    seen.clear()
    assert run_in(tmp_path, monkeypatch, "doctor", child=look) == 0
    assert seen == ["te_canary.json"]


@pytest.mark.parametrize("name", ["doctor.run.json", "doctor.json"])
def test_what_cannot_be_taken_away_is_said_before_the_session(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name / "mine").mkdir(parents=True)
    assert run_in(tmp_path, monkeypatch, "doctor", child=lambda: pytest.fail("it was started")) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path / name} of an earlier run cannot be taken away" in said
    assert (tmp_path / name / "mine").is_dir()


@pytest.mark.parametrize(("number", "code", "cause"), [
    (errno.EROFS, 2, "mounted read-only"), (errno.ENOSPC, 6, "disk is full"), (errno.EACCES, 2, "this container runs"),
])  # fmt: skip
def test_a_folder_that_cannot_be_written_says_why(
    number: int, code: int, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    place = choose_place(tmp_path, tmp_path)
    assert isinstance(place, Refusal)
    assert (place.code, cause in place.words) == (code, True)
