"""What is said of the JIT caches: compiled ahead of time, found again, and carried elsewhere."""

from __future__ import annotations

from typing import Final

from megacpp_validate.errors import Exit
from megacpp_validate.text import count

from ...jitcache.result import (
    JitCacheResult,
    JitCacheSize,
    JitCause,
    JitCompile,
    JitTaskRow,
    JitTaskState,
    JitVerdict,
    JitVerifyResult,
    JitVerifyRow,
    PrewarmResult,
    StackDifference,
)
from ..document import Block, Bullets, Details, Diagnostic, Document, Paragraph, Preformatted, Table
from ..marks import Mark, bad, good, missing, risk

_STATES: Final = {
    JitTaskState.DONE: good("done"), JitTaskState.KEPT: good("kept"), JitTaskState.FAILED: bad("failed"),
    JitTaskState.NOT_RUN: missing(),
}  # fmt: skip
_VERDICTS: Final = {
    JitVerdict.WARM: good("warm"), JitVerdict.COMPILED: bad("compiled"), JitVerdict.SILENT: bad("asked no cache"),
    JitVerdict.FAILED: bad("failed"), JitVerdict.NOT_RUN: missing(),
}  # fmt: skip
_WHY: Final = {
    JitVerdict.SILENT: "it compiled nothing and looked for nothing that it compiles when it is prewarmed: it took "
    "another path now, or compiling is switched off",
    JitCause.NO_TASK: "the cache was sealed without this task",
    JitCause.OTHER_SETTINGS: "the cache was sealed with other settings of this task",
    JitCause.OTHER_KEY: "this very task was prewarmed: the requested kernel has another key",
}
_STEPS: Final = {
    JitVerdict.SILENT: "check the backends in its receipt, and its log: a fallback does not prove a warm cache",
    JitVerdict.FAILED: "fix what failed first: its log lies beside the receipt",
    JitVerdict.NOT_RUN: "run it on a machine of the target, with what it lacks: what never ran is not verified",
}
_EXITS: Final = {Exit.OPEN: good("done"), Exit.CLOSED: bad("closed")}
_SHOWN: Final = 12  # compiles of one row that are listed unfolded
_MIB: Final = 2**20


def describe_prewarm(result: PrewarmResult) -> Document:
    """A row a task, what failed in full, and what lies in the caches now."""
    blocks: list[Block] = []
    if result.swept:
        blocks.append(
            Paragraph(f"Removed {count(result.swept, 'file')} of a killed prewarm: no finished task owns them.")
        )
    rows = [(row.task, _STATES[row.state], f"{row.seconds:.1f}", _count_compiles(row)) for row in result.rows]
    blocks.append(Table(("task", "state", "seconds", "compiled"), tuple(rows), numeric=frozenset({2})))
    blocks += [
        Diagnostic(row.task, _STATES[row.state], message=row.reason)
        for row in result.rows
        if row.state in (JitTaskState.FAILED, JitTaskState.NOT_RUN)
    ]
    for row in result.rows:
        if row.compiled:
            blocks.append(Details(f"Compiled by {row.task}", (Bullets(tuple(map(_describe_compile, row.compiled))),)))
    blocks += [Paragraph(f"Left out: {line}.") for line in result.left_out]
    blocks.append(Paragraph(f"{result.folder}: {_describe_caches(result.caches)}"))
    blocks.append(Paragraph(f"{result.interpreter}; {result.seconds:.1f} s"))
    title = f"JIT caches of {result.target} ({result.architecture}, {result.mode})"
    return Document(title, _summarize_prewarm(result), _EXITS.get(result.exit, missing()), tuple(blocks))


def _summarize_prewarm(result: PrewarmResult) -> str:
    states = [row.state for row in result.rows]
    kept = states.count(JitTaskState.KEPT)
    compiled = sum(len(row.compiled) for row in result.rows if row.state is JitTaskState.DONE)
    seal = "Not sealed: a task did not run. `nox -s jit_cache -- seal` seals what is there."
    if result.sealed:
        seal = f"Sealed as {result.manifest}."
    elif not result.manifest:
        seal = "There is no manifest: a task failed, or none could run here."
    done = kept + states.count(JitTaskState.DONE)
    said = f"{done} of {count(states, 'task')} done for {result.architecture} ({kept} by an earlier run)"
    return f"{said}; {count(compiled, 'kernel')} compiled now. {seal}"


