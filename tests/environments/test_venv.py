"""Virtual environments made by a real uv from locks with hashes, whole or not at all, whatever is killed and when."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from hashlib import sha256
from pathlib import Path

import pytest

from megacpp_validate.environments import venv
from megacpp_validate.environments.environment import NoEnvironment
from megacpp_validate.environments.interpreter import InterpreterEnvironment
from megacpp_validate.environments.venv import make_once, make_venv, run_tool

HASH = f"--hash=sha256:{'0' * 64}"


def make_wheel(folder: Path, body: str = "VERSION = '1.0'\n") -> str:
    """A wheel of a package `tiny` 1.0 in a folder; its SHA-256."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "tiny/__init__.py": body,
        "tiny-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n",
        "tiny-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "tiny-1.0.dist-info/entry_points.txt": "[console_scripts]\ntiny = tiny:main\n",
    }
    record = "".join(f"{name},,\n" for name in (*files, "tiny-1.0.dist-info/RECORD"))
    wheel = folder / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in {**files, "tiny-1.0.dist-info/RECORD": record}.items():
            archive.writestr(zipfile.ZipInfo(name), text)
    return sha256(wheel.read_bytes()).hexdigest()


def host(tmp_path: Path, **variables: str) -> InterpreterEnvironment:
    """An interpreter, uv, and a folder of wheels in place of every index."""
    uv = find_uv_or_skip()
    own = {
        "PATH": os.pathsep.join([str(uv.parent), os.defpath]), "UV_CACHE_DIR": str(tmp_path / "uv-cache"),
        "UV_OFFLINE": "1", "UV_NO_INDEX": "1", "UV_NO_CONFIG": "1", "UV_FIND_LINKS": str(tmp_path / "wheels"),
        "MEGACPP_ENVIRONMENTS": str(tmp_path / "envs"),
        **variables,
    }  # fmt: skip
    return InterpreterEnvironment((sys.executable,), own)


def find_uv_or_skip() -> Path:
    found = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if found is None:
        pytest.skip("not-run: there is no uv; it is in the dependency group `test`")
    if not subprocess.run([found, "--version"], capture_output=True, check=False).stdout.startswith(b"uv "):
        pytest.skip(f"not-run: {found} is a shim that leads to no uv")
    return Path(found)


def write_lock(tmp_path: Path, text: str) -> Path:
    lock = tmp_path / "Te 2.20.txt"
    lock.write_text(text)
    return lock


