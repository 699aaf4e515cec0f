"""The verbs of the supply chain: what they run, and the exit code of each answer."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import typer

from ...catalog.bridge import Catalog
from ...environments.plan import UnknownTarget
from ...evidence.json_text import read_json
from ...images.bundle.archive import read_tree
from ...images.contents import open_contents, read_place
from ...images.labels import TARGET_LABEL, labels_of, read_config
from ...images.licences import list_licences, write_licences
from ...images.locks import read_image_lock
from ...images.plan import plan_images
from ...images.refusals import ImageRefused, RegistryLies, RegistryUnreachable
from ...images.sbom import NoSyft, compare_sbom, make_sbom, read_sbom, require_syft
from ...images.signature import (
    LICENCES,
    NoCosign,
    attest,
    make_keys,
    prove_key,
    read_public_key,
    require_cosign,
    sign_image,
)
from ...images.verify import Expected, verify_image
from ...images.verify_result import ImageVerdict
from ...report.markdown.image_verify import tell_image_verdict
from ...report.terminal.image_verify import render_image_verdict
from ..app import TOOL, Exit, errors, foreseen, refuse
from ..told_options import PageFormat
from ..whole_telling import tell_whole
from .image_rows import ImageRows, read_rows

_CODES: Final[dict[type[Exception], Exit]] = {
    ImageRefused: Exit.WRONG_ARGUMENTS,
    UnknownTarget: Exit.WRONG_ARGUMENTS,
    RegistryLies: Exit.CLOSED,
    NoCosign: Exit.NO_ENVIRONMENT,
    NoSyft: Exit.NO_ENVIRONMENT,
    RegistryUnreachable: Exit.INFRASTRUCTURE,
}


@dataclass(frozen=True)
class AskedVerify:
    """The arguments; what is empty was not given."""

    image: str
    key: Path | None
    target: str
    base: str
    deep: bool


@foreseen(_CODES)
def run_image_verify(
    catalog: Catalog, matrix: Path | None, asked: AskedVerify, fmt: PageFormat, output: Path | None, *, verbose: bool
) -> None:
    """Look at everything, tell it; closed where a check fails, not open where one was not run."""
    started = time.monotonic()
    place = read_place(asked.image)
    if asked.target:
        read_rows(catalog, asked.target, matrix)  # one that is named and is none is a wrong argument, not a check
    key = read_public_key(asked.key) if asked.key else ""
    expect = partial(_expect, catalog, matrix, asked, key)
    found = verify_image(place, open_contents(place), expect, os.environ)
    verdict = ImageVerdict(
        tool=TOOL,
        image=place.shown,
        target=found.target,
        key=str(asked.key or ""),
        checks=tuple(found.checks),
        packages=found.count_packages(),
        unknown_licences=tuple(dict.fromkeys(f"{row.kind} {row.name}" for row in found.licences if not row.known)),
        seconds=round(time.monotonic() - started, 2),
    )
    tell_whole(
        verdict,
        fmt,
        output,
        render=lambda console: render_image_verdict(verdict, verbose=verbose, console=console),
        markdown=lambda: tell_image_verdict(verdict),
    )
    if verdict.failed:
        raise typer.Exit(Exit.CLOSED)
    raise typer.Exit(Exit.EVIDENCE_MISSING if verdict.lacks else Exit.OPEN)


def _expect(catalog: Catalog, matrix: Path | None, asked: AskedVerify, key: str, labelled: str) -> Expected:
    """What an image of this target is held against; a plan that cannot be made is told as a check that was not run."""
    rest = {"key": key, "key_file": asked.key or Path(), "deep": asked.deep}
    target = asked.target or labelled
    if not target:
        return Expected(why_no_plan="no label says its target, and none was named (--target)", **rest)  # type: ignore[arg-type]
    try:
        rows = read_rows(catalog, target, matrix)
        pins = rows.read_pins()
        plan = plan_images(rows.images, pins, [rows.target], root=rows.root, own_base=asked.base)[0]
        locked = _read_locked(rows)
    except (ImageRefused, UnknownTarget) as fault:
        return Expected(why_no_plan=str(fault), **rest)  # type: ignore[arg-type]
    digests = {plan.reference.partition("@")[2]}
    pin = pins.find(rows.image.base)
    if pin and not asked.base:
        digests |= {one for one in (pin.index_digest, pin.platform_digests.get(plan.platform, "")) if one}
    return Expected(plan=plan, base_digests=frozenset(digests), locked=locked, **rest)  # type: ignore[arg-type]


def _read_locked(rows: ImageRows) -> dict[str, str]:
    """The Python packages that an image of these rows has beside those of its base: name -> version."""
    packages = read_image_lock(rows.root / rows.image.lock).packages
    return {name: one.version for name, one in packages.items()}


@foreseen(_CODES)
def run_image_sign(
    catalog: Catalog, matrix: Path | None, image: str, key: Path, sbom: Path | None, target: str
) -> None:
    """Read what is inside, attest it, and sign last: what is signed is whole."""
    variables = dict(os.environ)
    require_cosign(variables)
    place = read_place(image)
    prove_key(key, variables)  # what is wrong with the arguments is said before minutes of looking, not after them
    given = _read_sbom_file(sbom) if sbom else b""
    if not given:
        require_syft(variables)
    contents = open_contents(place)
    own = contents.place(place.digest)
    tree = read_tree(contents, place.digest)
    labels = [labels_of(read_config(contents.small_blob(digest), digest)) for digest in tree.images]
    said = target or next((one[TARGET_LABEL] for one in labels if one.get(TARGET_LABEL)), "")
    if not said:
        refuse(f"{place.shown} says no target. Next step: name it with --target.", Exit.WRONG_ARGUMENTS)
    rows = read_rows(catalog, said, matrix)
    errors.print("listing what is inside", markup=False)
    text = given or make_sbom(own, rows.image.platform, variables)
    packages = read_sbom(text)
    if why := compare_sbom(read_json(text), packages, tree.names, _read_locked(rows)):
        refuse(
            f"{sbom or 'the SBOM'} is not of {place.shown}: {why}. Next step: leave --sbom out, and syft makes one.",
            Exit.WRONG_ARGUMENTS,
        )
    listed = list_licences(contents, next(iter(tree.images.values()), ()), packages, rows.sources)
    with tempfile.TemporaryDirectory(prefix="megacpp-sign-") as room:
        for kind, body in (("spdxjson", text), (LICENCES, write_licences(listed))):
            file = Path(room, "predicate.json")
            file.write_bytes(body)
            attest(own, kind, file, key, variables)
        sign_image(own, key, variables)
    unknown = sum(not row.known for row in listed)
    words = f"SBOM of {len(packages)} packages, licences of {len(listed)}, of which {unknown} say none"
    errors.print(f"signed {place.shown}: {words}", markup=False)


def _read_sbom_file(file: Path) -> bytes:
    try:
        text = file.read_bytes()
    except OSError as fault:
        refuse(f"{file} cannot be read: {fault.strerror}. Next step: check the name.", Exit.WRONG_ARGUMENTS)
    read_sbom(text)
    return text


@foreseen(_CODES)
def run_image_keys(prefix: Path) -> None:
    """Make the pair, and say which half goes where."""
    private, public = make_keys(prefix, dict(os.environ))
    words = f"{private} signs: keep it. {public} verifies: give it away, by another way than the images."
    errors.print(words, markup=False)
