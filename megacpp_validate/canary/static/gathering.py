"""Gathers changes into findings, one a change, and judges each module by its findings and unmet requirements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ...diagnosis.checks import FIREWALL, USES, entries_of_symbol
from ...environments.fits import Fit, FitVerdict
from .findings import Change, ChangeKind, Finding, Impact, ModuleResult, ModuleVerdict
from .surface import Surface, Symbol, Use


@dataclass(frozen=True)
class Met:
    """A change, and the use that meets it."""

    change: Change
    use: Use
    symbol: Symbol


def gather(met: Iterable[Met], surface: Surface) -> list[Finding]:
    """Uses that meet the same change with the same impact become one finding."""
    groups: dict[tuple[object, ...], dict[tuple[object, ...], list[Met]]] = {}
    for one in met:
        c = one.change
        alike = groups.setdefault((one.symbol.path, c.member, c.kind, c.parameter, c.old, c.new), {})
        alike.setdefault((c.impact, c.doubt, c.cause), []).append(one)
    findings = []
    for alike in groups.values():
        counted = [group for group in alike.values() if group[0].change.impact is not Impact.HARMLESS]
        findings += [_finding(group, surface) for group in counted or alike.values()]
    rank, worst = surface.module_order.index, list(Impact).index
    return sorted(findings, key=lambda f: (worst(f.impact), rank(f.module), f.symbol, f.member, f.kind, f.parameter))


def _finding(group: list[Met], surface: Surface) -> Finding:
    modules = sorted({one.use.module for one in group}, key=surface.module_order.index)
    sites = {(one.use.site.file, one.use.site.line): one.use.site for one in group}
    change = {name: value for name, value in vars(group[0].change).items() if name != "raises"}
    return Finding(
        module=modules[0],
        modules=tuple(modules),
        symbol=group[0].symbol.path.rstrip("."),
        call_sites=tuple(sites[key] for key in sorted(sites)),
        **change,
    )


def judge_modules(
    findings: Iterable[Finding], standing: Iterable[Finding], surface: Surface
) -> tuple[ModuleResult, ...]:  # fmt: skip
    """One verdict a module, in dependency order, by its own lines; where the import fails, by the first module.

    Args:
        standing: uses that fail in OLD already.
    """
    results = []
    for module in surface.module_order:
        met = [f for f in findings if module in f.modules]
        red = [f for f in met if f.impact is Impact.BREAKING]
        own = [f for f in red if f.module == module or f.kind is not ChangeKind.IMPORT_REQUIREMENT_ADDED]
        failing = any(module in f.modules and f.impact is Impact.BREAKING for f in standing)
        at_risk = any(f.impact is Impact.RISK for f in met)
        verdict = ModuleVerdict.BREAKS if own else ModuleVerdict.CASCADE if red else ModuleVerdict.CLEAN
        if verdict is ModuleVerdict.CLEAN and (at_risk or failing):
            verdict = ModuleVerdict.RISK if at_risk else ModuleVerdict.FAILS_BEFORE
        under = red[0].module if verdict is ModuleVerdict.CASCADE else ""
        results.append(ModuleResult(module=module, verdict=verdict, under=under))
    return tuple(results)


def place_requirements(fits: Iterable[Fit], surface: Surface) -> Iterator[Fit]:
    """Requirements with the modules of the tree that they break; what breaks none of them is a warning."""
    for fit in fits:
        rows = tuple(row for row in surface.module_order if _stands_on(row, fit, surface))
        unused = fit.verdict is FitVerdict.REFUSED and not rows
        verdict = FitVerdict.WARNED if unused else fit.verdict
        yield fit.model_copy(update={"breaks": rows, "verdict": verdict})


def _stands_on(row: str, fit: Fit, surface: Surface) -> bool:
    """Whether a requirement breaks a row: by its name, else by what the row uses of what the named modules use."""
    if not fit.breaks or FIREWALL in fit.breaks or row in fit.breaks:
        return True
    if row in USES:  # of the bridge, and not named by the row of the matrix
        return False
    works = {entry for module, used in USES.items() if module not in fit.breaks for entry in used}
    entries = {entry for module in fit.breaks for entry in USES.get(module, ())} - works
    return any(not entries.isdisjoint(entries_of_symbol(use.accessor)) for use in surface.uses if use.module == row)


def blame_requirements(modules: Sequence[ModuleResult], fits: Iterable[Fit]) -> tuple[ModuleResult, ...]:
    """Verdicts with unmet requirements: the first module in order breaks, the others break with it."""
    found = {row.module: row for row in modules}
    for fit in fits:
        broken = [row for row in found if row in fit.breaks] if fit.verdict is FitVerdict.REFUSED else []
        for row in broken:
            if found[row].verdict not in (ModuleVerdict.BREAKS, ModuleVerdict.CASCADE):
                first = row == broken[0]
                verdict = ModuleVerdict.BREAKS if first else ModuleVerdict.CASCADE
                found[row] = ModuleResult(module=row, verdict=verdict, under="" if first else broken[0])
    return tuple(found.values())
