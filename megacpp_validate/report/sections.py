"""The order in which every renderer shows a static result: by blamed module, cascades under their cause."""

from __future__ import annotations

from typing import NamedTuple

from ..canary.static.findings import Finding, Impact, ModuleResult, ModuleVerdict, StaticResult


class Section(NamedTuple):
    """One bridge module of a result.

    own: the findings that are blamed on it.
    shared: findings that touch it and are blamed on an earlier module.
    cascades: the modules that are filed under it.
    """

    row: ModuleResult
    own: tuple[Finding, ...]
    shared: tuple[Finding, ...]
    cascades: tuple[str, ...]


def arrange_modules(result: StaticResult) -> tuple[Section, ...]:
    """One section a module, in dependency order. No finding is left out, whatever module it names."""
    rows = list(result.modules)
    known = {row.module for row in rows}
    for finding in result.findings:
        if finding.module not in known:  # a module without a row of its own must not hide its findings
            known.add(finding.module)
            rows.append(ModuleResult(module=finding.module, verdict=_judge_alone(finding, result)))
    return tuple(_arrange(row, result) for row in rows)


def sort_by_verdict(sections: tuple[Section, ...]) -> tuple[Section, ...]:
    """What breaks first, what is clean last; the same verdicts stay in dependency order."""
    ranks = (ModuleVerdict.BREAKS, ModuleVerdict.CASCADE, ModuleVerdict.RISK, ModuleVerdict.CLEAN)
    return tuple(sorted(sections, key=lambda section: ranks.index(section.row.verdict)))


def is_shown(finding: Finding, *, verbose: bool) -> bool:
    """Whether a finding is listed: a harmless one only where asked for, or where the bridge followed it."""
    return verbose or finding.impact is not Impact.HARMLESS or finding.follows


def _arrange(row: ModuleResult, result: StaticResult) -> Section:
    return Section(
        row=row,
        own=tuple(finding for finding in result.findings if finding.module == row.module),
        shared=tuple(f for f in result.findings if f.module != row.module and row.module in f.modules),
        cascades=tuple(
            other.module
            for other in result.modules
            if other.verdict is ModuleVerdict.CASCADE and other.under == row.module
        ),
    )


def _judge_alone(finding: Finding, result: StaticResult) -> ModuleVerdict:
    impacts = {other.impact for other in result.findings if other.module == finding.module}
    if Impact.BREAKING in impacts:
        return ModuleVerdict.BREAKS
    return ModuleVerdict.RISK if Impact.RISK in impacts else ModuleVerdict.CLEAN
