"""What the doctor saw, compared with the matrix: a pure function from a host to its differences, worst first.

The `difference` rows of matrix/needs.toml have the words of every kind of difference; the functions here decide which
holds, and how bad it is. What a loader error means, and what to do about it, comes from the table of failures in
`diagnosis`, as for a red receipt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from pathlib import PurePath
from typing import Any, Final, Literal

from packaging.version import Version

from ..catalog.bridge import Stack, Target
from ..catalog.images import Need, Needs, VendorPackage, is_in
from ..diagnosis.next_steps import advise
from ..diagnosis.rows import owner_of
from ..errors import Exit, exit_for
from ..evidence.doctor_look import Extension, PackageLook, PathLook, Wanted
from ..evidence.values import Frozen, Result, read_version
from .fits import JUDGED, TE, Fit, FitVerdict, add_libraries, judge_needs, list_loaded
from .fits import Stack as LoadedStack

NOT_STARTED: Final = "not started"
_RUNTIME: Final = "libcudart"
_MOST: Final = 3  # examples in a sentence
_PATCHED: Final = 0.1  # share of files that a person patches; between 2.17.1 and 2.18.0 a quarter of them changes
# Headers that lay a tensor out: an extension reads its members through what they inline.
_LAYOUT: Final = ("c10/core/TensorImpl.h", "c10/core/impl/PyObjectSlot.h", "c10/core/impl/SizesAndStrides.h",
                  "c10/core/StorageImpl.h")  # fmt: skip


class Weight(StrEnum):
    """How bad a difference is; in this order."""

    BREAKS = "breaks"  # it fails, or computes wrongly
    UNKNOWN = "unknown"  # it could not be checked
    RISK = "risk"  # it may fail, depending on what is called
    NOTE = "note"  # nothing fails because of it


class Difference(Frozen):
    """One difference.

    Attributes:
        aspect: what it is about: "import", "version", "torch ABI", ...
        subject: the package or library, as people call it.
        seen, wanted: what is there, and what should be; in words.
        breaks: bridge modules that fail because of it, in dependency order.
        how: what happens to them.
        next_step: what to do.
        source: where the wanted state is documented or was seen; empty where it is plain.
    """

    weight: Weight
    aspect: str
    subject: str
    seen: str
    wanted: str
    breaks: tuple[str, ...] = ()
    how: str
    next_step: str
    source: str = ""


class DoctorResult(Result):
    """One interpreter, checked.

    Attributes:
        interpreter: its path, and why the doctor chose it.
        target: the row of `matrix/targets.toml` that it is compared with.
        stack: the row of `matrix/stacks.toml` that it is compared with, and whether that is the pinned one.
        path: what it would find, without importing any of it.
        packages: as loaded, a process each.
        differences: worst first, then in dependency order of what they break.
    """

    schema_id: Literal["megacpp-validate/doctor/1"] = "megacpp-validate/doctor/1"
    interpreter: str
    target: str
    stack: str
    path: PathLook
    packages: tuple[PackageLook, ...]
    differences: tuple[Difference, ...]
    seconds: float

    @property
    def exit(self) -> Exit:
        """Closed where something fails; evidence is missing where something could not be checked."""
        weights = {difference.weight for difference in self.differences}
        return exit_for(breaks=Weight.BREAKS in weights, lacks=Weight.UNKNOWN in weights)


BREAKS, UNKNOWN, RISK, NOTE = Weight
_WEIGHTS: Final = {FitVerdict.REFUSED: BREAKS, FitVerdict.UNKNOWN: UNKNOWN, FitVerdict.WARNED: RISK}
# Kinds of difference that are about a file of a package, whatever the version of the package is.
_OF_A_FILE: Final = frozenset({"unreadable", "python", "libraries", "symbols"})


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
        self, kind: str, subject: str, breaks: Iterable[str] = (), *, weight: Weight | None = None, source: str = "",
        **words: Any,
    ) -> Difference:  # fmt: skip
        """A difference of some kind; its words, and those of the host, fill the sentences."""
        row, path = next(one for one in self.needs.difference if one.id == kind), self.path
        known = {"torch": path.torch or "of the stack", "target": self.target.id, "path": path, **words}
        seen, wanted, how, step = (text.format_map(known) for text in (row.seen, row.wanted, row.how, row.next))
        return Difference(
            weight=weight or Weight(row.weight), aspect=row.aspect, subject=subject, source=source, seen=seen,
            wanted=wanted, how=how, next_step=step, breaks=tuple(name for name in self.modules if name in set(breaks)),
        )  # fmt: skip

    def wants(self, row: VendorPackage) -> bool:
        """Whether the target has a use for a package."""
        if not self.target.arch:
            return row.id == "torch"
        return row.required or row.attention in self.target.attention or (row.deep_gemm and self.target.deep_gemm)

    def look(self, name: str) -> PackageLook | None:
        """The look at a package; None where it is not installed."""
        return next((look for look in self.packages if look.package == name and look.installed), None)

    @cached_property
    def loaded(self) -> LoadedStack:
        """What is there, as `fits` compares it."""
        found = {part.name: part for part in list_loaded(self.path, self.packages)}
        return add_libraries(LoadedStack("the host", "", found, complete=True), self.needs)

    @cached_property
    def te(self) -> Version | None:
        """The release of Transformer Engine as loaded, else as installed."""
        look = self.look(TE)
        return read_version(look.version if look else "") or self.loaded.version("transformer-engine")

    @cached_property
    def needed(self) -> tuple[tuple[Need, Fit], ...]:
        """What the release needs on a GPU, compared; without one nothing runs on CUDA's libraries."""
        stack = replace(self.loaded, te=str(self.te or ""))
        return tuple(judge_needs(stack, self.needs)) if self.target.arch else ()

    @cached_property
    def titles(self) -> dict[str, str]:
        """CUDA library -> what people call it."""
        return {row.id: row.title for row in self.needs.library}

    @property
    def cuda(self) -> str:
        """The major CUDA release that torch is built for; empty for a CPU build."""
        return self.path.torch_cuda.partition(".")[0]

    @cached_property
    def too_old(self) -> frozenset[str]:
        """Titles of the CUDA libraries that are known to be too old, which explains the symbols that they lack."""
        found = (need.of for need, fit in self.needed if need.kind == "library" and fit.verdict is FitVerdict.REFUSED)
        return frozenset(map(self.titles.__getitem__, found))