def ask(environment: InterpreterEnvironment, code: str) -> str:
    done = subprocess.run(
        [*environment.python, "-P", "-c", code],
        env=dict(environment.variables),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_an_environment_has_what_its_lock_says_and_this_package(tmp_path: Path) -> None:
    """A wheel made by hand stands for the index."""
    found = make_wheel(tmp_path / "wheels")
    lock = write_lock(tmp_path, f"# tiny\ntiny==1.0 \\\n    --hash=sha256:{found}\n")
    here = host(tmp_path, PYTHONPATH=str(tmp_path / "user"))
    made = make_venv(lock, here)
    code = (
        "import importlib.metadata as m, json, sys, tiny, megacpp_validate\n"
        "print(json.dumps([sorted(d.name for d in m.distributions()), tiny.VERSION, sys.prefix, sys.path]))"
    )
    names, version, prefix, path = json.loads(ask(made, code))
    assert (names, version) == (["tiny"], "1.0")
    assert prefix == made.variables["VIRTUAL_ENV"] == str(Path(made.python[0]).parents[1])
    assert str(tmp_path / "user") not in path
    assert made.lock_hash == sha256(lock.read_bytes()).hexdigest() == made.variables["MEGACPP_LOCK_HASH"]
    assert made.variables["PATH"].startswith(f"{prefix}/bin{os.pathsep}")
    assert make_venv(lock, here).identity == made.identity


def test_another_lock_and_another_choice_of_files_is_another_environment(tmp_path: Path) -> None:
    found = make_wheel(tmp_path / "wheels")
    text = f"tiny==1.0 --hash=sha256:{found}\n"
    first = make_venv(write_lock(tmp_path, text), host(tmp_path))
    other = make_venv(write_lock(tmp_path, f"# again\n{text}"), host(tmp_path))
    built = make_venv(write_lock(tmp_path, text), host(tmp_path, UV_NO_BUILD="1"))
    mirror = make_venv(write_lock(tmp_path, text), host(tmp_path, UV_HTTP_TIMEOUT="9"))
    assert len({first.python, other.python, built.python}) == 3
    assert mirror.python == first.python


REFUSED: dict[str, tuple[str, str]] = {
    "another-wheel-than-the-locks": (f"tiny==1.0 {HASH}\n", "[Hh]ash mismatch"),
    "not-in-the-index": (f"absent==1.0 {HASH}\n", "absent was not found"),
    "no-hash": ("tiny==1.0\n", "hash"),
    "no-version": (f"tiny>=1.0 {HASH}\n", "hash"),
}


@pytest.mark.parametrize(("text", "words"), REFUSED.values(), ids=REFUSED)
def test_a_lock_that_leaves_something_open_is_no_environment(text: str, words: str, tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels", "VERSION = 'not what was locked'\n")
    with pytest.raises(NoEnvironment, match=f"(?s)uv cannot make .*{words}.*Likely cause.*Next step"):
        make_venv(write_lock(tmp_path, text), host(tmp_path))
    assert not [place for place in (tmp_path / "envs").glob("venv-*") if place.is_dir()]


def test_a_lock_or_a_uv_that_there_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoEnvironment, match=r"cannot be read: .*Next step"):
        make_venv(tmp_path / "none.txt", host(tmp_path))
    bare = InterpreterEnvironment((sys.executable,), {"PATH": ""})
    monkeypatch.setattr(venv, "find_spec", lambda name: None)
    with pytest.raises(NoEnvironment, match=r"no uv.*pip install uv.*overlay"):
        make_venv(write_lock(tmp_path, f"tiny==1.0 {HASH}\n"), bare)


# --- whole, or not at all ---

# Writes half of an environment, reports it, and waits to be let on.
BUILDER = """
import sys, time
from pathlib import Path
from megacpp_validate.environments.venv import make_once

place, runs, go = map(Path, sys.argv[1:])

def make():
    place.mkdir()
    (place / "first").write_text("1")
    (runs / str(time.monotonic_ns())).touch()
    while not go.exists():
        time.sleep(0.01)
    (place / "second").write_text("2")

print(make_once(place, "state", make))
"""


def start(tmp_path: Path) -> subprocess.Popen[str]:
    (tmp_path / "runs").mkdir(exist_ok=True)
    words = [sys.executable, "-c", BUILDER, *(str(tmp_path / name) for name in ("env", "runs", "go"))]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def wait_for_runs(tmp_path: Path, count: int) -> None:
    end = time.monotonic() + 30
    while len(list((tmp_path / "runs").iterdir())) < count:
        assert time.monotonic() < end
        time.sleep(0.01)


def make_whole(place: Path) -> None:
    place.mkdir()
    (place / "first").write_text("1")
    (place / "second").write_text("2")


def test_who_waits_for_a_build_that_is_killed_builds_it_and_others_get_it(tmp_path: Path) -> None:
    first = start(tmp_path)
    wait_for_runs(tmp_path, 1)
    others = [start(tmp_path) for _ in range(3)]
    first.send_signal(signal.SIGKILL)
    first.communicate()
    wait_for_runs(tmp_path, 2)
    (tmp_path / "go").touch()
    place = tmp_path / "env"
    assert {other.communicate(timeout=60)[0].strip() for other in others} == {str(place)}
    assert {file.name for file in place.iterdir()} == {"first", "second", "installed"}
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_nothing_is_kept_of_a_failure_and_another_state_is_made_anew(tmp_path: Path) -> None:
    place = tmp_path / "envs" / "one"

    def fail() -> None:
        place.mkdir()
        raise NoEnvironment("the index does not answer")

    with pytest.raises(NoEnvironment, match="the index does not answer"):
        make_once(place, "state", fail)
    assert not place.exists()
    made: list[str] = []
    for state in ("state", "state", "another"):
        make_once(place, state, lambda: (make_whole(place), made.append("again")))
    assert len(made) == 2
    with pytest.raises(NoEnvironment, match=r"cannot be made in .*MEGACPP_ENVIRONMENTS"):
        make_once(place / "first" / "two", "state", fail)


def run(script: str, limit_s: float = 30.0) -> str:
    how = {"deed": "the tool cannot", "cause": "it is a test", "step": "none"}
    return run_tool(["sh", "-c", script], os.environ, **how, limit_s=limit_s)


FAILURES: dict[str, tuple[str, str]] = {
    "its-words": ("echo no such wheel >&2; exit 2", r"the tool cannot \(exit status 2\. Output: no such wheel\)"),
    "killed": ("kill -9 $$", "signal 9. Output: nothing"),
    "too-slow": ("sleep 60", "killed after 1 s"),
}


@pytest.mark.parametrize(("script", "words"), FAILURES.values(), ids=FAILURES)
def test_a_tool_that_fails_is_reported_with_its_own_last_words(script: str, words: str) -> None:
    with pytest.raises(NoEnvironment, match=words):
        run(script, limit_s=1.0 if script.startswith("sleep") else 30.0)
