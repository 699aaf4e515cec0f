"""Seven renderers over one document: each shows everything, and nothing of other people becomes syntax or a command."""

from __future__ import annotations

import io
import json
import re
from xml.etree import ElementTree as ET

import pytest
from pydantic import BaseModel
from syrupy.assertion import SnapshotAssertion

from megacpp_validate.report.document import (
    Bullets,
    Details,
    Diagnostic,
    Document,
    Figure,
    Heading,
    Link,
    Paragraph,
    Place,
    Preformatted,
    Table,
)
from megacpp_validate.report.marks import Mark, bad, cascade, good, missing, risk
from megacpp_validate.report.render.github import render_github
from megacpp_validate.report.render.html import render_html
from megacpp_validate.report.render.json import render_json
from megacpp_validate.report.render.junit import render_junit
from megacpp_validate.report.render.markdown import render_markdown
from megacpp_validate.report.render.sarif import render_sarif
from megacpp_validate.report.render.terminal import render_terminal
from tests.report.page import Page

RENDERERS = {
    "terminal": render_terminal,
    "html": render_html,
    "markdown": render_markdown,
    "junit": render_junit,
    "github": render_github,
    "sarif": render_sarif,
}
EVIL = (
    "<img src=x onerror=alert(1)></script>\"'&]]>-->|`*_[bold red]x[/](javascript:1){{7*7}}{%x%}"
    "%0A\r\n::error::x,y:z\n  ##[error]no\n# h\n1. x\n- y"
    "\x1b[31m\x1b]0;x\x07\x00\x0b\x85\u2028\u202e\ufffe\ud800\U0001f600"
)
CODE = "megacpp_validate/bridge/expert_gemm.py"


def make_document(text: str = "") -> Document:
    """Every kind of block, with foreign text at every place that can hold some."""
    red = Diagnostic(
        f"permute{text}",
        bad(f"fail{text}"),
        group=f"te2.20.2.h200{text}",
        message=f"`moe_permute` is gone.{text}",
        fields=((f"seen{text}", f"0.5{text}"), ("with", (f"a{text}", risk("b"), Place("c.py", 3))), ("none", "")),
        help=f"Read `CHANGELOG`.{text}",
        place=Place(f"{CODE}{text}", 80),
        output=f"Traceback{text}\n  line 2",
        seconds=1.5,
        code=f"removed{text}",
    )
    rows = (
        (f"te2.20.2{text}", good(f"pass{text}"), "1.25", Place(f"{CODE}{text}", 7)),
        ("native", Link(f"to the cell{text}", f"cells/x.html{text}", missing()), "10", f"`code`{text}"),
    )
    return Document(
        title=f"Parity of te2.20.2{text}",
        summary=f"1 of 4 probes fails.{text}",
        mark=bad(f"fails{text}"),
        blocks=(
            Paragraph(f"With `torch` 2.13.{text}"),
            Paragraph("Read this.", risk("risk")),
            Table((f"stack{text}", "outcome", "ratio", "where"), rows, caption=f"cells{text}", numeric=frozenset({2})),
            Heading(f"What fails{text}", 2, bad("x")),
            red,
            Details(f"More{text}", (Bullets((f"one{text}", "two")), Diagnostic("clean", good("pass")))),
            Preformatted(f"pip install x{text}\n  ::error::y"),
            Figure("<svg xmlns='http://www.w3.org/2000/svg'><title>t</title></svg>", f"a line that falls{text}"),
            Diagnostic("attention", cascade("blocked"), message="Blocked by permute."),
            Diagnostic("walker", missing("not run"), message="No GPU."),
            Diagnostic("speed", risk("slower"), message="10% slower."),
        ),
    )


@pytest.mark.parametrize("name", RENDERERS)
def test_wording(name: str, snapshot: SnapshotAssertion) -> None:
    text = RENDERERS[name](make_document())
    assert text.endswith("\n")
    if name == "html":
        text = re.sub(r"(?s)<style>.*</style>", "", text)
    assert text == snapshot


@pytest.mark.parametrize("name", RENDERERS)
def test_foreign_text_steers_nothing(name: str) -> None:
    text = RENDERERS[name](make_document(EVIL))
    text.encode()
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\ufffe]", text)
    commands = [line for line in text.splitlines() if line.strip().startswith("::") or "##[" in line]
    if name == "github":
        assert len(commands) == len(text.splitlines()) == 5
        assert not [line for line in commands if "##[" in line]
        assert all(re.match(r"::(error|warning|notice) ", line) for line in commands)
    else:
        assert commands == []


