"""What the verb jit_cache does with a sealed cache: check, seal, unseal, export, import, open."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .. import TOOL
from ..catalog.bridge import Catalog
from ..errors import EvidenceMissing, WrongArguments
from .layout import MANIFEST, NVRTC, arch_folder, cache_arch, cache_variables
from .manifest import Manifest, compare_stack
from .result import JitCacheResult, StackDifference
from .seal import check_sealed, is_at_home, is_sealed, open_working, seal, unseal
from .stack import JitOptions, open_stack
from .transfer import export_cache, import_cache, read_carried


@dataclass(frozen=True)
class CacheOptions:
    """What to do, and with what.

    Attributes:
        place: archive or folder to export to, or to import.
        arch: of the cache; the only one below the root where it is empty.
        work: root of the working copy of `open`.
        prefix: of the paths in an exported archive.
        replace: an import replaces another cache.
        any_stack: an import does not compare the cache with the stack.
        shared: any user may add files beside the sealed ones.
    """

    action: Literal["check", "seal", "unseal", "export", "import", "open"]
    place: Path | None = None
    arch: str = ""
    work: Path | None = None
    prefix: str = ""
    replace: bool = False
    any_stack: bool = False
    shared: bool = False


def run_cache(catalog: Catalog, jit: JitOptions, options: CacheOptions) -> JitCacheResult:
    """One action.

    Raises:
        ToolError: by the class of what is wrong.
        OSError: a disk is full, or a folder cannot be written.
    """
    started, root = time.monotonic(), jit.place()
    if options.action == "import":
        result = _import(catalog, jit, options, root)
    else:
        result = _act(_find_folder(root, options.arch), options)
    return result.model_copy(update={"seconds": round(time.monotonic() - started, 2)})


def _act(folder: Path, options: CacheOptions) -> JitCacheResult:
    action = options.action
    if action == "export":
        target = _require_outside(options.place, folder, "an archive such as jit.tar.zst, or a folder")
        done = export_cache(folder, target, prefix=options.prefix)
        return _describe(
            action, folder, done.manifest, done.digest, archive=str(done.place), archive_hash=done.archive,
            archive_bytes=done.archive_bytes, extra=done.extra,
        )  # fmt: skip
    if action == "seal":
        seal(folder, shared=options.shared)
    checked = check_sealed(folder)
    if action == "unseal":
        unseal(folder)
    if action != "open":
        sealed = action == "unseal" or is_sealed(folder)
        return _describe(action, folder, checked.manifest, checked.digest, extra=checked.extra, sealed=sealed)
    work = _require_outside(options.work, folder, "a folder that you can write with --work")
    place = open_working(folder, checked.manifest, work)
    variables = cache_variables(work, folder.name, nvrtc=checked.manifest.mode == NVRTC)
    return _describe(action, place, checked.manifest, checked.digest, variables=variables, in_place=True)


def _require_outside(place: Path | None, folder: Path, what: str) -> Path:
    if place is None:
        raise WrongArguments(f"no place is named. Next step: name {what}.")
    if place.absolute().resolve().is_relative_to(folder.resolve()):
        raise WrongArguments(f"{place} lies in the sealed cache itself. Next step: name another place.")
    return place.absolute()


def _find_folder(root: Path, arch: str) -> Path:
    """ROOT/ARCH; the only one with a manifest where no architecture is named."""
    if arch:
        return arch_folder(root, arch)
    found = sorted(path.parent for path in root.glob(f"*/{MANIFEST}"))
    if not found:
        raise EvidenceMissing(
            f"{root} has no cache with a manifest. Likely cause: nothing was prewarmed there, a prewarm did not end, "
            "or a folder may not be read. Next step: give the root of the caches with --root, or prewarm to the end."
        )
    if len(found) > 1:
        there = ", ".join(path.name for path in found)
        raise WrongArguments(f"{root} has {len(found)} caches ({there}). Next step: name one with --arch.")
    return found[0]


def _describe(action: str, folder: Path, manifest: Manifest, digest: str, **more: Any) -> JitCacheResult:
    fields = {"in_place": is_at_home(folder, manifest), **more}
    return JitCacheResult(
        tool=TOOL, deed=action, folder=str(folder), architecture=manifest.architecture, manifest=digest,
        mode=manifest.mode, made=manifest.made, stack=manifest.stack.versions, caches=manifest.sizes,
        tasks=tuple(task.id for task in manifest.tasks), missing=manifest.missing, **fields,
    )  # fmt: skip


def _import(catalog: Catalog, jit: JitOptions, options: CacheOptions, root: Path) -> JitCacheResult:
    if options.place is None:
        raise WrongArguments("no cache to import is named. Next step: name an archive, or an exported folder.")
    source = options.place.absolute()
    manifest, digest = read_carried(source)
    if options.arch not in ("", manifest.architecture):
        raise WrongArguments(
            f"{source} holds the cache of {manifest.architecture}, and --arch is {options.arch}. Next step: import the "
            "cache of that architecture, or leave --arch out."
        )
    if not options.any_stack and (differences := _find_differences(catalog, manifest, jit, root)):
        return _describe("import", source, manifest, digest, differences=differences)
    done = import_cache(source, root, replace=options.replace)
    return _describe("import", done.place, done.manifest, done.digest, kept=done.kept)


def _find_differences(catalog: Catalog, manifest: Manifest, jit: JitOptions, root: Path) -> tuple[StackDifference, ...]:
    """In what the cache and the stack that is here differ; what only a GPU reports is left out where none is seen."""
    target = next((row for row in catalog.targets if cache_arch(row.arch) == manifest.architecture), None)
    if target is None:
        raise WrongArguments(
            f"the cache is of {manifest.architecture}, and matrix/targets.toml has no target with that. Next step: add "
            "one, or say --any-stack."
        )
    with open_stack(catalog, target, jit, root) as stack:
        seen, architecture = stack.read_seen(), manifest.architecture
        if stack.facts.gpu is not None and target.arch:
            architecture = cache_arch(stack.facts.gpu.arch)
        elif target.arch:
            of_gpu = {name: text for name, text in manifest.stack.versions.items() if name in ("gpu", "driver")}
            seen = seen.model_copy(update={"versions": {**seen.versions, **of_gpu}})
        return compare_stack(manifest, seen, architecture, manifest.mode)
