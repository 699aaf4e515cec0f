"""Images, and what vendor packages and releases need, as typed values: the reader of images.toml and needs.toml."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version
from pydantic import Field

from .bridge import Catalog
from .file import Names, RequirementText, Row, Text, VersionRange, VersionText

FILE: Final = "images.toml"
NEEDS: Final = "needs.toml"
PARTS: Final = ("cuda", "cublas", "cudnn", "nccl")  # what a base has that is no distribution

Platform = Literal["linux/amd64", "linux/arm64"]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]+([.-][a-z0-9]+)*$")]
BaseName = Annotated[str, Names("base")]
Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
Commit = Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
Lock = Annotated[str, Field(pattern=r"^containers/locks/[a-z0-9-]+\.txt$")]
Pair = Annotated[tuple[str, VersionText], Field(strict=False)]

MACHINES: Final[dict[str, str]] = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}


def is_in(version: Version, versions: str) -> bool:
    """Whether a version lies in a range; a build of a release counts as the release."""
    return SpecifierSet(versions).contains(version.public, prereleases=True)


class Base(Row):
    """An image that others build, and what is in it.

    Attributes:
        repository: registry and path, without a tag.
        digest: of the index over all platforms, from which every build starts.
        verified: day on which a registry confirmed that the tag has this digest; empty where none has.
        python: its minor version.
        glibc: its version, which says what wheels it takes.
        provides: name and version of what it brings; an empty version is not known.
        stands_for: distributions whose files it brings in another way.
        driver_least: the least GPU driver that runs it; empty without GPU.
    """

    id: Name
    repository: str = Field(pattern=r"^[a-z0-9.-]+(:\d+)?(/[a-z0-9._-]+)+$")
    tag: str = Field(pattern=r"^\w[\w.-]{0,127}$")
    digest: Digest
    verified: str = Field(pattern=r"^(\d{4}-\d\d-\d\d)?$")
    python: str = Field(pattern=r"^3\.\d+$")
    glibc: str = Field(pattern=r"^2\.\d+$")
    provides: list[Pair]
    stands_for: list[Name]
    driver_least: str = Field(default="", pattern=r"^(\d+(\.\d+)*)?$")
    source: Text

    @property
    def provided(self) -> dict[str, str]:
        """Name of a part or distribution -> version, which is empty where it is not known."""
        return dict(self.provides)

    @property
    def distributions(self) -> dict[str, str]:
        """Distributions that it provides -> version."""
        return {name: version for name, version in self.provided.items() if name not in PARTS}


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

    target: Annotated[str, Names("target")]
    base: BaseName
    platform: Platform
    cache_arch: str = Field(pattern=r"^(sm_\d+a|cpu)$")
    lock: Lock
    groups: list[Name]
    requirements: list[RequirementText]
    over: list[Over] = Field(default_factory=list)
    removes: list[Over] = Field(default_factory=list)
    links: list[Annotated[str, Field(pattern=r"^https://\S+$")]] = Field(default_factory=list)
    te_archs: str = Field(default="", pattern=r"^(\d+[af]?(;\d+[af]?)*)?$")
    sources: Annotated[list[str], Names("source")]
    steps: list[Annotated[str, Field(pattern=r"^[a-z0-9_]+$")]] = Field(min_length=1)
    jit: list[Literal["fa4", "triton"]]
    user: int = Field(ge=1)
    named_by: ClassVar = ("target",)

    @property
    def te(self) -> str:
        """Release of Transformer Engine whose torch extension it compiles; empty without one."""
        return self.pinned.get("transformer-engine-torch", "")

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

    def with_release(self, te: str) -> Image:
        """The same image with another release of Transformer Engine, and a lock for that release.

        An image without a GPU gets the release's Python package, which cannot be loaded there.
        """
        if te == self.te:
            return self
        requirements = [*self.requirements, f"transformer-engine=={te}"]
        if self.te:
            requirements = [text.replace(f"=={self.te}", f"=={te}") for text in self.requirements]
        lock = f"{self.lock.removesuffix('.txt')}-te{te}.txt"
        return self.model_copy(update={"requirements": requirements, "lock": lock})


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
    named_by: ClassVar = ("name", "version")


class Accepts(Row):
    """What the build of a source accepts at some commits, as the files of that source say.

    Attributes:
        commits: at which the files were read.
        component: what the build compares.
        needs: range that its version must lie in.
        targets: rows of targets.toml that it is of; all without.
        says: what happens outside of the range.
        source: file and lines of the source.
    """

    commits: list[Commit] = Field(min_length=1)
    component: Literal["cuda", "torch", "python"]
    needs: Annotated[VersionRange, Field(min_length=1)]
    targets: Annotated[list[str], Names("target")] = Field(default_factory=list)
    says: Text
    source: Text


class Source(Row):
    """What is built from a commit, with the variables of its build.

    Attributes:
        verified: day on which the commit was fetched and built ("2026-11-22"); empty where it has not been yet.
        accepts: what the build accepts, at this commit and at others.
    """

    id: Name
    repository: str = Field(pattern=r"^https://[\w.-]+(/[\w.-]+)+$")
    commit: Commit
    subdirectory: str = ""
    verified: str = Field(pattern=r"^(\d{4}-\d\d-\d\d)?$")
    why: Text
    source: Text
    variables: dict[str, str] = Field(default_factory=dict)
    accepts: list[Accepts] = Field(default_factory=list)

    def list_accepted(self, target: str) -> dict[str, Accepts]:
        """Component -> what the build accepts at this commit; without those of which no row was made."""
        held = (row for row in self.accepts if self.commit in row.commits and target in (row.targets or [target]))
        return {row.component: row for row in held}


class Rule(Row):
    """What releases of Transformer Engine need.

    Attributes:
        te: range of releases.
        with_: it holds only where this is there too ("cuda>=13"); empty for always.
        says: what needs it.
        next: what to do.
        source: where it is known from.
    """

    id: Text
    te: VersionRange
    with_: RequirementText = Field(default="", alias="with")
    says: Text
    next: Text
    source: Text

    def holds_for(self, te: Version) -> bool:
        """Whether a release has this need; builds of a release ("2.14.0+f031cf8") count as the release."""
        return is_in(te, self.te)

    @property
    def beside(self) -> str:
        """Name of the distribution that it holds beside; empty for none."""
        return canonicalize_name(Requirement(self.with_).name) if self.with_ else ""

    def holds_beside(self, version: Version | None) -> bool:
        """Whether it holds beside that distribution in a version; None where the version is not known."""
        return version is None or is_in(version, str(Requirement(self.with_).specifier))


class Range(Rule):
    """What a component must be for releases of Transformer Engine, where matrix/needs.toml does not say it.

    Attributes:
        component: a part of CUDA, "driver", "python", or a distribution.
        needs: range that its version must lie in; "<0" where it must not be there.
        targets: rows of targets.toml that it is of; all without.
        outside: what a version outside of the range means: it does not work, or it works with less.
    """

    component: Name
    needs: Annotated[VersionRange, Field(min_length=1)]
    targets: Annotated[list[str], Names("target")] = Field(default_factory=list)
    outside: Literal["refused", "warned"] = "refused"

    def allows(self, version: Version) -> bool:
        """Whether a version is in the range."""
        return is_in(version, self.needs)


class Images(Row):
    """The whole file; `everywhere` are requirements of every image."""

    everywhere: list[RequirementText]
    base: list[Base] = Field(min_length=1)
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


def read_images(catalog: Catalog) -> Images:
    """The images of a matrix.

    Raises:
        MatrixInvalid: with every fault of the file.
    """
    return catalog.read(FILE, Images)


# --- What vendor packages and releases need. ---


class VendorPackage(Row):
    """A package that the bridge stands on.

    Attributes:
        id: what is imported.
        title: what people call it.
        distributions: that may have brought it.
        breaks: bridge modules that lose it.
        required: whether nothing on a GPU goes without it.
        attention: the word of a target's `attention` that asks for it.
        deep_gemm: whether a target's `deep_gemm` asks for it.
    """

    id: Text
    title: Text
    distributions: list[str] = Field(min_length=1)
    breaks: Annotated[list[str], Names("module")]
    required: bool = False
    attention: Literal["fa3", "fa4", ""] = ""
    deep_gemm: bool = False


class CudaLibrary(Row):
    """A library of CUDA: what people call it, which wheels bring it, and what fails where it is wrong."""

    id: str = Field(pattern=r"^lib\w+$")
    title: Text
    distributions: list[str] = Field(min_length=1)
    breaks: Annotated[list[str], Names("module")]


class Need(Rule):
    """What releases of Transformer Engine need of a library or distribution.

    Attributes:
        kind: "library": a CUDA library as loaded; "distribution": what is installed; "variable": an environment
            variable that must be 1; "one-runtime": that `dlopen`
            finds one CUDA runtime, "one-runtime-warned" where more are only warned of; "tolerated-symbol": an
            undefined symbol that is never called.
        of: library or distribution.
        version: range that it must lie in; empty for any.
        symbol: of "tolerated-symbol".
        cuda: major CUDA releases (range) whose core library has the need; empty for any.
    """

    kind: Literal["library", "distribution", "variable", "one-runtime", "one-runtime-warned", "tolerated-symbol"]
    of: Text
    version: VersionRange = ""
    symbol: str = ""
    cuda: VersionRange = ""
    breaks: Annotated[list[str], Names("module")]

    def holds_for_core(self, cuda: int | None) -> bool:
        """Whether a core library for a major CUDA release has it; None where the release is unknown."""
        return not self.cuda or cuda is None or SpecifierSet(self.cuda).contains(str(cuda))

    def allows(self, version: Version) -> bool:
        """Whether a version is in the range."""
        return is_in(version, self.version)


class Build(Row):
    """Which torch (range) a build of a distribution (range) is for, where its metadata does not say so."""

    of: Text
    version: VersionRange = Field(min_length=1)
    torch: VersionRange = Field(min_length=1)
    source: Text


class DifferenceText(Row):
    """What the doctor says of one kind of difference.

    Attributes:
        weight: how bad it is, unless a rule of the doctor gives another.
        aspect: what it is about.
        seen, wanted, how, next: sentences, with the names that the rule fills in.
    """

    id: Text
    weight: Literal["breaks", "unknown", "risk", "note"]
    aspect: Text
    seen: Text
    wanted: Text
    how: Text
    next: Text


class Needs(Row):
    """The whole file."""

    package: list[VendorPackage] = Field(min_length=1)
    library: list[CudaLibrary] = Field(min_length=1)
    need: list[Need] = Field(min_length=1)
    build: list[Build]
    difference: list[DifferenceText] = Field(min_length=1)


def read_needs(catalog: Catalog) -> Needs:
    """The needs of a matrix.

    Raises:
        MatrixInvalid: with every fault of the file.
    """
    return catalog.read(NEEDS, Needs)
