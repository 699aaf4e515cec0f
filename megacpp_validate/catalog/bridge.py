"""The matrix as typed values: the one reader of `matrix/`.

A file is refused as a whole, with every fault in it named at once: unknown keys, wrong types, ids that are given
twice, and ids that point to nothing.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from ..evidence.selftest import PARAMETERS, Fault, Requested, Value, Where
from ..evidence.selftest import Mutant as PlannedMutant
from .file import PACKAGE_ROOT, MatrixInvalid, Row, look_at_matrix_file, matrix_folder

__all__ = ["Catalog", "MatrixInvalid", "matrix_folder", "read_catalog"]


class BridgeModule(Row):
    """One bridge module.

    Attributes:
        id: its name in receipts and reports.
        files: its files, relative to the package.
        depends_on: modules whose breakage explains its own.
        title: what people call it.
        native: the path it takes without Transformer Engine.
        seconds: what its probe takes, importing and compiling included.
        gpu_memory_mib: what torch allocates there at the peak, MiB.
        compiles: it compiles and tunes kernels when it first runs, which takes most of its time.
    """

    id: str = Field(min_length=1)
    files: list[str] = Field(min_length=1)
    depends_on: list[str]
    title: str
    native: str
    seconds: int = Field(default=60, ge=0)
    gpu_memory_mib: int = Field(default=1024, ge=0)
    compiles: bool = False


Recipe = Literal["delayed", "current", "block", "mxfp8", "nvfp4"]


class ProbeCell(Row):
    """A cell that is more than one bridge module: a row of FP8 or of the smoke run, or a composition of the canary.

    Attributes:
        id: its name in receipts and reports.
        code: module below `probes` that looks.
        title: what people call it.
        stands_on: bridge modules that it reaches.
        settings: what tells it from other cells of the same code.
        once: a second use tells nothing, or would take too long.
        seconds, gpu_memory_mib, compiles: as of a bridge module.
        limit_s: seconds that it may take; 0 for what the session says.
    """

    id: str = Field(pattern=r"^[a-z][a-z0-9_]+$")
    code: str = Field(pattern=r"^[a-z][a-z0-9_]*\.[a-z0-9_]+$")
    title: str = Field(min_length=1)
    stands_on: list[str] = Field(min_length=1)
    settings: dict[str, str] = Field(default_factory=dict)
    once: bool = False
    seconds: int = Field(default=30, ge=0)
    gpu_memory_mib: int = Field(default=1024, ge=0)
    compiles: bool = False
    limit_s: int = Field(default=0, ge=0)


class Fp8Cell(ProbeCell):
    """A cell of FP8; `needs_te` is whether there is nothing to see without Transformer Engine."""

    id: str = Field(pattern=r"^fp8_[a-z0-9_]+$")
    code: str = Field(pattern=r"^fp8\.[a-z0-9_]+$")
    settings: dict[Annotated[str, Field(pattern=r"^(recipes?|seeds|steps|size)$")], str] = Field(default_factory=dict)
    needs_te: bool = True


class SmokeCell(ProbeCell):
    """A cell of the smoke run; `targets` that it is for, and devices of theirs that it takes (`ranks`)."""

    id: str = Field(pattern=r"^smoke_[a-z0-9_]+$")
    code: str = Field(pattern=r"^smoke\.[a-z0-9_]+$")
    targets: list[str] = Field(min_length=1)
    ranks: int = Field(ge=1)


class Stack(Row):
    """What is pinned together.

    Attributes:
        te: release of Transformer Engine.
        lock: file with the hash of every package, relative to the folder that `matrix/` lies in; empty where none is.
        image: container image by digest; empty where there is none.
    """

    id: str = Field(min_length=1)
    te: str = Field(pattern=r"^\d+(\.\d+)+(\.post\d+)?$")
    lock: str = Field(default="", pattern=r"^(\w[\w./-]*)?$")
    image: str = Field(default="", pattern=r"^([^\s@]+@sha256:[0-9a-f]{64})?$")


class Target(Row):
    """A kind of machine and what holds on it."""

    id: str = Field(min_length=1)
    arch: str = Field(pattern=r"^(sm_\d+)?$")
    machine: Literal["x86_64", "aarch64", ""]
    recipes: list[Recipe]
    production_recipe: str = ""
    attention: list[Literal["te", "fa3", "fa4", "sdpa"]]
    deep_gemm: bool


class Mutant(Row):
    """A fault that the suite plants in itself; see `evidence.selftest.Mutant`, which `planned` gives."""

    id: str = Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")
    module: str
    where: Where
    requested: Requested
    at: str = Field(pattern=r"^[a-z_0-9]+(\.[A-Za-z_0-9]+)*$")
    fault: Annotated[Fault, Field(strict=False)]
    parameters: dict[str, Value] = Field(default_factory=dict)
    says: str = Field(min_length=1)

    @property
    def planned(self) -> PlannedMutant:
        """The same as the environment is told."""
        return PlannedMutant(**self.model_dump())


class _BridgeFile(Row):
    module: list[BridgeModule] = Field(min_length=1)
    composition: list[ProbeCell] = Field(default_factory=list)


class _Fp8File(Row):
    cell: list[Fp8Cell] = Field(min_length=1)


class _SmokeFile(Row):
    cell: list[SmokeCell] = Field(min_length=1)


class _StackFile(Row):
    pinned: str
    stack: list[Stack] = Field(min_length=1)


class _TargetFile(Row):
    target: list[Target] = Field(min_length=1)


class _MutantFile(Row):
    mutant: list[Mutant] = Field(min_length=1)


class Catalog(Row):
    """The whole matrix.

    Attributes:
        modules: bridge modules in dependency order.
        compositions: of them, that the canary runs after them.
        pinned: the stack that is in production.
        fp8, smoke: cells of FP8 and of the smoke run, in the order in which they are told.
        mutants: what the suite's own score plants.
    """

    modules: tuple[BridgeModule, ...]
    compositions: tuple[ProbeCell, ...]
    fp8: tuple[Fp8Cell, ...]
    smoke: tuple[SmokeCell, ...]
    stacks: tuple[Stack, ...]
    pinned: Stack
    targets: tuple[Target, ...]
    mutants: tuple[Mutant, ...]


def read_catalog(folder: Path | None = None) -> Catalog:
    """The matrix in `folder`.

    Raises:
        MatrixInvalid: with every fault of every file.
    """
    root = folder or matrix_folder()
    faults: list[str] = []
    bridge, modules = look_at_matrix_file(root / "bridge.toml", _BridgeFile, faults)
    fp8, fp8_rows = look_at_matrix_file(root / "fp8.toml", _Fp8File, faults)
    smoke, smoke_rows = look_at_matrix_file(root / "moe_smoke.toml", _SmokeFile, faults)
    stacks, stack_rows = look_at_matrix_file(root / "stacks.toml", _StackFile, faults)
    targets, target_rows = look_at_matrix_file(root / "targets.toml", _TargetFile, faults)
    mutants, mutant_rows = look_at_matrix_file(root / "mutants.toml", _MutantFile, faults)
    # Ids are looked at in the rows as they were written, so that a wrong type elsewhere hides nothing.
    faults += _module_faults(_rows(modules, "module"))
    for file, kind, rows in (
        ("bridge.toml", "composition", modules),
        ("fp8.toml", "cell", fp8_rows),
        ("moe_smoke.toml", "cell", smoke_rows),
    ):
        faults += _cell_faults(file, kind, _rows(rows, kind), _rows(modules, "module"))
    faults += _smoke_faults(_rows(smoke_rows, "cell"), _rows(target_rows, "target"))
    faults += _stack_faults(stack_rows, root.parent)
    faults += _target_faults(_rows(target_rows, "target"))
    faults += _mutant_faults(_rows(mutant_rows, "mutant"), _rows(modules, "module"))
    if faults or not (bridge and fp8 and smoke and stacks and targets and mutants):
        raise MatrixInvalid(faults)
    pinned = next(stack for stack in stacks.stack if stack.id == stacks.pinned)
    return Catalog(
        modules=tuple(bridge.module),
        compositions=tuple(bridge.composition),
        fp8=tuple(fp8.cell),
        smoke=tuple(smoke.cell),
        stacks=tuple(stacks.stack),
        pinned=pinned,
        targets=tuple(targets.target),
        mutants=tuple(mutants.mutant),
    )


def _rows(data: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    """The rows of a file that have an id; what has none is told by its type."""
    rows = data.get(kind)
    every = rows if isinstance(rows, list) else []
    return [row for row in every if isinstance(row, dict) and isinstance(row.get("id"), str)]


def _texts(row: dict[str, Any], key: str) -> list[str]:
    values = row.get(key)
    return [value for value in values if isinstance(value, str)] if isinstance(values, list) else []


def _module_faults(modules: list[dict[str, Any]]) -> list[str]:
    faults = _twice("bridge.toml", "module", modules)
    known: set[str] = set()
    every = {module["id"] for module in modules}
    for module in modules:
        name = module["id"]
        for other in _texts(module, "depends_on"):
            if other not in every:
                faults.append(f"bridge.toml: module {name}: depends_on names {other!r}, which there is not")
            elif other not in known:
                faults.append(f"bridge.toml: module {name}: stands before {other!r}, on which it depends")
        faults += [
            f"bridge.toml: module {name}: there is no file {file}"
            for file in _texts(module, "files")
            if not (PACKAGE_ROOT / file).is_file()
        ]
        known.add(name)
    return faults


def _cell_faults(file: str, kind: str, cells: list[dict[str, Any]], modules: list[dict[str, Any]]) -> list[str]:
    faults = _twice(file, kind, cells)
    known = {module["id"] for module in modules}
    for cell in cells:
        name = f"{file}: {kind} {cell['id']}"
        if kind == "composition" and cell["id"] in known:
            faults.append(f"{name}: a bridge module has this id")
        faults += [
            f"{name}: stands_on names {other!r}, which there is not"
            for other in _texts(cell, "stands_on")
            if known and other not in known and not (PACKAGE_ROOT / "bridge" / f"{other}.py").is_file()
        ]
        code = cell.get("code")
        if isinstance(code, str) and not (PACKAGE_ROOT / "probes" / f"{code.replace('.', '/')}.py").is_file():
            faults.append(f"{name}: there is no probe {code!r}")
        settings = cell.get("settings")
        named = [settings.get(key, "") for key in ("recipe", "recipes")] if isinstance(settings, dict) else []
        faults += [
            f"{name}: settings name the recipe {recipe!r}, which there is not"
            for recipe in " ".join(text for text in named if isinstance(text, str)).split()
            if recipe not in get_args(Recipe)
        ]
    return faults


def _smoke_faults(cells: list[dict[str, Any]], targets: list[dict[str, Any]]) -> list[str]:
    known = {target["id"] for target in targets}
    return [
        f"moe_smoke.toml: cell {cell['id']}: targets names {target!r}, which there is not"
        for cell in cells
        for target in _texts(cell, "targets")
        if known and target not in known
    ]


def _stack_faults(data: dict[str, Any], home: Path) -> list[str]:
    stacks = _rows(data, "stack")
    faults = _twice("stacks.toml", "stack", stacks)
    pinned = data.get("pinned")
    if isinstance(pinned, str) and pinned not in {stack["id"] for stack in stacks}:
        faults.append(f"stacks.toml: pinned: there is no stack {pinned!r}")
    if (home / "containers").is_dir():  # an installed package has the matrix, and not the locks
        faults += [
            f"stacks.toml: stack {stack['id']}: there is no lock {lock}"
            for stack in stacks
            if isinstance(lock := stack.get("lock"), str) and lock and not (home / lock).is_file()
        ]
    return faults


def _target_faults(targets: list[dict[str, Any]]) -> list[str]:
    faults = _twice("targets.toml", "target", targets)
    for target in targets:
        recipe = target.get("production_recipe")
        if recipe and recipe not in _texts(target, "recipes"):
            faults.append(f"targets.toml: target {target['id']}: production_recipe {recipe!r} is none of its recipes")
    return faults


def _mutant_faults(mutants: list[dict[str, Any]], modules: list[dict[str, Any]]) -> list[str]:
    faults = _twice("mutants.toml", "mutant", mutants)
    known = {module["id"] for module in modules}  # empty where that file cannot be read, which is told already
    for mutant in mutants:
        name = f"mutants.toml: mutant {mutant['id']}"
        module = mutant.get("module")
        if known and isinstance(module, str) and module not in known:
            faults.append(f"{name}: module names {module!r}, which there is not")
        if mutant.get("where") == "vendor" and mutant.get("requested") == "native":
            faults.append(f"{name}: a fault in what Transformer Engine returns is not reached on the native path")
        given = mutant.get("parameters", {})
        if mutant.get("fault") not in list(Fault) or not isinstance(given, dict):
            continue
        takes = PARAMETERS[Fault(mutant["fault"])]
        faults += [f"{name}: {mutant['fault']} needs the parameter {key!r}" for key in sorted(takes.needs - set(given))]
        unknown = set(given) - takes.needs - takes.may
        faults += [f"{name}: {mutant['fault']} takes no parameter {key!r}" for key in sorted(unknown)]
    return faults


def _twice(file: str, kind: str, rows: list[dict[str, Any]]) -> list[str]:
    counts = Counter(row["id"] for row in rows)
    return [f"{file}: {kind} {name!r} is there {count} times" for name, count in counts.items() if count > 1]
