"""The CUDA libraries of a process, judged: second files, second runtimes, the driver, and what releases need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath
from typing import Final

from packaging.version import Version

from ..catalog.needs import Need
from ..evidence.doctor_look import PackageLook
from .doctor_result import Aspect, Difference, Weight
from .doctor_seen import TE, Rows, Seen, join, read_version

_RUNTIME: Final = "libcudart"
_FA3: Final = "flash_attn_interface"


def judge_driver(seen: Seen, rows: Rows) -> Iterator[Difference]:
    """The driver against the CUDA release that torch was built for. Source: CUDA compatibility guide."""
    built, driver = read_version(seen.path.torch_cuda), read_version(seen.path.driver_cuda)
    if built is None or driver is None or driver >= built:
        return
    older = driver.major < built.major
    yield Difference(
        weight=Weight.BREAKS if older else Weight.NOTE,
        aspect=Aspect.DRIVER,
        subject="NVIDIA driver",
        seen=f"driver {seen.path.driver} runs CUDA {driver}, torch {seen.path.torch} is built for CUDA {built}",
        wanted=f"a driver for CUDA {built.major}" if older else f"a driver for CUDA {built}, or the same major release",
        breaks=rows.modules if older else (),
        how="no kernel starts" if older else "kernels run; what a driver compiles from PTX may not",
        next_step=f"install a driver for CUDA {built} or later"
        + (", or the forward-compatibility package where the GPU is a data-centre one" if older else ""),
        source="docs.nvidia.com/deploy/cuda-compatibility",
    )


def judge_second_files(seen: Seen, rows: Rows) -> Iterator[Difference]:
    """Two files of one CUDA library in one process."""
    for row in rows.needs.library:
        if row.id == _RUNTIME:
            continue  # its own rule, below
        for look in (found for found in (seen.package(TE), seen.package("torch")) if found is not None):
            groups = {
                name: files for name, files in look.mapped.items() if name == row.id or name.startswith(f"{row.id}_")
            }
            folders = dict.fromkeys(str(PurePath(file).parent) for files in groups.values() for file in files)
            if len(folders) < 2:
                continue
            answers = seen.answered(row.id)
            installed = seen.installed(row.distributions)
            brought = f"{installed.name} {installed.version} is installed, " if installed else ""
            yield Difference(
                weight=Weight.RISK,
                aspect=Aspect.SECOND_COPY,
                subject=row.title,
                seen=f"{brought}{join(answers) or 'an unknown release'} answers once {look.package} is imported; "
                f"mapped from {join(folders)}",
                wanted="one",
                breaks=rows.order(row.breaks),
                how="which one runs depends on what was imported first, and parts of both may be mixed",
                next_step=f"leave one: remove the system's, or point {row.title.upper()}_HOME at torch's own folder",
            )
            break


def judge_runtimes(seen: Seen, rows: Rows) -> Iterator[Difference]:
    """More than one CUDA runtime that a process could open."""
    look = seen.package(TE) or seen.package("torch")
    if look is None:
        return
    runtimes = look.runtimes
    if len(runtimes) > 1:
        yield _say_runtimes(look, seen, rows)
    elif (fa3 := seen.package(_FA3)) and len(fa3.runtimes) > 1:
        rule = _runtime_rule(seen, rows)
        yield Difference(
            weight=Weight.RISK if rule and rule.kind == "one-runtime" else Weight.NOTE,
            aspect=Aspect.CUDA_RUNTIME,
            subject="CUDA runtime",
            seen=f"a process that imports {_FA3} can open {_list_runtimes(fa3)}",
            wanted="one",
            breaks=rows.order(rule.breaks if rule else ()),
            how=rule.says if rule else "two runtimes in one process do not share their state",
            next_step="import FlashAttention 3 in no process that uses Transformer Engine's attention",
            source=rule.source if rule else "",
        )


def judge_needs(seen: Seen, rows: Rows) -> Iterator[Difference]:
    """What the release of Transformer Engine that is there needs of libraries and other packages."""
    te = seen.te
    if te is None or not rows.target.arch:
        return
    for need in rows.needs.need:
        if not need.holds_for(te) or not need.holds_for_core(seen.core_cuda):
            continue
        if need.kind == "library":
            yield from _judge_library(need, te, seen, rows)
        elif need.kind == "distribution":
            yield from _judge_distribution(need, te, seen, rows)
        elif need.kind == "tolerated-symbol" and _lacks_symbol(need, seen):
            yield _say_need(need, te, f"{need.symbol} is not there", rows, Weight.NOTE)


def _judge_library(need: Need, te: Version, seen: Seen, rows: Rows) -> Iterator[Difference]:
    """The oldest answer counts: where two files are mapped, a mixture of them may run."""
    row = rows.library(need.of)
    answers = seen.answered(need.of)
    oldest = read_version(answers[0]) if answers else seen.installed_version(row.distributions)
    if oldest is None:
        look = seen.package(TE)
        if look is not None:
            seen_words = f"no {row.title} was found, or it did not say its version"
            yield _say_need(need, te, seen_words, rows, Weight.UNKNOWN)
    elif not need.allows(oldest):
        seen_words = f"{row.title} {oldest}{'' if answers else ' is installed'}"
        yield _say_need(need, te, seen_words, rows, Weight.BREAKS)


def _judge_distribution(need: Need, te: Version, seen: Seen, rows: Rows) -> Iterator[Difference]:
    neighbour = seen.installed([need.beside]) if need.with_ else None
    if need.with_ and (neighbour is None or not need.holds_beside(read_version(neighbour.version))):
        return
    beside = f" beside {neighbour.name} {neighbour.version}" if neighbour else ""
    found = seen.installed([need.of])
    version = read_version(found.version) if found else None
    failed = (look := seen.package(TE)) is not None and (look.failure is not None or bool(look.ended))
    if found is None:
        # Where the import went well, whatever metadata says, this need is no hindrance to it.
        weight = Weight.BREAKS if failed or look is None or "imports" not in need.breaks else Weight.RISK
        yield _say_need(need, te, f"{need.of} is not installed{beside}", rows, weight)
    elif version is not None and not need.allows(version):
        yield _say_need(need, te, f"{need.of} {version}{beside}", rows, Weight.BREAKS if failed else Weight.RISK)


def _say_need(need: Need, te: Version, seen: str, rows: Rows, weight: Weight) -> Difference:
    version = need.version.replace(">=", "at least ").replace("<", "below ") or "any release"
    return Difference(
        weight=weight,
        aspect=Aspect.LIBRARY if need.kind in ("library", "tolerated-symbol") else Aspect.VERSION,
        subject=f"Transformer Engine {te}",
        seen=seen,
        wanted=f"{_title(need, rows)} {version}",
        breaks=rows.order(need.breaks),
        how=need.says,
        next_step=need.next,
        source=need.source,
    )


def _title(need: Need, rows: Rows) -> str:
    return rows.library(need.of).title if need.kind != "distribution" else need.of


def _lacks_symbol(need: Need, seen: Seen) -> bool:
    look = seen.package(TE)
    return look is not None and any(wanted.symbol == need.symbol for one in look.extensions for wanted in one.wanted)


def _runtime_rule(seen: Seen, rows: Rows) -> Need | None:
    te = seen.te
    kinds = ("one-runtime", "one-runtime-warned")
    return next((need for need in rows.needs.need if te and need.kind in kinds and need.holds_for(te)), None)


def _say_runtimes(look: PackageLook, seen: Seen, rows: Rows) -> Difference:
    rule = _runtime_rule(seen, rows)
    throws = rule is not None and rule.kind == "one-runtime"
    row = rows.library(_RUNTIME)
    own = seen.path.torch_cuda
    return Difference(
        weight=Weight.BREAKS if throws else Weight.RISK,
        aspect=Aspect.CUDA_RUNTIME,
        subject="CUDA runtime",
        seen=f"a process that imports {look.package} can open {_list_runtimes(look)}"
        + (f"; LD_LIBRARY_PATH={seen.path.ld_library_path}" if seen.path.ld_library_path else ""),
        wanted=f"one, of CUDA {own}, as torch" if own else "one",
        breaks=rows.order(rule.breaks if rule and throws else row.breaks),
        how=rule.says if rule else "two runtimes in one process do not share their state",
        next_step=rule.next if rule else "leave only torch's own to be found",
        source=rule.source if rule else "",
    )


def _list_runtimes(look: PackageLook) -> str:
    return join(f"{name} ({file})" for name, file in look.runtimes.items())
