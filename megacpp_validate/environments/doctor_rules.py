"""What the doctor saw, compared with the matrix: a pure function from a host to its differences, worst first.

`KINDS` has the words of every kind of difference; the functions below it decide which holds, and how bad it is. What a
loader error means, and what to do about it, comes from the table of failures in `diagnosis`, as for a red receipt.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath
from typing import Final, NamedTuple

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from ..catalog.bridge import Stack, Target
from ..catalog.needs import CudaLibrary, Need, Needs, VendorPackage
from ..diagnosis.diagnose import diagnose
from ..diagnosis.next_steps import advise
from ..evidence.doctor_look import Distribution, Extension, PackageLook, PathLook, Wanted
from ..evidence.values import read_version
from .doctor_result import Aspect, Difference, Weight

TE: Final = "transformer_engine.pytorch"
NOT_STARTED: Final = "not started"
_FA3: Final = "flash_attn_interface"
_RUNTIME: Final = "libcudart"
_DRIVER: Final = "libcuda.so.1"
_TORCH_ABI: Final = "torch ABI"
_CORES: Final = (12, 13)  # major CUDA releases that a core library is on the index for
_MOST: Final = 3  # examples in a sentence
_PATCHED: Final = 0.1  # share of files that a person patches; between 2.17.1 and 2.18.0 a quarter of them changes
# Headers that lay a tensor out: an extension reads its members through what they inline.
_LAYOUT: Final = ("c10/core/TensorImpl.h", "c10/core/impl/PyObjectSlot.h", "c10/core/impl/SizesAndStrides.h",
                  "c10/core/StorageImpl.h")  # fmt: skip
Words = Mapping[str, object]
BREAKS, UNKNOWN, RISK, NOTE = Weight.BREAKS, Weight.UNKNOWN, Weight.RISK, Weight.NOTE


class Kind(NamedTuple):
    """One kind of difference: its weight unless a rule gives another, and its words, with names of `Host.find`."""

    weight: Weight
    aspect: Aspect
    seen: str
    wanted: str
    how: str
    step: str


KINDS: Final = {
    "gpu": Kind(UNKNOWN, Aspect.LOOK, "{gpu}", "a GPU of the target {target} ({arch})",
        "the doctor did not check what needs that GPU",
        "run it on a machine of the target {target}, or give --target cpu"),
    "machine": Kind(UNKNOWN, Aspect.LOOK, "{machine}", "{wanted}",
        "packages for this machine are not those of the target",
        "run it on a machine of the target {target}"),
    "stack": Kind(NOTE, Aspect.VERSION, "{te}", "{release}, the {which} stack {stack}",
        "results of that stack do not hold for this one",
        "install transformer-engine=={release}{grid}"),
    "missing": Kind(NOTE, Aspect.MISSING, "`import {id}` finds no module", "{distribution}, for the target {target}",
        "features that need it fall back to native PyTorch",
        "install {distribution} for torch {torch}, or go without it"),
    "no torch": Kind(BREAKS, Aspect.MISSING, "`import torch` finds no module", "torch, for the target {target}",
        "nothing runs", "install torch, or give another interpreter with --python"),
    "import": Kind(BREAKS, Aspect.IMPORT, "{what}", "an import without an error",
        "every path of it is lost; the bridge falls back", "{advice}"),
    "replaced": Kind(UNKNOWN, Aspect.METADATA,
        "of {compared} files that its installer recorded, {changed} are changed and {gone} are gone: {shown}",
        "the files of the release in its metadata",
        "the installed release is unknown, so the doctor did not check what depends on its version",
        "install {distribution} again"),
    "patched": Kind(RISK, Aspect.METADATA,
        "of {compared} files that its installer recorded, {changed} are changed and {gone} are gone: {shown}",
        "the files of the release in its metadata", "its code differs from the release",
        "install {distribution} again; if the change is a deliberate patch, apply it again"),
    "elsewhere": Kind(RISK, Aspect.METADATA, "loaded from {file}, while the metadata in {folder} gives its version",
        "the metadata of the loaded copy", "the loaded release is unknown",
        "take the unwanted copy off the path, or install it with its metadata"),
    "copies": Kind(RISK, Aspect.SECOND_COPY, "loaded from {file}; also on the path: {copies}", "one copy",
        "another order of the path, or another working folder, loads the other copy",
        "take the unwanted copy off PYTHONPATH, or uninstall it"),
    "two metadata": Kind(RISK, Aspect.METADATA, "{found}", "the metadata of one release",
        "code that reads its version gets that of the first",
        "uninstall {name} until none is left, and install one release"),
    "unreadable": Kind(RISK, Aspect.LIBRARY, "{extension} cannot be read: {problem}", "a shared library",
        "the loader refuses it", "install {distribution} {version} again, without pip's cache"),
    "python": Kind(BREAKS, Aspect.PYTHON_ABI, "`{name}` exists for {tags} only",
        "one for {soabi} (Python {python}), or for abi3", "the import does not find its compiled half",
        "install {distribution} with this interpreter's own pip"),
    "reads": Kind(BREAKS, Aspect.TORCH_ABI, "given a {given}, `{call}` answers: {answered}", "the tensor as it is",
        "it reads tensor sizes at wrong memory offsets: calls fail, or results are wrong", "{build}"),
    "not called": Kind(UNKNOWN, Aspect.LOOK, "`{call}` could not be called: {answered}", "its answer to a {given}",
        "whether it reads tensors correctly is unknown", "run the parity of this stack, which computes with it"),
    "libraries": Kind(NOTE, Aspect.LIBRARY, "`{name}` needs {missing}, which the loader does not find",
        "each of them on LD_LIBRARY_PATH, in the loader's cache, or beside torch", "what needs this file fails later",
        "{advice}"),
    "other CUDA": Kind(RISK, Aspect.CUDA_RUNTIME, "`{name}` was built for CUDA {built}",
        "CUDA {cuda}, as torch {torch}",
        "it brings a second CUDA runtime, with which Transformer Engine before 2.17 refuses attention",
        "install a build of {distribution} for CUDA {cuda}, or keep it out of such a process"),
    "symbols": Kind(RISK, Aspect.SYMBOL, "`{name}` needs {symbols}, which nothing defines",
        "{owner} of the release that it was built with", "a call that needs it ends the process", "{advice}"),
    "other torch": Kind(RISK, Aspect.TORCH_ABI, "`{name}` was not built for torch {torch}: {found}",
        "a build for torch {torch}", "{how}", "{build}"),
    "wheel": Kind(RISK, Aspect.METADATA, "{seen}", "{wanted}, as its metadata says",
        "its compiled files were made for something else", "install a build of {id} for the installed torch and CUDA"),
    "driver": Kind(NOTE, Aspect.DRIVER, "driver {driver} runs CUDA {runs}, torch is built for CUDA {built}",
        "a driver for CUDA {built}, or the same major release",
        "kernels run, except perhaps those that the driver compiles from PTX",
        "install a driver for CUDA {built} or later"),
    "old driver": Kind(BREAKS, Aspect.DRIVER, "driver {driver} runs CUDA {runs}, torch is built for CUDA {built}",
        "a driver for CUDA {major}", "no kernel starts",
        "install a driver for CUDA {built} or later, or the forward-compatibility package where the GPU is a "
        "data-centre one"),
    "two files": Kind(RISK, Aspect.SECOND_COPY, "importing {package} loads {title} {found} from {folders}", "one",
        "the order of imports decides which one runs, and one process may mix both",
        "leave one: remove the system's, or point {home}_HOME at torch's own folder"),
    "runtimes": Kind(RISK, Aspect.CUDA_RUNTIME, "a process that imports {package} can open {found}",
        "one, as torch has", "{says}", "{next}"),
    "need": Kind(BREAKS, Aspect.VERSION, "{found}", "{title} {range}", "{says}", "{next}"),
    "library": Kind(BREAKS, Aspect.LIBRARY, "{found}", "{title} {range}", "{says}", "{next}"),
}  # fmt: skip
# Kinds of difference that are about a file of a package, whatever the version of the package is.
_OF_A_FILE: Final = frozenset({"two metadata", "unreadable", "python", "libraries", "other CUDA", "symbols"})


@dataclass(frozen=True)
class Host:
    """Every look at one interpreter, and the rows of the matrix that it is compared with.

    Attributes:
        modules: ids of the bridge modules, in dependency order.
        stack: the requested row; None where only the target and the needs count.
        pinned: the release in production.
    """

    path: PathLook
    packages: tuple[PackageLook, ...]
    modules: tuple[str, ...]
    target: Target
    stack: Stack | None
    pinned: Stack
    needs: Needs

    def find(
        self, kind: str, words: Words, subject: str, breaks: Iterable[str] = (), *, weight: Weight | None = None,
        source: str = "",
    ) -> Difference:  # fmt: skip
        """A difference of some kind; its words, and those of the host, fill the sentences."""
        row, path = KINDS[kind], self.path
        known = {
            "torch": path.torch or "of the stack", "python": path.python, "soabi": path.soabi, "cuda": self.cuda,
            "machine": path.machine, "driver": path.driver, "target": self.target.id, "arch": self.target.arch, **words,
        }  # fmt: skip
        said = (text.format_map(known) for text in row[2:])
        broken = tuple(name for name in self.modules if name in set(breaks))
        fields = dict(zip(("seen", "wanted", "how", "next_step"), said, strict=True))
        return Difference(
            weight=weight or row.weight, aspect=row.aspect, subject=subject, breaks=broken, source=source, **fields
        )

    def advise(self, error: str, row: VendorPackage) -> str:
        """What to do about an error of the loader, by the table of failures; empty where no row is about it."""
        return advise(error, row.title, self.path.torch, self.cuda, self.path.driver)

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

    def reported(self, library: str) -> tuple[Version, ...]:
        """The versions that a CUDA library reports once Transformer Engine, else torch, is imported; oldest first."""
        looks = filter(None, (self.look(TE), self.look("torch")))
        texts = (one.version for look in looks for one in look.libraries if one.name == library and one.version)
        return tuple(sorted(filter(None, map(read_version, next(texts, "").split(", ")))))


def judge_host(host: Host) -> tuple[Difference, ...]:
    """Every difference: worst first, then in dependency order of the first bridge module that it breaks."""
    rows = {row.id: row for row in host.needs.package}
    found = [*_judge_stack(host)]
    for look in host.packages:
        if look.package in rows:
            found += _judge_package(rows[look.package], look, host)
    for row in host.needs.package:
        found += _judge_metadata(row, host)
    if host.target.arch:  # without a GPU nothing runs on CUDA's libraries
        for need in host.needs.need:
            if host.te is not None and need.holds_for(host.te) and need.holds_for_core(host.core_cuda):
                found += _judge_need(need, host)
        found += [*_judge_driver(host), *_judge_runtimes(host), *_judge_second_files(host)]
    # A row that says that a library is too old explains the missing symbols of that library.
    old = [one.wanted for one in found if one.aspect is Aspect.LIBRARY and one.weight is BREAKS and one.source]
    explained = {row.title for row in host.needs.library if any(wanted.startswith(row.title) for wanted in old)}
    kept = [one for one in found if one.aspect is not Aspect.SYMBOL or one.wanted.partition(" ")[0] not in explained]

    def order(one: Difference) -> tuple[int, int]:
        return one.weight.rank, host.modules.index(one.breaks[0]) if one.breaks else len(host.modules)

    return tuple(sorted(dict.fromkeys(kept), key=order))


def _judge_stack(host: Host) -> Iterator[Difference]:
    """GPU, machine and release, compared with the target and the stack."""
    target, path, te, wanted = host.target, host.path, host.te, host.stack or host.pinned
    arch = f"sm_{path.capability.replace('.', '')}" if path.gpu else ""
    if target.arch and arch != target.arch:
        gpu = f"{path.gpu} ({arch})" if path.gpu else f"no GPU: {path.no_gpu or 'unknown reason'}"
        yield host.find("gpu", {"gpu": gpu}, "GPU", host.modules)
    if target.arch and target.machine not in ("", path.machine):
        yield host.find("machine", {"wanted": target.machine}, "machine", host.modules)
    words = {
        "te": te or "not installed",
        "release": wanted.te,
        "stack": wanted.id,
        "grid": f", or see the support grid for {te.public}" if te else "",
    }
    if host.stack is not None and (te is None or te.public != wanted.te):
        yield host.find("stack", words | {"which": "requested"}, "Transformer Engine", host.modules, weight=BREAKS)
    elif te is not None and te.public != wanted.te and target.arch:
        yield host.find("stack", words | {"which": "production"}, "Transformer Engine")


# --- one package ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """One vendor package of a host: its row and the look at it."""

    row: VendorPackage
    look: PackageLook
    host: Host

    @property
    def failed(self) -> bool:
        """Whether its import does not come to a good end."""
        return self.look.failure is not None or bool(self.look.ended)

    def find(self, kind: str, words: Words = {}, *, weight: Weight | None = None) -> Difference:  # noqa: B006
        """A difference of this package, which breaks what stands on the package."""
        row, look = self.row, self.look
        known = {
            "id": row.id,
            "file": look.file,
            "version": look.version,
            "distribution": row.distributions[0],
            **words,
        }
        subject = row.title if kind in _OF_A_FILE else f"{row.title} {look.version}".strip()
        return self.host.find(kind, {**known, **words}, subject, row.breaks, weight=weight)

    def advise(self, error: str) -> str:
        """What to do about an error of the loader: by the table of failures, else install the package again."""
        path, distribution = self.host.path, self.row.distributions[0]
        again = f"install {distribution} again, built for torch {path.torch} and Python {path.python}"
        return self.host.advise(error, self.row) or again


def _judge_package(row: VendorPackage, look: PackageLook, host: Host) -> Iterator[Difference]:
    part, wanted = _Part(row, look, host), host.wants(row)
    if look.installed or look.ended:
        for one in (*_judge_import(part), *_judge_files(part), *_judge_compiled(part)):
            unused = one.weight in (BREAKS, UNKNOWN) and not wanted
            yield one.model_copy(update={"weight": NOTE}) if unused else one
    elif wanted and row.required:
        yield part.find("no torch" if row.id == "torch" else "missing", weight=BREAKS)
    elif wanted:
        yield part.find("missing").model_copy(update={"breaks": ()})


def _judge_import(part: _Part) -> Iterator[Difference]:
    look, what = part.look, f"`import {part.row.id}`"
    error = " ".join(f"{look.failure.type}: {look.failure.message}".split()) if look.failure else ""
    weight = UNKNOWN if look.ended.startswith(NOT_STARTED) else BREAKS
    if look.ended:
        what = f"{what} ends the process ({look.ended}): {look.words or 'no output'}"
    elif look.failure is not None:
        what = f"{what} raises {error[:400]}{f' (at {look.failure.frame})' if look.failure.frame else ''}"
    if part.failed:
        yield part.find("import", {"what": what, "advice": part.advise(error)}, weight=weight)


def _judge_files(part: _Part) -> Iterator[Difference]:
    """Files of a package against its metadata, and second copies."""
    look, record, path = part.look, part.look.record, part.host.path
    if others := (*record.changed, *record.gone):
        kind = "replaced" if _PATCHED * record.compared < len(others) else "patched"
        shown = ", ".join(others[:_MOST]) + (", ..." if len(others) > _MOST else "")
        numbers = {"compared": record.compared, "changed": len(record.changed), "gone": len(record.gone)}
        yield part.find(kind, {**numbers, "shown": shown})
    elif record.elsewhere:
        yield part.find("elsewhere", {"folder": record.elsewhere})
    if look.copies:
        yield part.find("copies", {"copies": ", ".join(look.copies)})
    for name in map(canonicalize_name, part.row.distributions):
        same = [one for one in path.distributions if canonicalize_name(one.name) == name]
        if len({one.version for one in same}) > 1:
            found = ", ".join(f"{one.name} {one.version} in {one.folder}" for one in same)
            yield part.find("two metadata", {"name": same[0].name, "found": found})


def _judge_compiled(part: _Part) -> Iterator[Difference]:
    """Compiled files against this Python and this torch, and the calls that show how they read tensors."""
    look, path = part.look, part.host.path
    modules: dict[str, list[str]] = {}
    for file in look.extensions:
        modules.setdefault(file.file.removesuffix(".so").removesuffix(f".{file.tag}"), []).append(file.tag)
    for module, tags in modules.items():
        if all(tag and tag not in ("abi3", path.soabi) for tag in tags):  # passed over in silence by the import
            yield part.find("python", {"name": PurePath(module).name, "tags": ", ".join(tags)})
    for call in look.behaviours:
        words = {"call": call.name, "given": call.given, "answered": call.answered, "build": _another_build(part)}
        if call.right is False:
            yield part.find("reads", words)
        elif call.right is None and path.gpu and part.host.wants(part.row):
            yield part.find("not called", words)
    for extension in look.extensions:
        if extension.problem:
            words = {"extension": extension.file, "problem": extension.problem}
            yield part.find("unreadable", words, weight=BREAKS if part.failed else RISK)
        else:
            yield from _judge_extension(part, extension, PurePath(extension.file).name)


def _judge_extension(part: _Part, extension: Extension, name: str) -> Iterator[Difference]:
    """Libraries that are not found, a second CUDA runtime, symbols that nothing defines, another torch."""
    host, owners = part.host, dict[str, list[Wanted]]()
    refused = part.failed and not extension.loaded
    missing = [library for library in extension.not_found if library != _DRIVER or host.target.arch]
    if missing and not extension.loaded:  # packages bring plugins that few can load
        error = f"OSError: {missing[0]}: cannot open shared object file"
        advice = (
            host.advise(error, part.row) or f"install what brings {missing[0]}, or put its folder on LD_LIBRARY_PATH"
        )
        words = {"name": name, "missing": ", ".join(missing), "advice": advice}
        yield part.find("libraries", words, weight=BREAKS if part.failed else NOTE)
    built = {match[1] for library in extension.needed if (match := re.match(r"libcudart\.so\.(\d+)", library))}
    if host.cuda and built and host.cuda not in built:
        yield part.find("other CUDA", {"name": name, "built": ", ".join(sorted(built))})
    for wanted in extension.wanted:
        owner = diagnose(f"ImportError: {name}: undefined symbol: {wanted.symbol}").component or wanted.owner
        if owner in (_TORCH_ABI, "torch") or not _is_tolerated(wanted, host):
            owners.setdefault(owner.removesuffix(" ABI"), []).append(wanted)
    of_torch = owners.pop("torch", [])
    for owner, symbols in owners.items():
        at_load = [wanted for wanted in symbols if not wanted.lazy] or (symbols if refused else [])
        shown = at_load or symbols
        advice = part.advise(f"ImportError: {name}: undefined symbol: {shown[0].symbol}")
        words = {"name": name, "symbols": _list_symbols(shown), "owner": owner or "a library", "advice": advice}
        weight = BREAKS if at_load and part.failed else NOTE
        yield part.find("symbols", words, weight=RISK if extension.loaded else weight)
    yield from _judge_torch(part, extension, of_torch, refused)


def _is_tolerated(wanted: Wanted, host: Host) -> bool:
    """Whether a row says that this symbol is never called, which takes one that is bound when it is called."""
    needs = (need for need in host.needs.need if need.symbol and need.symbol == wanted.symbol)
    return wanted.lazy and any(host.te is not None and need.holds_for(host.te) for need in needs)


def _judge_torch(part: _Part, extension: Extension, symbols: Sequence[Wanted], refused: bool) -> Iterator[Difference]:
    """Built for another torch: its headers, and symbols that this torch does not have."""
    moved = extension.headers.moved
    layout = [place for place in moved if place.startswith(_LAYOUT)]
    said = []
    if moved:
        shown = ", ".join((layout or list(moved))[:_MOST])
        said.append(f"{len(moved)} of {extension.headers.compared} assertions in it have other lines there ({shown})")
    if symbols:
        said.append(f"it needs {_list_symbols(symbols)}, which that torch does not define")
    right = any(call.right for call in part.look.behaviours)
    rows = (
        (BREAKS, symbols and refused, "the loader refuses it"),
        (BREAKS, layout and not right, "it loads, but reads tensor sizes at the memory offsets of another torch"),
        (RISK, symbols, "it loads; a call that needs one of them ends the process"),
        (NOTE, moved and right, "the call that reads a tensor gave the right answer"),
        (RISK, moved, "it inlines code of another torch; tensor sizes seem to lie at the same offsets"),
    )
    words = {"name": PurePath(extension.file).name, "found": "; ".join(said), "build": _another_build(part)}
    for weight, how in [(weight, how) for weight, holds, how in rows if holds][:1]:
        yield part.find("other torch", {**words, "how": how}, weight=weight)


def _another_build(part: _Part) -> str:
    text, row = part.host.path.torch, part.row
    torch = read_version(text)
    known = [one for one in part.host.needs.build if one.of in row.distributions and torch and one.is_for(torch)]
    if known:
        return f"install {', '.join(f'{one.of}{one.version}' for one in known)}, which is built for this torch"
    return f"build {row.distributions[0]} against torch {text}, or install the torch that it was built for"


def _list_symbols(symbols: Sequence[Wanted]) -> str:
    shown = ", ".join(f"`{wanted.readable}`" for wanted in symbols[:_MOST])
    return shown + (f" and {len(symbols) - _MOST} more" if len(symbols) > _MOST else "")


# --- what wheels and releases need ------------------------------------------------------------------------------------


def _judge_metadata(row: VendorPackage, host: Host) -> Iterator[Difference]:
    """What the wheels themselves require of torch, of CUDA and of each other."""
    torch = read_version(host.path.torch)
    for one in filter(None, (host.installed([name]) for name in row.distributions)):
        look = PackageLook(one.name, installed=True, version=one.version)
        part = _Part(row.model_copy(update={"title": one.name, "id": one.name}), look, host)
        local, pairs = one.version.partition("+")[2], list[tuple[str, str]]()
        built, cuda = re.search(r"torch(\d+\.\d+)", local), re.search(r"cu(\d\d)", local)
        if torch and built and not f"{torch.public}.".startswith(f"{built[1]}."):
            pairs.append((f"a build for torch {built[1]}", f"torch {torch}"))
        if row.id != "torch" and cuda and host.cuda and cuda[1] != host.cuda:
            pairs.append((f"a build for CUDA {cuda[1]}", f"CUDA {host.cuda}, as torch"))
        pairs += [(f"`{text}`", f"torch {host.path.torch}") for text in one.requires if _is_unfit(text, host)]
        for wanted, seen in pairs:
            yield part.find("wheel", {"wanted": wanted, "seen": seen})


def _is_unfit(text: str, host: Host) -> bool:
    """Whether a requirement is one of torch that the installed torch does not meet."""
    try:
        required = Requirement(text)
        found = host.installed([required.name])
        marker = {"extra": "", "python_version": host.path.python[:4]}
        if canonicalize_name(required.name) != "torch" or found is None:
            return False
        if required.marker is not None and not required.marker.evaluate(marker):
            return False
        return not required.specifier.contains(found.version, prereleases=True)
    except (InvalidRequirement, ValueError):
        return False


def _judge_need(need: Need, host: Host) -> Iterator[Difference]:
    """A row of what the release needs, against what is loaded, or installed."""
    look, found, weight, title = host.look(TE), "", BREAKS, need.of
    if need.kind == "library":
        row, reported = host.library(need.of), host.reported(need.of)
        installed, title = host.installed(row.distributions), row.title
        # The oldest one counts: where two files are mapped, a mixture of them may run.
        oldest = reported[0] if reported else read_version(installed.version if installed else "")
        if oldest is None and look is not None:
            found, weight = f"no {row.title} with a known version", UNKNOWN
        elif oldest is not None and not need.allows(oldest):
            found = f"{row.title} {oldest}{'' if reported else ' is installed'}"
    elif need.kind == "distribution":
        neighbour = host.installed([need.beside]) if need.with_ else None
        if need.with_ and (neighbour is None or not need.holds_beside(read_version(neighbour.version))):
            return
        beside = f" beside {neighbour.name} {neighbour.version}" if neighbour else ""
        installed = host.installed([need.of])
        version = read_version(installed.version if installed else "")
        failed = look is not None and (look.failure is not None or bool(look.ended))
        if installed is None:
            # After an import without an error this need is no hindrance to the import, whatever the metadata says.
            found = f"{need.of} is not installed{beside}"
            weight = BREAKS if failed or look is None or "imports" not in need.breaks else RISK
        elif version is not None and not need.allows(version):
            found, weight = f"{need.of} {version}{beside}", BREAKS if failed else RISK
    elif look is not None and any(one.symbol == need.symbol for file in look.extensions for one in file.wanted):
        found, weight, title = f"{need.symbol} is missing", NOTE, host.library(need.of).title
    if found:
        needed = need.version.replace(">=", "at least ").replace("<", "below ") or "any release"
        words = {"found": found, "title": title, "range": needed, "says": need.says, "next": need.next}
        kind = "need" if need.kind == "distribution" else "library"
        yield host.find(kind, words, f"Transformer Engine {host.te}", need.breaks, weight=weight, source=need.source)


def _judge_driver(host: Host) -> Iterator[Difference]:
    """The driver against the CUDA release that torch was built for. Source: CUDA compatibility guide."""
    built, driver = read_version(host.path.torch_cuda), read_version(host.path.driver_cuda)
    if built is not None and driver is not None and driver < built:
        kind, breaks = ("old driver", host.modules) if driver.major < built.major else ("driver", ())
        words = {"runs": driver, "built": built, "major": built.major}
        yield host.find(kind, words, "NVIDIA driver", breaks, source="docs.nvidia.com/deploy/cuda-compatibility")


def _judge_second_files(host: Host) -> Iterator[Difference]:
    """Two files of one CUDA library in one process; the runtime has a rule of its own."""
    for row in (row for row in host.needs.library if row.id != _RUNTIME):
        for look in filter(None, (host.look(TE), host.look("torch"))):
            of_it = [files for name, files in look.mapped.items() if name == row.id or name.startswith(f"{row.id}_")]
            folders = dict.fromkeys(str(PurePath(file).parent) for files in of_it for file in files)
            if len(folders) > 1:
                version = ", ".join(map(str, host.reported(row.id))) or "of an unknown version"
                words = {"package": look.package, "title": row.title, "found": version, "home": row.title.upper()}
                yield host.find("two files", {**words, "folders": ", ".join(folders)}, row.title, row.breaks)
                break


def _judge_runtimes(host: Host) -> Iterator[Difference]:
    """More than one CUDA runtime that a process can open: with Transformer Engine, else with FlashAttention 3 alone."""
    look, fa3 = host.look(TE) or host.look("torch"), host.look(_FA3)
    in_te = look is not None and len(look.runtimes) > 1
    look = look if in_te or look is None else fa3
    if look is None or len(look.runtimes) < 2:
        return
    kinds = ("one-runtime", "one-runtime-warned")
    rule = next((need for need in host.needs.need if need.kind in kinds and host.te and need.holds_for(host.te)), None)
    throws = rule is not None and rule.kind == "one-runtime"
    breaks: Sequence[str] = host.library(_RUNTIME).breaks if in_te else ()
    if rule is not None and (throws or not in_te):
        breaks = rule.breaks
    path = f"; LD_LIBRARY_PATH={host.path.ld_library_path}" if in_te and host.path.ld_library_path else ""
    words = {
        "package": look.package,
        "found": ", ".join(f"{name} ({file})" for name, file in look.runtimes.items()) + path,
        "says": rule.says if rule else "two runtimes in one process do not share their state",
        "next": "import FlashAttention 3 in no process that uses Transformer Engine's attention",
    }
    if in_te:
        words["next"] = rule.next if rule else "leave only torch's own to be found"
    weight = (BREAKS if throws else RISK) if in_te else (RISK if throws else NOTE)
    yield host.find("runtimes", words, "CUDA runtime", breaks, weight=weight, source=rule.source if rule else "")
