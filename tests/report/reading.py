"""What a reader finds in each format: the text of a page, of a log, of a file."""

from __future__ import annotations

import html
import io
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

from rich.console import Console

from megacpp_validate.environments.session_result import ParityResult, SmokeSession, SupportGrid
from megacpp_validate.gate.fp8_session import Fp8Result
from megacpp_validate.report import machine
from megacpp_validate.report.github import annotations as github
from megacpp_validate.report.html import pages
from megacpp_validate.report.junit import parity as junit_parity
from megacpp_validate.report.results import Result
from megacpp_validate.report.terminal import parity as terminal_parity


class Page(HTMLParser):
    """Tags with their attributes, and the text outside of style and script."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.pieces: list[str] = []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in {"meta", "link", "wbr", "br", "input"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.pieces.append(data)

    @property
    def text(self) -> str:
        return flat("".join(self.pieces))


def flat(text: str) -> str:
    """Text without what formats add or take: line ends, runs of spaces, backticks."""
    return " ".join(text.replace("`", "").split())


def print_terminal(result: Result, *, width: int = 10_000, verbose: bool = True, colour: bool = False) -> str:
    stream = io.StringIO()
    console = Console(
        file=stream,
        width=width,
        force_terminal=colour,
        color_system="truecolor" if colour else None,
        _environ={},
    )
    match result:
        case ParityResult() | Fp8Result() | SmokeSession():
            terminal_parity.render_session(result, verbose=verbose, console=console)
        case SupportGrid():
            terminal_parity.render_support(result, console=console)
    return stream.getvalue()


def write_html(result: Result) -> str:
    match result:
        case ParityResult() | Fp8Result() | SmokeSession():
            return pages.render_session_html(result)
    raise TypeError(type(result))


def write_junit(result: Result) -> str:
    match result:
        case ParityResult() | Fp8Result() | SmokeSession():
            return junit_parity.render_session_junit(result)
    raise TypeError(type(result))


def write_annotations(result: Result) -> str:
    match result:
        case ParityResult() | Fp8Result() | SmokeSession():
            return github.render_session_annotations(result)
    raise TypeError(type(result))


def read_junit(result: Result) -> str:
    pieces = []
    for element in ET.fromstring(write_junit(result).encode()).iter():
        pieces += [*element.attrib.values(), element.text or ""]
    return flat(" ".join(pieces))


def read_annotations(result: Result) -> str:
    text = write_annotations(result)
    for code, character in (("%0A", "\n"), ("%0D", "\r"), ("%3A", ":"), ("%2C", ","), ("%25", "%")):
        text = text.replace(code, character)
    return flat(text)


def read_summary(result: Result) -> str:
    return flat(html.unescape(re.sub(r"</?code>|\*\*", "", github.render_step_summary(result))))


def read_json(result: Result) -> str:
    def walk(value: object) -> list[str]:
        if isinstance(value, dict):
            return [piece for key, inner in value.items() for piece in (key, *walk(inner))]
        if isinstance(value, list):
            return [piece for inner in value for piece in walk(inner)]
        return [str(value)]

    return flat(" ".join(walk(json.loads(machine.to_json(result)))))


READERS: dict[str, Callable[[Result], str]] = {
    "terminal": lambda result: flat(print_terminal(result)),
    "html": lambda result: Page(write_html(result)).text,
    "junit": read_junit,
    "annotations": read_annotations,
    "summary": read_summary,
    "json": read_json,
}
