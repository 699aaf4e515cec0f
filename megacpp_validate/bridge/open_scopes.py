"""Which precision scopes are open, where each was entered, and that there is one of low precision at most.

The rules:

1. One scope of low precision at a time. A second entry is an error, not a nesting: what it would do to scales and amax
   histories differs by release, recipe and depth, and shows as drift weeks later.
2. High precision nests everywhere; low precision inside it is an error. Inside a low scope there may be one region at a
   time (`fp8_scope.amax_shared_with`), which is a part of that scope and no second entry.
3. The scopes around a piece of code are one context variable. The state of Transformer Engine belongs to the process: a
   scope that turns it on, and any other scope, are refused in one context while the other kind is open elsewhere, or
   each would compute in the other's precision without a word. A backward pass runs in threads of autograd's; what
   `te_recompute` runs again there has the context of its first pass, so both are one program.
4. No low precision in what a checkpoint runs again (`recompute`).
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple

import torch

from .amax_owner import pending_amax_kept
from .backends import Choice
from .errors import BridgeError, ScopeEnteredTwice
from .recipes import RecipeName
from .recompute import refuse_scope_in_recompute


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
        stack = open_here()
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
        self._turned = turned
        _around.set((*stack, self))
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
        stack = open_here()
        inner = stack[stack.index(self) + 1 :] if self in stack else ()
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
        _around.set(open_here())
        try:
            if turned is not None:
                turned.__exit__(*raised)
        finally:
            _release(self)


def current_scope() -> Scope | None:
    """The innermost scope that is open around this code; None outside of all."""
    for one in reversed(_around.get()):
        if one.scope is not None:
            return one.scope
    return None


def open_here() -> tuple[PrecisionScope, ...]:
    """The scopes that are open around this code, the outermost first."""
    return tuple(one for one in _around.get() if one.scope is not None)  # some were left in another context


def scope_around_region(*files: str) -> PrecisionScope:
    """The low-precision scope of this thread that a region can be a part of.

    Args:
        files: that ask for somebody else, whom errors name.

    Raises:
        AmaxRegionMisplaced: none is open, or it is not the innermost one.
    """
    place = _place_of_entry(*files)
    stack = open_here()
    if not stack:
        raise _misplaced(place, "outside of every scope of this thread")
    inner = stack[-1]
    entered_at = inner.scope.entered_at if inner.scope is not None else ""
    if inner.plan.around is not None:
        raise _misplaced(place, f"inside the one entered at {entered_at}")
    if not inner.plan.exclusive:
        raise _misplaced(place, f"in the high precision entered at {entered_at} ({inner.plan.reason})")
    return inner


class _Claim(NamedTuple):
    """An open scope that wants something of the state of Transformer Engine."""

    scope: PrecisionScope
    place: str
    thread: str


# The scopes entered around this code, the outermost first; one that was left in another context is still listed.
_around: Final[ContextVar[tuple[PrecisionScope, ...]]] = ContextVar("megacpp_precision_scopes", default=())
_lock: Final = threading.RLock()  # a collected generator may close its scope while this thread holds it
_claims: dict[int, _Claim] = {}  # of the scopes that are open anywhere in the process, by id of the scope


def _claim(scope: PrecisionScope, stack: tuple[PrecisionScope, ...], place: str) -> None:
    """Note what a scope wants of the state of the process, unless a scope that is not around it wants it otherwise.

    Asked of every scope that wants anything of it, also where Transformer Engine is off right now: a scope of high
    precision that finds it off would not see another thread turn it on.
    """
    plan = scope.plan
    if not (plan.turns_on or plan.keeps_off):
        return
    with _lock:
        for other in list(_claims.values()):
            if other.scope not in stack and (plan.turns_on or other.scope.plan.turns_on):
                raise _twice(
                    other.place,
                    place,
                    f"that was in the thread {other.thread}, and all threads share its state",
                    "low" if plan.turns_on else "high",
                )
        _claims[id(scope)] = _Claim(scope, place, threading.current_thread().name)


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
