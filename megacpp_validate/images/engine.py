"""The Docker Engine of a host, and one image that bake builds there: its lines are read, its failures explained."""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from ..errors import InfrastructureFailed, NoEnvironment, ToolError
from ..evidence.values import Frozen
from ..process import Ended
from .plan import BuildSettings, ImagePlan, name_image, plan_bake
from .tools import ImageRefused, call, read_pip_settings, require_program

_BUILD_S: Final = 6 * 3600.0  # FlashAttention 3 takes an hour on 64 cores
_UP_S: Final = 900.0  # packages of 420 MB, and a base of Debian
_MACHINES: Final = {"x86_64": "linux/amd64", "aarch64": "linux/arm64", "amd64": "linux/amd64", "arm64": "linux/arm64"}
_HOW_TO_GET_ONE: Final = (
    'On a Debian machine as root, `eval "$(containers/docker_engine up)"` starts an engine with a registry, in a '
    "folder of its own; elsewhere install Docker Engine 26.1 or newer with buildx"
)
_CERTIFICATES: Final = ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
_PIP_KEYS: Final = ("index-url", "extra-index-url", "trusted-host", "proxy", "timeout", "retries")
_VERTEX: Final = re.compile(r"^#(\d+) \[(?:\S+ )?(?P<stage>[\w-]+)(?: +\d+/\d+)?\] (?P<what>.+)$")
_EXPORT: Final = re.compile(r"^#(\d+) (?:\[\w+\] )?(?P<what>exporting to image|pushing .*)$")
_DONE: Final = re.compile(r"^#(\d+) (?:DONE (?P<seconds>\d+\.\d+)s|(?P<cached>CACHED))$")
_SCRIPT: Final = re.compile(r"bash /steps/(\w+)\.sh")
_STEP_SAID: Final = re.compile(r"^#?\d* ?\d+\.\d+ (?P<words>.+)$")
_RESOLVE: Final = "failed to resolve source metadata.*"
# What an engine says (seen: 26.1, 28.5), the class of exit, what it means. A full disk comes first: other failures are
# made of it.
_CAUSES: Final[tuple[tuple[str, type[ToolError], str], ...]] = (
    (
        r"no space left on device|disk quota exceeded", InfrastructureFailed,
        "the disk is full: the build of {target} stopped in the middle, and {name} is not set. Likely cause: the disk "
        "of the engine's data folder, or that of temporary files, has no room. Next step: make room (`docker buildx "
        "du`, `docker buildx prune`) and start it again: steps that ended are kept.",
    ),
    (
        r"parent snapshot \S+ does not exist", InfrastructureFailed,
        "the engine lost a layer while it built {target}, and {name} is not set. Likely cause: images that share the "
        "layer were removed in the same minute. Next step: the same command again.",
    ),
    (
        r"failed to push|error: failed to .*push", InfrastructureFailed,
        "{name} was built and could not be pushed. Likely cause: the registry is down, speaks no TLS, or wants a "
        "login. Next step: `docker login` there, or start it; then the same command again, which builds nothing anew.",
    ),
    (
        rf"{_RESOLVE}(not found|manifest unknown|unauthorized|denied|forbidden|\b40[13]\b)|no match for platform|"
        "unexpected (commit )?digest|failed precondition: unexpected|failed to verify|digest mismatch", NoEnvironment,
        "the registry has another image than {pulled} names, has none for {platform}, or refuses this caller; {name} "
        "is not set. Likely cause: the registry wants a login, the image was taken down, or a mirror does not have it. "
        "Next step: `docker login` there (nvcr.io: user `$oauthtoken`, the password is the API key); `docker buildx "
        "imagetools inspect {repository}` shows what is there; `nox -s lock` checks the pins against it.",
    ),
    (
        rf"{_RESOLVE}(no such host|connection refused|dial tcp|timeout|EOF|\b50\d\b)|failed to do request.*dial tcp",
        InfrastructureFailed,
        "the registry of {repository} does not answer; {name} is not set. Likely cause: this network does not reach "
        "it, or it is down. Next step: name a mirror in MEGACPP_REGISTRY_MIRROR (the digest stays what it is), load "
        "the base from an archive and give it with --base, or run again where it can be reached.",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Engine:
    """An engine that answers: its client, versions, the platforms that it can build, and whether it has a bridge."""

    docker: str
    variables: Mapping[str, str] = field(repr=False)
    version: str
    buildx: str
    platforms: tuple[str, ...]
    has_bridge: bool

    def ask(self, *words: str, limit_s: float = 60.0, folder: Path | None = None) -> Ended:
        """Run the client to its end; its exit code is for the caller."""
        return call([self.docker, *words], self.variables, limit_s=limit_s, folder=folder)


def find_engine(variables: Mapping[str, str]) -> Engine:
    """The engine that the client of this host talks to.

    Raises:
        NoEnvironment: no client, no answer, or no buildx.
    """
    docker = require_program("docker", variables)
    info, buildx = (
        call([docker, *words], variables) for words in (("info", "--format", "{{json .}}"), ("buildx", "version"))
    )
    try:
        facts = json.loads(info.words)
    except ValueError:
        facts = {}
    if info.code or not facts.get("ServerVersion") or buildx.code:
        said = (buildx if facts.get("ServerVersion") else info).last_words
        raise NoEnvironment(
            f"no Docker Engine with buildx answers {docker}: {said}. Likely cause: it does not run, is not yours, "
            f"DOCKER_HOST is of another one, or docker-buildx is missing. Next step: start it, or: {_HOW_TO_GET_ONE}."
        )
    bridges = call([docker, "network", "ls", "--quiet", "--filter", "driver=bridge"], variables)
    own = _MACHINES.get(facts.get("Architecture", ""), "linux/unknown")
    listed = re.findall(r"^\s*Platforms:(.*)$", call([docker, "buildx", "inspect"], variables).words, re.MULTILINE)
    others = (name.strip() for line in listed for name in line.replace("*", "").split(","))
    return Engine(
        docker, variables, str(facts["ServerVersion"]), next(iter(buildx.words.split()[1:2]), ""),
        (own, *(name for name in others if name and not name.startswith(own))), bool(bridges.words.strip()),
    )  # fmt: skip


def start_engine(root: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """The variables with an engine, a registry and a base of this machine's own: `containers/docker_engine up`.

    Raises:
        NoEnvironment: it cannot be started here; the script says why.
    """
    script = 'words=$("$0" up) && eval "$words" && env -0'
    done = call(["bash", "-c", script, str(root / "containers/docker_engine")], variables, limit_s=_UP_S)
    if done.code:
        raise NoEnvironment(done.errors.strip().rpartition("docker_engine: ")[2][-600:] or done.last_words)
    return dict(word.partition("=")[::2] for word in done.words.split("\0") if word)


def require_platform(engine: Engine, plan: ImagePlan) -> None:
    """Refuse what the engine cannot run, before anything is pulled.

    Raises:
        NoEnvironment: it builds for other machines.
    """
    if plan.platform not in engine.platforms:
        raise NoEnvironment(
            f"the image for {plan.target} is {plan.platform}, and this engine builds "
            f"{', '.join(engine.platforms[:4])}. Likely cause: a machine of another architecture, "
            "without emulation. Next step: build it on a machine of that architecture, or register emulation "
            "(binfmt_misc with qemu-user-static), which is slow."
        )


def read_build_settings(variables: Mapping[str, str], *, has_bridge: bool, clones: Sequence[str] = ()) -> BuildSettings:
    """What this host lends: its own settings of pip and certificates, and the variables MEGACPP_BUILD_*.

    Args:
        has_bridge: the engine has a network of its own for builds.
        clones: "ID=FOLDER": a clone in place of a repository.

    Raises:
        ImageRefused: a setting names what is not there.
    """
    found: dict[str, Path] = {}
    given = {name: variables.get(f"MEGACPP_BUILD_{name}", "") for name in ("WHEELS", "APT_SOURCES")}
    for word in [f"{name}={value}" for name, value in given.items() if value] + list(clones):
        name, _, place = word.partition("=")
        if not place or not Path(place).exists():
            raise ImageRefused(
                f"{word!r} names what is not there. Next step: name a folder or file that is, or unset it."
            )
        found[name] = Path(place).absolute()
    links = variables.get("PIP_FIND_LINKS", "")
    lent = Path(links) if links and Path(links).is_dir() else None
    certificates = next((Path(variables[name]) for name in _CERTIFICATES if variables.get(name)), None)
    said = call([sys.executable, "-m", "pip", "config", "list"], variables).words
    return BuildSettings(
        wheels=found.pop("WHEELS", lent),
        apt_sources=found.pop("APT_SOURCES", None),
        ca_bundle=certificates if certificates and certificates.is_file() else None,
        pip_conf=render_pip_conf(said),
        network=variables.get("MEGACPP_BUILD_NETWORK", "" if has_bridge else "host"),
        jobs=variables.get("MEGACPP_BUILD_JOBS", ""),
        sources=found,
    )


def render_pip_conf(text: str) -> str:
    """A configuration file from `pip config list`: a folder of the host means nothing in a build."""
    found = read_pip_settings(text)
    kept = {key: " ".join(word for word in found.get(key, ()) if not word.startswith("file:")) for key in _PIP_KEYS}
    return "\n".join(["[global]", *(f"{key} = {value}" for key, value in sorted(kept.items()) if value)]) + "\n"


class BuildStep(Frozen):
    """A step of a build: seconds, and whether the engine took it from its cache."""

    name: str
    seconds: float
    cached: bool


@dataclass(frozen=True)
class BuildOrder:
    """What to build; `registry` to push to, `tag` in place of the version, `fresh` takes nothing from the cache."""

    plan: ImagePlan
    registry: str = ""
    tag: str = ""
    fresh: bool = False

    @property
    def name(self) -> str:
        """Repository and tag."""
        return name_image(self.plan.target, self.registry, self.tag)


@dataclass(frozen=True)
class Built:
    """What the engine made: the digest of its index, its steps, start (UTC, ISO 8601) and seconds."""

    digest: str
    steps: tuple[BuildStep, ...]
    started: str
    seconds: float


def bake(
    engine: Engine, order: BuildOrder, settings: BuildSettings, root: Path, log: Path, say: Callable[[str], None]
) -> Built:
    """Build an image, and push it where a registry is named.

    Args:
        root: of the checkout.
        log: file for every line of the client.
        say: called with each step as it ends.

    Raises:
        NoEnvironment: the engine cannot build for that platform, or the build failed by itself. No tag is set or moved.
        InfrastructureFailed: the same build may go well another time.
    """
    require_platform(engine, order.plan)
    started, clock, target = datetime.now(UTC), time.monotonic(), order.plan.target
    lines, steps = list[str](), _Steps(say)

    def read_line(line: str) -> None:
        lines.append(line)
        steps.read(line)

    with tempfile.TemporaryDirectory(prefix="megacpp-build-") as name:
        folder = Path(name)
        file, metadata = folder / "bake.json", folder / "metadata.json"
        file.write_text(json.dumps(_plan_build(order, settings, folder)), encoding="utf-8")
        words = [
            *("buildx", "bake", "--file", str(file), "--progress", "plain", "--metadata-file", str(metadata)),
            *(["--no-cache"] if order.fresh else ()),
            *_allow(settings, folder),
            target,
        ]
        # The client's lines are on its standard error.
        words = ["sh", "-c", 'exec "$@" 2>&1', "sh", engine.docker, *words]
        done = call(words, engine.variables, limit_s=_BUILD_S, folder=root, each_line=read_line)
        log.write_text("\n".join(lines) + "\n", encoding="utf-8")
        if done.code:
            raise explain_build(order.plan, order.name, lines, log)
        try:
            digest = str(json.loads(metadata.read_text(encoding="utf-8"))[target]["containerimage.digest"])
        except (OSError, ValueError, KeyError, TypeError) as fault:
            raise NoEnvironment(
                f"the build of {target} ended well, and gives no digest: {fault!r}. Likely cause: an engine without "
                "the containerd image store. Next step: switch it on (`features: {containerd-snapshotter: true}` in "
                "daemon.json) and build again."
            ) from fault
    seconds = round(time.monotonic() - clock, 1)
    return Built(digest, tuple(steps.ended), started.isoformat(timespec="seconds"), seconds)


@dataclass
class _Steps:
    """The steps of a build, from the client's lines."""

    say: Callable[[str], None]
    ended: list[BuildStep] = field(default_factory=list)
    _names: dict[str, str] = field(default_factory=dict)

    def read(self, line: str) -> None:
        if started := _EXPORT.match(line) or _VERTEX.match(line):
            what, stage = started["what"], started.groupdict().get("stage")
            script = _SCRIPT.search(what)
            name = script[1] if script else f"{stage}: {what.split(' ', 1)[0]}" if stage else what.split(" to ")[0]
            self._names.setdefault(started[1], name)
        elif (done := _DONE.match(line)) and done[1] in self._names and "internal" not in self._names[done[1]]:
            step = BuildStep(
                name=self._names.pop(done[1]), seconds=float(done["seconds"] or 0), cached=bool(done["cached"])
            )
            if ":" not in step.name or step.seconds >= 1.0:  # else a line of the recipe that only names something
                self.ended.append(step)
                self.say(f"{'cached' if step.cached else f'{step.seconds:.1f} s':>8} {step.name}")


def _plan_build(order: BuildOrder, settings: BuildSettings, folder: Path) -> dict[str, Any]:
    """The bake file of one build. Its secrets stay outside of the image; the one with passwords is ours alone."""
    pip_conf = folder / "pip.conf"
    pip_conf.touch(mode=0o600)
    pip_conf.write_text(settings.pip_conf, encoding="utf-8")
    secrets = {"pip_conf": pip_conf, "apt_sources": settings.apt_sources, "ca_bundle": settings.ca_bundle}
    document = plan_bake([order.plan], settings)
    target = document["target"][order.plan.target]
    target["secret"] = [f"id={name},src={file}" for name, file in sorted(secrets.items()) if file]
    # One exporter sets the tag, as the last thing that it does: a build that fails has set none.
    push = str(bool(order.registry)).lower()
    target["output"] = [f"type=image,name={order.name},push={push},oci-mediatypes=true"]
    del target["tags"]
    return document


def _allow(settings: BuildSettings, folder: Path) -> Iterator[str]:
    """What bake may read outside of the checkout, and the network that it may use."""
    for place in (folder, settings.wheels, settings.apt_sources, settings.ca_bundle, *settings.sources.values()):
        for real in dict.fromkeys((place, place.resolve())) if place else ():
            yield from ("--allow", f"fs.read={real}")
    if settings.network == "host":
        yield from ("--allow", "network.host")


def explain_build(plan: ImagePlan, name: str, lines: Sequence[str], log: Path) -> ToolError:
    """What a client's lines mean; where no cause is known, the last words of the step that failed."""
    text = "\n".join(lines)
    facts = {
        "target": plan.target, "platform": plan.platform, "name": name, "pulled": plan.pulled,
        "repository": plan.pulled.partition("@")[0],
    }  # fmt: skip
    for pattern, kind, words in _CAUSES:
        if re.search(pattern, text, re.IGNORECASE):
            return kind(f"{words.format(**facts)} The log: {log}.")
    # The client shows what the step said between two rules, after the step's name.
    rules = [place for place, line in enumerate(lines) if line.startswith("------")]
    shown = lines[rules[0] + 1 : rules[1]] if len(rules) > 1 else lines[-15:]
    lines_of = [match["words"] if (match := _STEP_SAID.match(line)) else line.strip() for line in shown]
    said = " ".join(word for word in lines_of if word and not word.startswith(("WARNING", ">", "#")))
    said = said or next((line for line in reversed(lines) if line.strip()), "nothing")
    return NoEnvironment(
        f"the build of {plan.target} failed, and {name} is not set. It said: {' '.join(said.split())[-700:]}. Next "
        f"step: the log has every line: {log}; where a package could not be fetched, look at `pip config list`, which "
        "the build was given."
    )
