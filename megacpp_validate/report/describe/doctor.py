"""What the doctor finds in an interpreter."""

from __future__ import annotations

from ...environments.doctor_rules import TE, Difference, DoctorResult, Weight
from ...evidence.doctor_look import PackageLook
from ..document import Block, Diagnostic, Document, Table
from ..marks import Mark, bad, good, mark_of, quiet
from .words import tabulate_facts, tally


def describe_doctor(result: DoctorResult) -> Document:
    """The stack as loaded, then every difference, worst first."""
    looks, path = result.packages, result.path
    rows = tuple((look.package, _mark_package(look), look.version, f"{look.seconds:.1f}", look.file) for look in looks)
    facts = {
        "Python": f"{path.python} on {path.machine}",
        "torch": f"{path.torch or 'none'}, CUDA {path.torch_cuda or 'none'}",
        "GPU": path.gpu or f"none: {path.no_gpu}",
        "driver": f"{path.driver} (CUDA {path.driver_cuda or 'unknown'})" if path.gpu else "",
        "interpreter": result.interpreter,
    }
    blocks: tuple[Block, ...] = (
        tabulate_facts(facts),
        Table(("package", "as loaded", "version", "seconds", "file"), rows, numeric=frozenset({3})),
        Table(("loaded library", "version", "files", "by import of"), _list_libraries(looks)),
        *map(_describe_difference, result.differences),
    )  # fmt: skip
    loaded = sum(look.installed and look.failure is None and not look.ended for look in looks)
    weights = tally(mark_of(one.weight).word for one in result.differences) or "none"
    broken = {name: None for one in result.differences if one.weight is Weight.BREAKS for name in one.breaks}
    tail = f"; bridge modules that break: {', '.join(broken)}" if broken else ""
    summary = f"{loaded} of {len(looks)} packages load; differences: {weights}{tail}."
    mark = mark_of(result.differences[0].weight) if result.differences else good("fits together")
    has_te = any(look.package == TE and look.installed for look in looks)
    title = f"The stack{'' if has_te else ' without Transformer Engine'} as loaded, compared with {result.target} and "
    title += result.stack
    return Document(title, summary, mark, blocks)


def _mark_package(look: PackageLook) -> Mark:
    if look.failure is not None or look.ended:
        return bad("does not load")
    return good("loads") if look.installed else quiet("not installed")


def _describe_difference(one: Difference) -> Diagnostic:
    fields = (("wanted", one.wanted), ("breaks", ", ".join(one.breaks)), ("how", one.how), ("source", one.source))
    name = f"{one.subject}, {one.aspect}"
    return Diagnostic(name, mark_of(one.weight), message=one.seen, fields=fields, help=one.next_step)


def _list_libraries(looks: tuple[PackageLook, ...]) -> tuple[tuple[str, str, tuple[str, ...], str], ...]:
    """Every CUDA library as loaded: name, version that it reports, files, and by which imports."""
    rows: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for look in looks:
        versions = {library.name: library.version for library in look.libraries}
        for name, files in look.mapped.items():
            rows.setdefault((name, versions.get(name, ""), tuple(files)), []).append(look.package)
    return tuple((*key, ", ".join(packages)) for key, packages in sorted(rows.items()))
