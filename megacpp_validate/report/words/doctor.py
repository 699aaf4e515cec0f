"""What is said of an interpreter that was looked at."""

from __future__ import annotations

from collections import Counter
from typing import Final

from megacpp_validate.evidence.doctor_look import PackageLook, PathLook

from ...environments.doctor_result import Difference, DoctorResult, Weight
from ..marks import Mark
from ..summaries import count

_MARKS: Final = {
    Weight.BREAKS: Mark("✗", "X", "breaks", "bad"),
    Weight.UNKNOWN: Mark("○", "?", "not looked at", "risk"),
    Weight.RISK: Mark("▲", "!", "at risk", "risk"),
    Weight.NOTE: Mark("·", ".", "note", "quiet"),
}
_FINE: Final = Mark("✓", "-", "loads", "good")
_ABSENT: Final = Mark("·", ".", "not installed", "quiet")
_FAILS: Final = Mark("✗", "X", "does not load", "bad")


def mark_weight(weight: Weight) -> Mark:
    """How the weight of a difference looks."""
    return _MARKS[weight]


def mark_package(look: PackageLook) -> Mark:
    """How the look at a package went."""
    if look.failure is not None or look.ended:
        return _FAILS
    return _FINE if look.installed else _ABSENT


def summarize_doctor(result: DoctorResult) -> str:
    """The answer in a sentence."""
    counts = Counter(difference.weight for difference in result.differences)
    loaded = sum(look.installed and look.failure is None and not look.ended for look in result.packages)
    words = [
        count(counts[Weight.BREAKS], "difference that breaks something", "differences that break something"),
        count(counts[Weight.RISK], "risk"),
        count(counts[Weight.NOTE], "note"),
    ]
    if counts[Weight.UNKNOWN]:
        words.append(f"{counts[Weight.UNKNOWN]} not looked at")
    broken = [name for d in result.differences if d.weight is Weight.BREAKS for name in d.breaks]
    tail = f" Bridge modules that break: {', '.join(dict.fromkeys(broken))}." if broken else ""
    return f"{loaded} of {len(result.packages)} packages load; {', '.join(words)}.{tail}"


def say_machine(path: PathLook) -> str:
    """What it runs on."""
    torch = f"torch {path.torch}" if path.torch else "no torch"
    cuda = f" for CUDA {path.torch_cuda}" if path.torch_cuda else ""
    gpu = f"{path.gpu}, driver {path.driver} (CUDA {path.driver_cuda or '?'})" if path.gpu else f"no GPU: {path.no_gpu}"
    return f"Python {path.python} on {path.machine}, {torch}{cuda}; {gpu}"


def say_breaks(difference: Difference) -> str:
    """What it breaks, and how."""
    modules = ", ".join(difference.breaks)
    return f"{modules}: {difference.how}" if modules else difference.how


def say_folders(result: DoctorResult) -> list[str]:
    """Where the packages come from, a line a site folder."""
    folders: dict[str, list[str]] = {}
    for look in result.packages:
        if look.file:
            top = look.package.partition(".")[0]
            folders.setdefault(look.file.partition(f"/{top}")[0], []).append(top)
    return [f"from {folder}: {', '.join(names)}" for folder, names in folders.items()]


def say_libraries(result: DoctorResult) -> list[tuple[str, str, str, str]]:
    """Every CUDA library as it was mapped: name, version as it says it, files, and by which imports."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for look in result.packages:
        versions = {library.name: library.version for library in look.libraries}
        for name, files in look.mapped.items():
            rows.setdefault((name, versions.get(name, ""), "\n".join(files)), []).append(look.package)
    return [(*key, ", ".join(packages)) for key, packages in sorted(rows.items())]


def say_runtimes(result: DoctorResult) -> list[str]:
    """Which CUDA runtimes each process could open, where it is more than one."""
    return [
        f"{look.package}: {', '.join(f'{name} ({file})' for name, file in look.runtimes.items())}"
        for look in result.packages
        if len(look.runtimes) > 1
    ]


def say_extensions(look: PackageLook) -> list[str]:
    """A line a compiled file."""
    lines = []
    for one in look.extensions:
        if one.problem:
            lines.append(f"{one.file}: {one.problem}")
            continue
        parts = ["mapped" if one.loaded else "not mapped"]
        if one.headers.compared:
            parts.append(
                f"{one.headers.compared - len(one.headers.moved)} of {one.headers.compared} torch assertions in place"
            )
        if one.wanted:
            parts.append(f"wants {', '.join(wanted.readable for wanted in one.wanted)}")
        if one.not_found:
            parts.append(f"does not find {', '.join(one.not_found)}")
        lines.append(f"{one.file}: {'; '.join(parts)}")
    return lines
