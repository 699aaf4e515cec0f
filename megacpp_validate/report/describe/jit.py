"""JIT caches in words: compiled ahead of time, found again, and carried elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from megacpp_validate.text import count

from ...jitcache.cache import JitCacheResult
from ...jitcache.manifest import JitCacheSize, JitCompile, StackDifference
from ...jitcache.prewarm import JitTaskState, PrewarmResult
from ...jitcache.verify import JitCause, JitVerdict, JitVerifyResult, JitVerifyRow, VerifiedPrewarm
from ..document import Block, Bullets, Details, Diagnostic, Document, Paragraph, Preformatted, Table
from ..marks import bad, good, mark_exit, mark_of, missing, risk
from .words import tabulate_facts, tally

_REASONS: Final[dict[JitVerdict | JitCause, str]] = {
    JitVerdict.SILENT: "it compiled nothing and looked for nothing that it compiles when it is prewarmed: it took "
    "another path now, or compiling is switched off",
    JitCause.NO_TASK: "the cache was sealed without this task",
    JitCause.OTHER_SETTINGS: "the cache was sealed with other settings of this task",
    JitCause.OTHER_KEY: "this very task was prewarmed: the requested kernel has another key",
}
_STEPS: Final[dict[JitVerdict | JitCause | None, str]] = {
    JitVerdict.SILENT: "check the backends in its receipt, and its log: a fallback does not prove a warm cache",
    JitVerdict.FAILED: "fix the failure first: its log lies beside the receipt",
    JitVerdict.NOT_RUN: "run it on a machine of the target",
    JitCause.OTHER_KEY: "compare the shapes: for another shape, add a task to matrix/prewarm.toml; for the same, a "
    "variable or a source file in its key has changed; then {prewarm}",
}
_DONE: Final = {
    "export": "Exported", "import": "Imported and sealed", "open": "Opened as a working copy",
}  # fmt: skip


def describe_prewarm(result: PrewarmResult) -> Document:
    """A row a task, the reason of each failure, and what the caches hold now."""
    verdict = result.verdict if isinstance(result, VerifiedPrewarm) else None
    rows = tuple(
        (row.task, mark_of(row.state), f"{row.seconds:.1f}", tally(one.library for one in row.compiled), str(row.hits))
        for row in result.rows
    )
    cases = tuple(
        Diagnostic(row.task, mark_of(row.state), "prewarm", row.reason, seconds=row.seconds) for row in result.rows
    )
    facts = {
        "folder": result.folder,
        "caches": _describe_caches(result.caches),
        "left out": result.left_out,
        "removed": f"{count(result.swept, 'file')} of a killed prewarm" if result.swept else "",
        "manifest": result.manifest or "none: a task failed, or none ran",
        "sealed": "yes" if result.sealed else "no: `nox -s jit_cache -- seal` seals the cache",
        "stack": f"{result.interpreter}; {result.seconds:.1f} s",
    }
    blocks: tuple[Block, ...] = (
        Table(("task", "state", "seconds", "compiled", "found"), rows, numeric=frozenset({2, 4})),
        *(case for case, row in zip(cases, result.rows, strict=True) if row.reason),
        *(describe_verify(verdict).blocks if verdict else ()),
        *(Details(f"Compiled by {row.task}", (_list_compiles(row.compiled),)) for row in result.rows),
        tabulate_facts(facts),
    )
    done = sum(row.state in (JitTaskState.DONE, JitTaskState.KEPT) for row in result.rows)
    compiled = sum(len(row.compiled) for row in result.rows)
    summary = f"{done} of {count(result.rows, 'task')} done for {result.architecture}; kernels compiled: {compiled}."
    if result.left_out:
        summary += f" Left out: {count(result.left_out, 'task')}."
    if verdict is not None:
        summary += f" {describe_verify(verdict).summary}"
    title = f"JIT caches of {result.target} ({result.architecture}, {result.mode})"
    return Document(title, summary, mark_exit(result.exit, open_="done"), blocks, cases)


def describe_verify(result: JitVerifyResult) -> Document:
    """A row a task, and below it every compile with kernel and shape."""
    rows = tuple(
        (
            row.task,
            mark_of(row.verdict),
            f"{row.seconds:.1f}",
            str(len(row.compiled)),
            "" if row.hits is None else str(row.hits),
        )
        for row in result.rows
    )
    columns = ("task", "verdict", "seconds", "compiled", "found")
    cases = tuple(_diagnose(row, result) for row in result.rows)
    cold = [case for case, row in zip(cases, result.rows, strict=True) if row.verdict is not JitVerdict.WARM]
    unreported = [
        Diagnostic(
            path, bad("unreported"), "files", "no process reported the compile of this file: the monitor misses it"
        )
        for path in result.unreported
    ]
    facts = {
        "folder": f"{result.folder}: {count(result.files, 'file')}, {result.bytes / 2**20:.1f} MiB, every hash right",
        "manifest": result.manifest,
        "stack": result.interpreter,
        "time": f"checked and copied in {result.opened_s:.1f} s; {result.seconds:.1f} s in all",
    }
    blocks: tuple[Block, ...] = (
        *_describe_differences(result.differences, result.target),
        Table(columns, rows, numeric=frozenset({2, 3, 4})),
        *cold,
        *unreported,
        *(Paragraph(sentence, missing("unproven")) for sentence in result.unproven),
        *(Paragraph(note, risk("note")) for note in _list_notes(result)),
        tabulate_facts(facts),
    )
    warm = len(result.rows) - len(cold)
    summary = f"{warm} of {count(result.rows, 'task')} ran on the sealed cache without a compile."
    if result.differences:
        summary = "The cache is of another stack: no task ran on it, and nothing is proven."
    title = f"The sealed JIT cache of {result.target} ({result.architecture}, {result.mode})"
    mark = mark_exit(result.exit, open_="warm", closed="not warm", otherwise="not proven")
    return Document(title, summary, mark, blocks, (*cases, *unreported))


def _diagnose(row: JitVerifyRow, result: JitVerifyResult) -> Diagnostic:
    prewarm = f"`nox -s prewarm -- --target {result.target} --tasks {row.task} --reopen`"
    step = _STEPS.get(row.verdict) or _STEPS.get(row.cause) or "{prewarm}, and seal again"
    fields = [("the cache has", line) for line in row.known]
    for one in row.compiled:
        looked_for = one.looked_for or f"its key below {result.folder}/{one.library}: the library does not report it"
        fields += [("compiled", _describe_compile(one)), ("looked for", looked_for)]
    reasons = [row.reason, _REASONS.get(row.verdict, ""), _REASONS[row.cause] if row.cause else ""]
    return Diagnostic(
        row.task, mark_of(row.verdict), "jit_verify", "; ".join(filter(None, reasons)), tuple(fields),
        "" if row.verdict is JitVerdict.WARM else step.format(prewarm=prewarm), seconds=row.seconds,
    )  # fmt: skip


def _list_notes(result: JitVerifyResult) -> Iterator[str]:
    for row in result.rows:
        if row.unkept:
            names = ", ".join(f"`{name}`" for name in dict.fromkeys(one.kernel for one in row.unkept))
            yield f"{row.task}: this release compiles in every process: {names}"
    yield from result.notes
    yield from (f"left out, and not verified: {line}" for line in result.left_out)
    yield from (f"the cache was sealed without: {task}" for task in result.missing)
    yield from (f"compiled in memory, where no cache can be warm: {line}" for line in result.unwatched)


def describe_cache(result: JitCacheResult) -> Document:
    """What was done and what the cache is; variables as a shell reads them."""
    archive = f"{result.archive} {result.archive_hash}, {result.archive_bytes / 2**20:.1f} MiB"
    facts = {
        "folder": result.folder,
        "manifest": f"{result.manifest}, made {result.made}",
        "holds": _describe_caches(result.caches),
        "tasks": ", ".join(result.tasks),
        "not in it": ", ".join(result.missing),
        "for": ", ".join([*(f"{name} {version}" for name, version in result.stack.items()), result.mode]),
        "archive": archive if result.archive else "",
        "made since, and not exported": result.extra,
        "usable in place": "yes" if result.in_place else "no: use it by a working copy (`jit_cache open`)",
    }
    variables = "\n".join(f"export {name}={value}" for name, value in result.variables.items())
    blocks: tuple[Block, ...] = (
        tabulate_facts(facts, ("", "cache")),
        Preformatted(variables),
    )
    files = f"{count(sum(cache.files for cache in result.caches), 'file')}, every hash right"
    summary = f"{_DONE.get(result.deed, 'Sealed')}: {files}."
    if not result.sealed:
        summary = f"Whole, and not sealed: {files}. Export and jit_verify refuse it: `nox -s jit_cache -- seal`."
    return Document(f"JIT cache of {result.architecture}: {result.deed}", summary, good("done"), blocks)


def _describe_differences(differences: tuple[StackDifference, ...], target: str) -> tuple[Diagnostic, ...]:
    step = (
        "use the stack that the cache was made for, or prewarm this one: "
        f"`nox -s prewarm -- --target {target} --root FOLDER`"
    )
    fields = tuple(
        (one.what, f"recorded {one.recorded or 'none'}, here {one.observed or 'none'} (matters to {one.matters})")
        for one in differences
    )
    message = f"the cache and the stack have {count(differences, 'difference')}"
    return (Diagnostic("stack", bad("differs"), message=message, fields=fields, help=step),) if fields else ()


def _describe_caches(caches: tuple[JitCacheSize, ...]) -> tuple[str, ...]:
    return tuple(f"{one.library}: {count(one.files, 'file')}, {one.bytes / 2**20:.1f} MiB" for one in caches)


def _list_compiles(compiles: Iterable[JitCompile]) -> Bullets:
    return Bullets(tuple(map(_describe_compile, compiles)))


def _describe_compile(one: JitCompile) -> str:
    shape = f" for {one.shape}" if one.shape else ""
    return f"{one.library}: `{one.kernel}`{shape}, {one.seconds:.1f} s"
