"""`nox -s images`: what would be built, what stands in its way and what linters report, and images built in turn."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Final

from ..catalog.images import Image
from ..environments.fits import FitVerdict
from ..environments.interpreter import read_commit
from ..errors import Exit, InfrastructureFailed, NoEnvironment, NothingSelected, ToolError, WrongArguments, exit_for
from ..evidence.values import Frozen
from ..evidence.whole_file import write_whole
from .engine import BuildStep, Engine, bake, find_engine, read_build_settings, require_platform, start_engine
from .locks import read_image_lock
from .plan import (
    DOCKERFILE,
    BuildSettings,
    ImagePlan,
    ImageRows,
    find_images,
    name_image,
    plan_bake,
    require_base,
)
from .tools import REGISTRY, ImageRefused, call, find_program

_TAG: Final = re.compile(r"^\w[\w.-]{0,127}$", re.ASCII)
STEPS: Final = "containers/steps"
ENGINE_SCRIPT: Final = "containers/docker_engine"


class LintOutcome(StrEnum):
    """How a linter ended. `NOT_RUN` is never clean."""

    CLEAN = "clean"
    FAULTS = "faults"
    NOT_RUN = "not-run"


class Lint(Frozen):
    """What one linter reports of `subject`; `faults` of a linter that did not run: why."""

    linter: str
    subject: str
    outcome: LintOutcome
    faults: tuple[str, ...] = ()


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


def list_misfits(
    rows: ImageRows, image: Image, own_base: str, *verdicts: FitVerdict, locked: bool = True
) -> Iterator[Refused]:
    """What does not fit in the stack of an image: with its lock, or by what its row pins, where a lock is older."""
    fit = rows.judge(image, read_image_lock(rows.root / image.lock) if locked else None, own_base)
    for one in (one for verdict in verdicts for one in fit.of(verdict)):
        yield Refused(
            target=fit.name,
            why=f"{one.component} is {one.seen or 'unknown'}, wanted {one.wanted}: {one.says} ({one.source}). Next "
            f"step: {one.next_step}.",
        )


def check_options(options: ImageOptions, rows: ImageRows) -> None:
    """Refuse a wrong argument.

    Raises:
        WrongArguments: with the first one.
    """
    if options.tag and not _TAG.match(options.tag):
        raise WrongArguments(f"{options.tag!r} is not a valid tag. Next step: use letters, digits, dots and dashes.")
    if options.push is not None and not REGISTRY.match(options.push):
        raise WrongArguments(
            f"{options.push!r} is not a registry address. Next step: write host[:port][/prefix], without a scheme, as "
            "127.0.0.1:5000."
        )
    if options.own_base:
        require_base(options.own_base)
    if options.prove and options.targets != ("cpu",):
        raise WrongArguments(
            "--prove runs the image on this machine, so it is for cpu alone. Next step: `images cpu --prove`."
        )
    find_images(rows.images, options.targets)


def use_own_engine(rows: ImageRows, options: ImageOptions) -> tuple[ImageRows, ImageOptions]:
    """Both with the engine that `containers/docker_engine` starts, and its base where none is named."""
    found = start_engine(rows.root, rows.variables)
    own_base = options.own_base or found.get("MEGACPP_BASE", "")
    return replace(rows, variables=found), replace(options, own_base=own_base)


def plan_all(rows: ImageRows, options: ImageOptions) -> ImagePlans:
    """What would be built for each target that is named, what is refused, and what linters report of the recipe."""
    plans, refused, warned = list[ImagePlan](), list[Refused](), list[Refused]()
    pins_hash, base, engine, why = rows.pins.hash, options.own_base, None, ""
    for image in find_images(rows.images, options.targets):
        locked = True
        try:
            plans.append(rows.plan(image.target, base, read_commit()))
            warned += list_misfits(rows, image, base, FitVerdict.UNKNOWN, FitVerdict.WARNED)
        except ImageRefused as fault:
            locked = False
            refused.append(Refused(target=image.target, why=str(fault)))
        if locked or image.te:
            refused += list_misfits(rows, image, base, FitVerdict.REFUSED, locked=locked)
    try:
        engine = find_engine(rows.variables)
    except NoEnvironment as fault:
        why = str(fault)
    return ImagePlans(
        tool=rows.tool, plans=tuple(plans), refused=tuple(refused), warned=tuple(warned), pins_hash=pins_hash,
        lints=lint_recipe(rows.root, plans, engine, why, rows.variables),
    )  # fmt: skip


def build_all(rows: ImageRows, options: ImageOptions, say: Callable[[str], None]) -> list[ImageBuild]:
    """Build each target that is named. Everything that can be refused is refused before the first build.

    Raises:
        NothingSelected: no target is named.
        ImageClosed: a stack does not fit, a lock is older than the matrix, or a base has no digest.
        NoEnvironment: no engine, one of another architecture, or a build that fails.
        InfrastructureFailed: a full disk, or a registry that is down.
    """
    chosen, base = find_images(rows.images, options.targets), options.own_base
    if not options.targets:
        names = ", ".join(image.target for image in chosen)
        raise NothingSelected(f"no target is named. Next step: name one of {names}, or give --plan.")
    _ = rows.pins  # what is wrong with the file itself is no refusal of an image
    try:
        for locked in (False, True):  # what the rows alone refuse is not hidden by an older lock
            plans = [rows.plan(image.target, base, read_commit()) for image in chosen if locked]
            judged = [image for image in chosen if locked or image.te]
            misfits = [
                one for image in judged for one in list_misfits(rows, image, base, FitVerdict.REFUSED, locked=locked)
            ]
            if misfits:
                raise ImageClosed("; ".join(f"{row.target}: {row.why}" for row in misfits))
    except ImageRefused as fault:
        raise ImageClosed(str(fault)) from fault
    engine = find_engine(rows.variables)
    for plan in plans:
        require_platform(engine, plan)
    settings = read_build_settings(rows.variables, has_bridge=engine.has_bridge, clones=options.clones)
    return [_build(rows, options, engine, settings, plan, say) for plan in plans]


def _build(
    rows: ImageRows, options: ImageOptions, engine: Engine, settings: BuildSettings, plan: ImagePlan,
    say: Callable[[str], None],
) -> ImageBuild:  # fmt: skip
    """Build one image and write its receipt and its log."""
    folder, registry = options.receipts.absolute(), options.push or ""
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
            f"the receipt of the build cannot be written to {folder}: {fault}. Likely cause: its disk is full, or this "
            "user may not write there. Next step: make room, or give --receipts a folder that you can write."
        ) from fault
    return build


def lint_recipe(
    root: Path, plans: Sequence[ImagePlan], engine: Engine | None, no_engine: str, variables: Mapping[str, str]
) -> tuple[Lint, ...]:
    """Everything that can be found in the recipe without building it.

    Args:
        engine: that checks the stages; None where there is none, because of `no_engine`.
    """
    files = [*sorted(str(file.relative_to(root)) for file in (root / STEPS).glob("*.sh")), ENGINE_SCRIPT]
    checks = ["-x", "-P", "SCRIPTDIR", "-s", "bash", "-f", "json", *files]
    return (
        lint_house(root, plans),
        _lint("hadolint", DOCKERFILE, ["--no-color", "--format", "json", DOCKERFILE], root, variables),
        _lint("shellcheck", f"{len(files) - 1} scripts of {STEPS}, {ENGINE_SCRIPT}", checks, root, variables),
        *(_check_target(root, plan, engine, no_engine) for plan in plans),
    )


def lint_house(root: Path, plans: Sequence[ImagePlan]) -> Lint:
    """The rules of this project that no linter knows."""
    try:
        text = (root / DOCKERFILE).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        return _judge("house rules", DOCKERFILE, [f"it cannot be read: {fault}"])
    faults = []
    if any(line.replace(" ", "").lower().startswith("#syntax=") for line in text.splitlines()):
        faults.append(f"{DOCKERFILE}: a syntax line fetches a frontend from a registry; leave it out")
    for step, target in {step: plan.target for plan in reversed(plans) for step in plan.steps}.items():
        if not (root / STEPS / f"{step}.sh").is_file():
            faults.append(f"{STEPS}/{step}.sh is a step of {target}, and there is no such file")
        if f"bash /steps/{step}.sh" not in text:
            faults.append(f"{STEPS}/{step}.sh is a step of {target}, and {DOCKERFILE} does not run it")
    return _judge("house rules", DOCKERFILE, faults)


def _lint(name: str, subject: str, words: list[str], root: Path, variables: Mapping[str, str]) -> Lint:
    program = find_program(name, variables)
    if program is None:
        return _judge(name, subject, None, f"{name} is missing; `nox -s images` installs it")
    done = call([program, *words], variables, folder=root)
    code = "SC" if name == "shellcheck" else ""
    try:
        rows = json.loads(done.words)
        faults = [f"{row['file']}:{row['line']}: {code}{row['code']} {row['message']}" for row in rows]
    except (ValueError, KeyError, TypeError):
        return _judge(name, subject, None, done.last_words)
    return _judge(name, subject, faults)


def _check_target(root: Path, plan: ImagePlan, engine: Engine | None, no_engine: str) -> Lint:
    """What `docker buildx build --check` reports of the stages of a target.

    The base is an empty image here: a registry that is down is no fault of the recipe.
    """
    linter, subject = "docker buildx --check", f"{DOCKERFILE} as {plan.target} builds it"
    if engine is None:
        return _judge(linter, subject, None, no_engine)
    with tempfile.TemporaryDirectory(prefix="megacpp-bake-") as folder:
        document = plan_bake([plan])
        target = document["target"][plan.target]
        target["args"]["BASE_IMAGE"] = "scratch"
        target.pop("contexts", None)
        target.pop("platforms", None)
        file = Path(folder) / "bake.json"
        file.write_text(json.dumps(document), encoding="utf-8")
        words = ["buildx", "bake", "--progress", "quiet", "--allow", f"fs.read={folder}", "--file", str(file)]
        done = engine.ask(*words, "--call", "check,format=json", plan.target, folder=root)
    try:
        check = json.loads(done.words)["target"][plan.target]["check"]
        faults = [f"{row.get('ruleName', '?')}: {row.get('detail', '')}" for row in check.get("warnings") or ()]
        faults += [str(check["buildError"])] if check.get("buildError") else []
    except (ValueError, KeyError, TypeError):
        return _judge(linter, subject, None, done.last_words)
    return _judge(linter, subject, faults)


def _judge(linter: str, subject: str, faults: Iterable[str] | None, why: str = "") -> Lint:
    """A linter that ran; or, with None, one that did not, and why."""
    if faults is None:
        return Lint(linter=linter, subject=subject, outcome=LintOutcome.NOT_RUN, faults=(why,))
    found = tuple(faults)
    outcome = LintOutcome.FAULTS if found else LintOutcome.CLEAN
    return Lint(linter=linter, subject=subject, outcome=outcome, faults=found)
