"""A folder aside is gone when its process is: at once, or when the next one is made."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from megacpp_validate.jitcache import aside
from megacpp_validate.jitcache.aside import folder_aside
from tests.sealed_caches import put


def _be_killed(parent: Path) -> None:
    """In a child: with a gigabyte half copied, as it were."""
    child = os.fork()
    if child == 0:
        with folder_aside(parent, ".import-") as folder:
            put(folder / "sm_90a" / "half.cubin", b"half")
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


def test_it_is_gone_afterwards(tmp_path: Path) -> None:
    with folder_aside(tmp_path / "new", ".import-") as folder:
        put(folder / "sm_90a" / "a.cubin", b"a")
    assert list((tmp_path / "new").iterdir()) == []


def test_what_a_killed_process_left_goes_and_what_lives_stays(tmp_path: Path) -> None:
    put(tmp_path / ".import-of-a-person" / "file", b"without a lock")
    with folder_aside(tmp_path, ".import-") as living:
        _be_killed(tmp_path)
        assert len(list(tmp_path.iterdir())) == 3
        with folder_aside(tmp_path, ".import-") as other:
            assert {path.name for path in tmp_path.iterdir()} == {".import-of-a-person", living.name, other.name}
    assert [path.name for path in tmp_path.iterdir()] == [".import-of-a-person"]


def test_that_of_another_machine_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its locks need not be seen here."""
    _be_killed(tmp_path)
    put(tmp_path / "boot", b"another\n")
    monkeypatch.setattr(aside, "_BOOT", tmp_path / "boot")
    with folder_aside(tmp_path, ".import-"):
        assert len(list(tmp_path.glob(".import-*"))) == 2


def test_a_machine_without_such_locks_still_has_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aside, "_BOOT", tmp_path / "nothing")
    with folder_aside(tmp_path, ".import-") as folder:
        assert list(folder.iterdir()) == []
    assert list(tmp_path.iterdir()) == []
