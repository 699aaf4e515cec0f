"""The verdict on a sealed cache: what ran on a copy of it, and whether anything was compiled there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ..catalog.prewarm import PrewarmTask, UnkeptKernel
from ..evidence.receipt import Outcome, Receipt
from .files import Seen, find_products, library_of
from .manifest import Manifest
from .prewarm import Answer
from .purpose import COUNTED, asked_nothing
from .result import JitCause, JitCompile, JitVerdict, JitVerifyRow

_GOOD = (Outcome.PASS, Outcome.EXPECTED_UNSUPPORTED)
_DID_NOT_RUN = (Outcome.NOT_RUN, Outcome.BLOCKED)
_SHOWN = 4  # shapes of a kernel that are told
_DRIVER = "cuda"
_NAMELESS = "PTX"  # a file of the driver's cache in which no name is found (jit/watch_files.py)
_NAMED = 4  # files that nobody could watch and that are named


def read_receipt_answer(receipt: Receipt) -> Answer:
    """What the receipt of a cell tells of compiles. A receipt that counts them and does not list them is counted."""
    jit = receipt.jit
    listed = tuple(
        JitCompile(library=one.library, kernel=one.kernel, shape=one.shape, seconds=max(0.0, one.seconds))
        for one in jit.compiled
    )
    counted = Counter(jit.warm_up) + Counter(jit.after) - Counter(one.library for one in listed)
    silent = tuple(
        JitCompile(library=library, kernel="(the receipt does not say which)")
        for library, number in counted.items()
        for _ in range(number)
    )
    reason = f"{receipt.outcome.value}: {receipt.reason}" if receipt.reason else receipt.outcome.value
    return Answer(
        compiled=(*listed, *silent),
        hits=jit.hits,
        failure="" if receipt.outcome in (*_GOOD, *_DID_NOT_RUN) else reason,
        missing=reason if receipt.outcome in _DID_NOT_RUN else "",
        unwatched=tuple(f"{library}: {why}" for library, why in jit.unwatched.items()),
        notes=jit.notes,
        seconds=receipt.seconds.get("total", 0.0),
    )


def judge_task(
    task: PrewarmTask, answer: Answer, manifest: Manifest, unkept: Sequence[UnkeptKernel] = ()
) -> JitVerifyRow:
    """What a task or a cell made of the cache. What did not run is not verified, whatever it says of compiles.

    Args:
        task: row of `matrix/prewarm.toml`.
        answer: of its process on the working copy.
        manifest: of the cache.
        unkept: what no cache keeps.
    """
    excused = _find_unkept(answer.compiled, unkept, manifest.stack.versions.get("transformer-engine", ""))
    missed = tuple(one for one in answer.compiled if one not in excused)
    if answer.missing:
        verdict = JitVerdict.NOT_RUN
    elif answer.failure:
        verdict = JitVerdict.FAILED
    elif missed:
        verdict = JitVerdict.COMPILED
    else:
        verdict = JitVerdict.SILENT if _is_silent(task, answer, manifest) else JitVerdict.WARM
    names = dict.fromkeys((one.library, one.kernel) for one in missed)
    known = tuple(_say_known(manifest, library, kernel) for library, kernel in names)
    cause = _find_cause(task, manifest) if missed else None
    return JitVerifyRow(
        task=task.id, verdict=verdict, compiled=missed, unkept=excused, known=known, cause=cause,
        hits=None if answer.hits is None else sum(answer.hits.values()),
        reason=answer.missing or answer.failure, seconds=answer.seconds,
    )  # fmt: skip


def _find_unkept(
    compiled: Sequence[JitCompile], unkept: Sequence[UnkeptKernel], release: str
) -> tuple[JitCompile, ...]:
    """What no cache keeps, and the other halves of it.

    NVRTC leaves two files a kernel: its machine code, which has a name, and what that was made of, in which none may be
    found. Where nothing else of the driver's was compiled, and there are no more of those than of named ones, they are
    these halves: a kernel that is really missing leaves its machine code, and with it its name.
    """
    named = [one for one in compiled if any(row.fits(one.library, one.kernel, release) for row in unkept)]
    others = [one for one in compiled if one.library == _DRIVER and one not in named]
    halves = others if len(others) <= len(named) and all(one.kernel == _NAMELESS for one in others) else []
    return tuple(one for one in compiled if one in named or one in halves)


def _is_silent(task: PrewarmTask, answer: Answer, manifest: Manifest) -> bool:
    """Whether a library was not asked that this task asked when it was finished: a fallback compiles nothing, either.

    What it found then counts as what it compiled: another task may have been first. And a task that asks nothing of
    the library that it is there for is silent whatever it did then: compiling may have been switched off both times.
    """
    if asked_nothing(task, answer):
        return True
    done = next((one for one in manifest.tasks if one.id == task.id), None)
    if done is None or answer.hits is None:
        return False
    found = {COUNTED.get(library) for library, number in answer.hits.items() if number}
    asked = tuple(one.library for one in done.compiled) if done.asked is None else done.asked
    return any(COUNTED.get(library) not in (None, *found) for library in asked)


def _find_cause(task: PrewarmTask, manifest: Manifest) -> JitCause:
    done = next((one for one in manifest.tasks if one.id == task.id), None)
    if done is None:
        return JitCause.NO_TASK
    same = (done.code, done.settings, done.ranks) == (task.code, task.settings, task.ranks)
    return JitCause.OTHER_KEY if same else JitCause.OTHER_SETTINGS


def _say_known(manifest: Manifest, library: str, kernel: str) -> str:
    shapes = manifest.shapes_of(library, kernel)
    more = f"; and {len(shapes) - _SHOWN} more" if len(shapes) > _SHOWN else ""
    return f"{kernel}: {'; '.join(shapes[:_SHOWN])}{more}" if shapes else f"{kernel}: nothing"


def find_unreported(before: Mapping[str, Seen], after: Iterable[Seen], rows: Sequence[JitVerifyRow]) -> tuple[str, ...]:
    """Compiled kernels that appeared in the working copy, in caches of which no process told a compile.

    A monitor that misses a compile would call a cold cache warm: the files are asked too. Of the driver's cache each
    file must have been told, since its processes tell of files (jit/watch_files.py).

    Args:
        before, after: the working copy before anything ran, and now.
        rows: what the processes told.
    """
    every = [one for row in rows for one in (*row.compiled, *row.unkept)]
    files = {f"{_DRIVER}/{one.shape}" for one in every if one.library == _DRIVER}
    told = {one.library for one in every if one.library != _DRIVER}
    if told & {"fa4", "cute"}:
        told |= {"fa4", "cute"}  # one compiler, two caches
    if "inductor" in told:
        told.add("triton")  # TorchInductor writes its kernels in Triton
    return tuple(path for path in find_products(before, after) if path not in files and library_of(path) not in told)


def set_unwatched_apart(unreported: Sequence[str], unwatched: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Files that nobody told of, and sentences about those of which nobody could.

    A process that cannot work on a copy of the driver's cache tells of no compile there, and says so. What appears
    there then is no breakage (the kernels that no cache keeps appear each time), and no proof either.

    Args:
        unreported: as `find_unreported` has them.
        unwatched: what the processes could not watch: "LIBRARY: why".
    """
    if not any(line.startswith(f"{_DRIVER}: ") for line in unwatched):
        return tuple(unreported), ()
    apart = [path for path in unreported if library_of(path) == _DRIVER]
    if not apart:
        return tuple(unreported), ()
    more = f" and {len(apart) - _NAMED} more" if len(apart) > _NAMED else ""
    said = (
        f"{len(apart)} file(s) appeared in the driver's cache, which could not be watched: "
        f"{', '.join(apart[:_NAMED])}{more}. Whether it is warm is not proven"
    )
    return tuple(path for path in unreported if path not in apart), (said,)
