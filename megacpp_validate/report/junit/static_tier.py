"""JUnit XML: one suite a tier or a step, one case a bridge module or a damaged install.

What breaks is a failure; a risk passes and says so in `system-out`; what did not run is skipped with the
reason, and a release that could not be read is an error: missing evidence never looks green.
"""

from __future__ import annotations

from xml.etree import ElementTree as ET

from ...canary.firewall.result import FirewallCase, FirewallOutcome, FirewallResult
from ...canary.static.findings import Finding, Impact, ModuleVerdict, StaticResult, Sweep
from ..marks import mark_impact
from ..sections import Section, arrange_modules
from ..summaries import say_direction, say_not_consumed, summarize_static
from ..words.findings import LIMITS, consequence, headline, headline_of_fault, next_step, next_step_of_fault, place
from .tree import add, add_properties, make, write


def render_static_junit(result: StaticResult) -> str:
    """The static tier's answer for one pair, as one suite."""
    return write([static_suite(result)])


def render_sweep_junit(sweep: Sweep) -> str:
    """Every step as a suite of its own, and one suite of the releases that could not be read."""
    suites = [static_suite(step) for step in sweep.steps]
    if sweep.unreadable:
        suite = make("testsuite", name="static: releases that could not be read")
        for release, reason in sweep.unreadable.items():
            case = add(suite, "testcase", name=release, classname="static.releases")
            add(case, "error", reason, message=reason, type="unreadable")
        suites.append(suite)
    return write(suites)


def render_firewall_junit(result: FirewallResult) -> str:
    """The firewall tier's answer, as one suite."""
    return write([firewall_suite(result)])


def firewall_suite(result: FirewallResult) -> ET.Element:
    """The firewall tier's answer, one case a damaged install."""
    suite = make("testsuite", name="firewall")
    add_properties(suite, {"tool": result.tool, "python": result.python, "torch": result.torch})
    for case in result.cases:
        _add_firewall_case(suite, case)
    return suite


def static_suite(result: StaticResult) -> ET.Element:
    """The static tier's answer for one pair."""
    name = f"static {result.old.version} -> {result.new.version}"
    suite = make("testsuite", name=name)
    sources = {side.version: f"{side.wheel} sha256:{side.sha256}" for side in (result.old, result.new)}
    add_properties(suite, {"tool": result.tool, **sources, "not-consumed": str(result.not_consumed)})
    for section in arrange_modules(result):
        case = add(suite, "testcase", name=section.row.module, classname=name.replace(".", "_"))
        _add_static_case(case, section, result)
    lines = [summarize_static(result), say_direction(result), say_not_consumed(result) + "."]
    lines += [f"not consumed: {change}" for change in result.changes_not_consumed]
    for finding in result.unchanged_faults:
        lines.append(f"failing in {result.old.version} already: {finding.module}: {headline_of_fault(finding)}")
        lines += [consequence(finding), *(f"consumed: {place(site)}" for site in finding.call_sites)]
        lines.append(f"next: {next_step_of_fault(finding, result.old.version)}")
    lines += [f"cannot be seen here: {limit.what}; seen by {limit.seen_by}" for limit in LIMITS]
    add(suite, "system-out", "\n".join(filter(None, lines)))
    return suite


def _add_static_case(case: ET.Element, section: Section, result: StaticResult) -> None:
    breaking = [finding for finding in section.own if finding.impact is Impact.BREAKING]
    others = [finding for finding in section.own if finding.impact is not Impact.BREAKING]
    if section.row.verdict is ModuleVerdict.CASCADE:
        message = f"breaks with {section.row.under}, and is filed under it"
        add(case, "failure", message, message=message, type="cascade")
    elif breaking or section.row.verdict is ModuleVerdict.BREAKS:
        message = "; ".join(headline(finding) for finding in breaking) or "breaks"
        kinds = ", ".join(dict.fromkeys(finding.kind for finding in breaking))
        text = "\n\n".join(_tell(finding, result) for finding in breaking)
        add(case, "failure", text, message=message, type=kinds or "breaks")
    lines = [_tell(finding, result) for finding in others]
    lines += [f"filed under {finding.module}: {headline(finding)}" for finding in section.shared]
    if lines:
        add(case, "system-out", "\n\n".join(lines))


def _tell(finding: Finding, result: StaticResult) -> str:
    lines = [f"{mark_impact(finding.impact).word}: {headline(finding)}", consequence(finding)]
    sides = ((result.old.version, finding.before), (result.new.version, finding.after))
    lines += [f"{version}: {place(line)}" for version, line in sides if line is not None]
    lines += [f"consumed: {place(site)}" for site in finding.call_sites]
    return "\n".join([*lines, f"symbol: {finding.symbol}", f"next: {next_step(finding, result.old.version)}"])


def _add_firewall_case(suite: ET.Element, case: FirewallCase) -> None:
    element = add(suite, "testcase", name=case.case, classname="firewall", time=f"{case.seconds:.3f}")
    problems = "; ".join(case.problems)
    if case.outcome is FirewallOutcome.FAIL:
        add(element, "failure", "\n".join(case.problems), message=problems or "not as expected", type="fail")
    elif case.outcome is FirewallOutcome.NOT_RUN:
        add(element, "skipped", message=problems or case.reason or "not run, no reason given")
    lines = [f"damage: {case.damage}", f"release: {case.release}, compiled half: {case.compiled}"]
    lines += [f"available: {case.available}", f"reason: {case.reason}", f"ended: {case.ended}"]
    lines += [f"native path of {module}: {path}" for module, path in case.native_paths.items()]
    add(element, "system-out", "\n".join(lines))
