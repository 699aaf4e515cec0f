"""A document as JUnit XML: one case a thing that was judged. What has no evidence is skipped, and never a pass."""

from __future__ import annotations

import re
from typing import Final
from xml.etree import ElementTree as ET

from megacpp_validate.text import clean

from ..document import Diagnostic, Document
from ..marks import Tone
from .github import list_plain_fields

# What GitHub's log takes for a command, where the XML goes to standard output: written as a reference, it is the same.
_COMMAND: Final = re.compile(r"(?m)^(\s*):(?=:)|(#)(?=#\[)")
_TAGS: Final = {Tone.BAD: "failure", Tone.MISSING: "skipped"}


def render_junit(document: Document) -> str:
    """One suite of all cases; a document that is not good has at least one case that is not."""
    cases = document.judged()
    tag = _TAGS.get(document.mark.tone)
    if not cases or (tag and not any(case.mark.tone in _TAGS for case in cases)):
        cases = (*cases, Diagnostic("verdict", document.mark, message=document.summary))
    root = _make("testsuites", name="megacpp-validate")
    suite = _add(root, "testsuite", name=document.title)
    for case in cases:
        _add_case(suite, case, case.group or document.title.replace(".", "_"))
    _add(suite, "system-out", document.summary)
    for element in (suite, root):
        element.attrib.update(_count(suite))
    ET.indent(root)
    body = ET.tostring(root, encoding="unicode")
    body = _COMMAND.sub(lambda found: "&#35;" if found[2] else f"{found[1]}&#58;", body)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{body}\n'


def _add_case(suite: ET.Element, case: Diagnostic, group: str) -> None:
    element = _add(suite, "testcase", name=case.name, classname=group, time=f"{case.seconds:.3f}")
    lines = [case.message, *list_plain_fields(case)]
    if case.place is not None:
        lines.append(f"at: {case.place}")
    if case.help:
        lines.append(f"next: {case.help}")
    text = "\n".join(filter(None, [*lines, case.output]))
    if case.mark.tone is Tone.BAD:
        _add(element, "failure", text, message=case.message or case.mark.word, type=case.code or case.mark.word)
    elif case.mark.tone is Tone.MISSING:
        _add(element, "skipped", text, message=case.message or case.mark.word)
    else:
        _add(element, "system-out", f"{case.mark.word}\n{text}")


def _count(suite: ET.Element) -> dict[str, str]:
    cases = list(suite.iter("testcase"))
    found = {"failures": "failure", "skipped": "skipped"}
    numbers = {plural: sum(case.find(tag) is not None for case in cases) for plural, tag in found.items()}
    return {"tests": str(len(cases)), "errors": "0", **{name: str(number) for name, number in numbers.items()}}


def _make(tag: str, **attributes: str) -> ET.Element:
    return ET.Element(tag, {name: clean(value) for name, value in attributes.items()})


def _add(parent: ET.Element, tag: str, text: str = "", **attributes: str) -> ET.Element:
    element = _make(tag, **attributes)
    element.text = clean(text) or None
    parent.append(element)
    return element
