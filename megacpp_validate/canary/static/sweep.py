"""Many pairs: one comparison, every adjacent pair of releases, the first release in which a module breaks."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path

import griffe
from packaging.version import InvalidVersion, Version

from ...catalog.bridge import Catalog
from ...catalog.file import PACKAGE_ROOT
from .compare import compare_releases
from .derive import BridgeFile, derive_surface
from .findings import Impact, ModuleVerdict, StaticResult, Sweep
from .gathering import judge_modules
from .import_faults import read_import_faults
from .import_time import read_requirements
from .release import ROOTS, Release, ReleaseUnreadable, without_garbage_collection
from .sources import Sources, SourceUnavailable
from .surface import Surface
from .unlisted import unlisted_files

OLDEST = "1.9.0.post1"  # the first release with a pure-Python wheel


def read_surface(catalog: Catalog) -> Surface:
    """What the bridge of this project consumes."""
    files = [
        BridgeFile(module.id, PACKAGE_ROOT / name, f"{PACKAGE_ROOT.name}/{name}")
        for module in catalog.modules
        for name in module.files
    ]
    order = [module.id for module in catalog.modules]
    return derive_surface([*files, *unlisted_files(files, order)], order)


def run_pair(old: Release, new: Release, surface: Surface, *, tool: str, verbose: bool = False) -> StaticResult:
    """The static tier for one pair of releases."""
    with without_garbage_collection():
        findings, standing = compare_releases(old, new, surface)
        others = list(_not_consumed(old, new, surface))
    return StaticResult(
        tool=tool,
        old=old.source,
        new=new.source,
        downgrade=is_downgrade(old.version, new.version),
        modules=judge_modules(findings, surface),
        findings=tuple(findings),
        unchanged_faults=tuple(standing),
        not_consumed=len(others) + sum(f.impact is Impact.HARMLESS for f in findings),
        changes_not_consumed=tuple(others) if verbose else (),
    )


def read_pair(sources: Sources, old: str, new: str) -> tuple[Release, Release]:
    """Two releases, read side by side where they were never read before.

    Raises:
        UnknownRelease, SourceUnavailable, ReleaseUnreadable: as `Sources.release`.
    """
    pair = sources.release(old), sources.release(new)
    fresh = [release.version for release in pair if release.source.sha256 and not release.is_read]
    if len(fresh) > 1:
        with ProcessPoolExecutor(len(fresh)) as pool:
            list(pool.map(_read_ahead, [(version, sources.cache) for version in fresh]))
    return pair


def run_sweep(
    versions: Sequence[str],
    sources: Sources,
    catalog: Catalog,
    *,
    tool: str,
    progress: Callable[[str], None] = lambda _: None,
) -> Sweep:
    """Every adjacent pair of `versions`, oldest first; a release that cannot be read is left out and named."""
    readable: list[str] = []
    unreadable: dict[str, str] = {}
    for version in versions:
        try:
            sources.wheel(version)
            readable.append(version)
        except (SourceUnavailable, ReleaseUnreadable) as fault:
            unreadable[version] = str(fault)
    steps: list[StaticResult] = []
    jobs = min(os.cpu_count() or 1, 4)
    with ProcessPoolExecutor(jobs) as pool:
        list(pool.map(_read_ahead, [(version, sources.cache) for version in readable]))
        asked = [(old, new, sources.cache, catalog, tool) for old, new in pairwise(readable)]
        for step in pool.map(_run_step, asked):
            progress(f"{step.old.version} -> {step.new.version}")
            steps.append(step)
    return Sweep(steps=tuple(steps), unreadable=unreadable)


def first_bad(sweep: Sweep, module: str) -> StaticResult | None:
    """The first step of a sweep in which a bridge module breaks, by its own fault or by a cascade."""
    red = {ModuleVerdict.BREAKS, ModuleVerdict.CASCADE}
    return next(
        (step for step in sweep.steps if any(m.module == module and m.verdict in red for m in step.modules)),
        None,
    )


def is_same_release(old: str, new: str) -> bool:
    """Whether two names are one release, spelled alike or not (2.9 and 2.9.0)."""
    try:
        return Version(old) == Version(new)
    except InvalidVersion:
        return old == new


def is_downgrade(old: str, new: str) -> bool:
    """Whether OLD is the newer release; folders have no order."""
    try:
        return Version(old) > Version(new)
    except InvalidVersion:
        return False


def _read_ahead(asked: tuple[str, Path]) -> None:
    version, cache = asked
    release = Sources(cache).release(version)
    with without_garbage_collection():
        _ = release.tree
        read_requirements(release)
        read_import_faults(release)
    gc.collect()  # a worker reads many releases; the last one's tree goes before the next one comes


def _run_step(asked: tuple[str, str, Path, Catalog, str]) -> StaticResult:
    old, new, cache, catalog, tool = asked
    sources = Sources(cache)
    result = run_pair(sources.release(old), sources.release(new), read_surface(catalog), tool=tool)
    gc.collect()
    return result


def _not_consumed(old: Release, new: Release, surface: Surface) -> Iterator[str]:
    """API changes that griffe finds and that are about nothing the bridge names."""
    named = {symbol.name for accessor in surface.accessors.values() for symbol in accessor.symbols}
    for breakage in griffe.find_breaking_changes(old.tree, new.tree):
        path = breakage.obj.path
        if path.startswith(ROOTS) and not named & set(path.split(".")):
            yield f"{breakage.kind.value}: {path.removeprefix(old.tree.path + '.')}"
