"""A document as SARIF 2.1.0, the format of code scanning: one result for each thing that is not good.

The standard: https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html.
"""

from __future__ import annotations

import json
from pathlib import PurePath
from typing import Any, Final
from urllib.parse import quote

from megacpp_validate import TOOL
from megacpp_validate.text import clean, clean_line

from ..document import Diagnostic, Document, Place
from ..marks import Tone
from .github import list_plain_fields

_SCHEMA: Final = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_LEVELS: Final = {Tone.BAD: "error", Tone.RISK: "warning", Tone.MISSING: "warning"}


def render_sarif(document: Document) -> str:
    """One run; a document that is not good has at least one result, and every result a rule."""
    cases = [case for case in document.judged() if case.mark.tone in _LEVELS]
    if not cases and document.mark.tone in _LEVELS:
        cases = [Diagnostic("verdict", document.mark, message=document.summary)]
    rules = list(dict.fromkeys(map(_rule_of, cases)))
    name, _, version = TOOL.partition(" ")
    driver = {"name": name, "version": version, "rules": [_describe_rule(rule) for rule in rules]}
    run: dict[str, Any] = {
        "tool": {"driver": driver},
        "automationDetails": {"description": {"text": clean_line(f"{document.title}: {document.summary}")}},
        "columnKind": "unicodeCodePoints",
        "results": [_render_result(case, rules) for case in cases],
    }
    text = json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2)
    return text.replace("##[", "#\\u0023[") + "\n"  # which GitHub's log takes for a command


def _rule_of(case: Diagnostic) -> str:
    return clean_line(case.code or case.mark.word)


def _describe_rule(rule: str) -> dict[str, Any]:
    return {"id": rule, "shortDescription": {"text": rule.replace("-", " ").capitalize()}}


def _render_result(case: Diagnostic, rules: list[str]) -> dict[str, Any]:
    lines = [": ".join(filter(None, (case.group, case.message or case.name))), *list_plain_fields(case)]
    lines += [f"Next step: {case.help}"] if case.help else []
    location: dict[str, Any] = {"logicalLocations": [{"name": clean_line(case.group or case.name), "kind": "module"}]}
    if case.place is not None:
        location["physicalLocation"] = _locate(case.place)
    rule = _rule_of(case)
    return {
        "ruleId": rule,
        "ruleIndex": rules.index(rule),
        "level": _LEVELS[case.mark.tone],
        "message": {"text": clean("\n".join(lines))},
        "locations": [location],
    }


def _locate(place: Place) -> dict[str, Any]:
    """A file relative to the folder of the run, or as a URI where it lies elsewhere."""
    path = PurePath(clean_line(place.file))
    artifact = (
        {"uri": path.as_uri()} if path.is_absolute() else {"uri": quote(path.as_posix()), "uriBaseId": "%SRCROOT%"}
    )
    return {"artifactLocation": artifact, "region": {"startLine": max(place.line, 1)}}
