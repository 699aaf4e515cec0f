"""`nox -s images`: what would be built, what stands in its way, and images built one after another."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Final

from ..catalog.bridge import Catalog, matrix_folder, read_catalog
from ..catalog.images import Image, Images
from ..environments.interpreter import read_commit
from ..errors import Exit, InfrastructureFailed, NoEnvironment, NothingSelected, ToolError, WrongArguments, exit_for
from ..evidence.values import Frozen
from ..evidence.whole_file import write_whole
from .engine import BuildStep, Engine, bake, find_engine, read_build_settings, require_platform, start_engine
from .fits import FitVerdict, judge_stacks, read_all_images, stack_of_image
from .lint import Lint, LintOutcome, lint_recipe
from .locking import write_together
from .locks import read_image_lock
from .pins import FILE as PINS_FILE
from .pins import Pins, read_pins
from .plan import (
    BAKE_FILE,
    BuildSettings,
    ImagePlan,
    find_images,
    name_image,
    plan_images,
    render_committed_bake,
    require_base,
)
from .tools import MIRROR, REGISTRY, ImageRefused

_TAG: Final = re.compile(r"^\w[\w.-]{0,127}$", re.ASCII)


class ImageClosed(ToolError):
    """An image is refused before it is built."""

    exit = Exit.CLOSED


class Refused(Frozen):
    """A target, and why it is not built, or works with less."""

    target: str
    why: str


class ImagePlans(Frozen):
    """What would be built; `warned`: what works with less, or is unknown."""

    schema_id: str = "megacpp-validate/image-plans/1"
    tool: str
    plans: tuple[ImagePlan, ...]
    refused: tuple[Refused, ...]
    warned: tuple[Refused, ...]
    lints: tuple[Lint, ...]
    pins_hash: str

    @property
    def exit(self) -> Exit:
        """Closed where a target is refused or a linter finds a fault, incomplete where a linter did not run."""
        outcomes = {lint.outcome for lint in self.lints}
        return exit_for(
            breaks=bool(self.refused) or LintOutcome.FAULTS in outcomes, lacks=LintOutcome.NOT_RUN in outcomes
        )


class ImageBuild(Frozen):
    """An image that was built: the receipt.

    Attributes:
        digest: of its index, which names the image and its provenance.
        base_verified: day on which a registry gave the base's digest; empty where none has.
        revision: commit of the project, with "-dirty" where files differ; empty outside of a checkout.
        started: UTC, ISO 8601.
        seconds: of the whole build, with the push.
    """

    schema_id: str = "megacpp-validate/image-build/1"
    tool: str
    target: str
    platform: str
    name: str
    digest: str
    pushed: bool
    base: str
    base_verified: str
    lock: str
    lock_hash: str
    pins_hash: str
    revision: str
    engine: str
    buildx: str
    steps: tuple[BuildStep, ...]
    started: str
    seconds: float

    @property
    def exit(self) -> Exit:
        """It is built."""
        return Exit.OPEN

    @property
    def reference(self) -> str:
        """The image by its digest, without the tag."""
        repository, colon, tag = self.name.rpartition(":")
        return f"{repository if colon and '/' not in tag else self.name}@{self.digest}"


@dataclass(frozen=True)
class ImageOptions:
    """Arguments of the verb."""

    targets: tuple[str, ...] = ()
    own_base: str = ""
    push: str | None = None
    tag: str = ""
    fresh: bool = False
    prove: bool = False
    clones: tuple[str, ...] = ()
    receipts: Path = Path(".megacpp/images")
    matrix: Path | None = None


@dataclass(frozen=True)
class ImageRows:
    """What is read before anything is planned."""

    options: ImageOptions
    tool: str
    variables: Mapping[str, str]

    @cached_property
    def catalog(self) -> Catalog:
        """The matrix."""
        return read_catalog(self.options.matrix)

    @cached_property
    def images(self) -> Images:
        """The rows of images.toml."""
        return read_all_images(self.catalog, self.options.matrix)

    @cached_property
    def pins(self) -> Pins:
        """The digests of bases."""
        return read_pins(self.root / PINS_FILE)

    @property
    def root(self) -> Path:
        """Of the checkout."""
        return (self.options.matrix or matrix_folder()).resolve().parent

    def plan(self, target: str, own_base: str = "", revision: str = "") -> ImagePlan:
        """What would be built for a target; raises ImageRefused."""
        rows, mirror = [row for row in self.catalog.targets if row.id == target], self.variables.get(MIRROR, "")
        how = {"own_base": own_base, "mirror": mirror, "revision": revision}
        return plan_images(self.images, self.pins, rows, root=self.root, **how)[0]

    def judge(self, image: Image, *verdicts: FitVerdict, locked: bool) -> Iterator[Refused]:
        """What does not fit in its stack: with its lock, or by what its row pins, where a lock is older still."""
        lock = read_image_lock(self.root / image.lock) if locked else None
        stack = stack_of_image(self.images, image, lock, self.options.own_base)
        (fit,) = judge_stacks(self.catalog, self.options.matrix, self.images, [stack])
        for one in (one for verdict in verdicts for one in fit.of(verdict)):
            yield Refused(
                target=fit.name,
                why=f"{one.component} is {one.seen or 'unknown'}, wanted {one.wanted}: {one.says} ({one.source}). Next "
                f"step: {one.next_step}.",
            )


def read_rows(options: ImageOptions, tool: str, variables: Mapping[str, str], *, own_engine: bool = False) -> ImageRows:
    """The rows, after the arguments are checked.

    Args:
        own_engine: start `containers/docker_engine`, and take its base where none is named.

    Raises:
        WrongArguments: an argument is wrong.
        NoEnvironment: the engine cannot be started.
    """
    if options.tag and not _TAG.match(options.tag):
        raise WrongArguments(f"{options.tag!r} is no tag. Next step: use letters, digits, dots and dashes.")
    if options.push is not None and not REGISTRY.match(options.push):
        raise WrongArguments(
            f"{options.push!r} is no registry. Next step: write host[:port][/prefix], without a scheme, as "
            "127.0.0.1:5000."
        )
    if options.own_base:
        require_base(options.own_base)
    if options.prove and options.targets != ("cpu",):
        raise WrongArguments(
            "--prove runs the image on this machine, so it is for cpu alone. Next step: `images cpu --prove`."
        )
    rows = ImageRows(options, tool, variables)
    find_images(rows.images, options.targets)
    if own_engine:
        found = start_engine(rows.root, variables)
        return ImageRows(replace(options, own_base=options.own_base or found.get("MEGACPP_BASE", "")), tool, found)
    return rows


def write_bake(rows: ImageRows) -> Path:
    """Write the committed bake file: pinned bases by their own names, whatever this host has set.

    Raises:
        ImageClosed: an image cannot be planned.
        InfrastructureFailed: it cannot be written.
    """
    try:
        text = render_committed_bake(rows.images, rows.pins, rows.catalog.targets, rows.root)
    except ImageRefused as fault:
        raise ImageClosed(str(fault)) from fault
    write_together(rows.root, {BAKE_FILE: text})
    return rows.root / BAKE_FILE


def plan_all(rows: ImageRows) -> ImagePlans:
    """What would be built for each target that is named, what is refused, and what linters report of the recipe."""
    plans, refused, warned = list[ImagePlan](), list[Refused](), list[Refused]()
    pins_hash, engine, why = rows.pins.hash, None, ""
    for image in find_images(rows.images, rows.options.targets):
        locked = True
        try:
            plans.append(rows.plan(image.target, rows.options.own_base, read_commit()))
            warned += rows.judge(image, FitVerdict.UNKNOWN, FitVerdict.WARNED, locked=True)
        except ImageRefused as fault:
            locked = False
            refused.append(Refused(target=image.target, why=str(fault)))
        if locked or image.te:
            refused += rows.judge(image, FitVerdict.REFUSED, locked=locked)
    try:
        engine = find_engine(rows.variables)
    except NoEnvironment as fault:
        why = str(fault)
    lints = lint_recipe(rows.root, plans, engine, why, rows.variables)
    return ImagePlans(
        tool=rows.tool, plans=tuple(plans), refused=tuple(refused), warned=tuple(warned), lints=lints,
        pins_hash=pins_hash,
    )  # fmt: skip


def build_all(rows: ImageRows, say: Callable[[str], None]) -> list[ImageBuild]:
    """Build each target that is named. Everything that can be refused is refused before the first build.

    Raises:
        NothingSelected: no target is named.
        ImageClosed: a stack does not fit, a lock is older than the matrix, or a base has no digest.
        NoEnvironment: no engine, one of another architecture, or a build that fails.
        InfrastructureFailed: a full disk, or a registry that is down.
    """
    options, chosen = rows.options, find_images(rows.images, rows.options.targets)
    if not options.targets:
        names = ", ".join(image.target for image in chosen)
        raise NothingSelected(f"no target is named. Next step: name one of {names}, or give --plan.")
    _ = rows.pins  # what is wrong with the file itself is no refusal of an image
    try:
        for locked in (False, True):  # what the rows alone refuse is not hidden by an older lock
            plans = [rows.plan(image.target, options.own_base, read_commit()) for image in chosen if locked]
            asked = (image for image in chosen if locked or image.te)
            misfits = [one for image in asked for one in rows.judge(image, FitVerdict.REFUSED, locked=locked)]
            if misfits:
                raise ImageClosed("; ".join(f"{row.target}: {row.why}" for row in misfits))
    except ImageRefused as fault:
        raise ImageClosed(str(fault)) from fault
    engine = find_engine(rows.variables)
    for plan in plans:
        require_platform(engine, plan)
    settings = read_build_settings(rows.variables, has_bridge=engine.has_bridge, clones=options.clones)
    return [_build(rows, engine, settings, plan, say) for plan in plans]


def _build(
    rows: ImageRows, engine: Engine, settings: BuildSettings, plan: ImagePlan, say: Callable[[str], None]
) -> ImageBuild:
    """Build one image and write its receipt and its log."""
    options, folder, registry = rows.options, rows.options.receipts.absolute(), rows.options.push or ""
    if options.prove and not registry:  # the registry on this machine that the base came from, or docker_engine's own
        host = options.own_base.partition("/")[0]
        registry = host if host.startswith(("127.", "localhost:")) else "127.0.0.1:5000"
    name, clock, started = name_image(plan.target, registry, options.tag), time.monotonic(), datetime.now(UTC)
    if not plan.verified:
        say(f"the base of {plan.target} is not verified: {plan.unverified}")
    say(f"building {name}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        log, how = folder / f"{plan.target}.log", {"push": bool(registry), "fresh": options.fresh}
        digest, steps = bake(engine, plan, name, settings, rows.root, log, say, **how)
        build = ImageBuild(
            tool=rows.tool, target=plan.target, platform=plan.platform, name=name, digest=digest,
            pushed=bool(registry), base=plan.reference, base_verified=plan.verified, lock=plan.lock,
            lock_hash=plan.lock_hash, pins_hash=rows.pins.hash, revision=read_commit(), engine=engine.version,
            buildx=engine.buildx, steps=steps, started=started.isoformat(timespec="seconds"),
            seconds=round(time.monotonic() - clock, 1),
        )  # fmt: skip
        write_whole(folder / f"{plan.target}.json", build.model_dump_json(indent=2) + "\n")
    except OSError as fault:
        raise InfrastructureFailed(
            f"the receipt of the build cannot be written to {folder}: {fault}. Likely cause: its disk is full, or it "
            "is not yours. Next step: make room, or give --receipts a folder that you can write."
        ) from fault
    return build