def _count_compiles(row: JitTaskRow) -> str:
    by = {one.library: sum(other.library == one.library for other in row.compiled) for one in row.compiled}
    said = [f"{number} by {library}" for library, number in sorted(by.items())]
    return ", ".join([*said, *([f"{row.hits} found"] if row.hits else [])]) or "nothing to compile"


def describe_verify(result: JitVerifyResult) -> Document:
    """A row a task, and below it every compile with kernel and shape."""
    size = f"{count(result.files, 'file')}, {_describe_bytes(result.bytes)}, every hash right"
    blocks: list[Block] = [Paragraph(f"{result.folder}: {size}; {result.manifest}")]
    if result.differences:
        blocks.append(_describe_differences(result.differences, result.target))
    if result.rows:
        rows = [
            (row.task, _VERDICTS[row.verdict], f"{row.seconds:.1f}", str(len(row.compiled)), _hits(row))
            for row in result.rows
        ]
        headings = ("task", "verdict", "seconds", "compiled", "found")
        blocks.append(Table(headings, tuple(rows), numeric=frozenset({2, 3, 4})))
    for row in result.rows:
        if row.verdict is not JitVerdict.WARM:
            blocks += _describe_cold(row, result)
    for path in result.unreported:
        message = f"{path} appeared, and no process reported its compile: the monitor misses that library"
        blocks.append(Diagnostic(path, bad("unreported"), message=message))
    blocks += [Paragraph(sentence, missing("unproven")) for sentence in result.unproven]
    blocks += [Paragraph(note, risk("note")) for note in _list_notes(result)]
    took = f"checked and copied in {result.opened_s:.1f} s; {result.seconds:.1f} s in all"
    blocks.append(Paragraph(f"{result.interpreter}; {took}"))
    title = f"The sealed JIT cache of {result.target} ({result.architecture}, {result.mode})"
    mark = {Exit.OPEN: good("warm"), Exit.CLOSED: bad("not warm")}.get(result.exit, missing("not proven"))
    cases = tuple(Diagnostic(row.task, _VERDICTS[row.verdict], message=_why(row)) for row in result.rows)
    return Document(title, _summarize_verify(result), mark, tuple(blocks), cases)


def _hits(row: JitVerifyRow) -> str:
    return "" if row.hits is None else str(row.hits)


def _summarize_verify(result: JitVerifyResult) -> str:
    if result.differences:
        number = count(result.differences, "difference")
        return f"The cache is of another stack ({number}): no task ran on it, and nothing is proven."
    if not result.rows:
        return "Nothing ran: nothing is proven."
    warm = sum(row.verdict is JitVerdict.WARM for row in result.rows)
    said = f"{warm} of {count(result.rows, 'task')} ran on the sealed cache without a compile"
    if result.exit is Exit.OPEN:
        part = f"; {count(result.left_out, 'task')} of the target left out" if result.left_out else ""
        return f"Warm: {said}{part}."
    compiles = sum(len(row.compiled) for row in result.rows) + len(result.unreported)
    return f"Not warm: {count(compiles, 'compile')}; {said}." if compiles else f"Not proven: {said}."


def _describe_cold(row: JitVerifyRow, result: JitVerifyResult) -> list[Block]:
    prewarm = f"`nox -s prewarm -- --target {result.target} --tasks {row.task} --reopen`"
    step = _STEPS.get(row.verdict, f"{prewarm}, and seal again")
    if row.verdict is JitVerdict.COMPILED and row.cause is JitCause.OTHER_KEY:
        step = (
            "compare the shapes: for another shape, add a task to matrix/prewarm.toml; for the same, a variable or a "
            f"source file in its key has changed; then {prewarm}"
        )
    fields = [("the cache has", line) for line in row.known]
    for one in row.compiled[:_SHOWN]:
        looked_for = one.looked_for or f"its key below {result.folder}/{one.library}: the library does not report it"
        fields += [("compiled", _describe_compile(one)), ("looked for", looked_for)]
    mark = _VERDICTS[row.verdict]
    blocks: list[Block] = [Diagnostic(row.task, mark, message=_why(row), fields=tuple(fields), help=step)]
    if rest := row.compiled[_SHOWN:]:
        blocks.append(Details(f"{len(rest)} more compiled", (Bullets(tuple(map(_describe_compile, rest))),)))
    return blocks