def judge_host(host: Host) -> tuple[Difference, ...]:
    """Every difference: worst first, then in dependency order of the first bridge module that it breaks."""
    rows = {row.id: row for row in host.needs.package}
    found = [*_judge_stack(host)]
    for look in host.packages:
        if look.package in rows:
            found += _judge_package(_Part(rows[look.package], look, host))
    found += _judge_needs(host)
    if host.target.arch:
        found += [*_judge_runtimes(host), *_judge_second_files(host)]

    def order(one: Difference) -> tuple[int, int]:
        return list(Weight).index(one.weight), host.modules.index(one.breaks[0]) if one.breaks else len(host.modules)

    return tuple(sorted(dict.fromkeys(found), key=order))


def _judge_stack(host: Host) -> Iterator[Difference]:
    """GPU, release and driver, compared with the target, the stack and torch."""
    target, path, te, wanted = host.target, host.path, host.te, host.stack or host.pinned
    arch = f"sm_{path.capability.replace('.', '')}" if path.gpu else ""
    if target.arch and arch != target.arch:
        gpu = f"{path.gpu} ({arch})" if path.gpu else f"no GPU: {path.no_gpu or 'unknown reason'}"
        yield host.find("host", "GPU", host.modules, host=gpu, wanted=target.arch)
    if target.arch and target.machine not in ("", path.machine):
        yield host.find("host", "machine", host.modules, host=path.machine, wanted=target.machine)
    differs = te is None or te.public != wanted.te
    if differs and (host.stack is not None or (te is not None and target.arch)):
        which, breaks, weight = ("requested", host.modules, BREAKS) if host.stack else ("production", (), NOTE)
        yield host.find(
            "stack", "Transformer Engine", breaks, weight=weight, te=te or "not installed", release=wanted.te,
            stack=wanted.id, which=which,
        )  # fmt: skip
    built, runs = read_version(path.torch_cuda), read_version(path.driver_cuda)
    if target.arch and built is not None and runs is not None and runs.major < built.major:
        source = "docs.nvidia.com/deploy/cuda-compatibility"
        yield host.find("old driver", "NVIDIA driver", host.modules, source=source, runs=runs, built=built)


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

    def find(self, kind: str, weight: Weight | None = None, **words: Any) -> Difference:
        """A difference of this package, which breaks what stands on the package."""
        row, look = self.row, self.look
        words |= {"row": row, "look": look, "distribution": row.distributions[0], "build": self.another_build}
        subject = row.title if kind in _OF_A_FILE else f"{row.title} {look.version}".strip()
        return self.host.find(kind, subject, row.breaks, weight=weight, **words)

    def advise(self, error: str, otherwise: str = "") -> str:
        """What to do about an error of the loader: by the table of failures, else install the package again."""
        path, distribution = self.host.path, self.row.distributions[0]
        again = f"install {distribution} again, built for torch {path.torch} and Python {path.python}"
        known = advise(error, self.row.title, path.torch, self.host.cuda, path.driver)
        return known or otherwise or again

    @property
    def another_build(self) -> str:
        """What to install where it was built for another torch."""
        text, row = self.host.path.torch, self.row
        torch = read_version(text)
        known = [
            one for one in self.host.needs.build if one.of in row.distributions and torch and is_in(torch, one.torch)
        ]
        if known:
            return f"install {', '.join(f'{one.of}{one.version}' for one in known)}, which is built for this torch"
        return f"build {row.distributions[0]} against torch {text}, or install the torch that it was built for"


