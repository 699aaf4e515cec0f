"""The host's interpreter and stack: found, started with nothing of the tool's own environment, and told."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from megacpp_validate.environments import interpreter
from megacpp_validate.environments.environment import NoEnvironment
from megacpp_validate.environments.facts import read_facts, require_torch
from megacpp_validate.environments.interpreter import (
    PACKAGE,
    InterpreterEnvironment,
    host_interpreter,
    own_interpreter,
    read_commit,
)
from megacpp_validate.process import Processes

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


def test_the_tools_own_interpreter_where_it_has_torch(tmp_path: Path) -> None:
    found = host_interpreter({"PATH": str(tmp_path)}, tmp_path)
    assert found.python == (sys.executable,)


def test_what_is_wanted_beats_the_variable_and_that_beats_the_path(tmp_path: Path) -> None:
    one, two = fake_python(tmp_path / "one"), fake_python(tmp_path / "two")
    variables = {"PATH": "/usr/bin:/bin", "MEGACPP_PYTHON": str(two)}
    assert host_interpreter(variables, tmp_path, str(one)).python == (str(one),)
    assert host_interpreter(variables, tmp_path).python == (str(two),)
    assert host_interpreter(variables, tmp_path).because == "MEGACPP_PYTHON"


def test_the_first_python_of_the_host_not_the_tools(tmp_path: Path, no_torch_here: None) -> None:
    """A virtual environment that is active, or the one that runs nox, is not the host's stack."""
    host = fake_python(tmp_path / "host" / "bin")
    path = os.pathsep.join([str(Path(sys.prefix) / "bin"), "", str(ROOT / ".venv" / "bin"), str(host.parent)])
    assert host_interpreter({"PATH": path}, tmp_path).python == (str(host),)
    assert host_interpreter({"PATH": str(Path(sys.prefix) / "bin")}, tmp_path).python == (sys.executable,)


def test_an_interpreter_that_there_is_not_is_told(tmp_path: Path) -> None:
    with pytest.raises(NoEnvironment, match=r"python9.*Likely cause.*Next step"):
        host_interpreter({"PATH": str(tmp_path)}, tmp_path, "python9")


def test_the_package_stands_behind_what_the_user_put_on_the_path(tmp_path: Path) -> None:
    variables = {"PYTHONPATH": "/opt/te:/opt/base", "HOME": "/root"}
    made = own_interpreter(variables)
    assert made.variables["PYTHONPATH"] == f"/opt/te:/opt/base:{ROOT}"
    assert made.variables["HOME"] == "/root"
    assert own_interpreter({}).variables["PYTHONPATH"] == str(ROOT)


def test_an_installed_package_is_reached_through_a_door_that_shows_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside it, in the tool's environment, lie a pydantic and a numpy that the host's stack must not import."""
    site = tmp_path / "site-packages"
    (site / "megacpp_validate").mkdir(parents=True)
    (site / "megacpp_validate" / "__init__.py").write_text("HERE = True\n")
    (site / "pydantic.py").write_text("raise SystemExit('of another Python')\n")
    monkeypatch.setattr(interpreter, "PACKAGE", site / "megacpp_validate")
    made = host_interpreter({"PATH": ""}, tmp_path / "door", str(fake_python(tmp_path / "host")))
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
    "another-version": ('for last; do :; done; echo "{}" > "$last"', "another form"),
}


@pytest.mark.parametrize(("script", "word"), BROKEN.values(), ids=BROKEN)
def test_an_interpreter_that_does_not_answer_is_told_with_its_words(script: str, word: str, tmp_path: Path) -> None:
    environment = InterpreterEnvironment((str(fake_python(tmp_path, script)),), {"PATH": "/usr/bin:/bin"})
    with pytest.raises(NoEnvironment, match=r"Likely cause.*Next step") as told:
        read_facts(environment, Processes())
    assert word in str(told.value)


def test_an_interpreter_that_cannot_be_started_is_told(tmp_path: Path) -> None:
    with pytest.raises(NoEnvironment, match="Next step"):
        read_facts(InterpreterEnvironment((str(tmp_path / "nothing"),), {}), Processes())


def test_the_host_side_never_imports_torch() -> None:
    """Neither does what it takes from the probes' room: the form of an order."""
    code = (
        "import sys; import megacpp_validate.cli, megacpp_validate.cli.sessions.parity_runs;"
        "print([name for name in ('torch', 'griffe', 'transformer_engine') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


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
