"""The verb that handles sealed caches: what it does, and the exit code of each answer."""

from __future__ import annotations

import errno
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from ...catalog.bridge import Catalog, read_catalog
from ...catalog.bridge import Target as TargetRow
from ...jitcache.archive import TransferRefused
from ...jitcache.layout import MANIFEST, NVRTC, arch_folder, cache_arch, cache_variables
from ...jitcache.manifest import Manifest, compare_stack
from ...jitcache.result import JitCacheResult, StackDifference
from ...jitcache.seal import check_sealed, is_sealed, seal, unseal
from ...jitcache.transfer import export_cache, import_cache, read_carried
from ...jitcache.working import is_at_home, open_working
from ...process import Processes
from ..app import TOOL, Exit, Format, foreseen, refuse, refuse_full_disk
from .jit_stack import AskedJit, open_stack
from .jit_telling import tell_jit
from .prewarm_runs import FORESEEN


@dataclass(frozen=True)
class AskedCache:
    """The arguments of the verb."""

    deed: str
    place: Path | None
    root: Path | None
    arch: str
    work: Path | None
    prefix: str
    replace: bool
    any_stack: bool
    shared: bool
    python: str

    @property
    def jit(self) -> AskedJit:
        """The same as prewarm has it."""
        return AskedJit("", None, self.root, self.python, "", 1, 1, 0, 0.0)


@foreseen({**FORESEEN, TransferRefused: Exit.WRONG_ARGUMENTS})
def run_jit_cache(matrix: Path | None, asked: AskedCache, fmt: Format, output: Path | None) -> None:
    """One deed, told; closed where a cache is of another stack."""
    started = time.monotonic()
    root = asked.jit.place()
    try:
        if asked.deed == "import":
            result = _import(read_catalog(matrix), asked, root)
        else:
            result = _DEEDS[asked.deed](_find_folder(root, asked.arch), asked)
    except OSError as fault:
        refuse_full_disk(_written_to(asked, root), fault)
        refuse(
            f"{asked.deed}: {fault}. Likely cause: a file or folder belongs to another user, is mounted read-only, or "
            "is none. Next step: give one that you can read and write.",
            Exit.WRONG_ARGUMENTS,
        )
    tell_jit(result.model_copy(update={"seconds": round(time.monotonic() - started, 2)}), fmt, output)
    raise typer.Exit(Exit.CLOSED if result.differences else Exit.OPEN)


def _written_to(asked: AskedCache, root: Path) -> Path:
    """Whose disk is the full one, where one is."""
    places = {"export": asked.place, "open": asked.work}
    return places.get(asked.deed) or root


def _find_folder(root: Path, arch: str) -> Path:
    """ROOT/ARCH; the only one with a manifest where no architecture is named."""
    if arch:
        try:
            return arch_folder(root, arch)
        except ValueError as fault:
            refuse(str(fault), Exit.WRONG_ARGUMENTS)
    found = sorted(path.parent for path in root.glob(f"*/{MANIFEST}"))
    if not found and (closed := sorted(path for path in root.glob("*/") if not os.access(path, os.R_OK | os.X_OK))):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(closed[0]))
    if not found:
        refuse(
            f"{root} has no cache with a manifest. Likely cause: nothing was prewarmed there, or a prewarm did not "
            "come to its end. Next step: give the root of the caches with --root, or `nox -s prewarm` to its end.",
            Exit.EVIDENCE_MISSING,
        )
    if len(found) > 1:
        there = ", ".join(path.name for path in found)
        refuse(
            f"{root} has {len(found)} caches with a manifest ({there}). Next step: name one with --arch.",
            Exit.WRONG_ARGUMENTS,
        )
    return found[0]


def _say(deed: str, folder: Path, manifest: Manifest, digest: str, **more: Any) -> JitCacheResult:
    return JitCacheResult(
        tool=TOOL, deed=deed, folder=str(folder), architecture=manifest.architecture, manifest=digest,
        mode=manifest.mode, made=manifest.made, stack=manifest.stack.versions, caches=manifest.sizes,
        tasks=tuple(task.id for task in manifest.tasks), missing=manifest.missing,
        in_place=is_at_home(folder, manifest), **more,
    )  # fmt: skip


def _check(folder: Path, asked: AskedCache) -> JitCacheResult:
    checked = check_sealed(folder)
    return _say(
        asked.deed, folder, checked.manifest, checked.digest, extra=checked.extra, sealed=is_sealed(folder)
    )  # fmt: skip


