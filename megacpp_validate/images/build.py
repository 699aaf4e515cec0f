"""An image built by a real engine: what it is told, what it says on the way, and what is known of the result."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from .bake import name_image, plan_bake
from .build_faults import BuildFailed, explain_build
from .build_result import BuildStep, ImageBuild
from .build_settings import BuildSettings
from .engine import Engine, NoEngine
from .plan_result import ImagePlan

_VERTEX: Final = re.compile(r"^#(\d+) \[(?:\S+ )?(?P<stage>[\w-]+)(?: +\d+/\d+)?\] (?P<what>.+)$")
_EXPORT: Final = re.compile(r"^#(\d+) (?:\[\w+\] )?(?P<what>exporting to image|pushing .*)$")
_DONE: Final = re.compile(r"^#(\d+) (?:DONE (?P<seconds>\d+\.\d+)s|(?P<cached>CACHED))$")
_WORTH_TELLING_S: Final = 1.0
_SCRIPT: Final = re.compile(r"bash /steps/(\w+)\.sh")


@dataclass(frozen=True)
class BuildOrder:
    """What is asked for.

    Attributes:
        plan: of the image.
        registry: that it is pushed to; empty for none.
        tag: in place of the version.
        fresh: nothing is taken from the engine's cache.
    """

    plan: ImagePlan
    registry: str = ""
    tag: str = ""
    fresh: bool = False

    @property
    def name(self) -> str:
        """Repository and tag."""
        return name_image(self.plan.target, self.registry, self.tag)


@dataclass(frozen=True)
class Told:
    """What a receipt says beside the build itself."""

    tool: str
    pins_hash: str
    revision: str


@dataclass
class _Steps:
    """The steps of a build, read from what the client says line by line."""

    tell: Callable[[str], None]
    ended: list[BuildStep] = field(default_factory=list)
    _names: dict[str, str] = field(default_factory=dict)

    def __call__(self, line: str) -> None:
        if started := _EXPORT.match(line) or _VERTEX.match(line):
            what = started["what"]
            script = _SCRIPT.search(what)
            stage = started.groupdict().get("stage")
            name = script[1] if script else what.split(" ", 1)[0] if stage else what.split(" to ")[0]
            if stage and not script:
                name = f"{stage}: {name}"
            self._names.setdefault(started[1], name)
        elif (done := _DONE.match(line)) and done[1] in self._names and "internal" not in self._names[done[1]]:
            name = self._names.pop(done[1])
            step = BuildStep(name, float(done["seconds"] or 0.0), cached=bool(done["cached"]))
            if ":" in name and step.seconds < _WORTH_TELLING_S:
                return  # a line of the recipe that only names something
            self.ended.append(step)
            self.tell(f"{'cached' if step.cached else f'{step.seconds:.1f} s':>8} {name}")


def require_platform(engine: Engine, plan: ImagePlan) -> None:
    """Refuse what the engine cannot run, before anything is pulled.

    Raises:
        NoEngine: it builds for other machines.
    """
    if plan.platform not in engine.platforms:
        raise NoEngine(
            f"the image for {plan.target} is {plan.platform}, and this engine builds "
            f"{', '.join(engine.platforms[:4])}. Likely cause: a machine of another architecture, without emulation. "
            "Next step: build it on a machine of that architecture, or register emulation (binfmt_misc with "
            "qemu-user-static), which is slow."
        )


def build_image(
    engine: Engine,
    order: BuildOrder,
    settings: BuildSettings,
    told: Told,
    root: Path,
    log: Path,
    tell: Callable[[str], None],
) -> ImageBuild:
    """Build an image, and push it where a registry is named.

    Args:
        engine: that builds.
        order: what.
        settings: what this host lends.
        told: what the receipt says beside the build.
        root: of the checkout.
        log: file for every line that the client says.
        tell: is told of each step as it ends.

    Raises:
        NoEngine: the engine cannot build for that platform.
        BuildFailed: with what happened, why, and the next step. No tag was set or moved.
    """
    require_platform(engine, order.plan)
    started, clock = datetime.now(UTC), time.monotonic()
    steps = _Steps(tell)
    with tempfile.TemporaryDirectory(prefix="megacpp-build-") as name:
        digest = _bake(engine, order, settings, root, Path(name), log, steps)
    plan = order.plan
    return ImageBuild(
        tool=told.tool,
        target=plan.target,
        platform=plan.platform,
        name=order.name,
        digest=digest,
        pushed=bool(order.registry),
        base=plan.reference,
        base_verified=plan.verified,
        lock=plan.lock,
        lock_hash=plan.lock_hash,
        pins_hash=told.pins_hash,
        revision=told.revision,
        engine=engine.version,
        buildx=engine.buildx,
        steps=tuple(steps.ended),
        started=started.isoformat(timespec="seconds"),
        seconds=round(time.monotonic() - clock, 1),
    )


def _bake(
    engine: Engine, order: BuildOrder, settings: BuildSettings, root: Path, folder: Path, log: Path, steps: _Steps
) -> str:
    """Let the engine build; the digest of what it built."""
    secrets = _write_secrets(settings, folder)
    file, metadata = folder / "bake.json", folder / "metadata.json"
    file.write_text(json.dumps(_plan_bake(order, settings, secrets)), encoding="utf-8")
    words = (
        "buildx", "bake", "--file", str(file), "--progress", "plain", "--metadata-file", str(metadata),
        *(["--no-cache"] if order.fresh else ()), *_allow(settings, folder), order.plan.target,
    )  # fmt: skip
    lines: list[str] = []

    def hear(line: str) -> None:
        lines.append(line)
        steps(line)

    if engine.stream(words, root, log, hear):
        raise explain_build(order.plan, order.name, lines, log)
    return _read_digest(metadata, order.plan.target)


def write_build(build: ImageBuild, folder: Path) -> Path:
    """Write the receipt of a build, aside and renamed.

    Raises:
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{build.target}.json"
    aside = file.with_suffix(".json.new")
    aside.write_text(json.dumps(asdict(build), indent=2, sort_keys=True) + "\n", encoding="utf-8")
    aside.replace(file)
    return file


