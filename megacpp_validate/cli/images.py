"""Golden images: planned, built, locked, signed, and carried."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from .app import Answer, Context, Receipts, Result, fill, say, verb
from .options import TE, Base, Image


@verb("images:describe_build")
def images(
    context: Context,
    targets: Annotated[tuple[str, ...], "Targets to build for: h200, b200, gb10, cpu; all for a plan."] = (),
    /,
    plan: Annotated[bool, "Print what would be built, and build nothing."] = False,
    own_base: Base = "",
    allow_unknown: Annotated[bool, "Build although a requirement is unknown."] = False,
    push: Annotated[str | None, "Registry to push to, as 127.0.0.1:5000."] = None,
    tag: Annotated[str, "In place of the version."] = "",
    te: TE = "",
    receipts: Receipts = Path(".megacpp/images"),
) -> Answer | None:
    """Golden images: what would be built from which digests, built, and pushed.

    Exit code 0: built, or nothing stands in its way; 1: refused; 2: no such target, or a wrong argument; 4: a
    requirement is unknown; 5: no engine, or a build that failed; 6: a full disk, or a registry that is down.
    """
    from ..images import build
    from .output import write_result

    options, rows = fill(build.ImageOptions, locals()), replace(context.images, te=te)
    if plan:
        return Answer(build.plan_all(rows, options), "images:describe_plans")
    for built in build.build_all(rows, options, say):
        write_result(built, "images:describe_build", context.output, fmt=context.fmt)
    return None


@verb("images:describe_lock")
def lock(
    context: Context,
    targets: Annotated[tuple[str, ...], "Images whose locks are made; all, and pins, without."] = (),
    /,
    check: Annotated[bool, "Compare every lock with the matrix; write nothing, ask no index."] = False,
    upgrade: Annotated[tuple[str, ...], typer.Option(metavar="NAME", help="A package to take anew; all for all.")] = (),
    te: TE = "",
) -> Result:
    """Write containers/locks: packages with hashes from the index; compare the digests of bases.

    Exit code 0: they are what the matrix says, 1: the tag of a base is another image now, a lock does not fit, or
    (--check) a file is missing, older than the matrix or edited by hand, 2: the matrix or an argument is wrong, 5: uv
    is missing, or makes no lock, 6: the disk is full. An unknown requirement changes no lock, and not the exit code.
    """
    from ..images.locks import run_lock

    return run_lock(replace(context.images, te=te), targets, upgrade, check=check, report=say)


@verb("images:describe_fits")
def fits(
    context: Context,
    te: Annotated[str | None, typer.Argument(metavar="RELEASE", help="Without it, of each image.")] = None,
    parts: Annotated[
        tuple[str, ...], typer.Argument(metavar="PART=VERSION...", help="cublas=13.1.0.3 cudnn=9.19 torch=2.11.0 ...")
    ] = (),
    /,
    target: Annotated[str, "A row of matrix/targets.toml; without, all."] = "",
) -> Result:
    """Does a release of Transformer Engine fit a stack? Judged from the rows of the matrix; nothing is installed.

    Exit code 0: it fits, 1: something does not, 2: the matrix or an argument is wrong, 4: nothing is refused, and
    something is unknown.
    """
    from ..images.plan import run_fits

    return run_fits(context.images, te, parts, target)


@verb("images:describe_bundle")
def bundle(
    context: Context,
    target: Annotated[str, "A row of matrix/targets.toml that has an image."],
    /,
    image: Annotated[str | None, "REPOSITORY@sha256:DIGEST in a registry."] = None,
    out: Annotated[Path | None, "Folder to write; else bundle-TARGET."] = None,
    jit: Annotated[Path | None, "JIT caches: the root folder, with one an architecture."] = None,
    key: Annotated[Path | None, "Public key to put in."] = None,
    sign_key: Annotated[Path | None, "Private key that signs the bundle, with cosign."] = None,
) -> Result:
    """Write one folder that gives a host without a network the environment of a target.

    Exit code 0: it is there, and was read back, 1: what the registry gives is not what the digest says, 2: the matrix
    or an argument is wrong, or it is there already, 4: the JIT caches are not sealed, 5: cosign is missing, 6: the
    registry does not answer, or the disk is full.
    """
    from ..images.bundle import BundleOptions, write_bundle

    place = (out or Path(f"bundle-{target}")).absolute()
    return write_bundle(context.images, BundleOptions(target, image, place, jit, key, sign_key), say)


@verb()
def image_sign(
    context: Context,
    image: Image,
    /,
    key: Annotated[Path, "Private key; COSIGN_PASSWORD has its password."],
) -> str:
    """Attest the SBOM of an image, and sign it by its digest, with a key of one's own.

    Exit code 0: it is signed, 1: the registry gives other bytes than the digest says, 2: an argument is wrong, 5:
    cosign or syft is missing or fails, 6: the registry does not answer.
    """
    from ..images.supply import sign_image

    return sign_image(context.images, image, key, say)


@verb("images:describe_verdict")
def image_verify(
    context: Context,
    image: Image,
    /,
    key: Annotated[Path | None, "Public key that must have signed it."] = None,
    target: Annotated[str, "What it must be for; else what its label says."] = "",
    base: Base = "",
) -> Result:
    """Is an image what its digest, the plan and a key say? Also its SBOM and provenance.

    Exit code 0: every check passes, 1: one fails, 2: no digest, or the matrix is wrong, 4: none fails and not all were
    run, 6: the registry does not answer.
    """
    from ..images.supply import verify_image

    return verify_image(context.images, image, key, target, base)
