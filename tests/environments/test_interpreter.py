"""The host's interpreter and stack: found, started with nothing of the tool's own environment, and told."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from megacpp_validate.environments import interpreter
from megacpp_validate.environments.interpreter import (
    PACKAGE,
    InterpreterEnvironment,
    find_libraries,
    host_interpreter,
    own_interpreter,
    put_over,
    read_commit,
    read_facts,
    require_torch,
)
from megacpp_validate.errors import NoEnvironment
from megacpp_validate.process import Processes
from tests.environments.site_folders import make_package, make_te

ROOT = PACKAGE.parent
THIS = f'exec {sys.executable} "$@"'


@pytest.fixture
def no_torch_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the tool's own environment on a GPU host."""
    monkeypatch.setattr(interpreter, "find_spec", lambda name: None)


def fake_python(folder: Path, script: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "python3"
    file.write_text(f"#!/bin/sh\n{script or THIS}\n")
    file.chmod(0o755)
    return file


def test_what_is_wanted_beats_the_variable_and_that_beats_the_path(tmp_path: Path) -> None:
    one, two = fake_python(tmp_path / "one"), fake_python(tmp_path / "two")
    variables = {"PATH": "/usr/bin:/bin", "MEGACPP_PYTHON": str(two)}
    assert host_interpreter(variables, str(one)).python == (str(one),)
    assert host_interpreter(variables).python == (str(two),)
    assert host_interpreter(variables).because == "MEGACPP_PYTHON"


def test_the_first_python_of_the_host_not_the_tools(tmp_path: Path, no_torch_here: None) -> None:
    """A virtual environment that is active, or the one that runs nox, is not the host's stack."""
    host = fake_python(tmp_path / "host" / "bin")
    path = os.pathsep.join([str(Path(sys.prefix) / "bin"), "", str(ROOT / ".venv" / "bin"), str(host.parent)])
    assert host_interpreter({"PATH": path}).python == (str(host),)
    assert host_interpreter({"PATH": str(Path(sys.prefix) / "bin")}).python == (sys.executable,)


def test_an_installed_package_is_reached_through_a_door_that_shows_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside it, in the tool's environment, lie a pydantic and a numpy that the host's stack must not import."""
    site = tmp_path / "site-packages"
    (site / "megacpp_validate").mkdir(parents=True)
    (site / "megacpp_validate" / "__init__.py").write_text("HERE = True\n")
    (site / "pydantic.py").write_text("raise SystemExit('of another Python')\n")
    monkeypatch.setattr(interpreter, "PACKAGE", site / "megacpp_validate")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = host_interpreter({"PATH": ""}, str(fake_python(tmp_path / "host")))
    code = "import megacpp_validate, pydantic; print(megacpp_validate.HERE, pydantic.VERSION[:2])"
    done = subprocess.run(
        [*made.python, "-P", "-c", code], env=dict(made.variables), capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["True", "2."], done.stderr


def test_facts_of_this_interpreter() -> None:
    facts = read_facts(own_interpreter(os.environ), Processes())
    assert facts.executable == sys.executable
    assert facts.torch
    require_torch(facts)
    with pytest.raises(NoEnvironment, match=r"has no torch.*Next step"):
        require_torch(facts.model_copy(update={"torch": ""}))


BROKEN: dict[str, tuple[str, str]] = {
    "too-old": ("echo 'unknown option -P' >&2; exit 2", "unknown option -P"),
    "silent": ("exit 0", "nothing"),
    "another-version": ("echo '{}'", "queried: {}"),
}


@pytest.mark.parametrize(("script", "word"), BROKEN.values(), ids=BROKEN)
def test_an_interpreter_that_does_not_answer_is_told_with_its_words(script: str, word: str, tmp_path: Path) -> None:
    environment = InterpreterEnvironment((str(fake_python(tmp_path, script)),), {"PATH": "/usr/bin:/bin"})
    with pytest.raises(NoEnvironment, match=r"Likely cause.*Next step") as told:
        read_facts(environment, Processes())
    assert word in str(told.value)


def test_the_commit_is_that_of_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "PACKAGE", tmp_path / "megacpp_validate")
    assert read_commit() == ""
    git: Mapping[str, str] = {**os.environ, "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b",
                              "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}  # fmt: skip
    (tmp_path / "file").write_text("1")
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "one"]):
        subprocess.run(["git", *command], cwd=tmp_path, env=dict(git), check=True)
    commit = read_commit()
    assert len(commit) == 40
    (tmp_path / "file").write_text("2")
    assert read_commit() == f"{commit}-dirty"


# --- Site folders before an interpreter's own. ---


def host(**variables: str) -> InterpreterEnvironment:
    return InterpreterEnvironment((sys.executable,), {"PATH": os.defpath, **variables})


def say(environment: InterpreterEnvironment, code: str) -> str:
    words = [*environment.python, "-P", "-c", code]
    done = subprocess.run(words, env=dict(environment.variables), capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_folders_come_first_then_what_the_user_has_then_the_hosts(tmp_path: Path) -> None:
    """The host of these tests has an einops and an iniconfig of its own."""
    te, common = make_te(tmp_path / "te-2.12.0", "2.12.0"), make_package(tmp_path / "base", "einops", "0.1")
    user = make_package(make_package(tmp_path / "user", "einops", "0.2"), "iniconfig", "0.3")
    made = put_over(host(PYTHONPATH=str(user)), [te, common])
    names = "transformer_engine, einops, iniconfig"
    assert say(made, f"import {names}; print(*(module.VERSION for module in ({names})))") == "2.12.0 0.1 0.3"
    assert made.folders == (te, common)


def test_an_import_line_of_a_pth_file_adds_to_the_path(tmp_path: Path) -> None:
    """Word for word what the CuTe DSL 4.8.1 writes there; FlashAttention 4 is not found without."""
    site = make_package(tmp_path / "fa4", "nvidia_cutlass_dsl", "4.8.1")
    make_package(site / "nvidia_cutlass_dsl" / "dsl_packages", "cutlass", "4.8.1")
    (site / "nvidia_cutlass_dsl_packages.pth").write_text(
        "import sys, os, nvidia_cutlass_dsl; "
        "sys.path.insert(0, os.path.join(nvidia_cutlass_dsl.__path__[0], 'dsl_packages'))"
    )
    te = make_te(tmp_path / "te", "2.20.2")
    made = put_over(host(), [te, site])
    assert say(made, "import cutlass; print(cutlass.VERSION)") == "4.8.1"
    assert made.variables["PYTHONPATH"].startswith(str(te))


def test_a_pth_file_that_ends_the_interpreter_is_no_environment(tmp_path: Path) -> None:
    site = make_package(tmp_path / "site", "einops", "0.1")
    (site / "a.pth").write_text("import os; os._exit(3)\n")
    with pytest.raises(NoEnvironment, match=r"\.pth files of .*Next step"):
        put_over(host(), [site])


def make_library(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(b"\x7fELF")
    return folder


def test_a_package_finds_the_libraries_of_another(tmp_path: Path) -> None:
    site = make_package(tmp_path / "base", "tvm_ffi", "0.1.11")
    libraries = make_library(site / "tvm_ffi" / "lib", "libtvm_ffi.so")
    made = put_over(host(LD_LIBRARY_PATH="/opt/driver"), [site])
    assert made.variables["LD_LIBRARY_PATH"] == f"{libraries}{os.pathsep}/opt/driver"
    assert str(libraries) in made.because
    bare = put_over(host(), [site])
    assert bare.variables["LD_LIBRARY_PATH"] == str(libraries)  # no empty entry: that is the working folder


CUDA = ("libcudart.so.12", "libcublas.so.13", "libcublasLt.so.13", "libcudnn.so.9", "libcudnn_ops.so.9", "libnccl.so.2",
        "libnvrtc.so.12", "libnvrtc-builtins.so.13.0", "libnvJitLink.so.13", "libcuda.so.1")  # fmt: skip


@pytest.mark.parametrize("name", CUDA)
def test_a_second_cuda_library_does_not_become_visible(name: str, tmp_path: Path) -> None:
    """Transformer Engine 2.12.0 loses attention where libcudart.so.12 can be seen beside 13."""
    site = make_package(tmp_path / "site", "cuda_runtime", "12.8")
    make_library(make_library(site / "cuda_runtime" / "lib", "libother.so"), name)
    assert find_libraries([site]) == ()
    made = put_over(host(), [site])
    assert "LD_LIBRARY_PATH" not in made.variables


@pytest.mark.parametrize("name", ["te-9", "te:2"])
def test_a_folder_that_does_not_exist_or_that_no_path_can_carry(name: str, tmp_path: Path) -> None:
    make_te(tmp_path / "te:2", "2.12.0")
    with pytest.raises(NoEnvironment, match=rf"no folder .*{name}.*Likely cause.*Next step"):
        put_over(host(), [tmp_path / name])