def _plan_bake(order: BuildOrder, settings: BuildSettings, secrets: Mapping[str, Path]) -> dict[str, Any]:
    target = order.plan.target
    document = plan_bake([order.plan], settings, names={target: order.name}, secrets=secrets)
    # One exporter sets the tag, as the last thing that it does: a build that fails has set none.
    described = document["target"][target]
    push = str(bool(order.registry)).lower()
    described["output"] = [f"type=image,name={order.name},push={push},oci-mediatypes=true"]
    described.pop("tags")
    return document


def _write_secrets(settings: BuildSettings, folder: Path) -> dict[str, Path]:
    """What stays outside of the image, as files; the one that may hold passwords is ours alone, and goes."""
    pip_conf = folder / "pip.conf"
    pip_conf.touch(mode=0o600)
    pip_conf.write_text(settings.pip_conf, encoding="utf-8")
    found = {"pip_conf": pip_conf}
    if settings.apt_sources:
        found["apt_sources"] = settings.apt_sources
    if settings.ca_bundle:
        found["ca_bundle"] = settings.ca_bundle
    return found


def _allow(settings: BuildSettings, folder: Path) -> Iterator[str]:
    """What bake may read outside of the checkout, and the network that it may use; it asks a person otherwise."""
    places = [folder, settings.wheels, settings.apt_sources, settings.ca_bundle, *settings.sources.values()]
    for place in places:
        if place is not None:
            yield from ("--allow", f"fs.read={place}")
            if (real := place.resolve()) != place:
                yield from ("--allow", f"fs.read={real}")
    if settings.network == "host":
        yield from ("--allow", "network.host")


def _read_digest(metadata: Path, target: str) -> str:
    try:
        said = json.loads(metadata.read_text(encoding="utf-8"))
        digest = said[target]["containerimage.digest"]
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise BuildFailed(
            f"the build of {target} ended well, and says no digest: {fault!r}. Likely cause: an engine without the "
            "containerd image store. Next step: switch it on (`features: {containerd-snapshotter: true}` in "
            "daemon.json) and build again.",
            infrastructure=False,
        ) from fault
    return str(digest)
