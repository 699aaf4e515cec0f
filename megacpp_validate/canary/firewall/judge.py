"""Whether what a process of the firewall tier answered is what its case asks for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Protocol

from pydantic import BaseModel, ConfigDict

from ...process import Ended
from .damage import Damage


class BridgeModule(Protocol):
    """A row of `matrix/bridge.toml`, as far as this tier reads it."""

    @property
    def id(self) -> str:
        """Id of the module."""

    @property
    def files(self) -> Sequence[str]:
        """Its files, relative to the package."""

    @property
    def native(self) -> str:
        """The native path behind it, in words."""


class Answer(BaseModel):
    """What a process in the environment answered; `firewall_child.py` makes it.

    Attributes:
        imported: module of the bridge -> what importing it raised; empty if nothing.
        imported_early: Transformer Engine was imported before anybody asked for it.
        native_paths: module -> its NATIVE_PATH.
        top_level: `import transformer_engine` itself succeeded.
        available, reason: the verdict.
        decided_twice: the second question got another answer.
        missing: accessor that gives None -> its reason.
        problems: where an accessor contradicts itself.
        raised: what one of the questions raised.
    """

    model_config = ConfigDict(frozen=True)

    imported: dict[str, str]
    imported_early: bool
    native_paths: dict[str, str]
    top_level: bool
    available: bool | None = None
    reason: str = ""
    decided_twice: bool = False
    missing: dict[str, str] = {}
    problems: tuple[str, ...] = ()
    raised: str = ""


def judge(row: Damage, modules: Sequence[BridgeModule], answer: Answer | None, ended: Ended) -> tuple[str, ...]:
    """What was not as the case asks for; empty on a pass."""
    if answer is None:
        return (f"the process gave no answer ({ended.how}){where_it_was(ended)}: {_last_words(ended)}",)
    return (
        *(
            f"importing {name} raised {fault}"
            for name, fault in answer.imported.items()
            if _is_problem(row, name, fault)
        ),
        *_judge_verdict(row, answer),
        *_judge_reason(row, reason_of(row, answer)),
        *(() if row.hides_torch else _judge_native_paths(modules, answer)),
    )


def judge_end(row: Damage, ended: Ended) -> tuple[str, ...]:
    """Whether a process that simply imports the install ended as the damage has it."""
    expected = "killed after" if row.ends == "hang" else "signal"
    if ended.how.startswith(expected):
        return () if where_it_was(ended) else ("nothing says where the process was when it ended",)
    return (f"the plain process ended otherwise than by the damage ({ended.how}): {_last_words(ended)}",)


def reason_of(row: Damage, answer: Answer | None) -> str:
    """The reason that the case is about: of the missing entry where TE is available, else of the verdict."""
    if answer is None:
        return ""
    if row.available and answer.available and row.missing and not row.says_nothing:
        return answer.missing.get(row.missing[0], "")
    return answer.reason


def native_paths(modules: Sequence[BridgeModule], answer: Answer) -> dict[str, str]:
    """Bridge module -> the native path that it names; the import bridge has none, so the matrix does."""
    return {
        row.id: answer.native_paths.get(_stem(row)) or (row.native if row.id == "imports" else "") for row in modules
    }


def where_it_was(ended: Ended) -> str:
    """Where a process was when it hung or died, by TE's innermost frame; empty if none was written."""
    frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', ended.words)
    vendor = [frame for frame in frames if "transformer_engine" in frame[0]]
    return " at {}:{} ({})".format(*vendor[0]) if vendor else ""


def _is_problem(row: Damage, name: str, fault: str) -> bool:
    """Whether importing a module of the bridge may not have raised this; who asks for the verdict needs no torch."""
    lacks_torch = row.hides_torch and fault == "ModuleNotFoundError: No module named 'torch'"
    return bool(fault) and not (lacks_torch and not name.endswith(".imports"))


def _judge_verdict(row: Damage, answer: Answer) -> Iterator[str]:
    if answer.raised:
        yield f"asking the bridge raised {answer.raised}"
        return
    if answer.imported_early:
        yield "importing the bridge imported transformer_engine"
    if answer.available is not row.available:
        yield f"is_te_available() is {answer.available}, not {row.available}"
    if answer.decided_twice:
        yield "is_te_available() gave two answers in one process"
    if row.available and answer.available and set(answer.missing) != set(row.missing):
        none, expected = ", ".join(answer.missing) or "no accessor", ", ".join(row.missing) or "none"
        yield f"{none} gives None, where {expected} should"
    if row.top_level is not None and answer.top_level is not row.top_level:
        yield f"`import transformer_engine` itself {'succeeds' if answer.top_level else 'fails'} here"
    yield from answer.problems


def _judge_reason(row: Damage, reason: str) -> Iterator[str]:
    if row.says_nothing:
        if reason:
            yield f"it is available and yet there is a reason: {reason}"
        return
    for pattern in row.reason:
        if not re.search(pattern, reason):
            yield f"the reason does not say {pattern!r}" if reason else "the reason is empty"


def _judge_native_paths(modules: Sequence[BridgeModule], answer: Answer) -> Iterator[str]:
    for row in modules:
        named = native_paths([row], answer)[row.id]
        if not named:
            yield f"{row.id} names no native path"
        elif named != row.native:
            yield f"{row.id} names the native path {named!r}, the matrix {row.native!r}"


def _stem(row: BridgeModule) -> str:
    return PurePath(row.files[0]).stem


def _last_words(ended: Ended) -> str:
    lines = [line.strip() for line in ended.words.splitlines() if line.strip()]
    return lines[-1][:400] if lines else "it wrote nothing"
