"""Which precision scopes are open, where each was entered, and that there is one of low precision at most.

A second entry is refused, not nested: what it would do to scales and amax histories differs by release, recipe and
depth, and shows as drift weeks later. Each thread has scopes of its own; but the state of Transformer Engine belongs to
the process: a scope of low precision that turns it on, and any other scope, are refused in one thread while the other
kind is open in another, or each would compute in the other's precision without a word. A backward pass runs in threads
of autograd's while the thread that asked for it waits: those two are one program, not two.

Inside a low scope there may be one region at a time (`amax_region`): a part of that scope, no second entry.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Literal

import torch

from .backends import Choice
from .errors import BridgeError, ScopeEnteredTwice
from .pending_amax import pending_amax_kept
from .recipes import RecipeName
from .recompute_owner import refuse_scope_in_recompute


class AmaxRegionMisplaced(BridgeError, RuntimeError):
    """A region of another amax group that is not directly inside a low-precision scope."""


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
        around: of a region: the low-precision scope that it is a part of.
    """

    recipe: RecipeName | None
    choice: Choice
    reason: str
    exclusive: bool
    turn: Callable[[str], AbstractContextManager[Any]]
    around: PrecisionScope | None = None

    @property
    def turns_on(self) -> bool:
        """Whether it turns on state that all threads share."""
        return self.exclusive and self.choice.observed == "te"

    @property
    def keeps_off(self) -> bool:
        """Whether it promises that this state is off, whoever turned it on."""
        return not self.exclusive and self.around is None


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
            ScopeEnteredTwice: low precision is asked for inside another scope, or beside a scope of another thread
                that wants the process's state otherwise; the text names both places.
            AmaxRegionMisplaced: it is a region, and the scope that it was made in is not the innermost one here.
            WrongRecomputeOwner: low precision is asked for in what a checkpoint runs, and will run again.
        """
        plan, place = self.plan, _place_of_entry()
        if plan.exclusive or plan.around is not None:
            refuse_scope_in_recompute(place)
        if plan.around is not None and scope_around_region() is not plan.around:
            raise _misplaced(place, "inside another scope than it was made in")
        if self.scope is not None:
            raise _twice(self.scope.entered_at, place, "it is the same scope object")
        stack = _threads.stack
        if plan.exclusive and stack:
            outer = next((one for one in stack if one.plan.exclusive), stack[-1])
            why = "" if outer.plan.exclusive else f"that one keeps its inside in high precision: {outer.plan.reason}"
            raise _twice(outer.scope.entered_at if outer.scope else "", place, why)
        _claim(self, stack, place)
        try:
            with contextlib.ExitStack() as entered:
                if plan.turns_on and plan.recipe == "delayed" and not torch.is_grad_enabled():
                    entered.enter_context(pending_amax_kept())
                entered.enter_context(plan.turn(place))
                turned = entered.pop_all()
        except BaseException:
            _release(self)
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
            _release(self)


def current_scope() -> Scope | None:
    """The innermost scope that is open in this thread; None outside of all."""
    stack = _threads.stack
    return stack[-1].scope if stack else None


def scope_around_region(*files: str) -> PrecisionScope:
    """The low-precision scope of this thread that a region can be a part of.

    Args:
        files: that ask for somebody else, whom errors name.

    Raises:
        AmaxRegionMisplaced: none is open, or it is not the innermost one.
    """
    place = _place_of_entry(*files)
    if not _threads.stack:
        raise _misplaced(place, "outside of every scope of this thread")
    inner = _threads.stack[-1]
    entered_at = inner.scope.entered_at if inner.scope is not None else ""
    if inner.plan.around is not None:
        raise _misplaced(place, f"inside the one entered at {entered_at}")
    if not inner.plan.exclusive:
        raise _misplaced(place, f"in the high precision entered at {entered_at} ({inner.plan.reason})")
    return inner


@dataclass(frozen=True, eq=False)
class _Claim:
    """An open scope that wants something of the state of Transformer Engine; a stack is one thread's."""

    place: str
    thread: threading.Thread
    stack: list[PrecisionScope]
    turns_on: bool


class _Threads(threading.local):
    def __init__(self) -> None:
        self.stack: list[PrecisionScope] = []


_threads: Final = _Threads()
_lock: Final = threading.RLock()  # a collected generator may close its scope while this thread holds it
_claims: dict[int, _Claim] = {}  # of the scopes that are open in any thread, by id of the scope


def _claim(scope: PrecisionScope, stack: list[PrecisionScope], place: str) -> None:
    """Note what a scope wants of the state that all threads share, unless another thread wants it otherwise.

    Asked of every scope that wants anything of it, also where Transformer Engine is off right now: a scope of high
    precision that finds it off would not see another thread turn it on.
    """
    plan = scope.plan
    if not (plan.turns_on or plan.keeps_off):
        return
    with _lock:
        for other in list(_claims.values()):
            if other.stack is not stack and (plan.turns_on or other.turns_on):
                if plan.keeps_off and _waits_for_this(other):
                    continue
                raise _twice(
                    other.place,
                    place,
                    f"that was in the thread {other.thread.name}, and all threads share its state",
                    "low" if plan.turns_on else "high",
                )
        _claims[id(scope)] = _Claim(place, threading.current_thread(), stack, plan.turns_on)


def _waits_for_this(claim: _Claim) -> bool:
    """Whether this is a thread of a backward pass, and the claim's thread does nothing but wait for one to end.

    So it is where a layer that is recomputed keeps a part of itself in high precision, and the backward pass was begun
    inside the low scope. What is turned off here is on again before the other thread goes on.
    """
    if torch._C._current_graph_task_id() == -1:
        return False
    frame = sys._current_frames().get(claim.thread.ident or -1)
    return frame is not None and frame.f_code is _RUN_BACKWARD


_RUN_BACKWARD: Final = torch.autograd.graph._engine_run_backward.__code__  # nothing of Python's runs below it


def _release(scope: PrecisionScope) -> None:
    with _lock:
        _claims.pop(id(scope), None)


def _twice(first: str, second: str, why: str, asked: Literal["low", "high"] = "low") -> ScopeEnteredTwice:
    more = f" ({why})" if why else ""
    return ScopeEnteredTwice(
        f"the {asked}-precision scope was entered at {second} while the one entered at {first} is open{more}. Likely "
        "cause: a layer enters it that its group or model has entered already, or a generator yielded inside it, or "
        "another thread computes at the same time. Next step: enter it at one of the two places only, or leave the "
        "first before the second is entered."
    )


def _misplaced(place: str, where: str) -> AmaxRegionMisplaced:
    return AmaxRegionMisplaced(
        f"a region of another amax group was entered at {place} {where}. Likely cause: a layer enters it that its "
        "model has put into it already, or keeps out of low precision. Next step: enter low_precision first, and "
        "amax_shared_with directly inside it, once around these layers."
    )


# Scopes are also entered through an ExitStack or a context manager around them: the place is the caller's.
_OF_NOBODY: Final = frozenset({__file__, contextlib.__file__})


def _place_of_entry(*files: str) -> str:
    """Who entered, "file:line": the innermost caller that is in none of these files, nor in this one."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename in (*_OF_NOBODY, *files) and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
