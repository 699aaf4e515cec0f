"""`nox -s images`: what would be built, and images built one after another by `docker buildx bake`."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from .. import __version__, errors
from ..environments.fits import FitVerdict
from ..environments.interpreter import read_commit
from ..errors import EvidenceMissing, Exit, InfrastructureFailed, NoEnvironment, ToolError, WrongArguments
from ..evidence.receipt import write_whole
from ..evidence.values import Frozen, Result
from . import tools
from .locks import read_image_lock
from .plan import ImagePlan, ImageRows, describe_target, name_image

_BUILD_S: Final = 6 * 3600.0  # FlashAttention 3 takes an hour on 64 cores
_CERTIFICATES: Final = ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
_PIP_KEYS: Final = ("index-url", "extra-index-url", "trusted-host", "proxy", "timeout", "retries")
# What an engine prints (seen: 26.1, 28.5) where the same build may go well another time; "Unavailable": it was killed.
_INFRASTRUCTURE: Final = re.compile(
    r"no space left on device|disk quota exceeded|failed to push|parent snapshot \S+ does not exist|dial tcp|"
    r"code = Unavailable|could not resolve host",
    re.I,
)


class ImageClosed(ToolError):
    """An image is refused before it is built."""

    exit = Exit.CLOSED


class Refused(Frozen):
    """A target, and why it is not built, works with less, or may not work."""

    target: str
    why: str


class ImagePlans(Result):
    """What would be built; `warned`: what works with less."""

    schema_id: str = "megacpp-validate/image-plans/4"
    plans: tuple[ImagePlan, ...]
    refused: tuple[Refused, ...] = ()
    unknown: tuple[Refused, ...] = ()
    warned: tuple[Refused, ...] = ()

    @property
    def exit(self) -> Exit:
        """Closed where a target is refused, incomplete where a need is unknown."""
        return errors.exit_for(breaks=bool(self.refused), lacks=bool(self.unknown))


class ImageBuild(Result):
    """An image that was built: the receipt.

    Attributes:
        digest: of its index, which names the image and its provenance.
        started: UTC, ISO 8601.
        seconds: of the whole build, with the push.
    """

    schema_id: str = "megacpp-validate/image-build/3"
    plan: ImagePlan
    name: str
    digest: str
    pushed: bool
    engine: str
    buildx: str
    started: str
    seconds: float


@dataclass(frozen=True)
class ImageOptions:
    """Arguments of the verb; `allow_unknown`: a need that is unknown stops no build."""

    targets: tuple[str, ...] = ()
    own_base: str = ""
    allow_unknown: bool = False
    push: str | None = None
    tag: str = ""
    receipts: Path = Path(".megacpp/images")


# --- the engine -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Engine:
    """An engine that answers: its client and versions."""

    docker: str
    variables: Mapping[str, str] = field(repr=False)
    version: str
    buildx: str


def find_engine(variables: Mapping[str, str]) -> Engine:
    """The engine that the client of this host talks to.

    Raises:
        NoEnvironment: no client, no answer, or no buildx.
    """
    docker, versions = tools.require_program("docker", variables), list[str]()
    for words in (("version", "--format", "{{.Server.Version}}"), ("buildx", "version")):
        done = tools.call([docker, *words], variables)
        if done.code:
            raise NoEnvironment(
                f"{docker} cannot reach a Docker Engine with buildx: {done.last_words}. Likely cause: the engine is "
                "not running, this user may not access it, or docker-buildx is missing. Next step: start it; or as "
                'root on Debian, `eval "$(containers/docker_engine up)"` starts one with a registry.'
            )
        versions.append(done.words.strip())
    return Engine(docker, variables, *versions)


# --- one build --------------------------------------------------------------------------------------------------------


def plan_build(plan: ImagePlan, name: str, engine: Engine, folder: Path, *, push: bool = False) -> list[str]:
    """Write the bake file of one build with what this host lends, and return the words of the client for it.

    What a host lends is no part of the image: pip's settings and certificates are secrets, a folder of wheels is a
    context; MEGACPP_BUILD_APT_SOURCES, _NETWORK and _JOBS name more.

    Args:
        folder: for the bake file and the secrets.

    Raises:
        ImageRefused: a variable names a path that does not exist.
    """
    variables = engine.variables
    places: dict[str, Path] = {"bake": folder}
    links = variables.get("PIP_FIND_LINKS", "")
    lent: dict[str, str | None] = {
        "wheels": links if Path(links).is_dir() else "",
        "apt_sources": variables.get("MEGACPP_BUILD_APT_SOURCES"),
        "ca_bundle": next((variables[one] for one in _CERTIFICATES if Path(variables.get(one) or "/").is_file()), ""),
    }
    for key, given in lent.items():
        if given and not Path(given).exists():
            raise tools.ImageRefused(f"{key}: {given} does not exist. Next step: correct or unset MEGACPP_BUILD_*.")
        if given:
            places[key] = Path(given).absolute()
    pip_conf = folder / "pip.conf"
    pip_conf.touch(mode=0o600)  # it may hold passwords
    pip_conf.write_text(render_pip_conf(tools.read_pip_settings(variables)), encoding="utf-8")
    secrets = {"pip_conf": pip_conf}
    secrets |= {key: file for key, file in places.items() if key in ("apt_sources", "ca_bundle")}
    target = describe_target(plan)
    target["secret"] = [f"id={key},src={file}" for key, file in sorted(secrets.items())]
    # One exporter sets the tag, as the last thing that it does: a build that fails has set none.
    target["output"] = [f"type=image,name={name},push={str(push).lower()},oci-mediatypes=true"]
    if "wheels" in places:
        target.setdefault("contexts", {})["wheels"] = str(places["wheels"])
    if jobs := variables.get("MEGACPP_BUILD_JOBS"):
        target["args"]["JOBS"] = jobs
    words = [f"fs.read={real}" for place in places.values() for real in dict.fromkeys((place, place.resolve()))]
    if network := variables.get("MEGACPP_BUILD_NETWORK"):
        target["network"] = network
        words += ["network.host"] if network == "host" else []
    (folder / "bake.json").write_text(json.dumps({"target": {plan.target: target}}), encoding="utf-8")
    allowed = [word for one in words for word in ("--allow", one)]
    return ["buildx", "bake", "--file", str(folder / "bake.json"), "--progress", "plain", *allowed, plan.target]


def render_pip_conf(found: Mapping[str, Sequence[str]]) -> str:
    """A configuration file from settings of pip: a folder of the host means nothing in a build."""
    kept = {key: " ".join(word for word in found.get(key, ()) if not word.startswith("file:")) for key in _PIP_KEYS}
    return "\n".join(["[global]", *(f"{key} = {value}" for key, value in sorted(kept.items()) if value)]) + "\n"


def bake(
    engine: Engine, plan: ImagePlan, name: str, root: Path, log: Path, *, push: bool = False, fresh: bool = False
) -> str:  # fmt: skip
    """Build an image, and return the digest of its index.

    Args:
        name: repository and tag that are set when all has gone well; with `push`, in its registry.
        root: of the checkout.
        log: file for every line of the client, written while it runs.
        fresh: take nothing from the engine's cache.

    Raises:
        NoEnvironment: the build failed by itself. No tag is set or moved.
        InfrastructureFailed: the same build may go well another time.
    """
    with tempfile.TemporaryDirectory(prefix="megacpp-build-") as room:
        metadata = Path(room, "metadata.json")
        words = plan_build(plan, name, engine, Path(room), push=push)
        words += ["--metadata-file", str(metadata), *(["--no-cache"] if fresh else ())]
        words = ["sh", "-c", 'exec >"$0" 2>&1 "$@"', str(log), engine.docker, *words]
        if tools.call(words, engine.variables, limit_s=_BUILD_S, folder=root).code != 0:
            raise explain_build(plan, name, log.read_text(encoding="utf-8", errors="replace").splitlines(), log)
        try:
            return str(json.loads(metadata.read_text(encoding="utf-8"))[plan.target]["containerimage.digest"])
        except (OSError, ValueError, KeyError, TypeError) as fault:
            raise NoEnvironment(
                f"the build of {plan.target} succeeded, but reports no digest: {fault!r}. Likely cause: an engine "
                "without the containerd image store. Next step: switch it on (`features: {containerd-snapshotter: "
                "true}` in daemon.json) and build again."
            ) from fault


def explain_build(plan: ImagePlan, name: str, lines: Sequence[str], log: Path) -> ToolError:
    """What a client printed last, as an error: of infrastructure where the same build may succeed later."""
    # An engine quotes the recipe between what a step printed and its own last line.
    quote = next((number for number, line in enumerate(lines) if line.startswith("Dockerfile:")), len(lines))
    said = " ".join(line.strip() for line in (*lines[:quote][-11:], *lines[quote:][-1:]))
    kind = InfrastructureFailed if _INFRASTRUCTURE.search(said) else NoEnvironment
    return kind(
        f"the build of {plan.target} on {plan.pulled} failed, and {name} is not set: {said[-900:]}. Likely cause: a "
        "step failed, a registry does not give the pinned base, a disk is full, or the engine ended. Next step: read "
        f"the log, {log}; `docker login`, MEGACPP_REGISTRY_MIRROR and `docker buildx prune` may help."
    )


# --- the verb ---------------------------------------------------------------------------------------------------------


def plan_all(rows: ImageRows, options: ImageOptions) -> ImagePlans:
    """What would be built for each target that is named, and what is refused.

    Raises:
        WrongArguments: one base for several targets.
    """
    if options.own_base and len(options.targets) != 1:
        raise WrongArguments("--base is for one image. Next step: name the one target that it is for.")
    plans, found = list[ImagePlan](), {verdict: list[Refused]() for verdict in FitVerdict}
    for image in rows.find(options.targets):
        try:
            plan = rows.plan(image.target, options.own_base, read_commit())
            fit = rows.judge(image, read_image_lock(rows.root / image.lock), options.own_base)
        except tools.ImageRefused as fault:
            found[FitVerdict.REFUSED].append(Refused(target=image.target, why=str(fault)))
            continue
        plans.append(plan)
        for one in fit.fits:
            why = f"{one.component} is {one.seen or 'unknown'}, wanted {one.wanted}: {one.says} ({one.source})"
            found[one.verdict].append(Refused(target=image.target, why=f"{why}. Next step: {one.next_step}."))
    refused, unknown, warned, _ = map(tuple, found.values())
    return ImagePlans(plans=tuple(plans), refused=refused, unknown=unknown, warned=warned)


def build_all(rows: ImageRows, options: ImageOptions, report: Callable[[str], None]) -> Iterator[ImageBuild]:
    """Build each target that is named. Everything that can be refused is refused before the first build.

    Raises:
        NothingSelected: no target is named.
        ImageClosed: a stack does not fit, a lock is older than the matrix, or a base has no digest.
        EvidenceMissing: a need is unknown, and that is not allowed.
        NoEnvironment: no engine, one of another architecture, or a build that fails.
        InfrastructureFailed: a full disk, or a registry that is down.
    """
    if not options.targets:
        names = ", ".join(image.target for image in rows.images.image)
        raise errors.NothingSelected(f"no target is named. Next step: name one of {names}, or give --plan.")
    planned = plan_all(rows, options)
    if planned.refused:
        raise ImageClosed("; ".join(f"{row.target}: {row.why}" for row in planned.refused))
    if planned.unknown and not options.allow_unknown:
        raise EvidenceMissing(
            f"{len(planned.unknown)} requirements are unknown. Likely cause: matrix/images.toml lacks the digest of "
            "the base, or versions in its row. Next step: `--plan` names them; `--allow-unknown` builds all the same."
        )
    engine = find_engine(rows.variables)
    for plan in planned.plans:
        yield _build(rows, options, engine, plan, report)


def _build(
    rows: ImageRows, options: ImageOptions, engine: Engine, plan: ImagePlan, report: Callable[[str], None]
) -> ImageBuild:
    """Build one image and write its receipt and its log."""
    folder, registry = options.receipts.absolute(), options.push or ""
    release = f"-te{rows.te}" if rows.te else ""
    name = name_image(plan.target, registry, options.tag or f"{__version__}{release}")
    stem, clock, started = f"{plan.target}{release}", time.monotonic(), datetime.now(UTC)
    if not plan.verified:
        report(f"no registry has confirmed the base of {plan.target}")
    with errors.writing_to(folder, "the receipt and the log", "--receipts"):
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / f"{stem}.log"
        report(f"building {name}; its log: {log}")
        digest = bake(engine, plan, name, rows.root, log, push=bool(registry))
        build = ImageBuild(
            plan=plan, name=name, digest=digest, pushed=bool(registry), engine=engine.version,
            buildx=engine.buildx, started=started.isoformat(timespec="seconds"),
            seconds=round(time.monotonic() - clock, 1),
        )  # fmt: skip
        write_whole(folder / f"{stem}.json", build.model_dump_json(indent=2) + "\n")
    return build
