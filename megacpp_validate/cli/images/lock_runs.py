"""The verb of pins and locks: what it runs, and the exit code of each answer."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import typer

from ...catalog.bridge import Catalog, Target, matrix_folder
from ...catalog.images import Image, Images, read_images
from ...environments.environment import NoEnvironment
from ...images.bake import FILE as BAKE_FILE
from ...images.bake import render_bake
from ...images.claims import check_claims
from ...images.fit_result import StackFit
from ...images.inputs import read_project
from ...images.lock_compile import IndexSilent
from ...images.lock_result import LockLine, LockResult, PinLine, PinNews
from ...images.locking import (
    Asker,
    Locked,
    Written,
    check_locks,
    make_image_lock,
    make_releases_lock,
    make_sessions_lock,
    write_together,
)
from ...images.locks import ImageLock, read_image_lock
from ...images.pinning import Pinned, check_pins, pin_bases
from ...images.pins import FILE, read_pins, render_pins
from ...images.plan import MIRROR, find_images, plan_images
from ...images.refusals import ImageRefused, RegistryLies
from ...images.registry import RegistryClient
from ...images.stack import stack_of_image
from ...report.markdown.lock import tell_lock
from ...report.terminal.lock import render_lock
from ..app import TOOL, Exit, errors, foreseen, refuse, refuse_full_disk
from ..told_options import PageFormat
from ..whole_telling import tell_whole
from .image_rows import judge_stacks


@dataclass(frozen=True)
class Asked:
    """The arguments; `upgrade` has "*" for all, `only` is "pins", "locks" or empty."""

    targets: tuple[str, ...]
    check: bool
    only: str
    accept: frozenset[str]
    upgrade: tuple[str, ...]


@dataclass(frozen=True)
class _Made:
    """What would be written."""

    pins: tuple[Pinned, ...]
    locks: tuple[Locked, ...]


@foreseen(
    {
        ImageRefused: Exit.WRONG_ARGUMENTS,
        RegistryLies: Exit.CLOSED,
        IndexSilent: Exit.INFRASTRUCTURE,
        NoEnvironment: Exit.NO_ENVIRONMENT,
    }
)
def run_lock(
    catalog: Catalog, matrix: Path | None, asked: Asked, fmt: PageFormat, output: Path | None, *, verbose: bool
) -> None:
    """Look or write, and tell; closed where something is older than the matrix, or was refused."""
    started = time.monotonic()
    root = (matrix or matrix_folder()).absolute().parent
    images = read_images({target.id: target.machine for target in catalog.targets}, matrix, catalog.targets)
    chosen = find_images(images, asked.targets)
    _refuse_what_cannot_be(images, asked)
    if asked.check:
        result = _check(catalog, matrix, images, chosen, root, asked)
    else:
        result = _write(catalog, matrix, images, chosen, root, asked)
    result = result.model_copy(update={"seconds": round(time.monotonic() - started, 1)})
    tell_whole(
        result,
        fmt,
        output,
        render=lambda console: render_lock(result, verbose=verbose, console=console),
        markdown=lambda: tell_lock(result),
    )
    stopped = result.refusals or (asked.check and result.stale) or any(fit.refused for fit in result.fits)
    silent = any(line.news is PinNews.MISSING for line in result.pins)
    raise typer.Exit(Exit.CLOSED if stopped else Exit.INFRASTRUCTURE if silent else Exit.OPEN)


def _refuse_what_cannot_be(images: Images, asked: Asked) -> None:
    known = {name for base in images.base for name in (base.id, base.tag)}
    if unknown := sorted(asked.accept - known):
        raise ImageRefused(
            f"--accept names {', '.join(unknown)}, and no base of matrix/images.toml has such a tag. Next step: choose "
            f"of {', '.join(sorted(known))}."
        )
    if asked.check and (asked.accept or asked.upgrade):
        raise ImageRefused("--check writes nothing, and takes neither --accept nor --upgrade. Next step: leave it out.")


def _check(
    catalog: Catalog, matrix: Path | None, images: Images, chosen: tuple[Image, ...], root: Path, asked: Asked
) -> LockResult:
    pins: tuple[PinLine, ...] = ()
    locks: tuple[LockLine, ...] = ()
    refusals: tuple[str, ...] = ()
    found: dict[str, ImageLock] = {}
    if asked.only != "locks":
        pins = check_pins(images, read_pins(root / FILE))
        refusals = check_claims(images, read_pins(root / FILE))
    if asked.only != "pins":
        asker = Asker(root, read_project(root), os.environ, tuple(stack.te for stack in catalog.stacks))
        locks = check_locks(images, asker, chosen)
        whole = {line.target for line in locks if not line.stale}
        found = {image.target: read_image_lock(root / image.lock) for image in chosen if image.target in whole}
    fits = _judge(catalog, matrix, images, chosen, found)
    refusals += _check_bake(catalog, images, root)
    return LockResult(tool=TOOL, check=True, pins=pins, locks=locks, fits=fits, refusals=refusals)


def _write(
    catalog: Catalog, matrix: Path | None, images: Images, chosen: tuple[Image, ...], root: Path, asked: Asked
) -> LockResult:
    before = read_pins(root / FILE)
    made = _make(catalog, images, chosen, root, asked)
    found = {one.line.target: one.lock for one in made.locks if one.lock is not None}
    result = LockResult(
        tool=TOOL,
        check=False,
        pins=tuple(one.line for one in made.pins),
        locks=tuple(one.line for one in made.locks),
        fits=_judge(catalog, matrix, images, chosen, found),
        refusals=tuple(filter(None, [*(pin.refusal for pin in made.pins), *(lock.refusal for lock in made.locks)])),
    )
    if result.refusals or any(fit.refused for fit in result.fits):
        return result
    files = [Written(one.line.file, one.text) for one in made.locks]
    if made.pins and any(one.line.news is not PinNews.MISSING for one in made.pins):
        kept = tuple(one.pin for one in made.pins)
        others = tuple(
            pin for pin in before.pins if pin.base in {base.id for base in images.base} - {p.base for p in kept}
        )
        files.append(Written(FILE, render_pins((*kept, *others))))
    try:
        written = write_together(root, files)
        written += _write_bake(catalog, images, root)
    except OSError as fault:
        refuse_full_disk(root / "containers", fault)
        refuse(
            f"pins and locks cannot be written: {fault}. Likely cause: containers/ is not yours. Next step: run it as "
            "its owner. What was there is there still.",
            Exit.INFRASTRUCTURE,
        )
    return result.model_copy(update={"written": written})


def _write_bake(catalog: Catalog, images: Images, root: Path) -> tuple[str, ...]:
    """The bake file, which has the digests and the hashes of locks; left alone while one of them is older still."""
    text = _make_bake(catalog, images, root)
    return write_together(root, [Written(BAKE_FILE, text)]) if text else ()


def _check_bake(catalog: Catalog, images: Images, root: Path) -> tuple[str, ...]:
    """The bake file against what would be written; nothing where a lock is older still, which is told as that."""
    text = _make_bake(catalog, images, root)
    file = root / BAKE_FILE
    if not text or (file.is_file() and file.read_bytes() == text.encode()):
        return ()
    return (
        f"{BAKE_FILE} is not what the matrix, the pins and the locks say. Likely cause: it was edited by hand, or one "
        "of them was. Next step: `nox -s lock` writes it anew; look at what it changes, and commit it.",
    )


def _make_bake(catalog: Catalog, images: Images, root: Path) -> str:
    try:
        plans = plan_images(images, read_pins(root / FILE), _with_images(catalog, images), root=root, mirror="")
    except ImageRefused:
        return ""
    return render_bake(plans)


def _with_images(catalog: Catalog, images: Images) -> list[Target]:
    known = {image.target for image in images.image}
    return [target for target in catalog.targets if target.id in known]


def _make(catalog: Catalog, images: Images, chosen: tuple[Image, ...], root: Path, asked: Asked) -> _Made:
    """Everything that would be written, before anything is."""
    pins: tuple[Pinned, ...] = ()
    locks = list[Locked]()
    if asked.only != "locks" and not asked.targets:
        with errors.status("asking registries for the digests of bases"):
            client = RegistryClient(os.environ)
            today = datetime.now(UTC).date().isoformat()
            mirror = os.environ.get(MIRROR, "")
            pins = pin_bases(images, read_pins(root / FILE), client, today, asked.accept, mirror)
    if asked.only != "pins":
        releases = tuple(stack.te for stack in catalog.stacks)
        asker = Asker(root, read_project(root), os.environ, releases, asked.upgrade)
        for image in chosen:
            with errors.status(f"locking the packages of {image.target}"):
                locks.append(make_image_lock(images, image, asker))
        if not asked.targets:
            with errors.status("locking the packages of nox sessions"):
                locks.append(make_sessions_lock(images, asker))
            with errors.status("locking releases of Transformer Engine"):
                locks.append(make_releases_lock(images, asker))
    return _Made(pins, tuple(locks))


def _judge(
    catalog: Catalog, matrix: Path | None, images: Images, chosen: tuple[Image, ...], locks: dict[str, ImageLock]
) -> tuple[StackFit, ...]:
    stacks = (
        stack_of_image(images, image, locks[image.target]) for image in chosen if image.te and image.target in locks
    )
    return judge_stacks(catalog, matrix, images, stacks)