def _judge_package(part: _Part) -> Iterator[Difference]:
    row, look, wanted = part.row, part.look, part.host.wants(part.row)
    if look.installed or look.ended:
        for one in (*_judge_import(part), *_judge_compiled(part)):
            unused = one.weight in (BREAKS, UNKNOWN) and not wanted
            yield one.model_copy(update={"weight": NOTE}) if unused else one
    elif wanted and row.required:
        yield part.find("missing", BREAKS)
    elif wanted:
        yield part.find("missing").model_copy(update={"breaks": ()})


def _judge_import(part: _Part) -> Iterator[Difference]:
    """The import itself, files of a package against its metadata, and second copies."""
    look, what, record = part.look, f"`import {part.row.id}`", part.look.record
    error = " ".join(f"{look.failure.type}: {look.failure.message}".split()) if look.failure else ""
    if look.ended:
        what = f"{what} ends the process ({look.ended}): {look.words or 'no output'}"
    elif look.failure is not None:
        what = f"{what} raises {error[:400]}{f' (at {look.failure.frame})' if look.failure.frame else ''}"
    if part.failed:
        weight = UNKNOWN if look.ended.startswith(NOT_STARTED) else BREAKS
        yield part.find("import", weight, what=what, advice=part.advise(error))
    if others := (*record.changed, *record.gone):
        weight, effect = UNKNOWN, "the release that is there is unknown"
        if len(others) <= _PATCHED * record.compared:
            weight, effect = RISK, "its code differs from the release"
        shown = ", ".join(others[:_MOST]) + (", ..." if len(others) > _MOST else "")
        counts = f"{len(record.changed)} are changed and {len(record.gone)} are gone"
        yield part.find("patched", weight, counts=counts, shown=shown, effect=effect)
    if copies := ", ".join(filter(None, (*look.copies, record.elsewhere))):
        yield part.find("copies", copies=copies)


def _judge_compiled(part: _Part) -> Iterator[Difference]:
    """Compiled files against this Python and this torch, and the calls that show how they read tensors."""
    look, soabi = part.look, part.host.path.soabi
    modules: dict[str, list[str]] = {}
    for file in look.extensions:
        modules.setdefault(file.file.removesuffix(".so").removesuffix(f".{file.tag}"), []).append(file.tag)
    for module, tags in modules.items():
        if all(tag and tag not in ("abi3", soabi) for tag in tags):  # passed over in silence by the import
            yield part.find("python", name=PurePath(module).name, tags=", ".join(tags))
    for call in look.behaviours:
        if call.right is False or (call.right is None and part.host.path.gpu and part.host.wants(part.row)):
            yield part.find("not called" if call.right is None else "reads", call=call)
    for extension in look.extensions:
        if extension.problem:
            yield part.find("unreadable", BREAKS if part.failed else RISK, extension=extension)
        else:
            yield from _judge_extension(part, extension, PurePath(extension.file).name)


def _judge_extension(part: _Part, extension: Extension, name: str) -> Iterator[Difference]:
    """Libraries that are not found, symbols that nothing defines, another torch."""
    host, owners = part.host, dict[str, list[Wanted]]()
    refused = part.failed and not extension.loaded
    missing = [library for library in extension.not_found if library != "libcuda.so.1" or host.target.arch]
    if missing and not extension.loaded:  # packages bring plugins that few can load
        otherwise = f"install what brings {missing[0]}, or put its folder on LD_LIBRARY_PATH"
        advice = part.advise(f"OSError: {missing[0]}: cannot open shared object file", otherwise)
        weight = BREAKS if part.failed else NOTE
        yield part.find("libraries", weight, name=name, missing=", ".join(missing), advice=advice)
    never_called = {row.symbol for row, _ in host.needed if row.symbol}
    for wanted in extension.wanted:
        owner = owner_of(wanted.symbol)
        owner = "a library" if owner is None else owner.removesuffix(" ABI") or "Transformer Engine"
        if owner not in host.too_old and not (wanted.lazy and wanted.symbol in never_called):
            owners.setdefault(owner, []).append(wanted)
    of_torch = owners.pop("torch", [])
    for owner, symbols in owners.items():
        at_load = [wanted for wanted in symbols if not wanted.lazy] or (symbols if refused else [])
        shown = at_load or symbols
        advice = part.advise(f"ImportError: {name}: undefined symbol: {shown[0].symbol}")
        weight = RISK if extension.loaded else BREAKS if at_load and part.failed else NOTE
        yield part.find("symbols", weight, name=name, symbols=_list_symbols(shown), owner=owner, advice=advice)
    yield from _judge_torch(part, extension, of_torch, refused)


