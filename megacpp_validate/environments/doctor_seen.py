"""What the judgement of the doctor stands on: what was seen, and the rows that it is held against."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from ..catalog.bridge import Stack, Target
from ..catalog.needs import CudaLibrary, Needs, VendorPackage
from ..evidence.doctor_look import Distribution, PackageLook, PathLook

TE = "transformer_engine.pytorch"
_CORES = (12, 13)  # major CUDA releases that a core library is on the index for


@dataclass(frozen=True)
class Rows:
    """The matrix as far as it says what an interpreter should have.

    Attributes:
        modules: ids of the bridge modules, in dependency order.
        stack: row that is wanted; None where only the target and the needs are.
        pinned: the release in production.
    """

    modules: tuple[str, ...]
    target: Target
    stack: Stack | None
    pinned: Stack
    needs: Needs

    def order(self, names: Iterable[str]) -> tuple[str, ...]:
        """Bridge modules in dependency order."""
        wanted = set(names)
        return tuple(name for name in self.modules if name in wanted)

    def library(self, name: str) -> CudaLibrary:
        """The row of a CUDA library."""
        return next(row for row in self.needs.library if row.id == name)

    def wants(self, row: VendorPackage) -> bool:
        """Whether the target has a use for a package."""
        asked = bool(row.attention) and row.attention in self.target.attention
        if not self.target.arch:
            return row.id == "torch"
        return row.required or asked or (row.deep_gemm and self.target.deep_gemm)


@dataclass(frozen=True)
class Seen:
    """Every look at one interpreter."""

    path: PathLook
    packages: tuple[PackageLook, ...]

    def package(self, name: str) -> PackageLook | None:
        """The look at a package; None where there was none, or it is not installed."""
        return next((look for look in self.packages if look.package == name and look.installed), None)

    @cached_property
    def te(self) -> Version | None:
        """The release of Transformer Engine as loaded, else as installed."""
        look = self.package(TE)
        return read_version(look.version if look else "") or self.installed_version(["transformer-engine"])

    @cached_property
    def core_cuda(self) -> int | None:
        """The major CUDA release that the core library is for: its wheel says it, else that of torch; None unknown."""
        halves = [major for major in _CORES if self.installed([f"transformer-engine-cu{major}"])]
        own = self.path.torch_cuda.partition(".")[0]
        return halves[0] if len(halves) == 1 else int(own) if own.isdecimal() else None

    def installed(self, names: Sequence[str]) -> Distribution | None:
        """The first distribution on the path of some names."""
        wanted = [canonicalize_name(name) for name in names]
        return next((one for one in self.path.distributions if canonicalize_name(one.name) in wanted), None)

    def installed_version(self, names: Sequence[str]) -> Version | None:
        """Its version."""
        found = self.installed(names)
        return read_version(found.version) if found else None

    def answered(self, library: str) -> tuple[str, ...]:
        """What a CUDA library says of itself where Transformer Engine has been imported, else torch; oldest first."""
        for name in (TE, "torch"):
            look = self.package(name)
            told = next((one for one in look.libraries if one.name == library), None) if look else None
            if told is not None and told.version:
                versions = [version for version in map(read_version, told.version.split(", ")) if version]
                return tuple(map(str, sorted(versions)))
        return ()


def read_version(text: str) -> Version | None:
    """A version, where it is one."""
    try:
        return Version(text)
    except InvalidVersion:
        return None


def join(names: Iterable[str]) -> str:
    """Some names as people list them."""
    return ", ".join(names)
