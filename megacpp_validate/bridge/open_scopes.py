"""Which precision scopes are open, where each was entered, and that there is one of low precision at most.

A second entry is refused, not nested: what it would do to scales and amax histories differs by release, recipe and
depth, and shows as drift weeks later. Each thread has scopes of its own; but the state of Transformer Engine belongs to
the process, so a scope that turns it on is refused while another thread, or a generator that yielded inside its
scope, holds one.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

from .backends import Choice
from .errors import BridgeError, ScopeEnteredTwice
from .recipes import RecipeName


@dataclass(frozen=True)
class Scope:
    """A scope that is open.

    Attributes:
        recipe: the recipe that was asked for; None where the target has none, and in a BF16 zone.
        choice: whether Transformer Engine applies it ("te"), or nothing does ("native"), and why.
        entered_at: "file:line" of the entry.
        reason: why low precision is not on; empty where it is.
    """

    recipe: RecipeName | None
    choice: Choice
    entered_at: str
    reason: str = ""

    @property
    def is_low(self) -> bool:
        """Whether layers of Transformer Engine compute in low precision in here."""
        return self.choice.observed == "te"


@dataclass(frozen=True)
class Plan:
    """What a scope will do when it is entered.

    Attributes:
        recipe, choice, reason: as `Scope` has them.
        exclusive: whether it asks for low precision, so that there may be no other open.
        turn: from the place of entry, what turns the state of Transformer Engine; it may refuse by raising.
    """

    recipe: RecipeName | None
    choice: Choice
    reason: str
    exclusive: bool
    turn: Callable[[str], AbstractContextManager[Any]]

    @property
    def holds_process(self) -> bool:
        """Whether it turns on state that all threads share."""
        return self.exclusive and self.choice.observed == "te"


class PrecisionScope:
    """A scope to be entered by `with`; it gives the open `Scope`. The same object can be entered again afterwards."""

    def __init__(self, plan: Plan) -> None:
        self.plan: Final = plan
        self.scope: Scope | None = None
        self._stack: list[PrecisionScope] = []
        self._turned: AbstractContextManager[Any] | None = None

    def __enter__(self) -> Scope:
        """Open it.

        Raises:
            ScopeEnteredTwice: low precision is asked for inside another scope; the text names both places.
        """
        plan, place = self.plan, _place_of_entry()
        if self.scope is not None:
            raise _twice(self.scope.entered_at, place, "it is the same scope object")
        stack = _threads.stack
        if plan.exclusive and stack:
            outer = next((one for one in stack if one.plan.exclusive), stack[-1])
            why = "" if outer.plan.exclusive else f"that one keeps its inside in high precision: {outer.plan.reason}"
            raise _twice(outer.scope.entered_at if outer.scope else "", place, why)
        if plan.holds_process:
            _claim(place)
        try:
            turned = plan.turn(place)
            turned.__enter__()
        except BaseException:
            if plan.holds_process:
                _release()
            raise
        self.scope = Scope(plan.recipe, plan.choice, place, plan.reason)
        self._stack, self._turned = stack, turned
        stack.append(self)
        return self.scope

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it, and every scope that is still open inside it.

        Raises:
            BridgeError: one was, and nothing else is being raised.
        """
        if self.scope is None:  # an outer scope has closed this one, and said so
            return
        inner = self._stack[self._stack.index(self) + 1 :]
        words = [f"{one.scope.entered_at}" for one in inner if one.scope is not None]
        place = self.scope.entered_at
        for one in reversed(inner):
            one._close(kind, fault, trace)
        self._close(kind, fault, trace)
        if inner and fault is None:
            raise BridgeError(
                f"the precision scope entered at {place} was left while the one entered inside it at "
                f"{', '.join(words)} was open; both are closed now. Likely cause: a generator or task that was "
                "suspended inside its scope. Next step: leave scopes in the reverse order of entry, and do not "
                "yield inside one."
            )

    def _close(self, *raised: Any) -> None:
        turned, self._turned, self.scope = self._turned, None, None
        self._stack.remove(self)
        try:
            if turned is not None:
                turned.__exit__(*raised)
        finally:
            if self.plan.holds_process:
                _release()


def current_scope() -> Scope | None:
    """The innermost scope that is open in this thread; None outside of all."""
    stack = _threads.stack
    return stack[-1].scope if stack else None


class _Threads(threading.local):
    def __init__(self) -> None:
        self.stack: list[PrecisionScope] = []


_threads: Final = _Threads()
_lock: Final = threading.Lock()
_holder: dict[str, str] = {}  # "at" -> where the scope that holds the process was entered, "by" -> in which thread


def _claim(place: str) -> None:
    with _lock:
        if _holder:
            raise _twice(
                _holder["at"], place, f"that was in the thread {_holder['by']}, and all threads share its state"
            )
        _holder.update(at=place, by=threading.current_thread().name)


def _release() -> None:
    with _lock:
        _holder.clear()


def _twice(first: str, second: str, why: str) -> ScopeEnteredTwice:
    more = f" ({why})" if why else ""
    return ScopeEnteredTwice(
        f"the low-precision scope was entered at {second} while the one entered at {first} is open{more}. Likely "
        "cause: a layer enters it that its group or model has entered already, or a generator yielded inside it. Next "
        "step: enter it at one of the two places only."
    )


# Scopes are also entered through an ExitStack or a context manager around them: the place is the caller's.
_OF_NOBODY: Final = frozenset({__file__, contextlib.__file__})


def _place_of_entry() -> str:
    frame = sys._getframe(1)
    while frame.f_code.co_filename in _OF_NOBODY and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
