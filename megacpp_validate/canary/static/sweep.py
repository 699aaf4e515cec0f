"""Many pairs: one comparison, every adjacent pair of releases, the first release in which a module breaks."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from multiprocessing import parent_process
from pathlib import Path

import griffe

from ...catalog.bridge import Catalog
from ...catalog.file import PACKAGE_ROOT
from ...environments.fits import Fit, FitVerdict
from ...process_guard import PR_SET_PDEATHSIG, control_process
from ..package_index import sort_versions
from ..requirements import Requirements
from .compare import compare_releases
from .findings import ChangeKind, Finding, Impact, ModuleResult, ModuleVerdict, StaticResult, Sweep
from .gathering import blame_requirements, judge_modules, place_requirements
from .import_time import read_requirements
from .library import TE, Library
from .named_rows import read_source
from .project import Project, Source
from .release import Release, ReleaseUnreadable, without_garbage_collection
from .sources import Sources, SourceUnavailable
from .surface import Surface

OLDEST = "1.9.0.post1"  # the first release with a pure-Python wheel


BRIDGE = PACKAGE_ROOT / "bridge"


def read_bridge(catalog: Catalog, library: Library = TE) -> Source:
    """The bridge of this project, a row a module."""
    project = Project([BRIDGE], library=library)
    rows = {name.removeprefix("bridge/"): module.id for module in catalog.modules for name in module.files}
    order = tuple(module.id for module in catalog.modules) if library == TE else ()  # others have no import bridge
    return Source(project, rows, order, f"{PACKAGE_ROOT.name}/bridge/")


def read_chosen(roots: Sequence[Path], catalog: Catalog, library: Library = TE) -> Source:
    """The source tree below some folders; the bridge of this project without any, and by its own folder."""
    return read_source(roots, library) if roots and tuple(roots) != (BRIDGE,) else read_bridge(catalog, library)


def run_pair(
    old: Release, new: Release, source: Source, *, tool: str, verbose: bool = False,
    requirements: Requirements | None = None,
) -> StaticResult:  # fmt: skip
    """The static tier for one pair of releases; without `requirements` those of the environment are left out."""
    found = requirements.find_new(old.version, new.version) if requirements is not None else ()
    with without_garbage_collection():
        findings, standing, surface = compare_releases(old, new, source)
        others = list(_not_consumed(old, new, surface))
    placed = tuple(place_requirements(found, surface))
    findings = [finding for finding in findings if not _is_met(finding, placed)]
    judged = blame_requirements(judge_modules(findings, standing, surface), placed)
    unused = dict.fromkeys(source.rows.values())  # a module that the project names has a row, whatever it uses
    clean = [name for name in unused if name not in {row.module for row in judged}]
    return StaticResult(
        tool=tool,
        library=old.library.title,
        old=old.source,
        new=new.source,
        downgrade=is_downgrade(old.version, new.version),
        modules=(*judged, *(ModuleResult(module=name, verdict=ModuleVerdict.CLEAN) for name in clean)),
        findings=tuple(findings),
        unchanged_faults=tuple(standing),
        not_consumed=len(others)
        + sum(f.impact is Impact.HARMLESS and f.kind is not ChangeKind.ADDED for f in findings),
        changes_not_consumed=tuple(others) if verbose else (),
        not_read=dict(source.project.unreadable),
        source=source.title,
        environment=requirements.shown if requirements is not None else "",
        requirements=placed,
        rows={use.site.file: use.module for use in surface.uses if use.site.file != use.module},
        first_uses={use.module: use.site for use in reversed(surface.uses)},
    )


def _is_met(finding: Finding, placed: Sequence[Fit]) -> bool:
    """Whether a new check of the import asks for versions alone that the environment is known to have."""
    rows = [row for row in placed if f"{row.component}_version" in finding.new]
    checks = finding.new.split("; ")
    settled = rows and all(row.verdict is FitVerdict.FITS for row in rows)
    named = all(any(f"{row.component}_version" in check for row in rows) for check in checks)
    return finding.kind is ChangeKind.IMPORT_REQUIREMENT_ADDED and bool(settled) and named


def read_pair(sources: Sources, old: str, new: str) -> tuple[Release, Release]:
    """Two releases, read side by side where they were never read before.

    Raises:
        UnknownRelease, SourceUnavailable, ReleaseUnreadable: as `Sources.release`.
    """
    pair = sources.release(old), sources.release(new)
    fresh = [release.version for release in pair if release.source.sha256 and not release.is_read]
    if len(fresh) > 1:
        with _open_pool(len(fresh)) as pool:
            list(pool.map(_read_ahead, [(version, sources) for version in fresh]))
    return pair


def run_sweep(
    versions: Sequence[str],
    sources: Sources,
    catalog: Catalog,
    *,
    tool: str,
    roots: Sequence[Path] = (),
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> Sweep:
    """Every adjacent pair of `versions`, oldest first; a release that cannot be read is left out and named.

    Args:
        roots: folders of the source tree that is judged; the bridge of this project without any.
        progress: called with what has ended, the number of it and how many there are.
    """
    unreadable: dict[str, str] = {}
    steps: list[StaticResult] = []
    with _open_pool(min(os.cpu_count() or 1, 4)) as pool:
        read = pool.map(_read_ahead, [(version, sources) for version in versions])
        for number, (version, why) in enumerate(zip(versions, read, strict=True), start=1):
            progress(f"read {version}", number, len(versions))
            unreadable |= {version: why} if why else {}
        readable = [version for version in versions if version not in unreadable]
        orders = [(old, new, sources, catalog, tuple(roots), tool) for old, new in pairwise(readable)]
        for step in pool.map(_run_step, orders):
            steps.append(step)
            progress(f"{step.old.version} -> {step.new.version}", len(steps), len(orders))
    return Sweep(steps=tuple(steps), unreadable=unreadable)


def is_downgrade(old: str, new: str) -> bool:
    """Whether OLD is the newer release; folders have no order."""
    return old != new and sort_versions((old, new)) == [new, old]


def _open_pool(jobs: int) -> ProcessPoolExecutor:
    """Workers that end with this process, whatever ends it: they would wait for the next order for ever."""
    return ProcessPoolExecutor(jobs, initializer=_end_with_parent)


def _end_with_parent() -> None:
    control_process(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = parent_process()
    if parent is not None and not parent.is_alive():  # it ended before the line above
        os._exit(1)


def _read_ahead(order: tuple[str, Sources]) -> str:
    """Fetch a release and read it into the cache; why it cannot be read, empty where it can."""
    version, sources = order
    why = ""
    try:
        with without_garbage_collection():
            release = sources.release(version)
            _ = release.tree
            read_requirements(release)
    except (SourceUnavailable, ReleaseUnreadable) as fault:
        why = str(fault)
    gc.unfreeze()
    gc.collect()  # a worker reads many releases; the last one's tree goes before the next one comes
    return why


def _run_step(order: tuple[str, str, Sources, Catalog, tuple[Path, ...], str]) -> StaticResult:
    old, new, sources, catalog, roots, tool = order
    source = read_chosen(roots, catalog, sources.library)
    result = run_pair(sources.release(old), sources.release(new), source, tool=tool)
    gc.unfreeze()
    gc.collect()
    return result


def _not_consumed(old: Release, new: Release, surface: Surface) -> Iterator[str]:
    """API changes that griffe finds and that are about nothing the bridge names."""
    # A package that code imports (`import transformer_engine.pytorch as te`) is in the path of every change below it.
    named = {symbol.name for symbol in surface.symbols if new.module(symbol.path) is None}
    for breakage in griffe.find_breaking_changes(old.tree, new.tree):
        path = breakage.obj.path
        if path.startswith(new.library.roots) and not named & set(path.split(".")):
            yield f"{breakage.kind.value}: {path.removeprefix(old.tree.path + '.')}"
