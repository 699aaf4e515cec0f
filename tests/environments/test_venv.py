"""Virtual environments made by a real uv from locks with hashes; a wheel made by hand stands for the index."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from hashlib import sha256
from pathlib import Path

import pytest

from megacpp_validate.environments import venv
from megacpp_validate.environments.build_cache import BuildCache
from megacpp_validate.environments.environment import NoEnvironment
from megacpp_validate.environments.interpreter import InterpreterEnvironment
from megacpp_validate.environments.venv import find_uv, make_venv, read_lock

HASH = f"--hash=sha256:{'0' * 64}"
REAL = (
    "iniconfig==2.3.1 \\\n"
    "    --hash=sha256:67f4b9c50da0dedf52af349e7749a80a9057a5031199791b906c3bb3ae878960 \\\n"
    "    --hash=sha256:9121e2c1fdb355232495be3194c8dfe87ccc2d5dee45947b78e68f499790d7a7\n"
)


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
    found = make_wheel(tmp_path / "wheels")
    lock = read_lock(write_lock(tmp_path, f"# tiny\ntiny==1.0 \\\n    --hash=sha256:{found}\n"))
    here = host(tmp_path, PYTHONPATH=str(tmp_path / "user"))
    made = make_venv(lock, here, BuildCache(tmp_path / "envs"))
    code = (
        "import importlib.metadata as m, json, sys, tiny, megacpp_validate\n"
        "print(json.dumps([sorted(d.name for d in m.distributions()), tiny.VERSION, sys.prefix, sys.path]))"
    )
    names, version, prefix, path = json.loads(ask(made, code))
    assert (names, version) == (["tiny"], "1.0")
    assert prefix == made.variables["VIRTUAL_ENV"] == str(Path(made.python[0]).parents[1])
    assert str(tmp_path / "user") not in path
    assert made.lock_hash == lock.hash == made.variables["MEGACPP_LOCK_HASH"]
    assert made.variables["PATH"].startswith(f"{prefix}/bin{os.pathsep}")
    script = Path(prefix, "bin", "tiny").read_text()
    assert ".making" not in script  # it was moved into its place, and is not asked to know it
    assert make_venv(lock, here, BuildCache(tmp_path / "envs")).identity == made.identity


def test_another_lock_and_another_choice_of_files_is_another_environment(tmp_path: Path) -> None:
    found = make_wheel(tmp_path / "wheels")
    text = f"tiny==1.0 --hash=sha256:{found}\n"
    cache = BuildCache(tmp_path / "envs")
    first = make_venv(read_lock(write_lock(tmp_path, text)), host(tmp_path), cache)
    other = make_venv(read_lock(write_lock(tmp_path, f"# again\n{text}")), host(tmp_path), cache)
    built = make_venv(read_lock(write_lock(tmp_path, text)), host(tmp_path, UV_NO_BUILD="1"), cache)
    mirror = make_venv(read_lock(write_lock(tmp_path, text)), host(tmp_path, UV_HTTP_TIMEOUT="9"), cache)
    assert len({first.python, other.python, built.python}) == 3
    assert mirror.python == first.python


def test_a_wheel_that_is_another_than_the_locks_is_no_environment(tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels", "VERSION = 'not what was locked'\n")
    lock = read_lock(write_lock(tmp_path, f"tiny==1.0 {HASH}\n"))
    with pytest.raises(NoEnvironment, match=r"(?i)uv cannot install .*hash mismatch.*Likely cause.*Next step"):
        make_venv(lock, host(tmp_path), BuildCache(tmp_path / "envs"))
    assert not list((tmp_path / "envs").glob("venv-*"))


def test_a_package_that_the_index_lacks_is_told_in_uvs_words(tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels")
    lock = read_lock(write_lock(tmp_path, f"absent==1.0 {HASH}\n"))
    with pytest.raises(NoEnvironment, match=r"absent was not found"):
        make_venv(lock, host(tmp_path), BuildCache(tmp_path / "envs"))


@pytest.mark.network
def test_a_real_lock_from_the_real_index(tmp_path: Path) -> None:
    uv = find_uv_or_skip()
    variables = {**os.environ, "PATH": os.pathsep.join([str(uv.parent), os.environ["PATH"]])}
    here = InterpreterEnvironment((sys.executable,), variables)
    try:
        made = make_venv(read_lock(write_lock(tmp_path, REAL)), here, BuildCache(tmp_path / "envs"))
    except NoEnvironment as fault:
        if "hash" in str(fault).lower().partition("likely cause")[0]:
            raise
        pytest.skip(f"not-run: {fault}")
    assert ask(made, "import importlib.metadata as m; print(m.version('iniconfig'))") == "2.3.1"


LOCKS: dict[str, tuple[str, str]] = {
    "no-hash": ("one==1.0\ntwo==2.0 " + HASH + "\n", r"line 1: one==1\.0 has no hash"),
    "no-hash-with-a-marker": ("# c\n\none==1.0 ; python_version < '4'\n", r"line 3: one==1\.0 has no hash"),
    "no-hash-over-lines": (f"a==1 {HASH}\none==1.0 \\\n    ; python_version < '4'\n", r"line 2: one==1\.0 has no hash"),
    "a-hash-in-a-comment": (f"one==1.0  # {HASH}\n", r"line 1: one==1\.0 has no hash"),
    "half-a-hash": ("one==1.0 --hash=sha256:abc\n", r"line 1: one==1\.0 has no hash"),
    "an-old-hash": (f"one==1.0 --hash=md5:{'0' * 32}\n", r"line 1: one==1\.0 has no hash"),
    "no-version": (f"one>=1.0 {HASH}\n", r"line 1: one>=1\.0 has no one version"),
    "another-file": (f"-r more.txt\none==1.0 {HASH}\n", r"line 1: -r more\.txt leads out"),
    "editable": (f"one==1.0 {HASH}\n-e .\n", r"line 2: -e \. leads out"),
    "nothing": ("# later\n", r"names no package"),
    "every-one": ("a==1\nb==1\nc==1\nd==1\ne==1\nf==1\ng==1\n", r"line 1: .*line 5: .*and 2 more"),
}


@pytest.mark.parametrize(("text", "told"), LOCKS.values(), ids=LOCKS)
def test_a_lock_that_leaves_something_open_is_refused(text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(NoEnvironment, match=rf"{told}.*Likely cause.*generate-hashes"):
        read_lock(write_lock(tmp_path, text))


def test_a_lock_as_uv_writes_it(tmp_path: Path) -> None:
    text = (
        f"# made by uv\n--index-url https://example.invalid/simple\n{REAL}"
        f"six==1.17.0 ; python_version < '4' \\\n    {HASH}\n"
        f"tool @ https://example.invalid/tool-1.0-py3-none-any.whl#sha256=1 \\\n    {HASH}\n    # via six\n"
    )
    assert read_lock(write_lock(tmp_path, text)).hash == sha256(text.encode()).hexdigest()


def test_a_lock_that_there_is_not(tmp_path: Path) -> None:
    with pytest.raises(NoEnvironment, match=r"cannot be read.*Next step"):
        read_lock(tmp_path / "none.txt")


def test_no_uv_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(venv, "find_spec", lambda name: None)
    with pytest.raises(NoEnvironment, match=r"no uv.*pip install uv.*overlay"):
        find_uv({"PATH": ""})
    monkeypatch.setattr(venv, "find_spec", lambda name: name)
    assert find_uv({"PATH": ""}) == (sys.executable, "-m", "uv")
