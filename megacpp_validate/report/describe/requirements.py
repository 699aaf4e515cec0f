"""What a release needs of NVIDIA's libraries, as a document."""

from __future__ import annotations

from ...canary.wheel_requirements import SymbolNeed, WheelRequirements
from ...text import count
from ..document import Block, Diagnostic, Document, Paragraph, Preformatted
from ..marks import bad, find_worst_mark, good, missing, risk


def describe_requirements(result: WheelRequirements) -> Document:
    """Each library that a release needs in a later version than the oldest on the index, and rows for it."""
    blocks: list[Block] = [
        Paragraph(f"{core.wheel}: {count(core.undefined, 'undefined symbol')}; needs {', '.join(core.needed)}.")
        for core in result.cores
    ]
    cases = [_diagnose(need) for need in result.needs]
    cases += [
        Diagnostic(name, missing("unknown"), "wheels", why, code="not-read") for name, why in result.unknown.items()
    ]
    rows = "\n".join(need.row for need in result.needs if need.row)
    new = [Paragraph(f"Written to {result.written}:" if result.written else "New rows (--write):"), Preformatted(rows)]
    names = ", ".join(f"{one.distribution}>={one.first or '?'}" for one in result.needs) or "any on the index"
    unread = f" Not read: {', '.join(result.unknown)}." if result.unknown else ""
    summary = f"Needs {names}.{unread}"
    mark = find_worst_mark((case.mark for case in cases), good("any library"))
    title = f"Requirements of Transformer Engine {result.te}"
    return Document(title, summary, mark, (*blocks, *cases, *(new if rows else ())))


def _diagnose(need: SymbolNeed) -> Diagnostic:
    mark = missing("in no wheel") if not need.first else good("known") if need.known else bad("new")
    when = "when the core library is loaded" if need.at_load else "at the first call"
    first = f"{need.first} defines it first, {need.before} does not" if need.first else "no wheel on the index has it"
    if need.first and not need.at_load:
        mark = risk(mark.word)
    return Diagnostic(
        f"{need.distribution} for CUDA {need.cuda}", mark, "wheels",
        f"{', '.join(need.symbols)}, bound {when}: {first}", (("row", need.known),), code=need.library,
    )  # fmt: skip
