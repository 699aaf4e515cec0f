"""The verb of offline bundles: what it runs, and the exit code of each answer."""

from __future__ import annotations

import errno
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final

from ...catalog.bridge import Catalog
from ...environments.plan import UnknownTarget
from ...errors import ToolError
from ...images.bundle.archive import ImageTree, read_tree
from ...images.bundle.evidence_files import EvidenceFiles, gather_evidence
from ...images.bundle.manifest import Stored
from ...images.bundle.restore.listing import Refused
from ...images.bundle.result import BundleKind, BundleResult
from ...images.bundle.write import BundleOrder, write_bundle
from ...images.contents import Contents, Place, open_contents, read_place
from ...images.labels import LOCK_LABEL, TARGET_LABEL, labels_of, read_config
from ...images.refusals import ImageRefused, RegistryLies, RegistryUnreachable
from ...images.sbom import make_sbom
from ...images.signature import NoCosign, prove_key, read_public_key, sign_file
from ...jitcache.seal import check_sealed
from ...jitcache.transfer import read_carried
from ...report.markdown.bundle import tell_bundle
from ...report.terminal.bundle import render_bundle
from ..app import TOOL, Exit, errors, foreseen, refuse
from ..told_options import PageFormat
from ..whole_telling import tell_whole
from .image_rows import ImageRows, read_rows

_UNITS: Final = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG]?I?)B?", re.IGNORECASE)


@dataclass(frozen=True)
class Asked:
    """The arguments; None is what was not given."""

    target: str
    image: str | None
    out: Path
    part_size: str
    jit: Path | None
    key: Path | None
    sign_key: Path | None


@foreseen(
    {
        ImageRefused: Exit.WRONG_ARGUMENTS,
        UnknownTarget: Exit.WRONG_ARGUMENTS,
        RegistryLies: Exit.CLOSED,
        Refused: Exit.INFRASTRUCTURE,
        NoCosign: Exit.NO_ENVIRONMENT,
        RegistryUnreachable: Exit.INFRASTRUCTURE,
    }
)
def run_bundle(catalog: Catalog, matrix: Path | None, asked: Asked, fmt: PageFormat, output: Path | None) -> None:
    """Read what is known of the image, write the bundle, tell what is in it."""
    started = time.monotonic()
    rows = read_rows(catalog, asked.target, matrix)
    part_bytes = read_size(asked.part_size)
    variables = dict(os.environ)
    public = _hold_arguments(asked, rows, variables)
    place = read_place(asked.image) if asked.image is not None else None
    found = EvidenceFiles(absent={} if place else {"image": "none was named (--image REPOSITORY@sha256:DIGEST)"})
    image: tuple[Contents, ImageTree] | None = None
    if place:
        contents = open_contents(place)
        image = contents, read_tree(contents, place.digest)
        _hold_to_rows(contents, image[1], rows)
        found = gather_evidence(
            place, *image, rows.sources, lambda one: make_sbom(one, rows.image.platform, variables), public
        )
    if asked.jit is None:
        found.absent["JIT caches"] = "none were named (--jit FOLDER)"
    if asked.key:
        found.files["cosign.pub"] = public.encode()
    order = _make_order(rows, asked, part_bytes, place, found)
    sign_key = asked.sign_key
    sign: Callable[[Path], str] | None = (lambda file: sign_file(file, sign_key, variables)) if sign_key else None
    try:
        written = write_bundle(order, image, sign=sign, say=lambda text: errors.print(text, markup=False))
    except OSError as fault:
        _refuse_disk(asked.out, fault)
        raise
    result = BundleResult(
        tool=TOOL,
        target=asked.target,
        folder=str(written.folder),
        id=written.id,
        image=place.shown if place else "",
        signed_by=str(asked.sign_key or ""),
        part_bytes=part_bytes,
        kinds=_count(written.files),
        absent=dict(order.absent),
        wheels_absent=written.wheels_absent,
        seconds=round(time.monotonic() - started, 1),
    )
    tell_whole(
        result,
        fmt,
        output,
        render=lambda console: render_bundle(result, console=console),
        markdown=lambda: tell_bundle(result),
    )


def _hold_arguments(asked: Asked, rows: ImageRows, variables: Mapping[str, str]) -> str:
    """Whatever is wrong with the arguments, said before the gigabytes and not after them; the public key."""
    _require_place(asked.out)
    for path in filter(None, (asked.jit, asked.key, asked.sign_key)):
        if not path.exists():
            refuse(f"there is no {path}. Next step: check the name.", Exit.WRONG_ARGUMENTS)
    if asked.jit:
        _check_caches(asked.jit, rows.image.cache_arch)
    public = read_public_key(asked.key) if asked.key else ""  # given away with the bundle: never unread
    if asked.sign_key:
        prove_key(asked.sign_key, variables, public)
    return public