def _judge_torch(part: _Part, extension: Extension, symbols: Sequence[Wanted], refused: bool) -> Iterator[Difference]:
    """Built for another torch: its headers, and symbols that this torch does not have."""
    moved = extension.headers.moved
    layout = [place for place in moved if place.startswith(_LAYOUT)]
    found = []
    if moved:
        shown = ", ".join((layout or list(moved))[:_MOST])
        found.append(f"{len(moved)} of {extension.headers.compared} assertions in it have other lines there ({shown})")
    if symbols:
        found.append(f"it needs {_list_symbols(symbols)}, which that torch does not define")
    right = any(call.right for call in part.look.behaviours)
    rows = (
        (BREAKS, symbols and refused, "the loader refuses it"),
        (BREAKS, layout and not right, "it loads, but reads tensor sizes at the memory offsets of another torch"),
        (RISK, symbols, "it loads; a call that needs one of them ends the process"),
        (NOTE, moved and right, "the call that reads a tensor gave the right answer"),
        (RISK, moved, "it inlines code of another torch; tensor sizes seem to lie at the same offsets"),
    )
    for weight, how in [(weight, how) for weight, holds, how in rows if holds][:1]:
        yield part.find("other torch", weight, name=PurePath(extension.file).name, found="; ".join(found), how=how)


def _list_symbols(symbols: Sequence[Wanted]) -> str:
    shown = ", ".join(f"`{wanted.readable}`" for wanted in symbols[:_MOST])
    return shown + (f" and {len(symbols) - _MOST} more" if len(symbols) > _MOST else "")


# --- what a release needs ---------------------------------------------------------------------------------------------


def _judge_needs(host: Host) -> Iterator[Difference]:
    """What the release needs, against what is loaded, or installed."""
    look = host.look(TE)
    works = look is not None and look.failure is None and not look.ended
    symbols = {one.symbol for file in look.extensions for one in file.wanted} if look else set()
    for need, fit in host.needed:
        title, weight = host.titles.get(need.of, need.of), _WEIGHTS.get(fit.verdict)
        words = {"variable": f"{need.of} is not set to 1", "tolerated-symbol": f"{need.symbol} is missing"}
        if need.kind == "distribution" and works and (need.of in host.loaded.parts or "imports" in need.breaks):
            # After an import without an error this need is no hindrance to the import, whatever the metadata says.
            weight = RISK if weight else None
        elif need.kind not in JUDGED:
            weight = NOTE if need.symbol in symbols else None
        if weight:
            yield host.find(
                "library" if need.of in host.titles else "need", f"Transformer Engine {host.te}", fit.breaks,
                weight=weight, source=fit.source, found=words.get(need.kind, f"{title} {fit.seen}"), title=title,
                range=fit.wanted, says=fit.says, next=fit.next_step,
            )  # fmt: skip


def _judge_second_files(host: Host) -> Iterator[Difference]:
    """Two files of one CUDA library in one process; the runtime has a rule of its own."""
    for row in (row for row in host.needs.library if row.id != _RUNTIME):
        for look in filter(None, (host.look(TE), host.look("torch"))):
            of_it = [files for name, files in look.mapped.items() if name == row.id or name.startswith(f"{row.id}_")]
            folders = dict.fromkeys(str(PurePath(file).parent) for files in of_it for file in files)
            if len(folders) > 1:
                version = next((one.version for one in look.libraries if one.name == row.id), "")
                yield host.find(
                    "two files", row.title, row.breaks, package=look.package, title=row.title,
                    found=version or "of an unknown version",
                    folders=", ".join(folders), home=row.title.upper(),
                )  # fmt: skip
                break


def _judge_runtimes(host: Host) -> Iterator[Difference]:
    """More than one CUDA runtime that a process with Transformer Engine can open."""
    look = host.look(TE) or host.look("torch")
    if look is None or len(look.runtimes) < 2:
        return
    path = f"; LD_LIBRARY_PATH={host.path.ld_library_path}" if host.path.ld_library_path else ""
    found = ", ".join(f"{name} ({file})" for name, file in look.runtimes.items()) + path
    says, step = "two runtimes in one process do not share their state", "leave only torch's own to be found"
    breaks, weight, source = next(row for row in host.needs.library if row.id == _RUNTIME).breaks, RISK, ""
    for rule in [need for need, _ in host.needed if need.kind in ("one-runtime", "one-runtime-warned")][:1]:
        says, step, source = rule.says, rule.next, rule.source
        if rule.kind == "one-runtime":  # the import throws
            breaks, weight = rule.breaks, BREAKS
    yield host.find(
        "runtimes", "CUDA runtime", breaks, weight=weight, source=source, package=look.package, found=found, says=says,
        next=step,
    )  # fmt: skip
