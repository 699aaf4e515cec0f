"""Images as typed values: the reader of `matrix/images.toml`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal, cast

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version
from pydantic import Field, model_validator

from .bridge import Target
from .file import References, RequirementText, Row, Text, VersionRange, VersionText, ids_of, read_rows, refuse_doubles

FILE: Final = "images.toml"
PARTS: Final = ("cuda", "cublas", "cudnn", "nccl")  # what a base has that is no distribution

Platform = Literal["linux/amd64", "linux/arm64"]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]+([.-][a-z0-9]+)*$")]
Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
Lock = Annotated[str, Field(pattern=r"^containers/locks/[a-z0-9-]+\.txt$")]
Pair = Annotated[tuple[str, VersionText], Field(strict=False)]

MACHINES: Final[dict[str, str]] = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}


class Base(Row):
    """An image that others build, and what is in it.

    Attributes:
        repository: registry and path, without a tag.
        python: its minor version.
        glibc: its version, which says what wheels it takes.
        provides: name and version of what it brings; an empty version is not known.
        stands_for: distributions whose files it brings in another way.
        constraints: file with the constraints that pip takes there by itself; empty where there is none.
        driver_built_for, driver_least: GPU driver that it is made for, and the least that runs it; empty without GPU.
    """

    id: Name
    repository: str = Field(pattern=r"^[a-z0-9.-]+(:\d+)?(/[a-z0-9._-]+)+$")
    tag: str = Field(pattern=r"^\w[\w.-]{0,127}$")
    python: str = Field(pattern=r"^3\.\d+$")
    glibc: str = Field(pattern=r"^2\.\d+$")
    provides: list[Pair]
    stands_for: list[Name]
    constraints: str = ""
    driver_built_for: str = Field(default="", pattern=r"^(\d+(\.\d+)*)?$")
    driver_least: str = Field(default="", pattern=r"^(\d+(\.\d+)*)?$")
    source: Text

    @model_validator(mode="after")
    def _require_no_doubles(self) -> Base:
        refuse_doubles([*(name for name, _ in self.provides), *self.stands_for])
        return self

    @property
    def provided(self) -> dict[str, str]:
        """Name of a part or distribution -> version, which is empty where it is not known."""
        return dict(self.provides)

    @property
    def distributions(self) -> dict[str, str]:
        """Distributions that it provides -> version."""
        return {name: version for name, version in self.provided.items() if name not in PARTS}


class Claim(Row):
    """A digest as others say it; an empty platform is the index over all platforms."""

    base: Name
    platform: Literal["linux/amd64", "linux/arm64", ""]
    digest: Digest
    source: Text
    named_by: ClassVar = ("base", "platform")


class Over(Row):
    """A distribution that a base provides, and that the lock holds in another version, which lies over it."""

    name: Name
    why: Text


class Image(Row):
    """An image of ours.

    Attributes:
        target: row of targets.toml.
        base: row of this file.
        cache_arch: name of its folder of JIT caches.
        lock: file with the hash of every package, relative to the folder that `matrix/` lies in.
        groups: dependency groups of pyproject.toml that are in it.
        requirements: what is in it beside those and the package's own dependencies.
        over: what the lock holds although the base provides it.
        removes: distributions of the base that the image must not have, with why.
        links: pages that list wheels of its requirements, for hosts without a folder of wheels.
        te_archs: architectures that what is compiled of Transformer Engine is for, as NVTE_CUDA_ARCHS has them.
        sources: rows of this file that are built from a commit.
        steps: scripts in containers/steps; the recipe says in which order they are run.
        jit: libraries whose kernels are compiled while the image is built.
        user: number of the user that it runs as.
    """

    target: Name
    base: Name
    platform: Platform
    cache_arch: str = Field(pattern=r"^(sm_\d+a|cpu)$")
    lock: Lock
    groups: list[Name]
    requirements: list[RequirementText]
    over: list[Over] = Field(default_factory=list)
    removes: list[Over] = Field(default_factory=list)
    links: list[Annotated[str, Field(pattern=r"^https://\S+$")]] = Field(default_factory=list)
    te_archs: str = Field(default="", pattern=r"^(\d+[af]?(;\d+[af]?)*)?$")
    sources: list[Name]
    steps: list[Annotated[str, Field(pattern=r"^[a-z0-9_]+$")]] = Field(min_length=1)
    jit: list[Literal["fa4", "triton"]]
    user: int = Field(ge=1)
    named_by: ClassVar = ("target",)

    @model_validator(mode="after")
    def _require_no_doubles(self) -> Image:
        refuse_doubles(self.steps)
        refuse_doubles(row.name for row in (*self.over, *self.removes))
        return self

    @property
    def te(self) -> str:
        """Release of Transformer Engine that is asked for; empty where none is."""
        return self.pinned.get("transformer-engine", "")

    @property
    def pinned(self) -> dict[str, str]:
        """Distributions that are asked for in one version -> that version."""
        found = {}
        for text in self.requirements:
            requirement = Requirement(text)
            exact = [part.version for part in requirement.specifier if part.operator == "=="]
            if exact:
                found[canonicalize_name(requirement.name)] = exact[0]
        return {str(name): version for name, version in found.items()}


class Sessions(Row):
    """The constraints that nox sessions outside of images install under.

    Attributes:
        lock: the file.
        python: the least minor version that they are for.
        groups: dependency groups of pyproject.toml.
        without: distributions that it leaves alone.
    """

    lock: Lock
    python: str = Field(pattern=r"^3\.\d+$")
    groups: list[Name]
    without: list[Name]


class Releases(Row):
    """The wheels of all releases of a distribution that stacks.toml has, and the file with their hashes."""

    lock: Lock
    distribution: Name


class Compiled(Row):
    """What a lock has as its source release.

    Attributes:
        requires: what its metadata requires, which would take a build to ask.
        variables: of its build.
    """

    name: Name
    version: Text
    requires: list[RequirementText]
    source: Text
    variables: dict[str, str] = Field(default_factory=dict)
    named_by: ClassVar = ("name",)


class Source(Row):
    """What is built from a commit, with the variables of its build.

    Attributes:
        verified: day on which the commit was fetched and built ("2026-11-22"); empty where it has not been yet.
    """

    id: Name
    repository: str = Field(pattern=r"^https://[\w.-]+(/[\w.-]+)+$")
    commit: str = Field(pattern=r"^[0-9a-f]{40}$")
    subdirectory: str = ""
    verified: str = Field(pattern=r"^(\d{4}-\d\d-\d\d)?$")
    why: Text
    source: Text
    variables: dict[str, str] = Field(default_factory=dict)


class Range(Row):
    """What a component must be for releases of Transformer Engine, where matrix/needs.toml does not say it.

    Attributes:
        te: range of releases.
        component: a part of CUDA, "driver", "python", or a distribution.
        needs: range that its version must lie in; "<0" where it must not be there.
        with_: it holds only where this is there too ("cuda>=13"); empty for always.
        targets: rows of targets.toml that it is of; all without.
        outside: what a version outside of the range means: it does not work, or it works with less.
    """

    id: Name
    te: VersionRange
    component: Name
    needs: Annotated[VersionRange, Field(min_length=1)]
    with_: RequirementText = Field(default="", alias="with")
    targets: list[Name] = Field(default_factory=list)
    outside: Literal["refused", "warned"] = "refused"
    says: Text
    next: Text
    source: Text

    def holds_for(self, te: Version) -> bool:
        """Whether a release has this need; builds of a release count as the release."""
        return SpecifierSet(self.te).contains(te.public, prereleases=True)

    def allows(self, version: Version) -> bool:
        """Whether a version is in the range."""
        return SpecifierSet(self.needs).contains(version.public, prereleases=True)


class Images(Row):
    """The whole file; `everywhere` are requirements of every image."""

    everywhere: list[RequirementText]
    base: list[Base] = Field(min_length=1)
    claim: list[Claim] = Field(default_factory=list)
    image: list[Image] = Field(min_length=1)
    sessions: Sessions
    releases: Releases
    compiled: list[Compiled] = Field(default_factory=list)
    source: list[Source] = Field(default_factory=list)
    range: list[Range] = Field(default_factory=list)

    @model_validator(mode="after")
    def _require_own_locks(self) -> Images:
        refuse_doubles([*(row.lock for row in self.image), self.sessions.lock, self.releases.lock])
        return self

    def find_base(self, name: str) -> Base:
        """The row of a base; there is one for every image of a file that was read."""
        return next(base for base in self.base if base.id == name)

    def find_source(self, name: str) -> Source:
        """The row of a source; there is one for every image of a file that was read."""
        return next(source for source in self.source if source.id == name)


def read_images(targets: dict[str, str], folder: Path | None = None, rows: Iterable[Target] = ()) -> Images:
    """The images in `folder`.

    Args:
        targets: id of every row of targets.toml -> its machine ("x86_64", "aarch64", or "" for any).
        folder: of the matrix; the project's own without it.
        rows: those rows, where what is built for a target is to be held against what the target can do.

    Raises:
        MatrixInvalid: with every fault of the file.
    """
    known = {row.id: row for row in rows}

    def list_references(images: Images) -> References:
        return {
            (FILE, "image", "base"): ids_of(images.base),
            (FILE, "image", "target"): targets,
            (FILE, "image", "sources"): ids_of(images.source),
            (FILE, "claim", "base"): ids_of(images.base),
            (FILE, "range", "targets"): targets,
        }

    def find(images: Images) -> Iterator[str]:
        for image in images.image:
            found = [*_find_in_image(image, images, targets)]
            if image.target in known:
                found += _find_of_another_target(image, known[image.target])
            yield from (f"{FILE}: image {image.target}: {fault}" for fault in found)

    (images,) = read_rows(folder, {FILE: Images}, list_references, find)
    return cast("Images", images)


def _find_in_image(image: Image, images: Images, targets: dict[str, str]) -> Iterator[str]:
    """Another machine; a source without its step, or the other way; what the base does not provide."""
    if targets.get(image.target, "") not in ("", MACHINES[image.platform]):
        yield f"platform {image.platform} is not the {targets[image.target]} of targets.toml"
    for source in images.source:
        if (source.id in image.sources) is not (source.id.replace("-", "_") in image.steps):
            yield f"{source.id!r} is in one of `sources` and `steps` alone"
    for base in (base for base in images.base if base.id == image.base):
        for row in (*image.over, *image.removes):
            if row.name not in base.distributions:
                yield f"over or removes names {row.name!r}, which {base.id} does not provide"


def _find_of_another_target(image: Image, target: Target) -> Iterator[str]:
    wanted = f"{target.arch}a" if target.arch else "cpu"
    if image.cache_arch != wanted:
        yield f"cache_arch {image.cache_arch!r} is not the {wanted!r} of its target"
    family = target.arch.removeprefix("sm_")[:-1]  # "sm_121" and what is compiled for 120 are of one family
    archs = [arch.rstrip("af")[:-1] for arch in image.te_archs.split(";") if arch]
    if archs and family not in archs:
        yield f"te_archs {image.te_archs!r} has nothing for the {target.arch or 'CPU'} of its target"
    has = {"deep-gemm": target.deep_gemm}
    has |= {"flash-attention-3": "fa3" in target.attention, "fa4": "fa4" in target.attention}
    for name in (*image.sources, *image.jit):
        if not has.get(name, True):
            yield f"names {name!r}, which targets.toml says that {target.id} does not have"
