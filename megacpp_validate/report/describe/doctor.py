"""What the doctor says of an interpreter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from megacpp_validate.evidence.doctor_look import PackageLook, PathLook
from megacpp_validate.text import count

from ...environments.doctor_result import Difference, DoctorResult, Weight
from ..document import Block, Bullets, Details, Diagnostic, Document, Paragraph, Table
from ..marks import Mark, bad, good, missing, quiet, risk

_MARKS: Final = {
    Weight.BREAKS: bad("breaks"), Weight.UNKNOWN: missing("not checked"), Weight.RISK: risk("at risk"),
    Weight.NOTE: quiet("note"),
}  # fmt: skip


def describe_doctor(result: DoctorResult) -> Document:
    """The stack as loaded, then every difference, worst first."""
    blocks: list[Block] = [
        Paragraph(_describe_machine(result.path)),
        Table(
            ("package", "as loaded", "version", "seconds", "file"),
            tuple(
                (
                    look.package,
                    _mark_package(look),
                    look.version,
                    f"{look.seconds:.1f}" if look.installed else "",
                    look.file,
                )
                for look in result.packages
            ),
            numeric=frozenset({3}),
            optional=frozenset({4}),
        ),
    ]
    if libraries := _list_libraries(result):
        blocks.append(Table(("loaded library", "version", "files", "by import of"), libraries))
    for look in result.packages:
        if len(look.runtimes) > 1:
            listed = ", ".join(f"{name} ({file})" for name, file in look.runtimes.items())
            blocks.append(Paragraph(f"CUDA runtimes that `import {look.package}` can open: {listed}", risk("at risk")))
    blocks += [_describe_difference(one) for one in result.differences]
    for look in result.packages:
        if look.extensions:
            blocks.append(Details(f"Compiled files of {look.package}", (Bullets(tuple(_list_extensions(look))),)))
    blocks.append(Paragraph(f"{result.interpreter}; {result.seconds:.1f} s"))
    worst = result.differences[0].weight if result.differences else None
    title = f"The stack as loaded, compared with {result.target} and {result.stack}"
    return Document(title, _summarize(result), _MARKS[worst] if worst else good("fits together"), tuple(blocks))


def _summarize(result: DoctorResult) -> str:
    number = Counter(difference.weight for difference in result.differences)
    loaded = sum(look.installed and look.failure is None and not look.ended for look in result.packages)
    words = [
        count(number[Weight.BREAKS], "breakage"), count(number[Weight.RISK], "risk"), count(number[Weight.NOTE], "note")
    ]  # fmt: skip
    if number[Weight.UNKNOWN]:
        words.append(f"{number[Weight.UNKNOWN]} not checked")
    broken = [name for one in result.differences if one.weight is Weight.BREAKS for name in one.breaks]
    tail = f" Bridge modules that break: {', '.join(dict.fromkeys(broken))}." if broken else ""
    return f"{loaded} of {len(result.packages)} packages load; {', '.join(words)}.{tail}"


def _describe_machine(path: PathLook) -> str:
    torch = f"torch {path.torch}" if path.torch else "no torch"
    cuda = f" for CUDA {path.torch_cuda}" if path.torch_cuda else ""
    gpu = f"{path.gpu}, driver {path.driver} (CUDA {path.driver_cuda or '?'})" if path.gpu else f"no GPU: {path.no_gpu}"
    return f"Python {path.python} on {path.machine}, {torch}{cuda}; {gpu}"


def _mark_package(look: PackageLook) -> Mark:
    if look.failure is not None or look.ended:
        return bad("does not load")
    return good("loads") if look.installed else quiet("not installed")


def _describe_difference(one: Difference) -> Diagnostic:
    breaks = f"{', '.join(one.breaks)}: {one.how}" if one.breaks else one.how
    return Diagnostic(
        name=f"{one.subject}, {one.aspect.value}",
        mark=_MARKS[one.weight],
        message=one.seen,
        fields=(("wanted", one.wanted), ("breaks", breaks), ("source", one.source)),
        help=one.next_step,
    )


def _list_libraries(result: DoctorResult) -> tuple[tuple[str, str, str, str], ...]:
    """Every CUDA library as loaded: name, version that it reports, files, and by which imports."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for look in result.packages:
        versions = {library.name: library.version for library in look.libraries}
        for name, files in look.mapped.items():
            rows.setdefault((name, versions.get(name, ""), "\n".join(files)), []).append(look.package)
    return tuple((*key, ", ".join(packages)) for key, packages in sorted(rows.items()))


def _list_extensions(look: PackageLook) -> Iterator[str]:
    for one in look.extensions:
        parts = [one.problem or ("loaded" if one.loaded else "not loaded")]
        if one.headers.compared:
            same = one.headers.compared - len(one.headers.moved)
            parts.append(f"{same} of {one.headers.compared} torch assertions have the same lines")
        if one.wanted:
            parts.append(f"needs {', '.join(wanted.readable for wanted in one.wanted)}")
        if one.not_found:
            parts.append(f"does not find {', '.join(one.not_found)}")
        yield f"{one.file}: {'; '.join(parts)}"