def _seal(folder: Path, asked: AskedCache) -> JitCacheResult:
    seal(folder, shared=asked.shared)
    return _check(folder, asked)


def _unseal(folder: Path, asked: AskedCache) -> JitCacheResult:
    checked = check_sealed(folder)
    unseal(folder)
    return _say(asked.deed, folder, checked.manifest, checked.digest, extra=checked.extra)


def _export(folder: Path, asked: AskedCache) -> JitCacheResult:
    if asked.place is None:
        refuse("export to what? Next step: name an archive such as jit.tar.zst, or a folder.", Exit.WRONG_ARGUMENTS)
    target = asked.place.absolute()
    if target.resolve().is_relative_to(folder.resolve()):
        refuse(f"{target} lies in the sealed cache itself. Next step: name another place.", Exit.WRONG_ARGUMENTS)
    done = export_cache(folder, target, prefix=asked.prefix)
    return _say(
        asked.deed, folder, done.manifest, done.digest, archive=str(done.place), archive_hash=done.archive,
        archive_bytes=done.archive_bytes, extra=done.extra,
    )  # fmt: skip


def _open(folder: Path, asked: AskedCache) -> JitCacheResult:
    if asked.work is None:
        refuse("open where? Next step: give --work a folder that you can write.", Exit.WRONG_ARGUMENTS)
    checked = check_sealed(folder)
    work = asked.work.absolute()
    if work.resolve().is_relative_to(folder.resolve()):
        refuse(f"{work} lies in the sealed cache itself. Next step: give --work another folder.", Exit.WRONG_ARGUMENTS)
    try:
        place = open_working(folder, checked.manifest, work)
    except FileExistsError:
        refuse(
            f"{work / folder.name} is there already. Likely cause: an earlier working copy, which may hold what was "
            "missing. Next step: use it as it is, give another --work, or remove it.",
            Exit.WRONG_ARGUMENTS,
        )
    variables = cache_variables(work, folder.name, nvrtc=checked.manifest.mode == NVRTC)
    said = _say(asked.deed, place, checked.manifest, checked.digest, variables=variables)
    return said.model_copy(update={"in_place": True})


_DEEDS = {"check": _check, "seal": _seal, "unseal": _unseal, "export": _export, "open": _open}


def _import(catalog: Catalog, asked: AskedCache, root: Path) -> JitCacheResult:
    if asked.place is None:
        refuse("import what? Next step: name an archive, or an exported folder.", Exit.WRONG_ARGUMENTS)
    source = asked.place.absolute()
    manifest, digest = read_carried(source)
    if asked.arch not in ("", manifest.architecture):
        refuse(
            f"{source} holds the cache of {manifest.architecture}, and --arch says {asked.arch}. Next step: import the "
            "cache of that architecture, or leave --arch out.",
            Exit.WRONG_ARGUMENTS,
        )
    if not asked.any_stack and (differences := _find_differences(catalog, manifest, asked, root)):
        return _say("import", source, manifest, digest, differences=differences)
    done = import_cache(source, root, replace=asked.replace)
    return _say("import", done.place, done.manifest, done.digest, kept=done.kept)


def _find_differences(
    catalog: Catalog, manifest: Manifest, asked: AskedCache, root: Path
) -> tuple[StackDifference, ...]:
    """In what the cache and the stack that is here differ. Where no GPU is seen, what it would tell is not asked."""
    target = _target_of(catalog, manifest)
    with open_stack(catalog, target, asked.jit, root, Processes()) as stack:
        seen, architecture = stack.seen, manifest.architecture
        if stack.facts.gpu is not None and target.arch:
            architecture = cache_arch(stack.facts.gpu.arch)
        elif target.arch:
            of_gpu = {
                name: manifest.stack.versions[name] for name in ("gpu", "driver") if name in manifest.stack.versions
            }
            seen = seen.model_copy(update={"versions": {**seen.versions, **of_gpu}})
        return compare_stack(manifest, seen, architecture, manifest.mode)


def _target_of(catalog: Catalog, manifest: Manifest) -> TargetRow:
    found = next((row for row in catalog.targets if cache_arch(row.arch) == manifest.architecture), None)
    if found is None:
        refuse(
            f"the cache is of {manifest.architecture}, and matrix/targets.toml has no target with that. Next step: add "
            "one, or say --any-stack.",
            Exit.WRONG_ARGUMENTS,
        )
    return found
