"""What the rules of the doctor read: every look at one interpreter, and the rows of the matrix to compare it with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from ..catalog.bridge import Stack, Target
from ..catalog.needs import CudaLibrary, Needs, VendorPackage
from ..evidence.doctor_look import Distribution, PackageLook, PathLook
from .doctor_result import Aspect, Difference, Weight

TE: Final = "transformer_engine.pytorch"
NOT_STARTED: Final = "not started"
_CORES: Final = (12, 13)  # major CUDA releases that a core library is on the index for


@dataclass(frozen=True)
class Host:
    """Every look at one interpreter, and the rows of the matrix that it is held against.

    Attributes:
        modules: ids of the bridge modules, in dependency order.
        stack: the wanted row; None where only the target and the needs are wanted.
        pinned: the release in production.
    """

    path: PathLook
    packages: tuple[PackageLook, ...]
    modules: tuple[str, ...]
    target: Target
    stack: Stack | None
    pinned: Stack
    needs: Needs

    def order(self, names: Iterable[str]) -> tuple[str, ...]:
        """Bridge modules in dependency order."""
        wanted = set(names)
        return tuple(name for name in self.modules if name in wanted)

    def wants(self, row: VendorPackage) -> bool:
        """Whether the target has a use for a package."""
        if not self.target.arch:
            return row.id == "torch"
        return row.required or row.attention in self.target.attention or (row.deep_gemm and self.target.deep_gemm)

    def library(self, name: str) -> CudaLibrary:
        """The row of a CUDA library."""
        return next(row for row in self.needs.library if row.id == name)

    def look(self, name: str) -> PackageLook | None:
        """The look at a package; None where it is not installed."""
        return next((look for look in self.packages if look.package == name and look.installed), None)

    def installed(self, names: Iterable[str]) -> Distribution | None:
        """The first distribution on the path with one of some names."""
        wanted = {canonicalize_name(name) for name in names}
        return next((one for one in self.path.distributions if canonicalize_name(one.name) in wanted), None)

    @cached_property
    def te(self) -> Version | None:
        """The release of Transformer Engine as loaded, else as installed."""
        look, found = self.look(TE), self.installed(["transformer-engine"])
        return read_version(look.version if look else "") or read_version(found.version if found else "")

    @cached_property
    def core_cuda(self) -> int | None:
        """The major CUDA release of the core library, by its wheel, else by torch; None where it is unknown."""
        wheels = [major for major in _CORES if self.installed([f"transformer-engine-cu{major}"])]
        return wheels[0] if len(wheels) == 1 else int(self.cuda) if self.cuda.isdecimal() else None

    @property
    def cuda(self) -> str:
        """The major CUDA release that torch is built for; empty for a CPU build."""
        return self.path.torch_cuda.partition(".")[0]

    def answered(self, library: str) -> tuple[str, ...]:
        """The versions that a CUDA library reports once Transformer Engine, else torch, is imported; oldest first."""
        for look in filter(None, (self.look(TE), self.look("torch"))):
            for one in look.libraries:
                if one.name == library and one.version:
                    return tuple(map(str, sorted(filter(None, map(read_version, one.version.split(", "))))))
        return ()


@dataclass(frozen=True)
class Part:
    """One vendor package of a host: its row and the look at it."""

    row: VendorPackage
    look: PackageLook
    host: Host

    @property
    def failed(self) -> bool:
        """Whether its import does not come to a good end."""
        return self.look.failure is not None or bool(self.look.ended)

    def report(
        self, weight: Weight, aspect: Aspect, seen: str, wanted: str, how: str, next_step: str, *, version: bool = True
    ) -> Difference:
        """A difference of this package, which breaks what stands on the package."""
        subject = f"{self.row.title} {self.look.version}".strip() if version else self.row.title
        breaks = self.host.order(self.row.breaks)
        return Difference(
            weight=weight, aspect=aspect, subject=subject, seen=seen, wanted=wanted, breaks=breaks, how=how,
            next_step=next_step,
        )  # fmt: skip


def read_version(text: str) -> Version | None:
    """A version, where the text is one."""
    try:
        return Version(text)
    except InvalidVersion:
        return None
