"""What vendor packages and releases need, as typed values: the reader of `matrix/needs.toml`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, cast

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version
from pydantic import Field

from .file import Names, RequirementText, Row, Text, VersionRange, ids_of, read_rows

_FILE = "needs.toml"


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


class Need(Row):
    """What releases of Transformer Engine need.

    Attributes:
        te: range of releases.
        kind: "library": a CUDA library as loaded; "distribution": what is installed; "one-runtime": that `dlopen`
            finds one CUDA runtime, "one-runtime-warned" where more are only warned of; "tolerated-symbol": an
            undefined symbol that is never called.
        of: library or distribution.
        version: range that it must lie in; empty for any.
        symbol: of "tolerated-symbol".
        with_: the need holds only where this distribution is installed, in a range where one is given.
        cuda: major CUDA releases (range) whose core library has the need; empty for any.
        says: what needs it.
        next: what to do.
        source: where it is known from.
    """

    id: Text
    te: VersionRange = Field(min_length=1)
    kind: Literal["library", "distribution", "one-runtime", "one-runtime-warned", "tolerated-symbol"]
    of: Text
    version: VersionRange = ""
    symbol: str = ""
    with_: RequirementText = Field(default="", alias="with")
    cuda: VersionRange = ""
    breaks: Annotated[list[str], Names("module")]
    says: Text
    next: Text
    source: Text

    def holds_for(self, te: Version) -> bool:
        """Whether a release has this need; builds of a release ("2.14.0+f031cf8") count as the release."""
        return SpecifierSet(self.te).contains(te.public, prereleases=True)

    def holds_for_core(self, cuda: int | None) -> bool:
        """Whether a core library for a major CUDA release has it; None where nobody has told which it is for."""
        return not self.cuda or cuda is None or SpecifierSet(self.cuda).contains(str(cuda))

    @property
    def beside(self) -> str:
        """Name of the distribution that it holds beside; empty for none."""
        return canonicalize_name(Requirement(self.with_).name) if self.with_ else ""

    def holds_beside(self, version: Version | None) -> bool:
        """Whether it holds beside that distribution in a version; None where the version is not known."""
        asked = Requirement(self.with_).specifier
        return version is None or asked.contains(version.public, prereleases=True)

    def allows(self, version: Version) -> bool:
        """Whether a version is in the range."""
        return SpecifierSet(self.version).contains(version.public, prereleases=True)


class Build(Row):
    """Which torch (range) a build of a distribution (range) is for, where its metadata does not say so."""

    of: Text
    version: VersionRange = Field(min_length=1)
    torch: VersionRange = Field(min_length=1)
    source: Text

    def is_of(self, version: Version) -> bool:
        """Whether it says something of a version of the distribution."""
        return SpecifierSet(self.version).contains(version.public, prereleases=True)

    def is_for(self, torch: Version) -> bool:
        """Whether it is for a torch."""
        return SpecifierSet(self.torch).contains(torch.public, prereleases=True)


class Needs(Row):
    """The whole file."""

    package: list[VendorPackage] = Field(min_length=1)
    library: list[CudaLibrary] = Field(min_length=1)
    need: list[Need] = Field(min_length=1)
    build: list[Build]


def read_needs(modules: list[str], folder: Path | None = None) -> Needs:
    """The needs in `folder`.

    Args:
        modules: ids of the bridge modules, which the rows name.
        folder: of the matrix; the project's own without it.

    Raises:
        MatrixInvalid: with every fault of the file.
    """

    def find(needs: Needs) -> list[str]:
        known = ids_of(needs.library)
        wrong = [need for need in needs.need if need.kind != "distribution" and need.of not in known]
        return [f"{_FILE}: need {need.id}: of names {need.of!r}, which does not exist" for need in wrong]

    (needs,) = read_rows(folder, {_FILE: Needs}, {"module": modules}, find)
    return cast("Needs", needs)
