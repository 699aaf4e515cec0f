"""An environment is whole or not there: built by real processes, some of which are killed in the middle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megacpp_validate.environments.build_cache import BuildCache, open_cache, run_tool
from megacpp_validate.environments.environment import NoEnvironment

# Writes half of an environment, says so, and waits to be let on.
BUILDER = """
import sys, time
from pathlib import Path
from megacpp_validate.environments.build_cache import BuildCache

root, runs, go = map(Path, sys.argv[1:])

def make(folder):
    (folder / "first").write_text("1")
    (runs / str(time.monotonic_ns())).touch()
    while not go.exists():
        time.sleep(0.01)
    (folder / "second").write_text("2")

print(BuildCache(root).build("venv-abc", make))
"""


def start(tmp_path: Path) -> subprocess.Popen[str]:
    (tmp_path / "runs").mkdir(exist_ok=True)
    words = [sys.executable, "-c", BUILDER, *(str(tmp_path / name) for name in ("root", "runs", "go"))]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def wait_for_runs(tmp_path: Path, count: int) -> None:
    end = time.monotonic() + 30
    while len(list((tmp_path / "runs").iterdir())) < count:
        assert time.monotonic() < end
        time.sleep(0.01)


def make_whole(folder: Path) -> None:
    (folder / "first").write_text("1")
    (folder / "second").write_text("2")


def is_whole(place: Path) -> bool:
    return (place / "first").is_file() and (place / "second").is_file()


def test_a_build_that_was_killed_is_never_used_and_is_made_again(tmp_path: Path) -> None:
    cache = BuildCache(tmp_path / "root")
    builder = start(tmp_path)
    wait_for_runs(tmp_path, 1)
    assert cache.find("venv-abc") is None  # half of it is there by now
    builder.send_signal(signal.SIGKILL)
    builder.communicate()
    assert cache.find("venv-abc") is None
    (tmp_path / "go").touch()
    again = start(tmp_path)
    assert again.communicate(timeout=30)[0].strip() == str(tmp_path / "root" / "venv-abc")
    assert is_whole(tmp_path / "root" / "venv-abc")
    assert list((tmp_path / "root" / ".making").iterdir()) == []  # what the killed one left is swept away


def test_several_processes_build_once_and_all_get_it(tmp_path: Path) -> None:
    builders = [start(tmp_path) for _ in range(4)]
    wait_for_runs(tmp_path, 1)
    time.sleep(0.3)
    (tmp_path / "go").touch()
    said = {builder.communicate(timeout=60)[0].strip() for builder in builders}
    assert said == {str(tmp_path / "root" / "venv-abc")}
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_who_waits_for_a_build_that_is_killed_builds_it(tmp_path: Path) -> None:
    first = start(tmp_path)
    wait_for_runs(tmp_path, 1)
    second = start(tmp_path)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    wait_for_runs(tmp_path, 2)
    (tmp_path / "go").touch()
    assert is_whole(Path(second.communicate(timeout=30)[0].strip()))


def test_a_build_that_hangs_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    builder = start(tmp_path)
    wait_for_runs(tmp_path, 1)
    with pytest.raises(NoEnvironment, match=r"another process .*Next step"):
        BuildCache(tmp_path / "root").build("venv-abc", make_whole, waits_s=0.5)
    builder.kill()
    builder.communicate()


def test_nothing_is_kept_of_a_failure(tmp_path: Path) -> None:
    cache = BuildCache(tmp_path)

    def fail(folder: Path) -> None:
        (folder / "first").write_text("1")
        raise NoEnvironment("the index does not answer")

    with pytest.raises(NoEnvironment, match="the index does not answer"):
        cache.build("venv-abc", fail)
    assert cache.find("venv-abc") is None
    assert list((tmp_path / ".making").iterdir()) == []
    assert is_whole(cache.build("venv-abc", make_whole))


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NoEnvironment, match=r"cannot be built in .*MEGACPP_ENVIRONMENTS"):
        BuildCache(tmp_path / "file").build("venv-abc", make_whole)


@pytest.mark.parametrize("key", ["", "../x", ".locks", "a/b", "A", "x" * 200])
def test_a_key_is_one_name(key: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no key"):
        BuildCache(tmp_path).build(key, make_whole)


def test_the_place_is_the_users_to_choose(tmp_path: Path) -> None:
    assert open_cache({"MEGACPP_ENVIRONMENTS": str(tmp_path)}).root == tmp_path
    assert open_cache({}).root.name == "envs"
    assert "megacpp-validate" in str(open_cache({}).root)


def run(script: str, limit_s: float = 30.0) -> str:
    how = {"deed": "the tool cannot", "cause": "it is a test", "step": "none"}
    return run_tool(["sh", "-c", script], os.environ, **how, limit_s=limit_s)


FAILURES: dict[str, tuple[str, str]] = {
    "its-words": (
        "echo no such wheel >&2; exit 2",
        r"the tool cannot \(exit status 2\)\. Output: no such wheel\. Likely",
    ),
    "the-last-of-many": ("seq 100000; echo last; exit 1", r"last\. Likely cause"),
    "no-words": ("exit 1", "Output: nothing"),
    "killed": ("kill -9 $$", "signal 9"),
    "too-slow": ("sleep 60", "killed after 1 s"),
}


@pytest.mark.parametrize(("script", "told"), FAILURES.values(), ids=FAILURES)
def test_a_tool_that_fails_is_told_with_its_own_last_words(script: str, told: str) -> None:
    with pytest.raises(NoEnvironment, match=told) as fault:
        run(script, limit_s=1.0 if script.startswith("sleep") else 30.0)
    assert len(str(fault.value)) < 2000


def test_a_tool_that_there_is_not_is_told() -> None:
    how = {"deed": "the tool cannot", "cause": "it is a test", "step": "install it"}
    with pytest.raises(NoEnvironment, match=r"No such file.*install it"):
        run_tool(["/no/such/tool"], {}, **how, limit_s=5.0)


HARMS: dict[str, Callable[[Path], object]] = {
    "removed": lambda place: (place / "second").unlink(),
    "cut-short": lambda place: (place / "second").write_text(""),
    "added": lambda place: (place / "lib" / "third").write_text("3"),
    "seal-cut-short": lambda place: (place / ".sealed.json").write_text("{"),
}


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_what_was_damaged_after_it_was_made_is_made_again(harm: Callable[[Path], object], tmp_path: Path) -> None:
    """Its receipts would say that they are of a lock, and it is not what the lock says any more."""

    def make(folder: Path) -> None:
        make_whole(folder)
        (folder / "lib").mkdir()

    cache = BuildCache(tmp_path)
    place = cache.build("venv-abc", make)
    (place / "lib" / "__pycache__").mkdir()
    (place / "lib" / "__pycache__" / "a.pyc").write_text("as Python writes there by itself")
    assert cache.find("venv-abc") == place
    harm(place)
    assert cache.find("venv-abc") is None
    assert is_whole(cache.build("venv-abc", make))
    assert not (place / "lib" / "third").exists()
