"""The compiled files of a package, judged: damaged, for another Python, for another torch, without its libraries."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Final

from ..catalog.needs import VendorPackage
from ..evidence.doctor_look import Extension, PackageLook, Wanted
from .doctor_result import Aspect, Difference, Weight
from .doctor_seen import Rows, Seen, join, read_version

# Headers that lay a tensor out: an extension reads its members through what they inline.
_LAYOUT: Final = ("c10/core/TensorImpl.h", "c10/core/impl/PyObjectSlot.h", "c10/core/impl/SizesAndStrides.h",
                  "c10/core/StorageImpl.h")  # fmt: skip
_DRIVER: Final = "libcuda.so.1"
_MOST: Final = 3  # examples in a sentence


def judge_extensions(row: VendorPackage, look: PackageLook, seen: Seen, rows: Rows) -> Iterator[Difference]:
    """What is wrong with the compiled files of one package."""
    yield from _judge_tags(row, look, seen, rows)
    yield from _judge_behaviours(row, look, seen, rows)
    for extension in look.extensions:
        if extension.problem:
            yield _say_damaged(row, look, extension, rows)
            continue
        yield from _judge_libraries(row, look, extension, seen, rows)
        yield from _judge_symbols(row, look, extension, seen, rows)
        yield from _judge_torch(row, look, extension, seen, rows)


def _judge_tags(row: VendorPackage, look: PackageLook, seen: Seen, rows: Rows) -> Iterator[Difference]:
    """A module of which there is no file for this Python: a file for another one is passed over in silence."""
    modules: dict[str, list[Extension]] = {}
    for extension in look.extensions:
        modules.setdefault(extension.file.removesuffix(".so").removesuffix(f".{extension.tag}"), []).append(extension)
    for module, files in modules.items():
        if all(file.tag and file.tag not in ("abi3", seen.path.soabi) for file in files):
            yield Difference(
                weight=Weight.BREAKS,
                aspect=Aspect.PYTHON_ABI,
                subject=row.title,
                seen=f"`{PurePath(module).name}` is there for {join(file.tag for file in files)} only",
                wanted=f"one for {seen.path.soabi} (Python {seen.path.python}), or for abi3",
                breaks=rows.order(row.breaks),
                how="the import does not find its compiled half",
                next_step=f"install {row.distributions[0]} with this interpreter's own pip",
            )


def _judge_behaviours(row: VendorPackage, look: PackageLook, seen: Seen, rows: Rows) -> Iterator[Difference]:
    for behaviour in look.behaviours:
        if behaviour.right is False:
            yield Difference(
                weight=Weight.BREAKS,
                aspect=Aspect.TORCH_ABI,
                subject=f"{row.title} {look.version}",
                seen=f"given a {behaviour.given}, `{behaviour.name}` answers: {behaviour.answered}",
                wanted="the tensor as it is",
                breaks=rows.order(row.breaks),
                how="it reads the sizes of tensors from the wrong place, so whatever it computes is refused or wrong",
                next_step=_another_build(row, seen, rows),
            )
        elif behaviour.right is None and seen.path.gpu and rows.wants(row):
            yield Difference(
                weight=Weight.UNKNOWN,
                aspect=Aspect.LOOK,
                subject=f"{row.title} {look.version}",
                seen=f"`{behaviour.name}` could not be asked: {behaviour.answered}",
                wanted=f"its answer to a {behaviour.given}",
                breaks=rows.order(row.breaks),
                how="whether it reads tensors rightly is not known",
                next_step="run the parity of this stack, which computes with it",
            )


def _say_damaged(row: VendorPackage, look: PackageLook, extension: Extension, rows: Rows) -> Difference:
    failed = look.failure is not None or bool(look.ended)
    return Difference(
        weight=Weight.BREAKS if failed else Weight.RISK,
        aspect=Aspect.LIBRARY,
        subject=row.title,
        seen=f"{extension.file} cannot be read: {extension.problem}",
        wanted="a shared library",
        breaks=rows.order(row.breaks),
        how="the loader refuses it",
        next_step=f"install {row.distributions[0]} {look.version} again, without pip's cache",
    )


def _judge_libraries(
    row: VendorPackage, look: PackageLook, extension: Extension, seen: Seen, rows: Rows
) -> Iterator[Difference]:
    name = PurePath(extension.file).name
    missing = [library for library in extension.not_found if library != _DRIVER or rows.target.arch]
    if missing and not extension.loaded:
        failed = look.failure is not None or bool(look.ended)
        yield Difference(
            weight=Weight.BREAKS if failed else Weight.NOTE,  # packages bring plugins that few hosts can load
            aspect=Aspect.LIBRARY,
            subject=row.title,
            seen=f"`{name}` needs {join(missing)}, which the loader does not find",
            wanted="each of them on LD_LIBRARY_PATH, in the loader's cache, or beside torch",
            breaks=rows.order(row.breaks),
            how="the loader refuses it" if failed else "the import goes without this file; what needs it fails later",
            next_step=_find_missing(missing, extension, seen),
        )
    runtimes = {found[1] for library in extension.needed if (found := re.match(r"libcudart\.so\.(\d+)", library))}
    own = seen.path.torch_cuda.partition(".")[0]
    if own and runtimes and own not in runtimes:
        yield Difference(
            weight=Weight.RISK,
            aspect=Aspect.CUDA_RUNTIME,
            subject=row.title,
            seen=f"`{name}` was built for CUDA {join(sorted(runtimes))}",
            wanted=f"CUDA {own}, as torch {seen.path.torch}",
            breaks=rows.order(row.breaks),
            how="it brings a second CUDA runtime, with which Transformer Engine before 2.17 refuses attention",
            next_step=f"install a build of {row.distributions[0]} for CUDA {own}, or keep it out of such a process",
        )


def _find_missing(missing: Sequence[str], extension: Extension, seen: Seen) -> str:
    known = {name: files[0] for name, files in seen.path.visible.items()}
    if found := [known[name] for name in missing if name in known]:
        return f"see why {found[0]} is not found from {extension.file}: its own libraries may be missing"
    if any(name.startswith(("libtorch", "libc10")) for name in missing):
        return "install the torch that it was built for: this one has no such library (a CPU build?)"
    return f"install what brings {missing[0]}, or put its folder on LD_LIBRARY_PATH"


def _judge_symbols(
    row: VendorPackage, look: PackageLook, extension: Extension, seen: Seen, rows: Rows
) -> Iterator[Difference]:
    """Symbols of others than torch that nothing defines."""
    failed = look.failure is not None or bool(look.ended)
    owners = dict.fromkeys(wanted.owner for wanted in extension.wanted if wanted.owner != "torch")
    for owner in owners:
        symbols = [wanted for wanted in extension.wanted if wanted.owner == owner]
        loud = [wanted for wanted in symbols if not _is_tolerated(wanted, seen, rows)]
        if not loud:
            continue
        now = [wanted for wanted in loud if not wanted.lazy] or (loud if failed and not extension.loaded else [])
        weight = Weight.RISK
        if not extension.loaded:
            weight = Weight.BREAKS if now and failed else Weight.NOTE
        yield Difference(
            weight=weight,
            aspect=Aspect.SYMBOL,
            subject=row.title,
            seen=f"`{PurePath(extension.file).name}` wants {_list_symbols(now or loud)}, which nothing defines",
            wanted=f"{owner or 'a library'} of the release that it was built with",
            breaks=rows.order(row.breaks),
            how="the loader refuses it" if weight is Weight.BREAKS else "a call that needs it ends the process",
            next_step=f"install a newer {owner or 'neighbour'}, or a {row.distributions[0]} built for the one there is",
        )


def _is_tolerated(wanted: Wanted, seen: Seen, rows: Rows) -> bool:
    """Whether a row says that this symbol is never called; only one that is bound when called can be."""
    te = seen.te
    return wanted.lazy and any(
        need.symbol == wanted.symbol and te is not None and need.holds_for(te)
        for need in rows.needs.need
        if need.symbol
    )


def _judge_torch(
    row: VendorPackage, look: PackageLook, extension: Extension, seen: Seen, rows: Rows
) -> Iterator[Difference]:
    """Built for another torch: its headers, and symbols that this torch does not have."""
    symbols = [wanted for wanted in extension.wanted if wanted.owner == "torch"]
    moved = extension.headers.moved
    if not symbols and not moved:
        return
    layout = [place for place in moved if place.startswith(_LAYOUT)]
    told = []
    if moved:
        shown = join((layout or list(moved))[:_MOST])
        told.append(
            f"{len(moved)} of {extension.headers.compared} assertions in it stand elsewhere in its headers ({shown})"
        )
    if symbols:
        told.append(f"it wants {_list_symbols(symbols)}, which that torch does not define")
    failed = (look.failure is not None or bool(look.ended)) and not extension.loaded
    right = [behaviour.right for behaviour in look.behaviours]
    if failed and symbols:
        weight, how = Weight.BREAKS, "the loader refuses it"
    elif layout and True not in right:
        weight, how = Weight.BREAKS, "it loads, and reads sizes and strides of tensors where another torch has them"
    elif symbols:
        weight, how = Weight.RISK, "it loads; a call that needs one of them ends the process"
    elif True in right:
        weight, how = Weight.NOTE, "the call that reads a tensor answered rightly"
    else:
        weight, how = Weight.RISK, "what it inlines of torch is not what is there; sizes of tensors seem to be the same"
    yield Difference(
        weight=weight,
        aspect=Aspect.TORCH_ABI,
        subject=f"{row.title} {look.version}".strip(),
        seen=f"`{PurePath(extension.file).name}` was not built for torch {seen.path.torch}: {'; '.join(told)}",
        wanted=f"a build for torch {seen.path.torch}",
        breaks=rows.order(row.breaks),
        how=how,
        next_step=_another_build(row, seen, rows),
    )


def _another_build(row: VendorPackage, seen: Seen, rows: Rows) -> str:
    torch = read_version(seen.path.torch)
    known = [build for build in rows.needs.build if build.of in row.distributions and torch and build.is_for(torch)]
    if known:
        return f"install {join(f'{build.of}{build.version}' for build in known)}, which is built for this torch"
    name = row.distributions[0]
    return f"build {name} against torch {seen.path.torch}, or install the torch that it was built for"


def _list_symbols(symbols: Sequence[Wanted]) -> str:
    shown = join(f"`{wanted.readable}`" for wanted in symbols[:_MOST])
    return shown + (f" and {len(symbols) - _MOST} more" if len(symbols) > _MOST else "")
