"""Write a bundle: aside, piece by piece, read back whole, and only then under its name.

What is killed leaves a folder `.NAME.writing` that no restore takes for a bundle, and the next run of the same order
goes on there: blobs and wheels that are there are hashed instead of fetched.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from ..contents import Contents, Place
from ..refusals import ImageRefused
from .archive import FILE, ImageTree, plan_archive
from .manifest import Manifest, Stored, hash_files, write_lists
from .parts import Part, write_archive
from .restore.listing import MANIFEST, read_bundle
from .restore.reading import verify
from .script import compose_restore
from .wheels import Machine, fetch_wheels

_ORDER: Final = ".order.json"
_LEAST_PART: Final = 1 << 20
_SPARE: Final = 64 << 20  # bytes beside what is known to come: lists, evidence, and what a disk takes for itself

Say = Callable[[str], None]


@dataclass(frozen=True)
class BundleOrder:
    """What shall be in a bundle.

    Attributes:
        tool: who writes it.
        target: row of targets.toml.
        platform: "linux/amd64".
        machine: what the wheels must fit.
        lock: file with the hashes of the wheels.
        matrix: folder of the matrix.
        out: folder that shall be there; its parent is made.
        part_bytes: of the largest file.
        image: where the image is; None for none.
        jit: folder of JIT caches, or an archive of them; None for none.
        jit_arch: of the folder the one architecture that is taken; empty for all.
        evidence: small files by their name in the bundle: SBOM, provenance, licences, signatures, key.
        absent: what is not in it -> why.
    """

    tool: str
    target: str
    platform: str
    machine: Machine
    lock: Path
    matrix: Path
    out: Path
    part_bytes: int
    image: Place | None = None
    jit: Path | None = None
    jit_arch: str = ""
    evidence: Mapping[str, bytes] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What an engine calls the image after it is restored; the digest stays what it is."""
        return f"{self.image.repository}:{self.target}-{self.image.digest[7:19]}" if self.image else ""


@dataclass(frozen=True)
class Written:
    """A bundle that is there.

    Attributes:
        id: SHA-256 of its manifest.
        files: what is in it.
        wheels_absent: packages without a wheel.
    """

    folder: Path
    id: str
    files: tuple[Stored, ...]
    wheels_absent: tuple[str, ...]


def write_bundle(
    order: BundleOrder,
    image: tuple[Contents, ImageTree] | None,
    *,
    sign: Callable[[Path], str] | None = None,
    variables: Mapping[str, str] | None = None,
    say: Say = lambda _: None,
) -> Written:
    """Write a bundle, or go on with one that was killed.

    Args:
        order: what shall be in it.
        image: where its blobs come from, and what it is made of.
        sign: makes a signature over a file; None for none.
        variables: environment variables for pip.
        say: told what is done.

    Raises:
        ImageRefused: it is there already, parts are too small, somebody else writes it, or a wheel cannot be had.
        RegistryUnreachable, RegistryLies: the image cannot be had.
        OSError: the disk does not take it; what was written stays aside and is no bundle.
    """
    if order.part_bytes < _LEAST_PART:
        raise ImageRefused(f"parts of {order.part_bytes} bytes are too small. Next step: take at least 1MiB.")
    if order.out.exists():
        raise ImageRefused(
            f"{order.out} is there already. Next step: `python3 {order.out}/restore.py` says whether it is a whole "
            "bundle; name another folder, or move this one away."
        )
    with _aside(order) as aside:
        _ask_for_room(order, aside, image[1].size if image else 0)
        done: tuple[Part, ...] = ()
        if image:
            say(f"fetching the image, {image[1].size / 1e9:.2f} GB")
            done = write_archive(aside, FILE, plan_archive(image[1], order.name), image[0], order.part_bytes)
        lacking = _write_wheels(order, aside, variables or {}, say)
        _write_small(order, aside)
        say("hashing")
        files = hash_files(aside, order.part_bytes, done)
        configs = sorted(image[1].images) if image else []
        manifest = Manifest(
            tool=order.tool,
            made=datetime.now(UTC).isoformat(timespec="seconds"),
            target=order.target,
            platform=order.platform,
            python=order.machine.python,
            image={"name": order.name, "digest": order.image.digest, "configs": configs} if order.image else None,
            lock=sha256(order.lock.read_bytes()).hexdigest(),
            part_bytes=order.part_bytes,
            wheels_absent=lacking,
            absent=dict(order.absent),
            files=files,
        )
        write_whole_lists(aside, manifest, sign)
        say("reading it back")
        verify(aside, read_bundle(aside), 2 * (os.cpu_count() or 1))
        name = sha256((aside / MANIFEST).read_bytes()).hexdigest()
        aside.rename(order.out)
        _sync(order.out.parent)
    return Written(order.out, name, files, lacking)


