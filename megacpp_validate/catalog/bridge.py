"""The matrix as typed values: the one reader of `matrix/`.

A file is refused as a whole, and every fault in it is named at once: unknown keys, wrong types, ids that appear twice,
and ids that point to nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar

from pydantic import Field

from ..evidence.selftest import Mutant
from ..evidence.values import ENVIRONMENT
from .file import PACKAGE_ROOT, MatrixInvalid, Names, Row, Text, matrix_folder, read_rows

__all__ = ["PACKAGE_ROOT", "Catalog", "MatrixInvalid", "matrix_folder", "read_catalog"]


Scopes = Annotated[list[str], Names("scope"), Field(min_length=1)]  # bridge modules, and files of the bridge
Targets = Annotated[list[str], Names("target"), Field(min_length=1)]
Recipe = Literal["delayed", "current", "block", "mxfp8", "nvfp4"]
_File = TypeVar("_File", bound=Row)


class _Cell(Row):
    """What every cell has; the attributes are those of `BridgeModule`."""

    id: Text
    title: Text
    seconds: int = Field(default=60, ge=0)


class BridgeModule(_Cell):
    """One bridge module.

    Attributes:
        id: its name in receipts and reports.
        files: its files, relative to the package.
        depends_on: modules whose breakage explains its own.
        title: what people call it.
        native: the path it takes without Transformer Engine.
        seconds: what its probe takes, importing and compiling included.
    """

    files: list[str] = Field(min_length=1)
    depends_on: Annotated[list[str], Names("module")]
    native: str


class ProbeCell(_Cell):
    """A cell that is more than one bridge module: a row of FP8 or of the smoke run, or a composition of the canary.

    Attributes:
        id: its name in receipts and reports.
        code: module below `probes` that looks.
        title: what people call it.
        stands_on: bridge modules that it reaches.
        settings: what tells it from other cells of the same code.
        once: a second use tells nothing, or would take too long.
        seconds: as of a bridge module.
        limit_s: seconds that it may take; 0 for what the session says.
    """

    id: str = Field(pattern=r"^[a-z][a-z0-9_]+$")
    code: Text
    stands_on: Scopes
    settings: dict[str, str] = Field(default_factory=dict)
    once: bool = False
    limit_s: int = Field(default=0, ge=0)


class Fp8Cell(ProbeCell):
    """A cell of FP8; `needs_te` is whether there is nothing to see without Transformer Engine."""

    id: str = Field(pattern=r"^fp8_[a-z0-9_]+$")
    settings: dict[Annotated[str, Field(pattern=r"^(recipes?|seeds|steps|size|features)$")], str] = Field(
        default_factory=dict
    )
    needs_te: bool = True


class SmokeCell(ProbeCell):
    """A cell of the smoke run; `targets` that it is for, and devices of theirs that it takes (`ranks`)."""

    id: str = Field(pattern=r"^smoke_[a-z0-9_]+$")
    targets: Targets
    ranks: int = Field(ge=1)


class Stack(Row):
    """What is pinned together.

    Attributes:
        te: release of Transformer Engine.
        lock: file with the hash of every package, relative to the folder that `matrix/` lies in; empty where none is.
        image: container image by digest; empty where there is none.
    """

    id: Text
    te: str = Field(pattern=r"^\d+(\.\d+)+(\.post\d+)?$")
    lock: str = Field(default="", pattern=r"^(\w[\w./-]*)?$")
    image: str = Field(default="", pattern=r"^([^\s@]+@sha256:[0-9a-f]{64})?$")


class Target(Row):
    """A kind of machine and what holds on it."""

    id: Text
    arch: str = Field(pattern=r"^(sm_\d+)?$")
    machine: Literal["x86_64", "aarch64", ""]
    recipes: list[Recipe]
    production_recipe: Recipe | Literal[""] = ""
    attention: list[Literal["te", "fa3", "fa4", "sdpa"]]
    deep_gemm: bool


class Planted(Row):
    """A fault that a suite plants, to see whether it is found. Each kind adds where the fault lies, and who is blamed.

    Attributes:
        id: short and stable.
        says: what goes wrong, in a sentence.
    """

    id: str = Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")
    says: Text


class _BridgeFile(Row):
    module: list[BridgeModule] = Field(min_length=1)
    composition: list[ProbeCell] = Field(default_factory=list)


class _Fp8File(Row):
    cell: list[Fp8Cell] = Field(min_length=1)


class _SmokeFile(Row):
    cell: list[SmokeCell] = Field(min_length=1)


class _StackFile(Row):
    pinned: Annotated[str, Names("stack")]
    stack: list[Stack] = Field(min_length=1)


class _TargetFile(Row):
    target: list[Target] = Field(min_length=1)


class _MutantFile(Row):
    mutant: list[Mutant] = Field(min_length=1)


class Catalog(Row):
    """The whole matrix.

    Attributes:
        folder: that it was read from, with the other files of the matrix.
        modules: bridge modules in dependency order.
        compositions: of them, that the canary runs after them.
        pinned: the stack that is in production.
        fp8, smoke: cells of FP8 and of the smoke run, in the order in which they are told.
        mutants: what the suite's own score plants, as the environment gets it.
    """

    folder: Path
    modules: tuple[BridgeModule, ...]
    compositions: tuple[ProbeCell, ...]
    fp8: tuple[Fp8Cell, ...]
    smoke: tuple[SmokeCell, ...]
    stacks: tuple[Stack, ...]
    pinned: Stack
    targets: tuple[Target, ...]
    mutants: tuple[Mutant, ...]

    @property
    def fp8_cells(self) -> tuple[ProbeCell, ...]:
        """Cells of FP8, with those that the canary runs too."""
        return (*self.fp8, *(row for row in self.compositions if row.id.startswith("fp8_")))

    @property
    def known(self) -> dict[str, list[str]]:
        """Kind -> ids of rows that the other files of the matrix may name."""
        probes = (*self.modules, *self.compositions, *self.fp8, *self.smoke)
        kinds: dict[str, tuple[_Cell | Target, ...]] = {
            "target": self.targets, "module": self.modules, "cell": self.fp8_cells, "probe": probes,
        }  # fmt: skip
        ids = {kind: [row.id for row in rows] for kind, rows in kinds.items()}
        return {**ids, "blamed": [*ids["module"], ENVIRONMENT]}

    def read(self, name: str, model: type[_File]) -> _File:
        """Another file of the same folder.

        Raises:
            MatrixInvalid: with every fault of the file.
        """
        files: tuple[_File, ...] = read_rows(self.folder, {name: model}, self.known)
        return files[0]


_FILES: Final[dict[str, type[Row]]] = {
    "bridge.toml": _BridgeFile, "fp8.toml": _Fp8File, "moe_smoke.toml": _SmokeFile, "stacks.toml": _StackFile,
    "targets.toml": _TargetFile, "mutants.toml": _MutantFile,
}  # fmt: skip


def read_catalog(folder: Path | None = None) -> Catalog:
    """The matrix in `folder`; the project's own where that is None.

    Raises:
        MatrixInvalid: with every fault of every file.
    """
    scopes = [path.stem for path in (PACKAGE_ROOT / "bridge").glob("*.py")]
    root = (folder or matrix_folder()).absolute()
    bridge, fp8, smoke, stacks, targets, mutants = read_rows(root, _FILES, {"scope": scopes})
    return Catalog(
        folder=root,
        modules=tuple(bridge.module),
        compositions=tuple(bridge.composition),
        fp8=tuple(fp8.cell),
        smoke=tuple(smoke.cell),
        stacks=tuple(stacks.stack),
        pinned=next(stack for stack in stacks.stack if stack.id == stacks.pinned),
        targets=tuple(targets.target),
        mutants=tuple(mutants.mutant),
    )
