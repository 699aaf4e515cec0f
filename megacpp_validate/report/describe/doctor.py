"""What the doctor finds in an interpreter."""

from __future__ import annotations

from ...environments.doctor_rules import Difference, DoctorResult, Weight
from ...environments.fits import TE
from ...evidence.doctor_look import PackageLook
from ..document import Block, Diagnostic, Document, Table
from ..marks import Mark, bad, good, mark_of, quiet
from .words import tabulate_facts, tally


def describe_doctor(result: DoctorResult) -> Document:
    """The stack as loaded, then every difference, worst first."""
    looks, path = result.packages, result.path
    rows = tuple((look.package, _mark_package(look), look.version, f"{look.seconds:.1f}", look.file) for look in looks)
    loaded = dict.fromkeys(
        (name, ", ".join(one.version for one in look.libraries if one.name == name), files)
        for look in looks
        for name, files in look.mapped.items()
    )
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
        Table(("loaded library", "version", "files"), tuple(loaded)),
        *map(_describe_difference, result.differences),
    )  # fmt: skip
    works = sum(look.installed and look.failure is None and not look.ended for look in looks)
    weights = tally(mark_of(one.weight).word for one in result.differences) or "none"
    broken = {name: None for one in result.differences if one.weight is Weight.BREAKS for name in one.breaks}
    tail = f"; bridge modules that break: {', '.join(broken)}" if broken else ""
    summary = f"{works} of {len(looks)} packages load; differences: {weights}{tail}."
    mark = mark_of(result.differences[0].weight) if result.differences else good("fits together")
    kind = "stack" if any(one.package == TE and one.installed for one in looks) else "stack without Transformer Engine"
    title = f"The {kind} as loaded, compared with {result.target} and {result.stack}"
    return Document(title, summary, mark, blocks)


def _mark_package(look: PackageLook) -> Mark:
    if look.failure is not None or look.ended:
        return bad("does not load")
    return good("loads") if look.installed else quiet("not installed")


def _describe_difference(one: Difference) -> Diagnostic:
    fields = (("wanted", one.wanted), ("breaks", ", ".join(one.breaks)), ("how", one.how), ("source", one.source))
    name = f"{one.subject}, {one.aspect}"
    return Diagnostic(name, mark_of(one.weight), message=one.seen, fields=fields, help=one.next_step)
