"""What the pages name is there: sessions, their options, files and folders of the project."""

from __future__ import annotations

import ast
import re
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


def read_doors() -> dict[str, str]:
    """Session -> the verb that it calls; empty where it calls something else."""
    verbs = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    doors = {}
    for node in ast.parse((ROOT / "noxfile.py").read_text()).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and node.decorator_list:
            said = (each.value for each in ast.walk(node) if isinstance(each, ast.Constant))
            doors[node.name] = next((value for value in said if isinstance(value, str) and value in verbs), "")
    return doors | dict.fromkeys(("h200_parity", "b200_parity", "gb10_compat"), "parity")


DOORS = read_doors()


def options_of(verb: str) -> set[str]:
    command = typer.main.get_command(app).commands[verb]  # type: ignore[attr-defined]
    return {option for one in command.params for option in (*one.opts, *one.secondary_opts)} | {"--help"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_sessions_and_options_that_a_page_names_are_there(page: Path) -> None:
    for line in code_of(page):
        for call in CALL.finditer(line):
            sessions = call["sessions"].split()
            assert set(sessions) <= DOORS.keys(), line
            if verb := DOORS[sessions[-1]]:
                assert set(OPTION.findall(call["rest"])) <= options_of(verb), line


def test_what_a_session_says_of_itself_names_options_that_are_there() -> None:
    for node in ast.parse((ROOT / "noxfile.py").read_text()).body:
        if isinstance(node, ast.FunctionDef) and DOORS.get(node.name):
            named = set(OPTION.findall(ast.get_docstring(node) or ""))
            assert named <= options_of(DOORS[node.name]), node.name


def test_every_session_has_its_place_in_a_page() -> None:
    said = {word for page in PAGES for line in code_of(page) for word in re.findall(r"[a-z0-9_]+", line)}
    assert set(DOORS) <= said


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
