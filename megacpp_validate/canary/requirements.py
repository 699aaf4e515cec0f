"""What a release of Transformer Engine needs of its environment: rows of the matrix, and symbols of the wheels.

`Requirements` compares the rows with an environment. `run_requirements` computes rows: the core library is linked with
cuBLAS, cuDNN, NCCL and the CUDA runtime. A symbol that the core library leaves undefined, and that an older wheel of
its library lacks, is a requirement: the first wheel that defines the symbol.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import zipfile
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final, Literal

from packaging.version import Version

from ..catalog.bridge import Catalog
from ..catalog.images import CudaLibrary, Images, Need, Needs, Range, read_images, read_needs
from ..diagnosis.rows import owner_of
from ..environments.doctor import read_given
from ..environments.fits import LIBRARIES, Fit, FitVerdict, Stack, judge_stack, require_known
from ..errors import ToolError
from ..evidence.values import Frozen, Result, read_version
from ..probes.doctor_elf import Elf, NotReadable, Symbol, read_elf

if TYPE_CHECKING:
    from .static.sources import Sources  # needs griffe, which a GPU host lacks

CORES: Final = {12: "transformer-engine-cu12", 13: "transformer-engine-cu13"}
_CORE_FILE: Final = "libtransformer_engine.so"
_LOADER: Final = "transformer_engine/common/__init__.py"
_LIMIT_S: Final = 1800.0  # of one wheel


class Requirements:
    """The rows of the matrix, and the environment that they are compared with.

    Args:
        texts: as --env takes them; none where the environment is unknown.
        target: row of targets.toml; empty where unknown.

    Raises:
        WrongArguments: a text names no environment, or a component that no row knows.
    """

    def __init__(self, catalog: Catalog, texts: Sequence[str], target: str = "") -> None:
        self._needs: Needs = read_needs(catalog)
        images: Images = read_images(catalog)
        self._ranges = [row for row in images.range if row.outside == "refused"]
        self._releases = [stack.te for stack in catalog.stacks]
        given = read_given(texts, self._needs, images.base, os.environ, target)
        self.given: Stack = require_known(given, self._needs, images.range)

    @property
    def shown(self) -> str:
        """The environment as the caller named it; empty for none."""
        return self.given.name

    def find_new(self, old: str, new: str) -> tuple[Fit, ...]:
        """Requirements that NEW has and OLD had not, compared with the environment, worst first.

        The rows were made from the releases of the matrix. Whether an older OLD had a requirement of the first of them
        is unknown, so that such a requirement is no new one; what the environment does not meet is listed all the same.
        """
        before = {fit.need for fit in self._judge(self.given.with_release(old))}
        first = min(self._releases, key=Version)
        is_older = (version := read_version(old)) is not None and version < Version(first)
        of_first = {fit.need for fit in self._judge(self.given.with_release(first))} if is_older else set()
        after = [fit for fit in self._judge(self.given.with_release(new)) if fit.need not in before]
        kept = (fit for fit in after if fit.need not in of_first or fit.verdict is FitVerdict.REFUSED)
        return tuple(map(_name_option, kept))

    def _judge(self, stack: Stack) -> tuple[Fit, ...]:
        return judge_stack(stack, self._needs, self._ranges, self._releases).fits


def _name_option(fit: Fit) -> Fit:
    """An unknown requirement, with the option that settles it."""
    if fit.verdict is not FitVerdict.UNKNOWN or fit.need == "release":
        return fit
    return fit.model_copy(
        update={"next_step": f"give --env {fit.component}=VERSION; if it is not met: {fit.next_step}"}
    )


# --- requirements from symbols ----------------------------------------------------------------------------------------


class SymbolNeed(Frozen):
    """Symbols of one library that older wheels of the library lack.

    Attributes:
        cuda: major CUDA release of the core library.
        library: row of needs.toml.
        distribution: whose wheels were read.
        first, before: the first wheel that defines the symbols (empty where none does), and the one before it.
        at_load: bound when the core library is loaded, so that the import fails; else at the first call.
        known: the row of needs.toml or images.toml that has it; empty for none.
    """

    cuda: int
    library: str
    distribution: str
    symbols: tuple[str, ...]
    first: str
    before: str
    at_load: bool
    known: str = ""


class WheelRequirements(Result):
    """What one release needs of NVIDIA's libraries.

    Attributes:
        unknown: what could not be read, with why.
    """

    schema_id: Literal["megacpp-validate/te-requirements/2"] = "megacpp-validate/te-requirements/2"
    te: str
    needs: tuple[SymbolNeed, ...]
    unknown: dict[str, str]

    @property
    def lacks(self) -> bool:
        """Whether something could not be read."""
        return bool(self.unknown)


def run_requirements(catalog: Catalog, te: str, *, note: Callable[[str], None] = lambda _: None) -> WheelRequirements:
    """Read the core wheels of a release, and the wheels of the libraries that they need.

    Args:
        te: release of Transformer Engine.
        note: called with each wheel before it is read.

    Raises:
        WrongArguments: the index has no such release.
    """
    from .static.sources import Sources

    needs, sources = read_needs(catalog), Sources()
    found: list[SymbolNeed] = []
    unknown: dict[str, str] = {}
    with zipfile.ZipFile(sources.wheel(te)) as archive:  # ctypes binds every symbol at once without RTLD_LAZY
        late = _LOADER in archive.namelist() and b"RTLD_LAZY" in archive.read(_LOADER)
    for cuda, distribution in CORES.items():
        try:
            note(f"reading {distribution} {te}")
            symbols = _read_core(sources, distribution, te)
        except (ToolError, NotReadable) as fault:
            unknown[f"{distribution} {te}"] = str(fault)
            continue
        for library in needs.library:
            mine = [one for one in symbols if _is_of(one, library)]
            name = _choose_distribution(library, cuda)
            try:
                found += _find_needs(sources, library, name, mine, cuda, late=late, note=note) if mine else ()
            except (ToolError, NotReadable) as fault:
                unknown[f"{name} for {distribution} {te}"] = str(fault)
    ranges = read_images(catalog).range
    known = tuple(one.model_copy(update={"known": _find_row(one, te, needs, ranges)}) for one in found)
    return WheelRequirements(te=te, needs=known, unknown=unknown)


def _read_core(sources: Sources, distribution: str, te: str) -> tuple[Symbol, ...]:
    with open_wheel(sources, distribution, te) as wheel:
        place = list_libraries(wheel).get(_CORE_FILE)
        if place is None:
            raise NotReadable(f"{distribution} {te} has no {_CORE_FILE}")
        return read_library(wheel, place).wants


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

    groups: dict[int, list[Symbol]] = {}  # by the index of the first wheel with a symbol; what is added stays
    for symbol in symbols:
        if symbol.name not in defined(versions[0]):
            first = bisect_left(versions, True, key=lambda version: symbol.name in defined(version))
            groups.setdefault(first, []).append(symbol)
    for first, group in groups.items():
        yield SymbolNeed(
            cuda=cuda, library=library.id, distribution=distribution, symbols=tuple(sorted(one.name for one in group)),
            first=versions[first] if first < len(versions) else "", before=versions[first - 1],
            at_load=not (late and all(one.lazy for one in group)),
        )  # fmt: skip


def _read_defined(
    sources: Sources, distribution: str, version: str, names: Collection[str], files: Collection[str]
) -> frozenset[str]:
    """Which of some symbols a wheel defines, in the files that they are expected from or in any."""
    found: set[str] = set()
    with open_wheel(sources, distribution, version) as wheel:
        libraries = list_libraries(wheel)
        for file in set(files) & libraries.keys() or libraries.keys():
            elf = read_library(wheel, libraries[file])
            found |= {name for name in names if elf.defines(name)}
    return frozenset(found)


def _find_row(need: SymbolNeed, te: str, needs: Needs, ranges: Sequence[Range]) -> str:
    """The row that knows a requirement, or a row of what works with less; empty where none does."""
    kind = "library" if need.at_load else "tolerated-symbol"
    rows: list[Need | Range] = [
        row for row in needs.need if row.of == need.library and row.kind == kind and row.holds_for_core(need.cuda)
    ]
    rows += [row for row in ranges if row.component == LIBRARIES[need.library]]
    rows = [row for row in rows if need.first and row.holds_for(Version(te)) and row.allows(Version(need.first))]
    return next((row.id for row in rows if not row.allows(Version(need.before))), "")


# --- libraries inside a wheel on the index ----------------------------------------------------------------------------


@contextmanager
def open_wheel(sources: Sources, distribution: str, version: str) -> Iterator[zipfile.ZipFile]:
    """A wheel of the index, in a folder that is removed afterwards: one of cuBLAS has 500 MB.

    Raises:
        ToolError: as `Sources.download`.
    """
    with (
        tempfile.TemporaryDirectory(prefix="megacpp-wheel-") as folder,
        zipfile.ZipFile(sources.download(version, distribution, Path(folder), _LIMIT_S)) as wheel,
    ):
        yield wheel


def list_libraries(wheel: zipfile.ZipFile) -> dict[str, str]:
    """Name of each shared library -> its place in the wheel."""
    names = map(PurePosixPath, wheel.namelist())
    return {place.name: str(place) for place in names if ".so" in place.suffixes}


def read_library(wheel: zipfile.ZipFile, place: str) -> Elf:
    """One shared library."""
    with tempfile.TemporaryDirectory(prefix="megacpp-wheel-") as folder:
        copy = Path(folder, PurePosixPath(place).name)
        with wheel.open(place) as member, copy.open("wb") as file:
            shutil.copyfileobj(member, file, 2**20)
        return read_elf(copy)
