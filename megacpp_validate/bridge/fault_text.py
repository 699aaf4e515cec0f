"""What an exception says: one line of bounded length that any stream can print, with what it was raised from."""

from __future__ import annotations

from typing import Final

# Of a longer text the start and the end are kept. Rules search it with patterns that take its length squared: 100 kB,
# as a compiler's log in an exception is, took a minute.
LONGEST: Final = 3000
_MANY: Final = 16  # exceptions that one was raised from, or is a group of


def text_of(fault: BaseException) -> str:
    """Its own text in one line; never raises."""
    try:
        text = str(fault)
    except KeyboardInterrupt:
        raise
    except BaseException:  # an odd exception may raise anything from its own __str__
        return "its text cannot be made"
    if len(text) > LONGEST:
        text = f"{text[: LONGEST // 2]} [... {len(text) - LONGEST} characters ...] {text[-LONGEST // 2 :]}"
    line = " ".join(text.split())
    line = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in line)
    return line or "no text"


def say_fault(fault: BaseException) -> str:
    """Its class and text, and those of what it was raised from."""
    causes = "".join(f" (from {type(one).__name__}: {text_of(one)})" for one in told_by(fault)[1:3])
    return f"{type(fault).__name__}: {text_of(fault)}{causes}"


def told_by(fault: BaseException) -> tuple[BaseException, ...]:
    """The exception, what it was explicitly raised from, and the members of groups, outermost first."""
    found: list[BaseException] = []
    left = [fault]
    while left and len(found) < _MANY:
        one = left.pop(0)
        if any(one is other for other in found):
            continue
        found.append(one)
        members = getattr(one, "exceptions", ())  # of an exception group
        inner = [one.__cause__, *(members if isinstance(members, tuple) else ())]
        left[:0] = [each for each in inner if isinstance(each, BaseException)]
    return tuple(found)


def met_on_the_way(fault: BaseException) -> tuple[BaseException, ...]:
    """What was being handled when it was raised: what to look at where it says nothing itself."""
    found: list[BaseException] = []
    one = fault.__context__ if not fault.__suppress_context__ else None
    while one is not None and len(found) < _MANY and not any(one is other for other in found):
        found.append(one)
        one = one.__context__
    return tuple(found)
