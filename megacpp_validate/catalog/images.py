"""Images as typed values: the reader of `matrix/images.toml`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Final, Literal

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from pydantic import Field

from .bridge import Target
from .file import Row, matrix_folder, read_matrix_file

FILE: Final = "images.toml"
PARTS: Final = ("cuda", "cublas", "cudnn", "nccl")  # what a base has that is no distribution

Platform = Literal["linux/amd64", "linux/arm64"]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]+([.-][a-z0-9]+)*$")]
Words = Annotated[str, Field(min_length=1)]
Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
Pair = Annotated[list[str], Field(min_length=2, max_length=2)]

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
    source: Words

    @property
    def provided(self) -> dict[str, str]:
        """Name of a part or distribution -> version, which is empty where it is not known."""
        return {name: version for name, version in self.provides}  # noqa: C416 - a pair is a list in TOML

    @property
    def distributions(self) -> dict[str, str]:
        """Distributions that it provides -> version."""
        return {name: version for name, version in self.provided.items() if name not in PARTS}


class Claim(Row):
    """A digest as others say it; an empty platform is the index over all platforms."""

    base: Name
    platform: Literal["linux/amd64", "linux/arm64", ""]
    digest: Digest
    source: Words


class Over(Row):
    """A distribution that a base provides, and that the lock holds in another version, which lies over it."""

    name: Name
    why: Words


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
    lock: str = Field(pattern=r"^containers/locks/[a-z0-9-]+\.txt$")
    groups: list[Name]
    requirements: list[Words]
    over: list[Over] = Field(default_factory=list)
    removes: list[Over] = Field(default_factory=list)
    links: list[Annotated[str, Field(pattern=r"^https://\S+$")]] = Field(default_factory=list)
    te_archs: str = Field(default="", pattern=r"^(\d+[af]?(;\d+[af]?)*)?$")
    sources: list[Name]
    steps: list[Annotated[str, Field(pattern=r"^[a-z0-9_]+$")]] = Field(min_length=1)
    jit: list[Literal["fa4", "triton"]]
    user: int = Field(ge=1)

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

    lock: str = Field(pattern=r"^containers/locks/[a-z0-9-]+\.txt$")
    python: str = Field(pattern=r"^3\.\d+$")
    groups: list[Name]
    without: list[Name]


class Releases(Row):
    """The wheels of all releases of a distribution that stacks.toml has, and the file with their hashes."""

    lock: str = Field(pattern=r"^containers/locks/[a-z0-9-]+\.txt$")
    distribution: Name


class Compiled(Row):
    """What a lock has as its source release.

    Attributes:
        requires: what its metadata requires, which would take a build to ask.
        variables: of its build.
    """

    name: Name
    version: Words
    requires: list[Words]
    source: Words
    variables: dict[str, str] = Field(default_factory=dict)


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
    why: Words
    source: Words
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
    te: str
    component: Name
    needs: Words
    with_: str = Field(default="", alias="with")
    targets: list[Name] = Field(default_factory=list)
    outside: Literal["refused", "warned"] = "refused"
    says: Words
    next: Words
    source: Words

    def holds_for(self, te: Version) -> bool:
        """Whether a release has this need; builds of a release count as the release."""
        return SpecifierSet(self.te).contains(te.public, prereleases=True)

    def allows(self, version: Version) -> bool:
        """Whether a version is in the range."""
        return SpecifierSet(self.needs).contains(version.public, prereleases=True)


class Images(Row):
    """The whole file; `everywhere` are requirements of every image."""

    everywhere: list[Words]
    base: list[Base] = Field(min_length=1)
    claim: list[Claim] = Field(default_factory=list)
    image: list[Image] = Field(min_length=1)
    sessions: Sessions
    releases: Releases
    compiled: list[Compiled] = Field(default_factory=list)
    source: list[Source] = Field(default_factory=list)
    range: list[Range] = Field(default_factory=list)

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

    def look(images: Images) -> Iterator[Iterator[str]]:
        for find in (
            _find_doubles, _find_doubly_provided, _find_false_versions, _find_false_requirements, _find_false_ranges
        ):  # fmt: skip
            yield find(images)
        yield _find_dangling(images, targets)
        for image in images.image:
            yield _find_of_image(images, image, targets, known)

    return read_matrix_file((folder or matrix_folder()) / FILE, Images, look)


def _find_strangers(image: Image, target: Target) -> Iterator[str]:
    """What is built for a target, and is of another one."""
    where = f"{FILE}: image {image.target}"
    wanted = f"{target.arch}a" if target.arch else "cpu"
    if image.cache_arch != wanted:
        yield f"{where}: cache_arch {image.cache_arch!r} is not the {wanted!r} of its target"
    family = target.arch.removeprefix("sm_")[:-1]  # "sm_121" and what is compiled for 120 are of one family
    archs = [arch.rstrip("af") for arch in image.te_archs.split(";") if arch]
    if archs and family not in [arch[:-1] for arch in archs]:
        yield f"{where}: te_archs {image.te_archs!r} has nothing for the {target.arch or 'CPU'} of its target"
    unable = {"deep-gemm": not target.deep_gemm, "flash-attention-3": "fa3" not in target.attention}
    yield from (
        f"{where}: sources names {name!r}, which targets.toml says that {target.id} does not have"
        for name in image.sources
        if unable.get(name)
    )
    if "fa4" in image.jit and "fa4" not in target.attention:
        yield f"{where}: jit names 'fa4', which targets.toml says that {target.id} does not have"


def _find_dangling(images: Images, targets: dict[str, str]) -> Iterator[str]:
    bases = {base.id for base in images.base}
    for claim in images.claim:
        if claim.base not in bases:
            yield f"{FILE}: claim of {claim.digest[:15]}: base names {claim.base!r}, which there is not"
    for row in images.range:
        strange = [name for name in row.targets if name not in targets]
        yield from (f"{FILE}: range {row.id}: targets names {name!r}, which targets.toml has not" for name in strange)


def _find_of_image(images: Images, image: Image, targets: dict[str, str], rows: dict[str, Target]) -> Iterator[str]:
    where = f"{FILE}: image {image.target}"
    if image.target not in targets:
        yield f"{where}: target names {image.target!r}, which targets.toml has not"
    elif targets[image.target] not in ("", MACHINES[image.platform]):
        yield f"{where}: platform {image.platform} is not the {targets[image.target]} of targets.toml"
    sources = {source.id for source in images.source}
    unknown = [name for name in image.sources if name not in sources]
    yield from (f"{where}: sources names {name!r}, which there is not" for name in unknown)
    if not unknown:
        yield from _find_steps(image, sources)
    if image.base not in {base.id for base in images.base}:
        yield f"{where}: base names {image.base!r}, which there is not"
    if image.target in rows:
        yield from _find_strangers(image, rows[image.target])
    yield from _find_bare(images, image)


def _find_bare(images: Images, image: Image) -> Iterator[str]:
    """What goes over the base, or is taken out of it, and is not there or is both."""
    where = f"{FILE}: image {image.target}"
    both = {row.name for row in image.over} & {row.name for row in image.removes}
    yield from (f"{where}: {name!r} is named under `over` and under `removes`" for name in sorted(both))
    provided = next((base.distributions for base in images.base if base.id == image.base), None)
    for kind, named in (("over", image.over), ("removes", image.removes)):
        yield from (
            f"{where}: {kind} names {row.name!r}, which {image.base} does not provide"
            for row in named
            if provided is not None and row.name not in provided
        )


def _find_steps(image: Image, sources: set[str]) -> Iterator[str]:
    """Steps that are there twice, and what is built from a commit without its step, or the other way round."""
    where = f"{FILE}: image {image.target}"
    counts = Counter(image.steps)
    yield from (f"{where}: the step {name!r} is there {count} times" for name, count in counts.items() if count > 1)
    for name in sorted(sources):
        step = name.replace("-", "_")
        if (name in image.sources) != (step in image.steps):
            there, absent = ("source", "step") if name in image.sources else ("step", "source")
            yield f"{where}: {name!r} has a {there} and no {absent}"


def _find_doubles(images: Images) -> Iterator[str]:
    named = (
        ("base", [row.id for row in images.base]),
        ("image", [row.target for row in images.image]),
        ("lock", [row.lock for row in images.image] + [images.sessions.lock, images.releases.lock]),
        ("source", [row.id for row in images.source]),
        ("compiled", [row.name for row in images.compiled]),
        ("range", [row.id for row in images.range]),
        ("claim", [f"{row.base} {row.platform or 'index'}" for row in images.claim]),
    )
    for kind, names in named:
        counts = Counter(names)
        yield from (f"{FILE}: {kind} {name!r} is there {count} times" for name, count in counts.items() if count > 1)


def _find_doubly_provided(images: Images) -> Iterator[str]:
    for base in images.base:
        counts = Counter([name for name, _ in base.provides] + base.stands_for)
        yield from (f"{FILE}: base {base.id}: {name!r} is provided twice" for name, n in counts.items() if n > 1)


def _find_false_versions(images: Images) -> Iterator[str]:
    for base in images.base:
        for name, version in base.provides:
            if version and not _is(Version, version):
                yield f"{FILE}: base {base.id}: provides {name} in {version!r}, which is no version"


def _find_false_requirements(images: Images) -> Iterator[str]:
    asked = [("everywhere", images.everywhere)]
    asked += [(f"image {row.target}", row.requirements) for row in images.image]
    asked += [(f"compiled {row.name}", row.requires) for row in images.compiled]
    for where, texts in asked:
        yield from (f"{FILE}: {where}: {text!r} is no requirement" for text in texts if not _is(Requirement, text))


def _find_false_ranges(images: Images) -> Iterator[str]:
    for row in images.range:
        if row.with_ and not _is(Requirement, row.with_):
            yield f"{FILE}: range {row.id}: with {row.with_!r} is no requirement"
        for text in (row.te, row.needs):
            if not _is(SpecifierSet, text):
                yield f"{FILE}: range {row.id}: {text!r} is no range of versions"


def _is(kind: type[Version] | type[Requirement] | type[SpecifierSet], text: str) -> bool:
    try:
        kind(text)
    except (InvalidVersion, InvalidRequirement, InvalidSpecifier):
        return False
    return True
