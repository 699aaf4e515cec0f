"""What the pages name is there: sessions, their options, files and folders of the project."""

from __future__ import annotations

import ast
import re
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
import typer.main

from megacpp_validate.cli.app import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
CODE = re.compile(r"```\w*\n(.*?)```|`([^`]+)`", re.DOTALL)
CALL = re.compile(r"nox -s (?P<sessions>[a-z0-9_]+(?: [a-z0-9_]+)*)(?P<rest>[^#\n]*)")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
WRITTEN = {"build", "dist", "reports"}


def code_of(page: Path) -> list[str]:
    """What is set as code: lines of blocks, and spans, each on one line."""
    found: list[str] = []
    for block, span in CODE.findall(page.read_text()):
        found += block.replace("\\\n", " ").splitlines() if block else [" ".join(span.split())]
    return found


def read_sessions() -> dict[str, str]:
    """Session -> the verb that it calls; empty where it calls something else."""
    found = {}
    for node in ast.parse((ROOT / "noxfile.py").read_text()).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and node.decorator_list:
            found[node.name] = ""
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            for name, row in zip(node.value.keys, node.value.values, strict=True):
                found[ast.literal_eval(name)] = ast.literal_eval(row.args[1])[0]
    return found


SESSIONS = read_sessions()


def options_of(verb: str) -> set[str]:
    command = typer.main.get_command(app).commands[verb]  # type: ignore[attr-defined]
    return {option for one in command.params for option in (*one.opts, *one.secondary_opts)} | {"--help"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_sessions_and_options_that_a_page_names_are_there(page: Path) -> None:
    for line in code_of(page):
        for call in CALL.finditer(line):
            sessions = call["sessions"].split()
            assert set(sessions) <= SESSIONS.keys(), line
            if verb := SESSIONS[sessions[-1]]:
                assert set(OPTION.findall(call["rest"])) <= options_of(verb), line


def test_workflows_call_sessions_and_options_that_exist() -> None:
    files = [*(ROOT / ".github" / "workflows").glob("*.yml"), ROOT / "ci" / "gitlab-ci.yml", ROOT / "ci" / "crontab"]
    calls = [call for file in files for call in CALL.finditer(file.read_text())]
    assert len(calls) >= 10
    for call in calls:
        (session,) = call["sessions"].split()
        verb = SESSIONS[session]
        assert not verb or set(OPTION.findall(call["rest"])) <= options_of(verb), call[0]


def test_the_canary_of_a_change_covers_the_steps_between_the_stacks_of_the_matrix() -> None:
    releases = [row["te"] for row in tomllib.loads((ROOT / "matrix" / "stacks.toml").read_text())["stack"]]
    steps = [f'"{old} {new}"' for old, new in pairwise(releases)]
    assert f"step: [{', '.join(steps)}]" in (ROOT / ".github" / "workflows" / "pull_request.yml").read_text()


def test_every_session_has_its_place_in_a_page() -> None:
    said = {word for page in PAGES for line in code_of(page) for word in re.findall(r"[a-z0-9_]+", line)}
    assert set(SESSIONS) <= said


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    """Those in folders of the project, or in rooms of its package; what commands write is there after they ran."""
    places = [ROOT, ROOT / "megacpp_validate"]
    for line in code_of(page):
        for word in re.findall(r"(?<![\w./:$-])[\w.]+(?:/[\w.*-]+)+/?", line):
            first = word.split("/")[0]
            if first.startswith(".") or first in WRITTEN:
                continue
            if any((place / first).is_dir() for place in places):
                assert any(list(place.glob(word.rstrip("/."))) for place in places), f"{word} in {line!r}"
