"""What the core wheels of a release need of NVIDIA's libraries, computed from symbols, and rows of the matrix for it.

The core library is linked with cuBLAS, cuDNN, NCCL and the CUDA runtime. A symbol that the core library leaves
undefined, and that an older wheel of its library lacks, is a requirement: the first wheel that defines the symbol.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Final, Literal

from packaging.version import Version

from ..catalog.bridge import Catalog, matrix_folder
from ..catalog.images import CudaLibrary, Need, Needs, Range, read_images, read_needs
from ..diagnosis.rows import owner_of
from ..environments.fits import LIBRARIES
from ..errors import Exit, ToolError, exit_for
from ..evidence.receipt import write_whole
from ..evidence.values import Frozen
from ..probes.doctor_elf import NotReadable, Symbol
from .remote_wheel import RemoteWheel
from .static.sources import Sources

CORES: Final = {12: "transformer-engine-cu12", 13: "transformer-engine-cu13"}
_CORE_FILE: Final = "libtransformer_engine.so"
_LOADER: Final = "transformer_engine/common/__init__.py"
_FILE: Final = "needs.toml"


class SymbolNeed(Frozen):
    """Symbols of one library that older wheels of the library lack.

    Attributes:
        cuda: major CUDA release of the core library.
        library: row of needs.toml.
        distribution: whose wheels were read.
        first, before: the first wheel that defines the symbols (empty where none does), and the one before it.
        at_load: bound when the core library is loaded, so that the import fails; else at the first call.
        known: the row of needs.toml that has it; empty for none.
        row: a row for needs.toml, as text; empty where there is one, or no wheel defines the symbols.
    """

    cuda: int
    library: str
    distribution: str
    symbols: tuple[str, ...]
    first: str
    before: str
    at_load: bool
    known: str = ""
    row: str = ""


class CoreWheel(Frozen):
    """The core library for one CUDA release: libraries that it names, and how many symbols it leaves undefined."""

    distribution: str
    wheel: str
    needed: tuple[str, ...]
    undefined: int


class WheelRequirements(Frozen):
    """What one release needs of NVIDIA's libraries.

    Attributes:
        unknown: what could not be read, with why.
        written: the file to which rows were added; empty for none.
    """

    schema_id: Literal["megacpp-validate/te-requirements/1"] = "megacpp-validate/te-requirements/1"
    tool: str
    te: str
    cores: tuple[CoreWheel, ...]
    needs: tuple[SymbolNeed, ...]
    unknown: dict[str, str]
    written: str = ""

    @property
    def exit(self) -> Exit:
        """Evidence is missing where something could not be read."""
        return exit_for(breaks=False, lacks=bool(self.unknown))


def run_requirements(
    catalog: Catalog, te: str, matrix: Path | None, *, tool: str, write: bool = False,
    note: Callable[[str], None] = lambda _: None,
) -> WheelRequirements:  # fmt: skip
    """Read the core wheels of a release, and the wheels of the libraries that they need.

    Args:
        te: release of Transformer Engine.
        write: add a row to needs.toml for each requirement without one.
        note: called with each wheel before it is read.
    """
    needs, sources = read_needs([module.id for module in catalog.modules], matrix), Sources()
    cores: list[CoreWheel] = []
    found: list[SymbolNeed] = []
    unknown: dict[str, str] = {}
    for cuda, distribution in CORES.items():
        try:
            lazy = _binds_late(sources.wheel(te))
            note(f"reading {distribution} {te}")
            core, symbols = _read_core(sources, distribution, te)
        except (ToolError, NotReadable) as fault:
            unknown[f"{distribution} {te}"] = str(fault)
            continue
        cores.append(core)
        for library in needs.library:
            mine = [one for one in symbols if _is_of(one, library)]
            name = _choose_distribution(library, cuda)
            try:
                found += _find_needs(sources, library, name, mine, cuda, late=lazy, note=note) if mine else ()
            except (ToolError, NotReadable) as fault:
                unknown[f"{name} for {distribution} {te}"] = str(fault)
    modules = [module.id for module in catalog.modules]
    ranges = read_images({row.id: row.machine for row in catalog.targets}, matrix, catalog.targets).range
    known = tuple(_add_row(one, te, needs, ranges, modules) for one in found)
    rows = [one.row for one in known if one.row]
    file = (matrix or matrix_folder()) / _FILE
    if write and rows:
        write_whole(file, file.read_text(encoding="utf-8").rstrip() + "\n\n" + "\n".join(rows))
        read_needs(modules, matrix)
    written = str(file) if write and rows else ""
    return WheelRequirements(tool=tool, te=te, cores=tuple(cores), needs=known, unknown=unknown, written=written)


def _binds_late(wheel: Path) -> bool:
    """Whether Python loads the core library with RTLD_LAZY; ctypes binds every symbol at once otherwise."""
    with zipfile.ZipFile(wheel) as archive:
        return _LOADER in archive.namelist() and b"RTLD_LAZY" in archive.read(_LOADER)


def _read_core(sources: Sources, distribution: str, te: str) -> tuple[CoreWheel, list[Symbol]]:
    with RemoteWheel(sources.find_address(distribution, te)) as wheel:
        place = wheel.libraries().get(_CORE_FILE)
        if place is None:
            raise NotReadable(f"{wheel.name} has no {_CORE_FILE}")
        with wheel.open_library(place) as elf:
            symbols = list(elf.wants)
            core = CoreWheel(
                distribution=distribution, wheel=wheel.name, needed=elf.needed, undefined=len(symbols)
            )  # fmt: skip
    return core, symbols


def _is_of(symbol: Symbol, library: CudaLibrary) -> bool:
    """A versioned symbol names the file that it is expected from; of another its own name says whose it is."""
    return all(owner_of(name) == library.title for name in filter(None, (symbol.name, symbol.source)))


def _choose_distribution(library: CudaLibrary, cuda: int) -> str:
    """The wheel of a library for a CUDA release: of CUDA 13 some have no "-cu13" in their names."""
    suffixed = [name for name in library.distributions if name.endswith(f"-cu{cuda}")]
    plain = [name for name in library.distributions if not re.search(r"-cu\d+$", name)]
    return (plain or suffixed)[0] if cuda >= 13 else suffixed[0]


def _find_needs(
    sources: Sources, library: CudaLibrary, distribution: str, symbols: Sequence[Symbol], cuda: int, *, late: bool,
    note: Callable[[str], None],
) -> Iterator[SymbolNeed]:  # fmt: skip
    """Symbols that the oldest wheel lacks, by the wheel that first defines them."""
    names = {one.name for one in symbols}
    files = {one.source for one in symbols if one.source}
    versions = sources.list_releases(distribution)
    if not versions:
        raise NotReadable(f"the index has no wheel of {distribution}")

    @cache
    def defined(version: str) -> frozenset[str]:
        note(f"reading {distribution} {version}")
        return _read_defined(sources, distribution, version, names, files)

    groups: dict[tuple[str, str], list[Symbol]] = {}
    for symbol in symbols:
        if symbol.name not in defined(versions[0]):
            groups.setdefault(_find_first(symbol.name, versions, defined), []).append(symbol)
    for (before, first), group in groups.items():
        yield SymbolNeed(
            cuda=cuda, library=library.id, distribution=distribution, symbols=tuple(sorted(one.name for one in group)),
            first=first, before=before, at_load=not (late and all(one.lazy for one in group)),
        )  # fmt: skip


def _read_defined(
    sources: Sources, distribution: str, version: str, names: Collection[str], files: Collection[str]
) -> frozenset[str]:
    """Which of some symbols a wheel defines, in the files that they are expected from or in any."""
    found: set[str] = set()
    with RemoteWheel(sources.find_address(distribution, version)) as wheel:
        libraries = wheel.libraries()
        for file in set(files) & libraries.keys() or libraries.keys():
            with wheel.open_library(libraries[file]) as elf:
                found |= {name for name in names if elf.defines(name)}
    return frozenset(found)


def _find_first(name: str, versions: Sequence[str], defined: Callable[[str], Collection[str]]) -> tuple[str, str]:
    """The last version without a symbol and the first with it; a symbol that is added stays."""
    low, high = 0, len(versions) - 1
    if name not in defined(versions[high]):
        return versions[high], ""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if name in defined(versions[middle]) else (middle, high)
    return versions[low], versions[high]


def _add_row(need: SymbolNeed, te: str, needs: Needs, ranges: Sequence[Range], modules: Sequence[str]) -> SymbolNeed:
    """The row that knows a requirement, or one for it."""
    if not need.first:
        return need
    kind = "library" if need.at_load else "tolerated-symbol"
    for row in needs.need:
        same = row.of == need.library and row.kind == kind and row.holds_for(Version(te))
        if same and row.holds_for_core(need.cuda) and _bounds(row, need):
            return need.model_copy(update={"known": row.id})
    for other in ranges:  # of what works with less
        if other.component == LIBRARIES[need.library] and other.holds_for(Version(te)) and _bounds(other, need):
            return need.model_copy(update={"known": other.id})
    return need.model_copy(update={"row": _render_row(need, te, kind, modules)})


def _bounds(row: Need | Range, need: SymbolNeed) -> bool:
    return row.allows(Version(need.first)) and not row.allows(Version(need.before))


def _render_row(need: SymbolNeed, te: str, kind: str, modules: Sequence[str]) -> str:
    short = ".".join(need.first.split(".")[:2])
    least = need.first if Version(need.before) >= Version(short) else short
    bound = "when it is loaded" if need.at_load else "at the first call"
    broken = ", ".join(f'"{one}"' for one in modules) if need.at_load else ""
    names = ", ".join(need.symbols)
    symbol = "" if need.at_load else f'symbol = "{need.symbols[0]}"\n'
    return (
        f'[[need]]\nid = "{need.library.lower()}-of-{te}-cu{need.cuda}-{need.first}"\nte = "=={te}"\nkind = "{kind}"\n'
        f'of = "{need.library}"\ncuda = "=={need.cuda}"\n{symbol}version = ">={least}"\nbreaks = [{broken}]\n'
        f'says = "the core library binds {names} {bound}"\n'
        f'next = "install {need.distribution}>={least} and have it found first"\n'
        f'source = "wheel: undefined symbols of {CORES[need.cuda]} {te}; {need.distribution} {need.first} is the first '
        f'that defines them, {need.before} does not (read on {datetime.now(UTC).date()})"\n'
    )
