"""What the doctor saw, held against the matrix: a pure function from looks and rows to differences, worst first."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from ..catalog.needs import VendorPackage
from ..evidence.doctor_look import Distribution, PackageLook
from .doctor_extensions import judge_extensions
from .doctor_libraries import judge_driver, judge_needs, judge_runtimes, judge_second_files
from .doctor_result import Aspect, Difference, Weight
from .doctor_seen import TE, Rows, Seen, join, read_version

NOT_STARTED: Final = "not started"
_MOST_FILES: Final = 3  # examples in a sentence
_PATCHED: Final = 0.1  # share of files that a person patches; between 2.17.1 and 2.18.0 a quarter of them changes


def judge(seen: Seen, rows: Rows) -> tuple[Difference, ...]:
    """Every difference: worst first, then in dependency order of the first bridge module that it breaks."""
    found = [
        *_judge_target(seen, rows),
        *_judge_stack(seen, rows),
        *_judge_packages(seen, rows),
        *judge_needs(seen, rows),
        *_judge_metadata(seen, rows),
    ]
    if rows.target.arch:  # without a GPU nothing runs on them
        found += [*judge_driver(seen, rows), *judge_runtimes(seen, rows), *judge_second_files(seen, rows)]
    explained = _explained_libraries(found, rows)
    kept = [one for one in found if not (one.aspect is Aspect.SYMBOL and one.wanted.partition(" ")[0] in explained)]

    def order(one: Difference) -> tuple[int, int]:
        return one.weight.rank, rows.modules.index(one.breaks[0]) if one.breaks else len(rows.modules)

    return tuple(sorted(dict.fromkeys(kept), key=order))


def _explained_libraries(found: list[Difference], rows: Rows) -> set[str]:
    """Libraries of which a row of the matrix says that they are too old: their missing symbols are the same finding."""
    titles = {row.title for row in rows.needs.library}
    needs = [one for one in found if one.aspect is Aspect.LIBRARY and one.weight is Weight.BREAKS and one.source]
    return {title for title in titles for one in needs if one.wanted.startswith(title)}


def _judge_target(seen: Seen, rows: Rows) -> Iterator[Difference]:
    target, path = rows.target, seen.path
    if not target.arch:
        return
    arch = f"sm_{path.capability.replace('.', '')}" if path.gpu else ""
    if arch != target.arch:
        yield Difference(
            weight=Weight.UNKNOWN,
            aspect=Aspect.LOOK,
            subject="GPU",
            seen=f"{path.gpu} ({arch})" if path.gpu else f"no GPU: {path.no_gpu or 'no reason was given'}",
            wanted=f"a GPU of the target {target.id} ({target.arch})",
            breaks=rows.modules,
            how="what needs that GPU was not looked at",
            next_step=f"run it on a machine of the target {target.id}, or give --target cpu",
        )
    if target.machine and target.machine != path.machine:
        yield Difference(
            weight=Weight.UNKNOWN,
            aspect=Aspect.LOOK,
            subject="machine",
            seen=path.machine,
            wanted=target.machine,
            breaks=rows.modules,
            how="its packages are other files than those of the target",
            next_step=f"run it on a machine of the target {target.id}",
        )


def _judge_stack(seen: Seen, rows: Rows) -> Iterator[Difference]:
    te, wanted = seen.te, rows.stack or rows.pinned
    if (te is not None and te.public == wanted.te) or (rows.stack is None and (te is None or not rows.target.arch)):
        return
    yield Difference(
        weight=Weight.NOTE if rows.stack is None else Weight.BREAKS,
        aspect=Aspect.VERSION,
        subject="Transformer Engine",
        seen=str(te or "none is installed"),
        wanted=f"{wanted.te}, as the stack {wanted.id} {'asks for' if rows.stack else 'pins for production'}",
        breaks=() if rows.stack is None else rows.modules,
        how="what is proved of that stack is not proved of this one",
        next_step=f"install transformer-engine=={wanted.te}"
        + (f", or see the support grid for {te.public}" if te is not None else ""),
    )


def _judge_packages(seen: Seen, rows: Rows) -> Iterator[Difference]:
    looks = {look.package: look for look in seen.packages}
    for row in rows.needs.package:
        look = looks.get(row.id)
        if look is None:
            continue
        if not look.installed and not look.ended:
            if rows.wants(row):
                yield _say_missing(row, seen, rows)
            continue
        for one in _judge_package(row, look, seen, rows):
            unused = one.weight in (Weight.BREAKS, Weight.UNKNOWN) and not rows.wants(row)
            yield one.model_copy(update={"weight": Weight.NOTE}) if unused else one


def _judge_package(row: VendorPackage, look: PackageLook, seen: Seen, rows: Rows) -> Iterator[Difference]:
    if look.failure is not None or look.ended:
        yield _say_import(row, look, seen, rows)
    yield from judge_extensions(row, look, seen, rows)
    yield from _judge_record(row, look, rows)
    yield from _judge_copies(row, look, seen, rows)


def _say_missing(row: VendorPackage, seen: Seen, rows: Rows) -> Difference:
    return Difference(
        weight=Weight.BREAKS if row.required else Weight.NOTE,
        aspect=Aspect.MISSING,
        subject=row.title,
        seen=f"`import {row.id}` finds nothing",
        wanted=f"one of {join(row.distributions)}, for the target {rows.target.id}",
        breaks=rows.order(row.breaks) if row.required else (),
        how="what stands on it falls back to native PyTorch" if row.id != "torch" else "nothing runs",
        next_step="install torch, or give another interpreter with --python"
        if row.id == "torch"
        else f"install {row.distributions[0]} for torch {seen.path.torch or 'of the stack'}, or go without it",
    )


def _say_import(row: VendorPackage, look: PackageLook, seen: Seen, rows: Rows) -> Difference:
    if look.ended.startswith(NOT_STARTED):
        weight, said = Weight.UNKNOWN, f"its look was {look.ended}"
    elif look.ended:
        weight, said = (
            Weight.BREAKS,
            f"`import {look.package}` ends the process ({look.ended}): {look.words or 'no words'}",
        )
    else:
        failure = look.failure
        text = " ".join(f"{failure.type}: {failure.message}".split())[:400] if failure else ""
        weight, said = Weight.BREAKS, f"`import {look.package}` raises {text}"
    where = f" (at {look.failure.frame})" if look.failure and look.failure.frame else ""
    return Difference(
        weight=weight,
        aspect=Aspect.IMPORT,
        subject=f"{row.title} {look.version}".strip(),
        seen=f"{said}{where}",
        wanted="an import that goes through",
        breaks=rows.order(row.breaks),
        how="every path of it is lost; the bridge falls back",
        next_step=_after_import(row, look, seen),
    )


def _after_import(row: VendorPackage, look: PackageLook, seen: Seen) -> str:
    """The plain next step; where the cause is known, it is a difference of its own."""
    text = look.failure.message if look.failure else ""
    if "undefined symbol" in text or "cannot open shared object file" in text or look.extensions:
        again = f"install {row.distributions[0]} again for torch {seen.path.torch}"
        return f"see what is said of its libraries below; where nothing is, {again}"
    if look.failure is not None and look.failure.type.endswith("ModuleNotFoundError"):
        return f"install what it does not find: {text}"
    return f"install {row.distributions[0]} again for torch {seen.path.torch} and Python {seen.path.python}"


def _judge_record(row: VendorPackage, look: PackageLook, rows: Rows) -> Iterator[Difference]:
    """Files that are not those of the release that the metadata names: then its version, too, is only said."""
    record, others = look.record, (*look.record.changed, *look.record.gone)
    if others:
        whole = _PATCHED * record.compared < len(others)
        words = [f"{len(record.changed)} changed"] if record.changed else []
        words += [f"{len(record.gone)} gone"] if record.gone else []
        shown = join(others[:_MOST_FILES]) + (", ..." if len(others) > _MOST_FILES else "")
        yield Difference(
            weight=Weight.UNKNOWN if whole else Weight.RISK,
            aspect=Aspect.METADATA,
            subject=f"{row.title} {look.version}".strip(),
            seen=f"of the {record.compared} files that its installer recorded, {' and '.join(words)}: {shown}",
            wanted="the files of the release that its metadata names",
            breaks=rows.order(row.breaks),
            how="which release this is is not known, so nothing that depends on its version was looked at"
            if whole
            else "what runs there is not what was released as this version",
            next_step=f"install {row.distributions[0]} again; where it was patched on purpose, keep that in mind",
        )
    elif record.elsewhere:
        yield Difference(
            weight=Weight.RISK,
            aspect=Aspect.METADATA,
            subject=f"{row.title} {look.version}".strip(),
            seen=f"loaded from {look.file}, and its version is told by the metadata in {record.elsewhere}",
            wanted="the metadata of the copy that is loaded",
            breaks=rows.order(row.breaks),
            how="which release is loaded is not known",
            next_step="take the copy that is not meant off the path, or install it with its metadata",
        )


def _judge_copies(row: VendorPackage, look: PackageLook, seen: Seen, rows: Rows) -> Iterator[Difference]:
    if look.copies:
        yield Difference(
            weight=Weight.RISK,
            aspect=Aspect.SECOND_COPY,
            subject=f"{row.title} {look.version}".strip(),
            seen=f"loaded from {look.file}; behind it on the path: {join(look.copies)}",
            wanted="one copy",
            breaks=rows.order(row.breaks),
            how="another order of the path, or another working folder, loads the other one",
            next_step="take the one that is not meant off PYTHONPATH, or uninstall it",
        )
    for name in row.distributions:
        same = [one for one in seen.path.distributions if canonicalize_name(one.name) == canonicalize_name(name)]
        if len({one.version for one in same}) > 1:
            yield _say_two_metadata(row, same, rows)


def _say_two_metadata(row: VendorPackage, same: list[Distribution], rows: Rows) -> Difference:
    return Difference(
        weight=Weight.RISK,
        aspect=Aspect.METADATA,
        subject=row.title,
        seen=join(f"{one.name} {one.version} in {one.folder}" for one in same),
        wanted="the metadata of one release",
        breaks=rows.order(row.breaks),
        how="what asks for its version is told that of the first",
        next_step=f"uninstall {same[0].name} until none is left, and install one release",
    )


def _judge_metadata(seen: Seen, rows: Rows) -> Iterator[Difference]:
    """What the wheels themselves say of torch, of CUDA and of each other."""
    torch = read_version(seen.path.torch)
    for row in rows.needs.package:
        for one in (found for name in row.distributions if (found := seen.installed([name]))):
            local = one.version.partition("+")[2]
            built = re.search(r"torch(\d+\.\d+)", local)
            if torch and built and not torch.public.startswith(built[1] + ".") and torch.public != built[1]:
                yield _say_metadata(row, one, f"a build for torch {built[1]}", f"torch {torch}", rows)
            cuda = re.search(r"cu(\d\d)", local)
            own = seen.path.torch_cuda.partition(".")[0]
            if row.id != "torch" and cuda and own and cuda[1] != own:
                yield _say_metadata(row, one, f"a build for CUDA {cuda[1]}", f"CUDA {own}, as torch", rows)
            for text in one.requires:
                yield from _judge_requirement(row, one, text, seen, rows)


def _judge_requirement(
    row: VendorPackage, one: Distribution, text: str, seen: Seen, rows: Rows
) -> Iterator[Difference]:
    try:
        asked = Requirement(text)
        if asked.marker is not None and not asked.marker.evaluate(
            {"extra": "", "python_version": seen.path.python[:4]}
        ):
            return
        found = seen.installed([asked.name])
        if found is None or asked.specifier.contains(found.version, prereleases=True):
            return
    except (InvalidRequirement, ValueError):
        return
    yield _say_metadata(row, one, f"`{text}`", f"{found.name} {found.version}", rows, note=asked.name != "torch")


def _say_metadata(
    row: VendorPackage, one: Distribution, asks: str, there: str, rows: Rows, *, note: bool = False
) -> Difference:
    return Difference(
        weight=Weight.NOTE if note else Weight.RISK,
        aspect=Aspect.METADATA,
        subject=f"{one.name} {one.version}",
        seen=there,
        wanted=f"{asks}, as its metadata says",
        breaks=() if note else rows.order(row.breaks),
        how="nobody has tried these two together" if note else "its compiled files were made for something else",
        next_step=f"install a {one.name} for what is there"
        if not note
        else "nothing, while its import and its looks are clean",
    )


__all__ = ("NOT_STARTED", "TE", "Rows", "Seen", "judge")
