"""The verb of images: what it runs, and the exit code of each answer."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

import typer

from ...catalog.bridge import Catalog, matrix_folder, read_catalog
from ...catalog.images import Images, read_images
from ...environments.interpreter import read_commit
from ...images.bake import FILE as BAKE_FILE
from ...images.bake import render_bake
from ...images.build import BuildOrder, Told, build_image, require_platform, write_build
from ...images.build_faults import BuildFailed
from ...images.build_result import ImageBuild, ImagePlans, Refused
from ...images.build_settings import BuildSettings, read_build_settings
from ...images.engine import Engine, NoEngine, bring_up, find_engine
from ...images.fit_result import FitVerdict
from ...images.locking import Written, write_together
from ...images.locks import read_image_lock
from ...images.pins import FILE as PINS_FILE
from ...images.pins import Pins, read_pins
from ...images.plan import find_images, plan_images
from ...images.plan_result import ImagePlan
from ...images.prove import prove_image
from ...images.recipe_lint import lint_recipe
from ...images.refusals import ImageRefused, PinsDamaged
from ...images.stack import Stack, stack_of_image, stack_of_rows
from ..app import TOOL, Exit, Format, errors, foreseen, refuse, refuse_full_disk
from .image_rows import judge_stacks
from .images_telling import tell_image

_TAG = re.compile(r"^\w[\w.-]{0,127}$", re.ASCII)
_REGISTRY = re.compile(r"^[a-z0-9.-]+(:\d+)?(/[a-z0-9._-]+)*$")
_BASE = re.compile(r"^[^\s@]+@sha256:[0-9a-f]{64}$")
_PROVING_REGISTRY = "127.0.0.1:5000"


@dataclass(frozen=True)
class Asked:
    """The arguments."""

    targets: tuple[str, ...]
    plan: bool
    write_bake: bool
    own_base: str
    push: str | None
    tag: str
    fresh: bool
    prove: bool
    own_engine: bool
    clones: tuple[str, ...]
    receipts: Path
    matrix: Path | None


@dataclass(frozen=True)
class _Rows:
    """What is read before anything is planned."""

    catalog: Catalog
    images: Images
    pins: Pins
    root: Path


@foreseen({PinsDamaged: Exit.WRONG_ARGUMENTS, ImageRefused: Exit.CLOSED, NoEngine: Exit.NO_ENVIRONMENT})
def run_images(asked: Asked, fmt: Format, output: Path | None) -> None:
    """Plan, or build each target that is named."""
    _require_words(asked)
    rows = _read_rows(asked)
    if asked.own_engine:
        with errors.status("bringing up an engine"):
            os.environ.update(bring_up(rows.root, os.environ))
        asked = replace(asked, own_base=asked.own_base or os.environ.get("MEGACPP_BASE", ""))
    if asked.write_bake:
        _write_bake(rows)
        return
    if asked.plan:
        plans = _tell_plans(asked, rows, fmt, output)
        raise typer.Exit(
            Exit.CLOSED if plans.breaks else Exit.EVIDENCE_MISSING if plans.lacks else Exit.OPEN,
        )
    if not asked.targets:
        refuse(
            "no target is named. Next step: name one of "
            f"{', '.join(image.target for image in rows.images.image)}, or give --plan.",
            Exit.NOTHING_SELECTED,
        )
    _build_all(asked, rows, fmt, output)


def _require_words(asked: Asked) -> None:
    if asked.tag and not _TAG.match(asked.tag):
        refuse(f"{asked.tag!r} is no tag. Next step: letters, digits, dots and dashes.", Exit.WRONG_ARGUMENTS)
    if asked.push is not None and not _REGISTRY.match(asked.push):
        refuse(
            f"{asked.push!r} is no registry. Next step: say host[:port][/prefix], without a scheme, as 127.0.0.1:5000.",
            Exit.WRONG_ARGUMENTS,
        )
    if asked.own_base and not _BASE.match(asked.own_base):
        refuse(
            f"the base {asked.own_base!r} is not pinned by a digest. Likely cause: a tag was given, which may be "
            "another image tomorrow. Next step: say REPOSITORY@sha256:DIGEST; `docker buildx imagetools inspect` "
            "shows it.",
            Exit.WRONG_ARGUMENTS,
        )
    if asked.prove and asked.targets != ("cpu",):
        refuse(
            "--prove runs the image on this machine, so it is for cpu alone. Next step: `images cpu --prove`.",
            Exit.WRONG_ARGUMENTS,
        )


def _read_rows(asked: Asked) -> _Rows:
    catalog = read_catalog(asked.matrix)
    images = read_images({target.id: target.machine for target in catalog.targets}, asked.matrix, catalog.targets)
    root = (asked.matrix or matrix_folder()).resolve().parent
    known = {image.target for image in images.image}
    if unknown := [name for name in asked.targets if name not in known]:
        refuse(
            f"there is no image for {', '.join(unknown)}. Next step: choose of {', '.join(sorted(known))}.",
            Exit.WRONG_ARGUMENTS,
        )
    return _Rows(catalog, images, read_pins(root / PINS_FILE), root)


def _plan(asked: Asked, rows: _Rows, target: str) -> ImagePlan:
    row = next(row for row in rows.catalog.targets if row.id == target)
    return plan_images(rows.images, rows.pins, [row], root=rows.root, own_base=asked.own_base, revision=read_commit())[
        0
    ]


def _plan_all(rows: _Rows) -> tuple[ImagePlan, ...]:
    """What the committed bake file is made from: pinned bases by their own names, whatever this host has set."""
    targets = {image.target for image in rows.images.image}
    chosen = [row for row in rows.catalog.targets if row.id in targets]
    return plan_images(rows.images, rows.pins, chosen, root=rows.root, mirror="")


def _write_bake(rows: _Rows) -> None:
    file = rows.root / BAKE_FILE
    try:
        write_together(rows.root, [Written(BAKE_FILE, render_bake(_plan_all(rows)))])
    except OSError as fault:
        refuse_full_disk(file.parent, fault)
        refuse(
            f"the bake file cannot be written: {fault}. Likely cause: {file.parent} is not yours. Next step: run it as "
            "its owner. What was there is there still.",
            Exit.INFRASTRUCTURE,
        )
    errors.print(f"written: {file}", markup=False)


def _tell_plans(asked: Asked, rows: _Rows, fmt: Format, output: Path | None) -> ImagePlans:
    plans: list[ImagePlan] = []
    refused: list[Refused] = []
    warned: list[Refused] = []
    for image in find_images(rows.images, asked.targets):
        try:
            plans.append(_plan(asked, rows, image.target))
            misfits = _judge(asked, rows, image.target)
        except ImageRefused as fault:
            refused.append(Refused(image.target, str(fault)))
            refused += _judge_rows(asked, rows, image.target)
            continue
        refused += misfits[0]
        warned += misfits[1]
    engine, why = _look_for_engine()
    result = ImagePlans(
        tool=TOOL,
        plans=tuple(plans),
        refused=tuple(refused),
        warned=tuple(warned),
        lints=lint_recipe(rows.root, plans, engine, why),
        pins_hash=rows.pins.hash,
    )
    tell_image(result, fmt, output)
    return result


def _judge(asked: Asked, rows: _Rows, target: str) -> tuple[list[Refused], list[Refused]]:
    """What does not fit in the stack of an image, and what is not known to."""
    image = find_images(rows.images, [target])[0]
    stack = stack_of_image(rows.images, image, read_image_lock(rows.root / image.lock), asked.own_base)
    return _say_misfits(asked, rows, target, stack)


def _judge_rows(asked: Asked, rows: _Rows, target: str) -> list[Refused]:
    """What cannot fit whatever is locked, as the rows alone say it: where a lock is older, making it is not enough."""
    image = find_images(rows.images, [target])[0]
    return _say_misfits(asked, rows, target, stack_of_rows(rows.images, image, asked.own_base))[0] if image.te else []


def _say_misfits(asked: Asked, rows: _Rows, target: str, stack: Stack) -> tuple[list[Refused], list[Refused]]:
    (fit,) = judge_stacks(rows.catalog, asked.matrix, rows.images, [stack])
    found: dict[FitVerdict, list[Refused]] = {verdict: [] for verdict in FitVerdict}
    for one in fit.fits:
        why = (
            f"{one.component} is {one.seen or 'not known'}, wanted {one.wanted}: {one.says} ({one.source}). "
            f"Next step: {one.next_step}."
        )
        found[one.verdict].append(Refused(target, why))
    return found[FitVerdict.REFUSED], found[FitVerdict.UNKNOWN] + found[FitVerdict.WARNED]


def _look_for_engine() -> tuple[Engine | None, str]:
    try:
        return find_engine(os.environ), ""
    except NoEngine as fault:
        return None, str(fault)


def _build_all(asked: Asked, rows: _Rows, fmt: Format, output: Path | None) -> None:
    """Everything that can be refused is refused before the first build."""
    targets = tuple(dict.fromkeys(asked.targets))
    if misfits := [row for target in targets for row in _judge_rows(asked, rows, target)]:
        refuse("; ".join(f"{row.target}: {row.why}" for row in misfits), Exit.CLOSED)
    plans = [_plan(asked, rows, target) for target in targets]
    for plan in plans:
        if misfits := _judge(asked, rows, plan.target)[0]:
            refuse("; ".join(f"{row.target}: {row.why}" for row in misfits), Exit.CLOSED)
    engine = find_engine(os.environ)
    for plan in plans:
        require_platform(engine, plan)
    settings = _read_settings(asked, engine)
    for plan in plans:
        if not plan.verified:
            errors.print(f"the base of {plan.target} is not verified: {plan.unverified}", markup=False)
        build = _build(asked, rows, engine, settings, plan)
        if not asked.prove:
            tell_image(build, fmt, output)
            continue
        proof = prove_image(engine, build, asked.receipts / "proof", TOOL)
        tell_image(proof, fmt, output)
        raise typer.Exit(Exit.OPEN if proof.holds else Exit.CLOSED)


def _read_settings(asked: Asked, engine: Engine) -> BuildSettings:
    settings = read_build_settings(os.environ, has_bridge=engine.has_bridge)
    clones = {}
    for word in asked.clones:
        name, sign, folder = word.partition("=")
        if not sign or not Path(folder).is_dir():
            refuse(f"--source {word!r} is no ID=FOLDER. Next step: name a clone that is there.", Exit.WRONG_ARGUMENTS)
        clones[name] = Path(folder).absolute()
    return replace(settings, sources=clones)


def _proving_registry(base: str) -> str:
    """The one on this machine that the base came from; else the one that `containers/docker_engine` starts."""
    host = base.partition("/")[0]
    return host if host.startswith(("127.", "localhost:")) else _PROVING_REGISTRY


def _build(asked: Asked, rows: _Rows, engine: Engine, settings: BuildSettings, plan: ImagePlan) -> ImageBuild:
    registry = asked.push or (_proving_registry(asked.own_base) if asked.prove else "")
    order = BuildOrder(plan, registry, asked.tag, asked.fresh)
    told = Told(TOOL, rows.pins.hash, read_commit())
    folder = asked.receipts.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / f"{plan.target}.log"
        with errors.status(f"building {order.name}"):
            build = build_image(
                engine, order, settings, told, rows.root, log, lambda line: errors.print(line, markup=False)
            )
        write_build(build, folder)
    except BuildFailed as fault:
        refuse(str(fault), Exit.INFRASTRUCTURE if fault.infrastructure else Exit.NO_ENVIRONMENT)
    except OSError as fault:
        refuse_full_disk(folder, fault)
        refuse(
            f"the receipt of the build cannot be written to {folder}: {fault.strerror or fault}. Next step: give "
            "--receipts a folder that you can write.",
            Exit.WRONG_ARGUMENTS,
        )
    return build
