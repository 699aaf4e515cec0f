"""JUnit XML as a tree: elements that hold the text of others, and the counts of a suite."""

from __future__ import annotations

import re
from typing import Final
from xml.etree import ElementTree as ET

# What XML 1.0 takes; everything else cannot be written at all, not even as a reference.
_FORBIDDEN: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write(suites: list[ET.Element]) -> str:
    """Suites as a file, with their cases counted."""
    root = make("testsuites", name="megacpp-validate")
    for suite in suites:
        suite.attrib.update(_count(suite))
        root.append(suite)
    root.attrib.update(_count(root))
    ET.indent(root)
    body = ET.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{body}\n'


def _count(element: ET.Element) -> dict[str, str]:
    cases = list(element.iter("testcase"))
    numbers = {"tests": len(cases)}
    for plural, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        numbers[plural] = sum(case.find(tag) is not None for case in cases)
    return {name: str(number) for name, number in numbers.items()}


def add_properties(suite: ET.Element, properties: dict[str, str]) -> None:
    """Properties of a suite."""
    holder = add(suite, "properties")
    for name, value in properties.items():
        add(holder, "property", name=name, value=value)


def make(tag: str, **attributes: str) -> ET.Element:
    """An element; what XML cannot hold is left out."""
    return ET.Element(tag, {name: _FORBIDDEN.sub("", value) for name, value in attributes.items()})


def add(parent: ET.Element, tag: str, text: str = "", **attributes: str) -> ET.Element:
    """An element with a text, in a parent."""
    element = make(tag, **attributes)
    if text:
        element.text = _FORBIDDEN.sub("", text)
    parent.append(element)
    return element
