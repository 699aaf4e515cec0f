"""JIT caches: compiled ahead of time, found again, and carried elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ...jitcache.cache import JitCacheResult
from ...jitcache.prewarm import PrewarmResult
from ...jitcache.stack import JitRow, JitVerdict
from ...jitcache.verify import JitVerifyResult
from ...text import count
from ..document import Block, Content, Diagnostic, Document, Paragraph, Preformatted
from ..marks import bad, good, mark_exit, mark_of, missing, risk
from .words import list_cases, list_fields, sum_up, tabulate, tabulate_facts

_UNWATCHED: Final = "this file appeared in the driver's cache, which could not be watched: the cache is not proven warm"
_PREWARM: Final = "`nox -s prewarm -- --target {target} --tasks {task} --root FOLDER`"
_CAUSES: Final[dict[JitVerdict, tuple[str, str]]] = {  # why, and what to do
    JitVerdict.COMPILED: (
        "the sealed cache does not have a kernel that was requested",
        "compare the shapes: for another shape, add a task to matrix/prewarm.toml; for the same, a variable or a "
        f"source file in its key has changed; then {_PREWARM}, and seal again",
    ),
    JitVerdict.SILENT: (
        "the task compiled nothing and looked for nothing that its prewarm compiled: the task took another path, or "
        "compiling is switched off",
        "check the backends in its receipt, and its log: a fallback does not prove a warm cache",
    ),
    JitVerdict.FAILED: ("", "fix the failure first: its log lies beside the receipt"),
    JitVerdict.NOT_RUN: ("", "run it on a machine of the target"),
}


def describe_prewarm(result: PrewarmResult) -> Document:
    """A row a task, the reason of each failure, and what the caches hold now."""
    verdict = result.verdict
    cases = list_cases(result.rows, "prewarm", "task", "verdict")
    facts = list_fields(result, "folder left_out caches versions manifest sealed interpreter seconds")
    blocks: tuple[Block, ...] = (
        tabulate(result.rows, "task verdict seconds compiled hits"),
        *(case for case in cases if case.message),
        *(describe_verify(verdict).blocks if verdict else ()),
        tabulate_facts(facts),
    )
    summary = (
        f"{count(result.rows, 'task')} for {result.architecture}: {sum_up(cases) or 'the cache is sealed already'}."
    )
    if result.left_out:
        summary += f" Left out: {count(result.left_out, 'task')}."
    if verdict is not None:
        summary += f" {describe_verify(verdict).summary}"
    title = f"JIT caches of {result.target} ({result.architecture}{'' if result.folder else ', compile only'})"
    return Document(title, summary, mark_exit(result.exit, open_="done"), blocks, cases)


def describe_verify(result: JitVerifyResult) -> Document:
    """A row a task, and below it every compile with kernel and shape."""
    cases = tuple(_diagnose(row, result) for row in result.rows)
    cold = [case for case, row in zip(cases, result.rows, strict=True) if row.verdict is not JitVerdict.WARM]
    missed = "no process reported the compile of this file: the monitor misses it"
    unreported = [Diagnostic(path, bad("unreported"), "files", missed) for path in result.unreported]
    blocks: tuple[Block, ...] = (
        tabulate(result.differences, "what recorded observed matters", "What differs between the cache and the stack"),
        tabulate(result.rows, "task verdict seconds compiled hits"),
        *cold,
        *unreported,
        *(Diagnostic(path, missing("unproven"), "files", _UNWATCHED) for path in result.unproven),
        *(Paragraph(note, risk("note")) for note in _list_notes(result)),
        tabulate_facts(list_fields(result, "folder files bytes manifest interpreter opened_s seconds")),
    )
    summary = f"{count(result.rows, 'task')} ran on the sealed cache: {sum_up(cases) or 'none'}."
    if result.differences:
        summary = (
            "The cache is of another stack: no task ran on it, and nothing is proven. Next step: use that stack, or "
        )
        summary += f"prewarm this one: `nox -s prewarm -- --target {result.target} --root FOLDER`."
    title = f"The sealed JIT cache of {result.target} ({result.architecture})"
    mark = mark_exit(result.exit, open_="warm", closed="not warm", otherwise="not proven")
    return Document(title, summary, mark, blocks, (*cases, *unreported))


def _diagnose(row: JitRow, result: JitVerifyResult) -> Diagnostic:
    cause, step = _CAUSES.get(row.verdict, ("", ""))
    fields: list[tuple[str, Content]] = [("the cache has", row.known)]
    for one in row.compiled:
        looked_for = one.looked_for or f"its key below {result.folder}/{one.library}: the library does not report it"
        shape = f" for {one.shape}" if one.shape else ""
        compiled = f"{one.library}: `{one.kernel}`{shape}, {one.seconds:.1f} s"
        fields += [("compiled", compiled), ("looked for", looked_for)]
    why = "; ".join(filter(None, (row.reason, cause)))
    step = step.format(target=result.target, task=row.task)
    return Diagnostic(row.task, mark_of(row.verdict), "jit_verify", why, tuple(fields), step, seconds=row.seconds)


def _list_notes(result: JitVerifyResult) -> Iterator[str]:
    for row in result.rows:
        if row.unkept:
            names = ", ".join(f"`{name}`" for name in dict.fromkeys(one.kernel for one in row.unkept))
            yield f"{row.task}: this release compiles in every process: {names}"
    yield from (f"left out, and not verified: {line}" for line in result.left_out)
    yield from (f"the cache was sealed without: {task}" for task in result.missing)
    yield from (f"compiled in memory, where no cache can be warm: {line}" for line in result.unwatched)


def describe_cache(result: JitCacheResult) -> Document:
    """What was done and what the cache is; variables as a shell reads them."""
    names = "folder manifest stack caches missing archive"
    blocks: tuple[Block, ...] = (
        tabulate_facts(list_fields(result, names)),
        Preformatted("\n".join(f"export {name}={value}" for name, value in result.variables.items())),
    )
    return Document(
        f"JIT cache of {result.architecture}: {result.deed}", "Done: every hash is right.", good("done"), blocks
    )