def _require_place(out: Path) -> None:
    """Refuse a folder that cannot be made there; a full disk is told by whoever knows how much it takes."""
    nearest = next(path for path in out.absolute().parents if path.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest):
            return
    except OSError as fault:
        if fault.errno in (errno.ENOSPC, errno.EDQUOT):
            return
        refuse(
            f"{out} cannot be written: {fault.strerror or fault} ({nearest}). Likely cause: {nearest} is a file, "
            "read-only or somebody else's. Next step: give --out another folder; nothing was done.",
            Exit.WRONG_ARGUMENTS,
        )


def _make_order(
    rows: ImageRows, asked: Asked, part_bytes: int, place: Place | None, found: EvidenceFiles
) -> BundleOrder:
    return BundleOrder(
        tool=TOOL,
        target=asked.target,
        platform=rows.image.platform,
        machine=rows.machine,
        lock=rows.root / rows.image.lock,
        matrix=rows.matrix,
        out=asked.out,
        part_bytes=part_bytes,
        image=place,
        jit=asked.jit,
        jit_arch=rows.image.cache_arch if asked.jit and asked.jit.is_dir() else "",
        evidence=found.files,
        absent=found.absent,
    )


def read_size(text: str) -> int:
    """Bytes, from "4GiB", "700MB" or "1000000".

    Raises:
        ImageRefused: it is no size.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None or found[2].upper() not in _UNITS:
        raise ImageRefused(f"--part-size {text!r} is no size. Next step: say it as 4GiB, 700MB or in bytes.")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def _hold_to_rows(contents: Contents, tree: ImageTree, rows: ImageRows) -> None:
    """An image that says another target or lock than its wheels have, or none, is not bundled with them.

    Raises:
        ImageRefused: it does.
    """
    lock = rows.root / rows.image.lock
    wanted = {TARGET_LABEL: rows.target.id, LOCK_LABEL: sha256(lock.read_bytes()).hexdigest()}
    for digest in tree.images:
        labels = labels_of(read_config(contents.small_blob(digest), digest))
        for label, value in wanted.items():
            if labels.get(label) != value:
                said = f"says {label}={labels[label]}" if label in labels else f"has no label {label}"
                raise ImageRefused(
                    f"the image {tree.digest} {said}, and the bundle would have {value}. Likely cause: it was built "
                    "from another lock, for another target, or by something else than this project. Next step: build "
                    "and push it anew, or check out what it was built from."
                )


def _check_caches(jit: Path, arch: str) -> None:
    """Caches that are not sealed, damaged, or of another architecture than the image's are not bundled with it.

    Raises:
        ImageRefused: they are.
    """
    try:
        manifest = check_sealed(jit / arch).manifest if jit.is_dir() else read_carried(jit)[0]
    except (ToolError, OSError) as fault:
        there = (
            ", ".join(sorted(path.name for path in jit.iterdir() if path.is_dir())) if jit.is_dir() else "an archive"
        )
        raise ImageRefused(
            f"{jit} has no JIT caches of {arch} that can be bundled (it has {there or 'nothing'}): {fault}"
        ) from fault
    if manifest.architecture != arch:
        raise ImageRefused(
            f"{jit} holds the JIT caches of {manifest.architecture}, and the image is for {arch}. Likely cause: "
            "another target was prewarmed. Next step: name the root that has a folder of this architecture."
        )


def _count(files: tuple[Stored, ...]) -> tuple[BundleKind, ...]:
    kinds = dict.fromkeys(row.kind for row in files)
    return tuple(
        BundleKind(
            kind=kind,
            files=len(own),
            parts=sum(len(row.parts) for row in own),
            bytes=sum(row.bytes for row in own),
        )
        for kind in kinds
        if (own := [row for row in files if row.kind == kind])
    )


def _refuse_disk(out: Path, fault: OSError) -> None:
    """What is there is no bundle, and the same order goes on with it."""
    if isinstance(fault, RegistryUnreachable | NoCosign):
        return
    refuse(
        f"the bundle was given up: {fault}. Nothing of it can be taken for a bundle. Likely cause: the disk of "
        f"{out.parent} is full, or that folder is not yours. Next step: make room and run it again, it goes on where "
        f"it was; or remove {out.parent / f'.{out.name}.writing'}.",
        Exit.INFRASTRUCTURE,
    )
