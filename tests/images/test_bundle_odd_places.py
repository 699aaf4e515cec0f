"""Restoring from and into what is no plain file or folder, and being stopped: told by cause, and nothing is left."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from megacpp_validate.images.bundle.restore import door, folders
from megacpp_validate.images.bundle.restore.door import main
from megacpp_validate.images.bundle.restore.listing import MOST_LISTED
from tests.images.small_bundle import order_of, write_small, write_sources
from tests.images.small_registry import SmallRegistry, served
from tests.images.small_signer import Signer
from tests.running_processes import hearing_signals

ONE = Signer(0xFACE)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("odd")
    with served(SmallRegistry()) as registry:
        write_sources(folder)
        order = order_of(registry, folder)
        order.lock.write_text("# no wheels, so no pip\n")
        yield write_small(order, {}, sign=lambda path: ONE.sign(path.read_bytes())).folder


@pytest.fixture
def bundle(written: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(written, tmp_path / "bundle"))


def restore(bundle: Path, *words: str) -> int:
    return main(["--bundle", str(bundle), *words])


@pytest.mark.parametrize("name", ["bundle.json", "SHA256SUMS", "bundle.json.sig", "lock.txt"])
def test_a_pipe_is_not_waited_for(name: str, bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (bundle / name).unlink()
    os.mkfifo(bundle / name)
    assert restore(bundle) == 1
    assert f"  {name}: is no plain file, but a link or a device\n" in capsys.readouterr().err


def test_caches_are_for_the_users_of_containers_too(bundle: Path, tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        assert restore(bundle, "--jit", str(tmp_path / "jit")) == 0
    finally:
        os.umask(before)
    closed = [path for path in (tmp_path / "jit", *(tmp_path / "jit").rglob("*")) if not path.stat().st_mode & 0o004]
    assert closed == []
    assert (tmp_path / "jit").stat().st_mode & 0o777 == 0o755


def test_a_list_without_an_end_is_not_read(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.truncate(bundle / "bundle.json", MOST_LISTED + 1)  # sparse: it takes no room
    assert restore(bundle) == 1
    assert f"bundle.json: has {MOST_LISTED + 1} bytes, and no list has" in capsys.readouterr().err


def test_a_link_to_a_folder_is_told_once_and_not_its_files(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (bundle / "jit").rename(bundle.with_name("elsewhere"))
    (bundle / "jit").symlink_to(bundle.with_name("elsewhere"))
    (bundle / "lock.txt").unlink()
    (bundle / "lock.txt").mkdir()
    assert restore(bundle) == 1
    said = capsys.readouterr().err
    assert "  jit: is no plain file, but a link or a device\n" in said
    assert "  lock.txt: is a folder, and should be a file\n" in said
    assert "is missing" not in said


def test_what_may_not_be_read_is_not_missing(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As another user sees it; root may read everything, so that what the kernel would say is said for it."""
    real = os.scandir

    def scan(path: str | Path) -> object:
        if Path(path).name == "jit":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scan)
    assert restore(bundle) == 6
    said = capsys.readouterr().err
    assert "somebody else's, or may not be read" in said
    assert "is missing" not in said


@pytest.mark.parametrize("option", ["--unpack", "--jit"])
def test_a_file_in_the_way_is_not_a_damaged_disk(
    option: str, bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    for place, words in (("file", "is there, and is no folder"), ("file/below", "cannot be made: Not a directory")):
        assert restore(bundle, option, str(tmp_path / place)) == 5
        assert words in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_that_is_somebody_elses(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, code in ((errno.EACCES, 5), (errno.EROFS, 5), (errno.ENOSPC, 6)):

        def refuse(_: Path, number: int = number, **__: object) -> None:
            raise OSError(number, os.strerror(number), "x")

        with monkeypatch.context() as patch:
            patch.setattr(folders.Path, "mkdir", refuse)
            assert restore(bundle, "--unpack", str(tmp_path / "there")) == code


def test_a_link_to_an_empty_folder_is_that_folder(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "dangling").symlink_to(tmp_path / "new")
    for link, real in (("link", "real"), ("dangling", "new")):
        assert restore(bundle, "--jit", str(tmp_path / link)) == 0
        assert (tmp_path / real / "cpu/manifest.json").is_file()
        assert (tmp_path / link).is_symlink()


@pytest.mark.parametrize("words", [
    ["--id", ""], ["--id", "abc"], ["--push", ""], ["--unpack", ""], ["--jit", ""], ["--venv", ""], ["--key", ""],
    ["--key", "{0}/lock.txt"], ["--jobs", "0"], ["--jobs", "-1"], ["--bundle", ""], ["--bundle", "{0}/lock.txt"],
    ["--bundle", "/nonexistent"],
])  # fmt: skip
def test_a_variable_without_a_value_is_a_wrong_argument(
    words: list[str], bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(SystemExit) as ended:
        restore(bundle, *(word.format(bundle) for word in words))
    assert ended.value.code == 2
    assert "error: " in capsys.readouterr().err
    assert not any((tmp_path / "here").iterdir())


def test_an_id_in_capitals_is_the_same(bundle: Path) -> None:
    name = sha256((bundle / "bundle.json").read_bytes()).hexdigest()
    for told in (name, name.upper(), f"sha256:{name}"):
        assert restore(bundle, "--id", told) == 0


def test_a_key_that_came_with_the_bundle_is_called_that(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.pub").write_text(ONE.key)
    assert restore(bundle, "--key", str(tmp_path / "own.pub")) == 0
    assert "came with the bundle" not in capsys.readouterr().out
    assert door._say_signer(bundle, bundle / "cosign.pub").endswith("so nobody knows whose it is")


def test_an_archive_without_the_image_is_refused_before_anything_is_pushed(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = json.loads((bundle / "bundle.json").read_text())
    manifest["image"]["digest"] = f"sha256:{'0' * 64}"
    old = sha256((bundle / "bundle.json").read_bytes()).hexdigest()
    (bundle / "bundle.json").write_text(json.dumps(manifest))
    new = sha256((bundle / "bundle.json").read_bytes()).hexdigest()
    sums = (bundle / "SHA256SUMS").read_text()
    (bundle / "SHA256SUMS").write_text(sums.replace(old, new))
    with served(SmallRegistry()) as registry:
        assert restore(bundle, "--push", f"{registry.host}/small") == 1
        assert f"image.tar: does not hold sha256:{'0' * 64}" in capsys.readouterr().err
        assert (registry.blobs, registry.manifests) == ({}, {})


WAITS = """
import sys, time
from megacpp_validate.images.bundle.restore import door
def verify(*_):
    print("up", flush=True)
    time.sleep(60)
door.verify = verify
for number in door._ENDING:
    door._hear(number)
sys.exit(door.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_being_asked_to_end_leaves_nothing_half_done(number: int, written: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-c", WAITS, "--bundle", str(written), "--unpack", str(tmp_path / "there")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with hearing_signals(), subprocess.Popen(words, cwd=ROOT, text=True, **pipes) as process:
        assert process.stdout is not None
        assert "verifying" in process.stdout.readline()
        assert process.stdout.readline() == "up\n"
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
    assert (process.returncode, "interrupted" in said) == (130, True), said
    assert not any(tmp_path.iterdir())