def test_a_terminal_obeys_nothing_but_our_colours() -> None:
    class Screen(io.StringIO):
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

    text = render_terminal(make_document(EVIL), verbose=True, stream=Screen())
    assert not re.search(r"\x1b(?!\[[\d;]*m)|\x07", text)


def test_a_page_has_no_foreign_tag_and_no_script() -> None:
    page = Page(render_html(make_document(EVIL)))
    clean = Page(render_html(make_document("x")))
    assert [tag for tag, _ in page.tags if tag not in {"wbr", "code"}] == [
        tag for tag, _ in clean.tags if tag not in {"wbr", "code"}
    ]
    assert "<img src=x onerror=alert(1)></script>" in page.text
    assert "{{7*7}}" in page.text


def test_markdown_keeps_its_shape() -> None:
    def shape(text: str) -> list[str]:
        """Lines without what is said: headings, items, rows with their bars."""
        return [re.match(r"\W*", line)[0] + "|" * line.count("|") for line in text.splitlines()]  # type: ignore[index]

    evil = render_markdown(make_document(EVIL))
    assert shape(evil) == shape(render_markdown(make_document("x")))
    assert "<img" not in evil
    assert "](javascript" not in evil


def test_junit_is_never_green_without_evidence() -> None:
    suite = ET.fromstring(render_junit(make_document(EVIL)))
    assert suite.attrib | {"name": ""} == {"name": "", "tests": "5", "failures": "2", "skipped": "1", "errors": "0"}
    for mark, counts in ((missing(), ("1", "0", "1")), (bad("x"), ("1", "1", "0")), (good("x"), ("1", "0", "0"))):
        root = ET.fromstring(render_junit(Document("t", "s", mark)))
        assert (root.attrib["tests"], root.attrib["failures"], root.attrib["skipped"]) == counts
    told = ET.fromstring(render_junit(Document("t", "lacks a loss", missing(), cases=(Diagnostic("a", good("x")),))))
    assert [case.find("skipped") is not None for case in told.iter("testcase")] == [False, True]


@pytest.mark.parametrize(
    ("mark", "level"), [(bad("x"), "error"), (missing(), "warning"), (risk("x"), "warning"), (good("x"), "notice")]
)
def test_github_annotates_the_line_and_gives_the_answer(mark: Mark, level: str) -> None:
    case = Diagnostic("permute", mark, message="100%: gone", place=Place("a,b:c.py", 0))
    lines = render_github(Document("t", "s", mark, (case,))).splitlines()
    assert lines[-1] == "::notice title=t::s"
    if level == "notice":
        assert len(lines) == 1
    else:
        assert lines[0].startswith(f"::{level} file=a%2Cb%3Ac.py,line=1,title=permute%3A ")
        assert lines[0].endswith("::100%25: gone")
    assert render_github(Document("t", "s", mark)) == f"::{level} title=t::s\n"


@pytest.mark.parametrize("width", [30, 60, 200])
def test_a_table_folds_and_a_place_never_does(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    long = "a_long_name_of_a_package " * 3
    table = Table(("what", "where"), ((long, "here"), ("x", "y")))
    found = Diagnostic("n", good("g"), place=Place(CODE, 1234))
    text = render_terminal(Document("t", "s", good("g"), (table, found)))
    assert f"{CODE}:1234" in text
    assert "…" not in text
    assert text.count("a_long_name_of_a_package") == 3


def test_a_terminal_without_symbols_gets_letters() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    text = render_terminal(make_document(), stream=stream)
    assert "✗" not in text
    assert "X permute" in text


class Said(BaseModel):
    text: str
    number: int = 1


def test_json_is_the_model_and_steers_nothing() -> None:
    text = render_json(Said(text=EVIL.replace("\ud800", "")))
    assert json.loads(text) == {"text": EVIL.replace("\ud800", ""), "number": 1}
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\ufffe]", text)
    assert not [line for line in text.splitlines() if line.strip().startswith("::") or "##[" in line]


def test_sarif_of_a_file_elsewhere_and_of_an_answer_without_cases() -> None:
    case = Diagnostic("a", bad("x"), place=Place("/a b/c#d.py", 0))
    (found,) = json.loads(render_sarif(Document("t", "s", bad("x"), (case,))))["runs"][0]["results"]
    place = found["locations"][0]["physicalLocation"]
    assert (place["artifactLocation"], place["region"]) == ({"uri": "file:///a%20b/c%23d.py"}, {"startLine": 1})
    assert [len(json.loads(render_sarif(Document("t", "s", mark)))["runs"][0]["results"]) for mark in (
        bad("x"), missing(), good("x"),
    )] == [1, 1, 0]  # fmt: skip
