"""A document as SARIF 2.1.0, the format of code scanning: one result for each thing that is not good.

The standard: https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Any, Final
from urllib.parse import quote

from megacpp_validate import TOOL
from megacpp_validate.text import clean, clean_line

from ..document import Diagnostic, Document, Place
from .github import LEVELS, list_lines
from .json import dump_json

_SCHEMA: Final = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def render_sarif(document: Document) -> str:
    """One run; a document that is not good has at least one result, and every result a rule."""
    cases = [case for case in document.judged() if case.mark.tone in LEVELS]
    if not cases and document.mark.tone in LEVELS:
        cases = [Diagnostic("verdict", document.mark, message=document.summary)]
    rules = list(dict.fromkeys(map(_rule_of, cases)))
    described = [{"id": one, "shortDescription": {"text": one.replace("-", " ").capitalize()}} for one in rules]
    name, _, version = TOOL.partition(" ")
    run = {
        "tool": {"driver": {"name": name, "version": version, "rules": described}},
        "automationDetails": {"description": {"text": clean_line(f"{document.title}: {document.summary}")}},
        "columnKind": "unicodeCodePoints",
        "results": [_render_result(case, rules) for case in cases],
    }
    return dump_json({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]})


def _rule_of(case: Diagnostic) -> str:
    return clean_line(case.code or case.mark.word)


def _render_result(case: Diagnostic, rules: list[str]) -> dict[str, Any]:
    text = ": ".join(filter(None, (case.group, "\n".join(list_lines(case)) or case.name)))
    location: dict[str, Any] = {"logicalLocations": [{"name": clean_line(case.group or case.name), "kind": "module"}]}
    if case.place is not None:
        location["physicalLocation"] = _locate(case.place)
    rule = _rule_of(case)
    return {
        "ruleId": rule, "ruleIndex": rules.index(rule), "level": LEVELS[case.mark.tone],
        "message": {"text": clean(text)}, "locations": [location],
    }  # fmt: skip


def _locate(place: Place) -> dict[str, Any]:
    """A file relative to the folder of the run, or as a URI where it lies elsewhere."""
    path = PurePath(clean_line(place.file))
    relative = {"uri": quote(path.as_posix()), "uriBaseId": "%SRCROOT%"}
    artifact = {"uri": path.as_uri()} if path.is_absolute() else relative
    return {"artifactLocation": artifact, "region": {"startLine": max(place.line, 1)}}
