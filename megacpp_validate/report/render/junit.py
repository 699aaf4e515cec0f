"""A document as JUnit XML: one case a thing that was judged. What has no evidence is skipped, and never a pass."""

from __future__ import annotations

from typing import Final
from xml.etree import ElementTree as ET

from megacpp_validate.text import clean

from ..document import Diagnostic, Document
from ..marks import Tone
from .github import list_lines

_TAGS: Final = {Tone.BAD: "failure", Tone.MISSING: "skipped"}


def render_junit(document: Document) -> str:
    """One suite of all cases; a document that is not good has at least one case that is not."""
    cases, tag = document.judged(), _TAGS.get(document.mark.tone)
    if not cases or (tag and not any(case.mark.tone in _TAGS for case in cases)):
        cases = (*cases, Diagnostic("verdict", document.mark, message=document.summary))
    tones = [case.mark.tone for case in cases]
    counts = {"tests": len(cases), "failures": tones.count(Tone.BAD), "skipped": tones.count(Tone.MISSING), "errors": 0}
    numbers = {name: str(number) for name, number in counts.items()}
    root = ET.Element("testsuites", {"name": "megacpp-validate", **numbers})
    suite = _add(root, "testsuite", name=document.title, **numbers)
    for case in cases:
        _add_case(suite, case, case.group or document.title.replace(".", "_"))
    _add(suite, "system-out", document.summary)
    ET.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(root, encoding="unicode")}\n'


def _add_case(suite: ET.Element, case: Diagnostic, group: str) -> None:
    element = _add(suite, "testcase", name=case.name, classname=group, time=f"{case.seconds:.3f}")
    text = "\n".join(filter(None, [*list_lines(case), f"at: {case.place}" if case.place else "", case.output]))
    if case.mark.tone in _TAGS:
        _add(element, _TAGS[case.mark.tone], text, message=case.message or case.mark.word)
    else:
        _add(element, "system-out", f"{case.mark.word}\n{text}")


def _add(parent: ET.Element, tag: str, text: str = "", **attributes: str) -> ET.Element:
    element = ET.SubElement(parent, tag, {name: clean(value) for name, value in attributes.items()})
    element.text = clean(text) or None
    return element
