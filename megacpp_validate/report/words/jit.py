"""Words for the JIT caches: what was compiled ahead of time, what was found again, and what to do about the rest."""

from __future__ import annotations

from ...jitcache.result import (
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
from ..marks import Mark
from ..summaries import count

_STATES = {
    JitTaskState.DONE: Mark("✓", "-", "done", "good"),
    JitTaskState.KEPT: Mark("✓", "-", "kept", "good"),
    JitTaskState.FAILED: Mark("✗", "X", "failed", "bad"),
    JitTaskState.NOT_RUN: Mark("○", "?", "not run", "risk"),
}
_VERDICTS = {
    JitVerdict.WARM: Mark("✓", "-", "warm", "good"),
    JitVerdict.COMPILED: Mark("✗", "X", "compiled", "bad"),
    JitVerdict.SILENT: Mark("✗", "X", "asked no cache", "bad"),
    JitVerdict.FAILED: Mark("✗", "X", "failed", "bad"),
    JitVerdict.NOT_RUN: Mark("○", "?", "not run", "risk"),
}
_CAUSES = {
    JitCause.NO_TASK: "the cache was sealed without this task",
    JitCause.OTHER_SETTINGS: "the cache was sealed with other settings of this task",
    JitCause.OTHER_KEY: "this very task was prewarmed: what is asked for now has another key",
}
_KIB = 1024


def mark_state(state: JitTaskState) -> Mark:
    """How a state of a task looks."""
    return _STATES[state]


def mark_warmth(verdict: JitVerdict) -> Mark:
    """How a verdict on a sealed cache looks."""
    return _VERDICTS[verdict]


def say_bytes(size: int) -> str:
    """A size, in units of 1024."""
    number, units = float(size), ["B", "KiB", "MiB", "GiB"]
    while number >= _KIB and len(units) > 1:
        number, units = number / _KIB, units[1:]
    return f"{number:.0f} {units[0]}" if units[0] == "B" else f"{number:.1f} {units[0]}"


def say_path(path: str) -> str:
    """The name of a file that anybody may have made: on one line, whatever stands in it."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in path)


def summarize_prewarm(result: PrewarmResult) -> str:
    """The answer in a sentence or two."""
    states = [row.state for row in result.rows]
    good = [state for state in states if state in (JitTaskState.DONE, JitTaskState.KEPT)]
    kept = states.count(JitTaskState.KEPT)
    compiled = sum(len(row.compiled) for row in result.rows if row.state is JitTaskState.DONE)
    if not result.rows:
        return f"Nothing was compiled for {result.architecture}: no task is selected."
    earlier = f" ({kept} by an earlier run)" if kept else ""
    said = f"{len(good)} of {count(len(states), 'task')} for {result.architecture} {_are(len(good))} done{earlier}"
    return f"{said}, with {count(compiled, 'kernel')} compiled now. {_say_seal(result)}"


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def _say_seal(result: PrewarmResult) -> str:
    if not result.manifest and not result.breaks:
        return "There is no manifest: nothing could run here."
    if not result.manifest:
        return "There is no manifest: mend what failed and prewarm again, or name the other tasks with --tasks."
    if result.sealed:
        return f"Sealed as {result.manifest}."
    return "It is not sealed: a task did not run. `nox -s jit_cache -- seal` seals what is there."


def say_caches(caches: tuple[JitCacheSize, ...]) -> str:
    """What lies in each cache."""
    return (
        ", ".join(f"{one.library} {count(one.files, 'file')} ({say_bytes(one.bytes)})" for one in caches) or "nothing"
    )


def say_task(row: JitTaskRow) -> str:
    """What a task compiled and found, or why it did not."""
    if row.reason:
        return row.reason
    by = {one.library: sum(other.library == one.library for other in row.compiled) for one in row.compiled}
    said = [f"{number} by {library}" for library, number in sorted(by.items())]
    found = [f"{row.hits} found"] if row.hits else []
    return ", ".join([*said, *found]) or "nothing to compile"


def summarize_verify(result: JitVerifyResult) -> str:
    """The answer in a sentence or two."""
    if result.differences:
        number = count(len(result.differences), "difference")
        return f"The cache is of another stack ({number}): nothing was run on it, and nothing is proven."
    if not result.rows:
        return "Nothing ran: nothing is proven."
    warm = sum(row.verdict is JitVerdict.WARM for row in result.rows)
    said = f"{warm} of {count(len(result.rows), 'task')} ran on the sealed cache without a compile"
    if result.holds:
        part = f"; {count(len(result.left_out), 'task')} of the target not asked for" if result.left_out else ""
        return f"Warm: {said}{part}."
    compiles = len(result.compiled) + len(result.unreported)
    cold = f"Not warm: {count(compiles, 'compile')}; " if compiles else ""
    return f"{cold}{said}." if cold else f"Not proven: {said}."


def say_compile(one: JitCompile) -> str:
    """One kernel that was not found."""
    shape = f" for {one.shape}" if one.shape else ""
    took = f", {one.seconds:.1f} s" if one.seconds else ""
    return f"{one.library}: `{one.kernel}`{shape}{took}"


def say_unkept(row: JitVerifyRow) -> str:
    """What a row compiled that no cache keeps."""
    names = ", ".join(f"`{name}`" for name in dict.fromkeys(one.kernel for one in row.unkept))
    number = count(len(row.unkept), "compile")
    return f"{row.task}: {number} of what this release compiles in every process: {names} (matrix/prewarm.toml)"


def say_looked_for(one: JitCompile, folder: str) -> str:
    """What was not in the cache, as far as it is known."""
    if one.looked_for:
        return one.looked_for
    return f"its key below {folder}/{one.library}: the library does not say which"


def say_why(row: JitVerifyRow) -> str:
    """Why a row is not warm."""
    if row.verdict is JitVerdict.SILENT:
        return (
            "it compiled nothing and looked for nothing of what it compiles when it is prewarmed: it took another path "
            "now, or compiling is switched off"
        )
    return "; ".join(filter(None, (row.reason, _CAUSES[row.cause] if row.cause is not None else "")))


def say_next_step(row: JitVerifyRow, result: JitVerifyResult) -> str:
    """What to do about a row that is not warm."""
    prewarm = f"`nox -s prewarm -- --target {result.target} --tasks {row.task} --reopen`"
    match row.verdict:
        case JitVerdict.WARM:
            return ""
        case JitVerdict.COMPILED if row.cause is not JitCause.OTHER_KEY:
            return f"{prewarm}, and seal again"
        case JitVerdict.COMPILED:
            return (
                "compare the shapes: where another one is asked for, add a task with it to matrix/prewarm.toml; where "
                f"it is the same, a variable or a source file in its key has changed; then {prewarm}"
            )
        case JitVerdict.SILENT:
            return "look at the backends in its receipt and at its log: a fallback is no proof of a warm cache"
        case JitVerdict.FAILED:
            return "mend what failed first: its log lies beside the receipt. What did not end well is not verified"
        case _:
            return "run it on a machine of the target, with what it lacks: what never ran is not verified"


def say_difference(difference: StackDifference) -> str:
    """One difference of cache and stack."""
    matters = f" (matters to {difference.matters})" if difference.matters else ""
    return f"{difference.what}: recorded {difference.recorded or 'none'}, here {difference.observed or 'none'}{matters}"


def say_step_for_differences(result: JitVerifyResult) -> str:
    """What to do about a cache of another stack."""
    return (
        "take the image or the stack that the cache was made for, or prewarm this one: "
        f"`nox -s prewarm -- --target {result.target} --root FOLDER`"
    )
