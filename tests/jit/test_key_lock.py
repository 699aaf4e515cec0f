"""A lock on a key: one holder, whoever dies, and none is robbed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from megacpp_validate.jit.key_lock import KeyLock, new_owner, read_owner


def test_one_has_it_and_the_next_when_it_is_let_go(tmp_path: Path) -> None:
    first, second = KeyLock(tmp_path, "key"), KeyLock(tmp_path, "key")
    assert first.take()
    assert not second.take()
    assert second.holder() == first.owner
    assert not second.is_gone(first.owner)
    assert first.owner.words() == f"process {os.getpid()} of {first.owner.host}"
    first.drop()
    assert second.holder() is None
    assert second.take()
    second.drop()
    assert os.listdir(tmp_path) == []  # noqa: PTH208 - hidden files too


def test_a_holder_that_was_killed_is_followed_at_once_also_before_anyone_waited_for_it(tmp_path: Path) -> None:
    words = (
        f"from pathlib import Path; from megacpp_validate.jit.key_lock import KeyLock\n"
        f"print(KeyLock(Path({str(tmp_path)!r}), 'key').take(), flush=True)\nimport time; time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", words], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "True\n"
    lock = KeyLock(tmp_path, "key")
    found = lock.holder()
    assert found is not None
    assert found.pid == holder.pid
    assert not lock.is_gone(found)
    holder.kill()
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # dead, and still in the table of processes
    assert lock.is_gone(found)
    holder.communicate()
    assert lock.is_gone(found)
    assert lock.follow(found)
    assert lock.holder() == lock.owner


def test_of_two_that_judged_one_holder_one_follows_and_a_new_holder_is_never_robbed(tmp_path: Path) -> None:
    dead, one, other, third = (KeyLock(tmp_path, "key") for _ in range(4))
    assert dead.take()
    assert one.follow(dead.owner)
    assert not other.follow(dead.owner)  # it judged the one before
    assert other.holder() == one.owner
    dead.drop()  # it was not dead: only slow
    assert other.holder() == one.owner
    assert not third.take()


def on_another_host(tmp_path: Path, lock: KeyLock) -> KeyLock:
    """A holder of whom this host knows nothing but its file."""
    lock.owner = replace(lock.owner, host="elsewhere", kernel="other-boot")
    lock._mine = lock.place / lock.owner.name
    assert lock.take()
    return lock


def test_another_host_is_judged_by_its_signs_of_life_in_the_time_of_the_file_system(tmp_path: Path) -> None:
    far, near = on_another_host(tmp_path, KeyLock(tmp_path, "key")), KeyLock(tmp_path, "key", stale_s=30.0)
    place = tmp_path / "key" / far.owner.name
    assert not near.is_gone(far.owner)
    old = time.time() - 31
    os.utime(place, (old, old))
    assert near.is_gone(far.owner)
    far.beat()
    assert not near.is_gone(far.owner)
    os.utime(place, (old, old))
    assert near.follow(far.owner)
    assert near.holder() == near.owner
    assert time.time() - (tmp_path / "key" / near.owner.name).stat().st_mtime < 20  # not judged by the old time
    assert [name for name in os.listdir(tmp_path) if name != "key"] == []  # noqa: PTH208


def test_the_clock_of_this_host_counts_for_nothing(tmp_path: Path, monkeypatch: object) -> None:
    far, near = on_another_host(tmp_path, KeyLock(tmp_path, "key")), KeyLock(tmp_path, "key", stale_s=30.0)
    wrong = time.time() + 86_400
    monkeypatch.setattr(time, "time", lambda: wrong)  # type: ignore[attr-defined]
    assert not near.is_gone(far.owner)


def test_what_is_left_by_who_died_between_two_steps_is_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / "key").mkdir()
    (tmp_path / ".0123456789ab").mkdir()
    (tmp_path / "key" / "notes.txt").touch()
    lock = KeyLock(tmp_path, "key")
    assert lock.holder() is None
    assert not lock.take()  # a file that is no owner's: nobody knows what it means, and nothing is deleted
    (tmp_path / "key" / "notes.txt").unlink()
    assert lock.take()


def test_a_number_that_another_process_has_now_is_not_the_holder(tmp_path: Path) -> None:
    lock = KeyLock(tmp_path, "key")
    mine = new_owner()
    assert not lock.is_gone(mine)
    assert lock.is_gone(replace(mine, began=mine.began - 1))
    assert read_owner(mine.name) == mine
    assert read_owner("notes.txt") is None
