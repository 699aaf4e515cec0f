"""The Docker Engine of a host, and one image that bake builds there: its lines are read, its failures explained."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ..errors import InfrastructureFailed, NoEnvironment, ToolError
from ..evidence.values import Frozen
from ..process import Ended
from .plan import BuildSettings, ImagePlan, plan_bake
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
_BEGINS: Final = re.compile(r"#(\d+) .*?(?:bash /steps/(\w+)\.sh|(exporting|pushing)\b)")
_ENDS: Final = re.compile(r"#(\d+) (?:DONE (\d+\.\d+)s|CACHED)$")
_RESOLVE: Final = "failed to resolve source metadata.*"
# What an engine prints (seen: 26.1, 28.5), the class of exit, cause and next step. A full disk comes first: other
# failures are made of it.
_CAUSES: Final[tuple[tuple[str, type[ToolError], str], ...]] = (
    (
        r".*(no space left on device|disk quota exceeded).*", InfrastructureFailed,
        "the disk is full, of the engine's data folder or of temporary files. Next step: make room (`docker buildx "
        "prune`), and start it again: steps that ended are kept",
    ),
    (
        r".*parent snapshot \S+ does not exist.*", InfrastructureFailed,
        "images that share a layer were removed in the same minute. Next step: the same command again",
    ),
    (
        r".*(failed to push|error: failed to .*push).*", InfrastructureFailed,
        "the registry is down, speaks no TLS, or requires a login. Next step: `docker login` there, or start it; the "
        "same command then reuses everything that was built",
    ),
    (
        rf".*{_RESOLVE}(not found|manifest unknown|unauthorized|denied|forbidden|\b40[13]\b).*|.*(no match for "
        "platform|unexpected (commit )?digest|failed precondition: unexpected|failed to verify|digest mismatch).*",
        NoEnvironment,
        "the registry has another image than the pin, none for the platform, or requires a login. Next step: `docker "
        "login` there (nvcr.io: user `$oauthtoken`, the password is the API key); `nox -s lock` checks the pins",
    ),
    (
        rf".*{_RESOLVE}(no such host|connection refused|dial tcp|timeout|EOF|\b50\d\b).*|.*failed to do request.*dial "
        "tcp.*",
        InfrastructureFailed,
        "the registry of the base does not answer. Next step: name a mirror in MEGACPP_REGISTRY_MIRROR (the digest "
        "stays what it is), or another base with --base",
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
    info = call([docker, "info", "--format", "{{.ServerVersion}} {{.Architecture}}"], variables)
    version, _, machine = info.words.strip().partition(" ")
    buildx = call([docker, "buildx", "version"], variables)
    if info.code or not machine or buildx.code:
        said = info.last_words if info.code or not machine else buildx.last_words
        raise NoEnvironment(
            f"{docker} cannot reach a Docker Engine with buildx: {said}. Likely cause: the engine is not running, this "
            "user may not access it, DOCKER_HOST names another engine, or docker-buildx is not installed. Next step: "
            f"start it, or: {_HOW_TO_GET_ONE}."
        )
    bridges = call([docker, "network", "ls", "--quiet", "--filter", "driver=bridge"], variables)
    listed = re.findall(r"Platforms:(.*)$", call([docker, "buildx", "inspect"], variables).words, re.MULTILINE)
    platforms = (_MACHINES.get(machine, machine), *re.findall(r"linux/[\w/]+", " ".join(listed)))
    release = next(iter(buildx.words.split()[1:2]), "")
    return Engine(docker, variables, version, release, tuple(dict.fromkeys(platforms)), bool(bridges.words.strip()))


def start_engine(root: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """The variables with an engine, a registry and a base of this machine's own: `containers/docker_engine up`.

    Raises:
        NoEnvironment: it cannot be started here, for the reason that the script prints.
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
            f"{', '.join(engine.platforms[:4])}. Likely cause: a machine of another architecture, without emulation. "
            "Next step: build it on a machine of that architecture, or register emulation (binfmt_misc), which is slow."
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
                f"{word!r} names a path that does not exist. Next step: give an existing folder or file, or unset the "
                "setting."
            )
        found[name] = Path(place).absolute()
    links = variables.get("PIP_FIND_LINKS", "")
    certificates = next((Path(variables[name]) for name in _CERTIFICATES if variables.get(name)), None)
    return BuildSettings(
        wheels=found.pop("WHEELS", Path(links) if links and Path(links).is_dir() else None),
        apt_sources=found.pop("APT_SOURCES", None),
        ca_bundle=certificates if certificates and certificates.is_file() else None,
        pip_conf=render_pip_conf(call([sys.executable, "-m", "pip", "config", "list"], variables).words),
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
    """A script of the recipe, or the export: seconds, and whether the engine took it from its cache."""

    name: str
    seconds: float
    cached: bool


def bake(  # noqa: PLR0913 - what one build takes
    engine: Engine, plan: ImagePlan, name: str, settings: BuildSettings, root: Path, log: Path,
    say: Callable[[str], None], *, push: bool = False, fresh: bool = False,
) -> tuple[str, tuple[BuildStep, ...]]:  # fmt: skip
    """Build an image.

    Args:
        name: repository and tag that are set when all has gone well; with `push`, in its registry.
        root: of the checkout.
        log: file for every line of the client.
        say: called with each step as it ends.
        fresh: take nothing from the engine's cache.

    Returns:
        digest of its index, and its steps.

    Raises:
        NoEnvironment: the engine cannot build for that platform, or the build failed by itself. No tag is set or moved.
        InfrastructureFailed: the same build may go well another time.
    """
    require_platform(engine, plan)
    lines, running, steps = list[str](), dict[str, str](), list[BuildStep]()

    def read_line(line: str) -> None:
        lines.append(line)
        if (step := read_step(line, running)) is not None:
            steps.append(step)
            say(f"{'cached' if step.cached else f'{step.seconds:.1f} s':>8} {step.name}")

    with tempfile.TemporaryDirectory(prefix="megacpp-build-") as room:
        folder = Path(room)
        file, metadata = folder / "bake.json", folder / "metadata.json"
        file.write_text(json.dumps(_plan_build(plan, name, settings, folder, push=push)), encoding="utf-8")
        words = [
            *("buildx", "bake", "--file", str(file), "--progress", "plain", "--metadata-file", str(metadata)),
            *(["--no-cache"] if fresh else ()),
            *_allow(settings, folder),
            plan.target,
        ]
        # The client's lines are on its standard error.
        words = ["sh", "-c", 'exec "$@" 2>&1', "sh", engine.docker, *words]
        done = call(words, engine.variables, limit_s=_BUILD_S, folder=root, each_line=read_line)
        log.write_text("\n".join(lines) + "\n", encoding="utf-8")
        if done.code:
            raise explain_build(plan, name, lines, log)
        try:
            digest = str(json.loads(metadata.read_text(encoding="utf-8"))[plan.target]["containerimage.digest"])
        except (OSError, ValueError, KeyError, TypeError) as fault:
            raise NoEnvironment(
                f"the build of {plan.target} succeeded, but reports no digest: {fault!r}. Likely cause: an engine "
                "without the containerd image store. Next step: switch it on (`features: {containerd-snapshotter: "
                "true}` in daemon.json) and build again."
            ) from fault
    return digest, tuple(steps)


def read_step(line: str, running: dict[str, str]) -> BuildStep | None:
    """The step that a line of the client ends; None for another line.

    Args:
        running: number of each step -> its name; changed by lines that begin or end one.
    """
    if begins := _BEGINS.match(line):
        running.setdefault(begins[1], begins[2] or begins[3])
    elif (ends := _ENDS.match(line)) and ends[1] in running:
        return BuildStep(name=running.pop(ends[1]), seconds=float(ends[2] or 0), cached=ends[2] is None)
    return None


def _plan_build(plan: ImagePlan, name: str, settings: BuildSettings, folder: Path, *, push: bool) -> dict[str, Any]:
    """The bake file of one build. Its secrets stay outside of the image; the one with passwords is ours alone."""
    pip_conf = folder / "pip.conf"
    pip_conf.touch(mode=0o600)
    pip_conf.write_text(settings.pip_conf, encoding="utf-8")
    secrets = {"pip_conf": pip_conf, "apt_sources": settings.apt_sources, "ca_bundle": settings.ca_bundle}
    document = plan_bake([plan], settings)
    target = document["target"][plan.target]
    target["secret"] = [f"id={key},src={file}" for key, file in sorted(secrets.items()) if file]
    # One exporter sets the tag, as the last thing that it does: a build that fails has set none.
    target["output"] = [f"type=image,name={name},push={str(push).lower()},oci-mediatypes=true"]
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
    # The client shows what the step printed between two rules, after the step's name.
    rules = [place for place, line in enumerate(lines) if line.startswith("------")]
    shown = lines[rules[0] + 2 : rules[1]] if len(rules) > 1 else []
    said = " ".join(re.sub(r"^(#\d+ )?\d+\.\d+ ", "", line).strip() for line in shown) or " ".join(lines[-3:])
    kind: type[ToolError] = NoEnvironment
    cause = (
        "a step of the recipe failed, or a package could not be fetched. Next step: read the log; `pip config list` "
        "shows what the build was given"
    )
    for pattern, known, words in reversed(_CAUSES):
        if found := re.search(pattern, "\n".join(lines), re.IGNORECASE):
            said, kind, cause = found[0], known, words
    return kind(
        f"the build of {plan.target} on {plan.pulled} failed, and {name} is not set: {said[-700:]}. Likely cause: "
        f"{cause}. The log: {log}."
    )