def _why(row: JitVerifyRow) -> str:
    causes = [row.reason, _WHY.get(row.verdict, ""), _WHY[row.cause] if row.cause is not None else ""]
    return "; ".join(filter(None, causes))


def _list_notes(result: JitVerifyResult) -> list[str]:
    notes = []
    for row in result.rows:
        if row.unkept:
            names = ", ".join(f"`{name}`" for name in dict.fromkeys(one.kernel for one in row.unkept))
            number = count(row.unkept, "compile")
            notes.append(f"{row.task}: {number} that this release makes in every process: {names}")
    notes += [*result.notes, *(f"left out, and not verified: {line}" for line in result.left_out)]
    if result.missing:
        notes.append(f"the cache was sealed without: {', '.join(result.missing)}")
    return [*notes, *(f"compiled in memory, where no cache can be warm: {line}" for line in result.unwatched)]


def describe_cache(result: JitCacheResult) -> Document:
    """What was done and what the cache is; variables as a shell reads them."""
    stack = ", ".join(f"{name} {version}" for name, version in result.stack.items())
    fields = {
        "folder": result.folder, "manifest": f"{result.manifest}, made {result.made}",
        "holds": _describe_caches(result.caches), "tasks": ", ".join(result.tasks),
        "not in it": ", ".join(result.missing), "for": f"{stack}; {result.mode}",
        "archive": f"{result.archive} {result.archive_hash}".strip(),
    }  # fmt: skip
    blocks: list[Block] = [Table(("", "cache"), tuple((label, text) for label, text in fields.items() if text))]
    if result.differences:
        blocks.append(_describe_differences(result.differences, ""))
    if not result.in_place:
        said = "Made in another folder, whose paths stand in it: use it by a working copy (`jit_cache open`)."
        blocks.append(Paragraph(said, risk("note")))
    if result.extra:
        blocks.append(Paragraph(f"{count(result.extra, 'file')} made since, and not exported:", risk("beside it")))
        blocks.append(Bullets(result.extra))
    if result.variables:
        blocks.append(Preformatted("\n".join(f"export {name}={value}" for name, value in result.variables.items())))
    mark: Mark = _EXITS.get(result.exit, bad("closed"))
    return Document(f"JIT cache of {result.architecture}: {result.deed}", _summarize_cache(result), mark, tuple(blocks))


def _summarize_cache(result: JitCacheResult) -> str:
    if result.differences:
        return f"Refused: the cache is of another stack ({count(result.differences, 'difference')}); not imported."
    if result.deed == "unseal":
        return "Open again: a prewarm can continue in it."
    size = _describe_bytes(sum(cache.bytes for cache in result.caches))
    files = f"{count(sum(cache.files for cache in result.caches), 'file')} ({size}), every hash right"
    archive = f", {_describe_bytes(result.archive_bytes)} packed" if result.archive_bytes else ""
    done = {
        "export": "Exported", "open": "A working copy",
        "import": "It is there already" if result.kept else "Imported and sealed",
    }.get(result.deed, "Sealed")  # fmt: skip
    if not result.sealed:
        return f"Whole, and not sealed: {files}. Export and jit_verify refuse it: `nox -s jit_cache -- seal`."
    return f"{done}: {files}{archive}."


def _describe_differences(differences: tuple[StackDifference, ...], target: str) -> Diagnostic:
    step = (
        "use the stack that the cache was made for, or prewarm this one: "
        f"`nox -s prewarm -- --target {target or 'TARGET'} --root FOLDER`; an import takes --any-stack, and misses"
    )
    fields = tuple(
        (one.what, f"recorded {one.recorded or 'none'}, here {one.observed or 'none'} (matters to {one.matters})")
        for one in differences
    )
    message = f"the cache and the stack have {count(differences, 'difference')}"
    return Diagnostic("stack", bad("differs"), message=message, fields=fields, help=step)


def _describe_caches(caches: tuple[JitCacheSize, ...]) -> str:
    listed = (f"{one.library} {count(one.files, 'file')} ({_describe_bytes(one.bytes)})" for one in caches)
    return ", ".join(listed) or "nothing"


def _describe_compile(one: JitCompile) -> str:
    shape = f" for {one.shape}" if one.shape else ""
    return f"{one.library}: `{one.kernel}`{shape}" + (f", {one.seconds:.1f} s" if one.seconds else "")


def _describe_bytes(size: int) -> str:
    return f"{size / _MIB:.1f} MiB"
