"""Changes that uses of the bridge meet, gathered into findings, one a change, and each module judged by them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .changes import Change
from .findings import Finding, Impact, ModuleResult, ModuleVerdict
from .surface import Surface, Symbol, Use

_ORDER = {Impact.BREAKING: 0, Impact.RISK: 1, Impact.HARMLESS: 2}


@dataclass(frozen=True)
class Met:
    """A change, and the use that meets it."""

    change: Change
    use: Use
    symbol: Symbol


def gather(met: Iterable[Met], surface: Surface) -> list[Finding]:
    """Uses that meet the same change become one finding, filed under the first module in dependency order."""
    groups: dict[tuple[object, ...], list[Met]] = {}
    for one in met:
        c = one.change
        key = (one.symbol.path, c.member, c.kind, c.parameter, c.old, c.new)
        groups.setdefault(key, []).append(one)
    findings = [_finding(group, surface) for group in groups.values()]
    rank = surface.module_order.index
    return sorted(findings, key=lambda f: (_ORDER[f.impact], rank(f.module), f.symbol, f.member, f.kind, f.parameter))


def _finding(group: list[Met], surface: Surface) -> Finding:
    worst = min(_ORDER[one.change.impact] for one in group)  # what a change is told as
    told = [one for one in group if _ORDER[one.change.impact] == worst]
    change = told[0].change
    modules = {one.use.module for one in group}
    sites = {(one.use.site.file, one.use.site.line): one.use.site for one in group}
    return Finding(
        module=surface.first({one.use.module for one in told}),
        modules=tuple(sorted(modules, key=surface.module_order.index)),
        kind=change.kind,
        impact=change.impact,
        cause=change.cause,
        symbol=group[0].symbol.path.rstrip("."),
        member=change.member,
        parameter=change.parameter,
        before=change.before,
        after=change.after,
        call_sites=tuple(sites[key] for key in sorted(sites)),
        old=change.old,
        new=change.new,
        suggestion=change.suggestion,
        follows=change.follows,
    )


def judge_modules(findings: Iterable[Finding], surface: Surface) -> tuple[ModuleResult, ...]:
    """One verdict a bridge module, in dependency order."""
    results = []
    for module in surface.module_order:
        own = [f for f in findings if f.module == module]
        touched = [f for f in findings if module in f.modules and f.module != module]
        if any(f.impact is Impact.BREAKING for f in own):
            results.append(ModuleResult(module=module, verdict=ModuleVerdict.BREAKS))
        elif red := [f for f in touched if f.impact is Impact.BREAKING]:
            results.append(ModuleResult(module=module, verdict=ModuleVerdict.CASCADE, under=red[0].module))
        elif any(f.impact is Impact.RISK for f in (*own, *touched)):
            results.append(ModuleResult(module=module, verdict=ModuleVerdict.RISK))
        else:
            results.append(ModuleResult(module=module, verdict=ModuleVerdict.CLEAN))
    return tuple(results)
