"""What the doctor saw, held against the matrix: a pure function from a host to its differences, worst first."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Final

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from ..catalog.needs import Need, VendorPackage
from ..evidence.doctor_look import Distribution, Extension, PackageLook, Wanted
from .doctor_host import NOT_STARTED, TE, Host, Part, read_version
from .doctor_result import Aspect, Difference, Weight

_FA3: Final = "flash_attn_interface"
_RUNTIME: Final = "libcudart"
_DRIVER: Final = "libcuda.so.1"
_MOST: Final = 3  # examples in a sentence
_PATCHED: Final = 0.1  # share of files that a person patches; between 2.17.1 and 2.18.0 a quarter of them changes
# Headers that lay a tensor out: an extension reads its members through what they inline.
_LAYOUT: Final = ("c10/core/TensorImpl.h", "c10/core/impl/PyObjectSlot.h", "c10/core/impl/SizesAndStrides.h",
                  "c10/core/StorageImpl.h")  # fmt: skip


def judge_host(host: Host) -> tuple[Difference, ...]:
    """Every difference: worst first, then in dependency order of the first bridge module that it breaks."""
    found = [*_judge_target(host), *_judge_stack(host)]
    rows = {row.id: row for row in host.needs.package}
    for part in (Part(rows[look.package], look, host) for look in host.packages if look.package in rows):
        found += _judge_package(part)
    if host.te is not None and host.target.arch:
        found += _judge_needs(host, host.te)
    for row in host.needs.package:
        found += _judge_metadata(row, host)
    if host.target.arch:  # without a GPU nothing runs on them
        found += [*_judge_driver(host), *_judge_runtimes(host), *_judge_second_files(host)]
    # A row that says that a library is too old explains the missing symbols of that library.
    old = [one.wanted for one in found if one.aspect is Aspect.LIBRARY and one.weight is Weight.BREAKS and one.source]
    explained = {row.title for row in host.needs.library if any(wanted.startswith(row.title) for wanted in old)}
    kept = [one for one in found if one.aspect is not Aspect.SYMBOL or one.wanted.partition(" ")[0] not in explained]

    def order(one: Difference) -> tuple[int, int]:
        return one.weight.rank, host.modules.index(one.breaks[0]) if one.breaks else len(host.modules)

    return tuple(sorted(dict.fromkeys(kept), key=order))


def _judge_target(host: Host) -> Iterator[Difference]:
    target, path = host.target, host.path
    if not target.arch:
        return
    arch = f"sm_{path.capability.replace('.', '')}" if path.gpu else ""
    gpu = f"{path.gpu} ({arch})" if path.gpu else f"no GPU: {path.no_gpu or 'unknown reason'}"
    machine = f"run it on a machine of the target {target.id}"
    for subject, differs, seen, wanted, how, step in (
        ("GPU", arch != target.arch, gpu, f"a GPU of the target {target.id} ({target.arch})",
         "the doctor did not check what needs that GPU", f"{machine}, or give --target cpu"),
        ("machine", target.machine not in ("", path.machine), path.machine, target.machine,
         "its packages are other files than those of the target", machine),
    ):  # fmt: skip
        if differs:
            yield Difference(
                weight=Weight.UNKNOWN, aspect=Aspect.LOOK, subject=subject, seen=seen, wanted=wanted,
                breaks=host.modules, how=how, next_step=step,
            )  # fmt: skip


def _judge_stack(host: Host) -> Iterator[Difference]:
    te, wanted = host.te, host.stack or host.pinned
    if (te is not None and te.public == wanted.te) or (host.stack is None and (te is None or not host.target.arch)):
        return
    yield Difference(
        weight=Weight.BREAKS if host.stack else Weight.NOTE,
        aspect=Aspect.VERSION,
        subject="Transformer Engine",
        seen=str(te or "not installed"),
        wanted=f"{wanted.te}, {'the requested' if host.stack else 'the production'} stack {wanted.id}",
        breaks=host.modules if host.stack else (),
        how="results of that stack do not hold for this one",
        next_step=f"install transformer-engine=={wanted.te}"
        + (f", or see the support grid for {te.public}" if te else ""),
    )


def _judge_package(part: Part) -> Iterator[Difference]:
    row, look, host = part.row, part.look, part.host
    if not look.installed and not look.ended:
        if host.wants(row):
            yield _report_missing(part)
        return
    for one in (*_judge_import(part), *_judge_extensions(part), *_judge_record(part), *_judge_copies(part)):
        unused = one.weight in (Weight.BREAKS, Weight.UNKNOWN) and not host.wants(row)
        yield one.model_copy(update={"weight": Weight.NOTE}) if unused else one


def _report_missing(part: Part) -> Difference:
    row, host = part.row, part.host
    step = f"install {row.distributions[0]} for torch {host.path.torch or 'of the stack'}, or go without it"
    if row.id == "torch":
        step = "install torch, or give another interpreter with --python"
    missing = part.report(
        Weight.BREAKS if row.required else Weight.NOTE, Aspect.MISSING, f"`import {row.id}` finds nothing",
        f"one of {', '.join(row.distributions)}, for the target {host.target.id}",
        "nothing runs" if row.id == "torch" else "what stands on it falls back to native PyTorch", step, version=False,
    )  # fmt: skip
    return missing if row.required else missing.model_copy(update={"breaks": ()})


def _judge_import(part: Part) -> Iterator[Difference]:
    row, look, path = part.row, part.look, part.host.path
    if not part.failed:
        return
    text = " ".join(f"{look.failure.type}: {look.failure.message}".split())[:400] if look.failure else ""
    again = f"install {row.distributions[0]} again for torch {path.torch}"
    seen, step = f"`import {row.id}` raises {text}", f"{again} and Python {path.python}"
    if look.failure and look.failure.frame:
        seen += f" (at {look.failure.frame})"
    if look.ended.startswith(NOT_STARTED):
        seen = f"its process was {look.ended}"
    elif look.ended:
        seen = f"`import {row.id}` ends the process ({look.ended}): {look.words or 'no output'}"
    if look.extensions or re.search("undefined symbol|cannot open shared object file", text):
        step = f"see the differences of its libraries below; without any, {again}"
    elif look.failure is not None and look.failure.type.endswith("ModuleNotFoundError"):
        step = f"install what it does not find: {look.failure.message}"
    weight = Weight.UNKNOWN if look.ended.startswith(NOT_STARTED) else Weight.BREAKS
    how = "every path of it is lost; the bridge falls back"
    yield part.report(weight, Aspect.IMPORT, seen, "an import without an error", how, step)


def _judge_record(part: Part) -> Iterator[Difference]:
    """Files that are not those of the release in the metadata: then the version of the package is unknown, too."""
    look, record = part.look, part.look.record
    if others := (*record.changed, *record.gone):
        another_release = _PATCHED * record.compared < len(others)
        shown = ", ".join(others[:_MOST]) + (", ..." if len(others) > _MOST else "")
        yield part.report(
            Weight.UNKNOWN if another_release else Weight.RISK, Aspect.METADATA,
            f"of {record.compared} files that its installer recorded, {len(record.changed)} are changed and "
            f"{len(record.gone)} are gone: {shown}",
            "the files of the release in its metadata",
            "the installed release is unknown, so the doctor did not check what depends on its version"
            if another_release else "its code differs from the release",
            f"install {part.row.distributions[0]} again; keep the difference in mind where somebody patched it",
        )  # fmt: skip
    elif record.elsewhere:
        yield part.report(
            Weight.RISK, Aspect.METADATA,
            f"loaded from {look.file}, while the metadata in {record.elsewhere} gives its version",
            "the metadata of the loaded copy", "the loaded release is unknown",
            "take the unwanted copy off the path, or install it with its metadata",
        )  # fmt: skip


def _judge_copies(part: Part) -> Iterator[Difference]:
    row, look = part.row, part.look
    if look.copies:
        yield part.report(
            Weight.RISK, Aspect.SECOND_COPY, f"loaded from {look.file}; also on the path: {', '.join(look.copies)}",
            "one copy", "another order of the path, or another working folder, loads the other copy",
            "take the unwanted copy off PYTHONPATH, or uninstall it",
        )  # fmt: skip
    for name in map(canonicalize_name, row.distributions):
        same = [one for one in part.host.path.distributions if canonicalize_name(one.name) == name]
        if len({one.version for one in same}) > 1:
            yield part.report(
                Weight.RISK, Aspect.METADATA, ", ".join(f"{one.name} {one.version} in {one.folder}" for one in same),
                "the metadata of one release", "code that reads its version gets that of the first",
                f"uninstall {same[0].name} until none is left, and install one release", version=False,
            )  # fmt: skip


# --- compiled files --------------------------------------------------------------------------------------------------


def _judge_extensions(part: Part) -> Iterator[Difference]:
    yield from _judge_tags(part)
    yield from _judge_behaviours(part)
    for extension in part.look.extensions:
        if extension.problem:
            yield part.report(
                Weight.BREAKS if part.failed else Weight.RISK, Aspect.LIBRARY,
                f"{extension.file} cannot be read: {extension.problem}", "a shared library", "the loader refuses it",
                f"install {part.row.distributions[0]} {part.look.version} again, without pip's cache", version=False,
            )  # fmt: skip
            continue
        yield from _judge_libraries(part, extension)
        yield from _judge_symbols(part, extension)
        yield from _judge_torch(part, extension)


def _judge_tags(part: Part) -> Iterator[Difference]:
    """A module without a file for this Python: the import passes over a file for another one in silence."""
    path, modules = part.host.path, dict[str, list[str]]()
    for file in part.look.extensions:
        modules.setdefault(file.file.removesuffix(".so").removesuffix(f".{file.tag}"), []).append(file.tag)
    for module, tags in modules.items():
        if all(tag and tag not in ("abi3", path.soabi) for tag in tags):
            yield part.report(
                Weight.BREAKS, Aspect.PYTHON_ABI, f"`{PurePath(module).name}` exists for {', '.join(tags)} only",
                f"one for {path.soabi} (Python {path.python}), or for abi3",
                "the import does not find its compiled half",
                f"install {part.row.distributions[0]} with this interpreter's own pip", version=False,
            )  # fmt: skip


def _judge_behaviours(part: Part) -> Iterator[Difference]:
    for call in part.look.behaviours:
        if call.right is False:
            yield part.report(
                Weight.BREAKS, Aspect.TORCH_ABI, f"given a {call.given}, `{call.name}` answers: {call.answered}",
                "the tensor as it is",
                "it reads the sizes of tensors from the wrong place, so its results are refused or wrong",
                _another_build(part),
            )  # fmt: skip
        elif call.right is None and part.host.path.gpu and part.host.wants(part.row):
            yield part.report(
                Weight.UNKNOWN, Aspect.LOOK, f"`{call.name}` could not be called: {call.answered}",
                f"its answer to a {call.given}", "whether it reads tensors correctly is unknown",
                "run the parity of this stack, which computes with it",
            )  # fmt: skip


def _judge_libraries(part: Part, extension: Extension) -> Iterator[Difference]:
    name, host, distribution = PurePath(extension.file).name, part.host, part.row.distributions[0]
    missing = [library for library in extension.not_found if library != _DRIVER or host.target.arch]
    if missing and not extension.loaded:
        there = [host.path.visible[library][0] for library in missing if library in host.path.visible]
        step = f"install what brings {missing[0]}, or put its folder on LD_LIBRARY_PATH"
        if there:
            step = f"see why {there[0]} is not found from {extension.file}: its own libraries may be missing"
        elif any(library.startswith(("libtorch", "libc10")) for library in missing):
            step = "install the torch that it was built for: this torch has no such library (a CPU build?)"
        yield part.report(
            Weight.BREAKS if part.failed else Weight.NOTE, Aspect.LIBRARY,  # packages bring plugins that few can load
            f"`{name}` needs {', '.join(missing)}, which the loader does not find",
            "each of them on LD_LIBRARY_PATH, in the loader's cache, or beside torch",
            "the loader refuses it" if part.failed else "what needs this file fails later", step, version=False,
        )  # fmt: skip
    runtimes = {found[1] for library in extension.needed if (found := re.match(r"libcudart\.so\.(\d+)", library))}
    if host.cuda and runtimes and host.cuda not in runtimes:
        yield part.report(
            Weight.RISK, Aspect.CUDA_RUNTIME, f"`{name}` was built for CUDA {', '.join(sorted(runtimes))}",
            f"CUDA {host.cuda}, as torch {host.path.torch}",
            "it brings a second CUDA runtime, with which Transformer Engine before 2.17 refuses attention",
            f"install a build of {distribution} for CUDA {host.cuda}, or keep it out of such a process", version=False,
        )  # fmt: skip


def _judge_symbols(part: Part, extension: Extension) -> Iterator[Difference]:
    """Symbols of other owners than torch that nothing defines."""
    unknown = [
        wanted for wanted in extension.wanted if wanted.owner != "torch" and not _is_tolerated(wanted, part.host)
    ]
    for owner in dict.fromkeys(wanted.owner for wanted in unknown):
        symbols = [wanted for wanted in unknown if wanted.owner == owner]
        at_load = [wanted for wanted in symbols if not wanted.lazy]
        if part.failed and not extension.loaded:
            at_load = at_load or symbols
        weight = Weight.RISK
        if not extension.loaded:
            weight = Weight.BREAKS if at_load and part.failed else Weight.NOTE
        shown = _list_symbols(at_load or symbols)
        yield part.report(
            weight, Aspect.SYMBOL, f"`{PurePath(extension.file).name}` needs {shown}, which nothing defines",
            f"{owner or 'a library'} of the release that it was built with",
            "the loader refuses it" if weight is Weight.BREAKS else "a call that needs it ends the process",
            f"install a newer {owner or 'neighbour'}, or a {part.row.distributions[0]} built for the one there is",
            version=False,
        )  # fmt: skip


def _is_tolerated(wanted: Wanted, host: Host) -> bool:
    """Whether a row says that this symbol is never called, which takes one that is bound when it is called."""
    needs = (need for need in host.needs.need if need.symbol and need.symbol == wanted.symbol)
    return wanted.lazy and any(host.te is not None and need.holds_for(host.te) for need in needs)


def _judge_torch(part: Part, extension: Extension) -> Iterator[Difference]:
    """Built for another torch: its headers, and symbols that this torch does not have."""
    symbols = [wanted for wanted in extension.wanted if wanted.owner == "torch"]
    moved, torch = extension.headers.moved, part.host.path.torch
    if not symbols and not moved:
        return
    layout = [place for place in moved if place.startswith(_LAYOUT)]
    said = []
    if moved:
        shown = ", ".join((layout or list(moved))[:_MOST])
        said.append(f"{len(moved)} of {extension.headers.compared} assertions in it have other lines there ({shown})")
    if symbols:
        said.append(f"it needs {_list_symbols(symbols)}, which that torch does not define")
    right = any(call.right for call in part.look.behaviours)
    for weight, holds, how in (
        (Weight.BREAKS, symbols and part.failed and not extension.loaded, "the loader refuses it"),
        (Weight.BREAKS, layout and not right, "it loads, and reads the sizes of tensors where another torch has them"),
        (Weight.RISK, symbols, "it loads; a call that needs one of them ends the process"),
        (Weight.NOTE, right, "the call that reads a tensor gave the right answer"),
        (Weight.RISK, True, "the torch code that it inlines is another one; sizes of tensors seem to be the same"),
    ):
        if holds:
            name = PurePath(extension.file).name
            yield part.report(
                weight, Aspect.TORCH_ABI, f"`{name}` was not built for torch {torch}: {'; '.join(said)}",
                f"a build for torch {torch}", how, _another_build(part),
            )  # fmt: skip
            return


def _another_build(part: Part) -> str:
    text, row = part.host.path.torch, part.row
    torch = read_version(text)
    known = [one for one in part.host.needs.build if one.of in row.distributions and torch and one.is_for(torch)]
    if known:
        return f"install {', '.join(f'{one.of}{one.version}' for one in known)}, which is built for this torch"
    return f"build {row.distributions[0]} against torch {text}, or install the torch that it was built for"


def _list_symbols(symbols: Sequence[Wanted]) -> str:
    shown = ", ".join(f"`{wanted.readable}`" for wanted in symbols[:_MOST])
    return shown + (f" and {len(symbols) - _MOST} more" if len(symbols) > _MOST else "")


# --- metadata --------------------------------------------------------------------------------------------------------


def _judge_metadata(row: VendorPackage, host: Host) -> Iterator[Difference]:
    """What the wheels themselves require of torch, of CUDA and of each other."""
    torch = read_version(host.path.torch)
    for one in filter(None, (host.installed([name]) for name in row.distributions)):
        look = PackageLook(one.name, installed=True, version=one.version)
        part = Part(row.model_copy(update={"title": one.name}), look, host)
        local = one.version.partition("+")[2]
        built, cuda = re.search(r"torch(\d+\.\d+)", local), re.search(r"cu(\d\d)", local)
        if torch and built and not f"{torch.public}.".startswith(f"{built[1]}."):
            yield _report_metadata(part, f"a build for torch {built[1]}", f"torch {torch}")
        if row.id != "torch" and cuda and host.cuda and cuda[1] != host.cuda:
            yield _report_metadata(part, f"a build for CUDA {cuda[1]}", f"CUDA {host.cuda}, as torch")
        for text in one.requires:
            neighbour = _find_unfit(text, host)
            if neighbour is not None:
                yield _report_metadata(part, f"`{text}`", f"{neighbour.name} {neighbour.version}", neighbour.name)


def _find_unfit(text: str, host: Host) -> Distribution | None:
    """The installed distribution that does not meet a requirement; None where it does, or nobody can say."""
    try:
        asked = Requirement(text)
        found = host.installed([asked.name])
        marker = {"extra": "", "python_version": host.path.python[:4]}
        if found is None or (asked.marker is not None and not asked.marker.evaluate(marker)):
            return None
        return None if asked.specifier.contains(found.version, prereleases=True) else found
    except (InvalidRequirement, ValueError):
        return None


def _report_metadata(part: Part, wanted: str, seen: str, neighbour: str = "torch") -> Difference:
    made_for_torch = canonicalize_name(neighbour) == "torch"
    said = part.report(
        Weight.RISK if made_for_torch else Weight.NOTE, Aspect.METADATA, seen, f"{wanted}, as its metadata says",
        "its compiled files were made for something else" if made_for_torch else "nobody has tried these two together",
        f"install a {part.look.package} for what is there" if made_for_torch else "nothing, while its import succeeds",
    )  # fmt: skip
    return said if made_for_torch else said.model_copy(update={"breaks": ()})


# --- CUDA libraries, the driver, and what releases need --------------------------------------------------------------


def _judge_needs(host: Host, te: Version) -> Iterator[Difference]:
    for need in host.needs.need:
        if not need.holds_for(te) or not need.holds_for_core(host.core_cuda):
            continue
        if need.kind == "library":
            yield from _judge_library(need, host)
        elif need.kind == "distribution":
            yield from _judge_distribution(need, host)
        elif need.kind == "tolerated-symbol" and need.symbol in _list_unresolved(host.look(TE)):
            yield _report_need(need, f"{need.symbol} is missing", host, Weight.NOTE)


def _list_unresolved(look: PackageLook | None) -> set[str]:
    return {wanted.symbol for one in look.extensions for wanted in one.wanted} if look else set()


def _judge_library(need: Need, host: Host) -> Iterator[Difference]:
    """The oldest answer counts: where two files are mapped, a mixture of them may run."""
    row, answers = host.library(need.of), host.answered(need.of)
    found = host.installed(row.distributions)
    oldest = read_version(answers[0] if answers else found.version if found else "")
    if oldest is None and host.look(TE) is not None:
        yield _report_need(need, f"no {row.title} with a known version", host, Weight.UNKNOWN)
    elif oldest is not None and not need.allows(oldest):
        yield _report_need(need, f"{row.title} {oldest}{'' if answers else ' is installed'}", host, Weight.BREAKS)


def _judge_distribution(need: Need, host: Host) -> Iterator[Difference]:
    beside = ""
    if need.with_:
        neighbour = host.installed([need.beside])
        if neighbour is None or not need.holds_beside(read_version(neighbour.version)):
            return
        beside = f" beside {neighbour.name} {neighbour.version}"
    found, look = host.installed([need.of]), host.look(TE)
    version = read_version(found.version) if found else None
    failed = look is not None and (look.failure is not None or bool(look.ended))
    if found is None:
        # After an import without an error this need is no hindrance to the import, whatever the metadata says.
        breaks = failed or look is None or "imports" not in need.breaks
        yield _report_need(need, f"{need.of} is not installed{beside}", host, Weight.BREAKS if breaks else Weight.RISK)
    elif version is not None and not need.allows(version):
        weight = Weight.BREAKS if failed else Weight.RISK
        yield _report_need(need, f"{need.of} {version}{beside}", host, weight)


def _report_need(need: Need, seen: str, host: Host, weight: Weight) -> Difference:
    version = need.version.replace(">=", "at least ").replace("<", "below ") or "any release"
    title = need.of if need.kind == "distribution" else host.library(need.of).title
    return Difference(
        weight=weight,
        aspect=Aspect.LIBRARY if need.kind in ("library", "tolerated-symbol") else Aspect.VERSION,
        subject=f"Transformer Engine {host.te}",
        seen=seen,
        wanted=f"{title} {version}",
        breaks=host.order(need.breaks),
        how=need.says,
        next_step=need.next,
        source=need.source,
    )


def _judge_driver(host: Host) -> Iterator[Difference]:
    """The driver against the CUDA release that torch was built for. Source: CUDA compatibility guide."""
    path = host.path
    built, driver = read_version(path.torch_cuda), read_version(path.driver_cuda)
    if built is None or driver is None or driver >= built:
        return
    older = driver.major < built.major
    compatible = ", or the forward-compatibility package where the GPU is a data-centre one" if older else ""
    yield Difference(
        weight=Weight.BREAKS if older else Weight.NOTE,
        aspect=Aspect.DRIVER,
        subject="NVIDIA driver",
        seen=f"driver {path.driver} runs CUDA {driver}, torch {path.torch} is built for CUDA {built}",
        wanted=f"a driver for CUDA {built.major}" if older else f"a driver for CUDA {built}, or the same major release",
        breaks=host.modules if older else (),
        how="no kernel starts" if older else "kernels run; what a driver compiles from PTX may not",
        next_step=f"install a driver for CUDA {built} or later{compatible}",
        source="docs.nvidia.com/deploy/cuda-compatibility",
    )


def _judge_second_files(host: Host) -> Iterator[Difference]:
    """Two files of one CUDA library in one process; of the runtime a rule of its own tells more."""
    for row in (row for row in host.needs.library if row.id != _RUNTIME):
        for look in filter(None, (host.look(TE), host.look("torch"))):
            of_it = [files for name, files in look.mapped.items() if name == row.id or name.startswith(f"{row.id}_")]
            folders = dict.fromkeys(str(PurePath(file).parent) for files in of_it for file in files)
            if len(folders) < 2:
                continue
            installed = host.installed(row.distributions)
            brought = f"{installed.name} {installed.version} is installed; " if installed else ""
            version = ", ".join(host.answered(row.id)) or "of an unknown version"
            yield Difference(
                weight=Weight.RISK,
                aspect=Aspect.SECOND_COPY,
                subject=row.title,
                seen=f"{brought}importing {look.package} loads {row.title} {version} from {', '.join(folders)}",
                wanted="one",
                breaks=host.order(row.breaks),
                how="which one runs depends on what was imported first, and parts of both may be mixed",
                next_step=f"leave one: remove the system's, or point {row.title.upper()}_HOME at torch's own folder",
            )
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
    listed = ", ".join(f"{name} ({file})" for name, file in look.runtimes.items())
    path = host.path.ld_library_path if in_te else ""
    step = rule.next if rule else "leave only torch's own to be found"
    row = host.library(_RUNTIME)
    yield Difference(
        weight=(Weight.BREAKS if throws else Weight.RISK) if in_te else (Weight.RISK if throws else Weight.NOTE),
        aspect=Aspect.CUDA_RUNTIME,
        subject="CUDA runtime",
        seen=f"a process that imports {look.package} can open {listed}" + (f"; LD_LIBRARY_PATH={path}" if path else ""),
        wanted=f"one, of CUDA {host.path.torch_cuda}, as torch" if host.path.torch_cuda else "one",
        breaks=host.order(rule.breaks if rule and (throws or not in_te) else row.breaks if in_te else ()),
        how=rule.says if rule else "two runtimes in one process do not share their state",
        next_step=step if in_te else "import FlashAttention 3 in no process that uses Transformer Engine's attention",
        source=rule.source if rule else "",
    )