def write_whole_lists(aside: Path, manifest: Manifest, sign: Callable[[Path], str] | None) -> None:
    """The lists of a bundle, the manifest signed where somebody signs."""
    signature = ""
    if sign is not None:
        draft = aside.with_name(f"{aside.name}.{MANIFEST}")
        try:
            draft.write_text(manifest.text(), encoding="utf-8")
            signature = sign(draft)
        finally:
            draft.unlink(missing_ok=True)
    write_lists(aside, manifest, signature)


@contextmanager
def _aside(order: BundleOrder) -> Iterator[Path]:
    """The folder that is written to, held against others; that of another order is thrown away."""
    order.out.parent.mkdir(parents=True, exist_ok=True)
    aside = order.out.with_name(f".{order.out.name}.writing")
    lock, note = aside.with_name(f"{aside.name}.lock"), aside.with_name(f"{aside.name}{_ORDER}")
    with lock.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as fault:
            raise ImageRefused(
                f"somebody else writes {order.out} now. Next step: wait until that is done, or name another folder."
            ) from fault
        said = json.dumps(_describe(order), sort_keys=True)
        if not note.is_file() or note.read_text(encoding="utf-8") != said:
            shutil.rmtree(aside, ignore_errors=True)
        note.write_text(said, encoding="utf-8")
        aside.mkdir(exist_ok=True)
        _sweep(aside)
        yield aside
        note.unlink(missing_ok=True)
        lock.unlink(missing_ok=True)


def _describe(order: BundleOrder) -> dict[str, Any]:
    """What makes two orders the same, so that one goes on where the other was killed."""
    return {"image": order.image.shown if order.image else "", "target": order.target, "parts": order.part_bytes}


def _sweep(aside: Path) -> None:
    """Of a bundle that was killed the archive and the wheels stay; all else is small, and made anew."""
    for path in aside.iterdir():
        if path.name == "wheelhouse":
            for wheel in path.glob("*.part[0-9][0-9][0-9][0-9]"):  # cut already: fetched again, it is in pip's cache
                wheel.unlink()
        elif not path.name.startswith(FILE):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _ask_for_room(order: BundleOrder, aside: Path, image: int) -> None:
    """Refuse before the first byte where the disk is too small for what is known to come.

    Raises:
        OSError: it is.
    """
    there = sum(path.stat().st_size for path in aside.rglob("*") if path.is_file())
    held = (order.jit, *(order.jit / order.jit_arch).rglob("*")) if order.jit else ()
    caches = sum(path.stat().st_size for path in held if path.is_file())
    needed, free = image + caches + _SPARE - there, shutil.disk_usage(aside).free
    if free < needed:
        raise OSError(
            28, f"No space left on device: {free >> 20} MiB free of {needed >> 20} MiB that it takes", str(aside)
        )


def _write_wheels(order: BundleOrder, aside: Path, variables: Mapping[str, str], say: Say) -> tuple[str, ...]:
    say("fetching the wheels")
    return fetch_wheels(order.lock, order.machine, aside / "wheelhouse", variables)


def _write_small(order: BundleOrder, aside: Path) -> None:
    shutil.copyfile(order.lock, aside / "lock.txt")
    shutil.copytree(order.matrix, aside / "matrix", ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    if order.jit is not None:
        _copy_caches(order.jit, order.jit_arch, aside / "jit")
    for name, body in order.evidence.items():
        (aside / name).parent.mkdir(parents=True, exist_ok=True)
        (aside / name).write_bytes(body)
    (aside / "restore.py").write_text(compose_restore(), encoding="utf-8")
    (aside / "README.txt").write_text(_README.format(target=order.target), encoding="utf-8")


def _copy_caches(source: Path, arch: str, target: Path) -> None:
    """Files and their times, and no modes: a sealed cache is read-only, and this folder is written to and swept.

    Raises:
        ImageRefused: a link is among them.
    """
    folder = source / arch if source.is_dir() else source
    for path in sorted(folder.rglob("*")) if folder.is_dir() else [folder]:
        if path.is_symlink():
            raise ImageRefused(
                f"{path} is a link, which no bundle holds: it leads elsewhere there. Next step: export the caches with "
                "`nox -s jit_cache -- export`, and bundle what that writes."
            )
        place = target / path.relative_to(source if source.is_dir() else source.parent)
        if path.is_file() and "locks" not in path.relative_to(source.parent).parts:
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)
            times = path.stat()
            os.utime(place, ns=(times.st_atime_ns, times.st_mtime_ns))


def _sync(folder: Path) -> None:
    """A rename is on the disk when its folder is."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


_README: Final = """\
An offline bundle for the target {target}, written by megacpp-validate.

    python3 restore.py            verifies every file, and says what is inside
    python3 restore.py --help     says what it can be loaded into

Without Python: `sha256sum -c SHA256SUMS`, then `cat image.tar* | docker load`.
"""
