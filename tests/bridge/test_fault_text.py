"""What an exception says: bounded, printable, and with what it was raised from."""

from __future__ import annotations

import time

import pytest

from megacpp_validate.bridge.fault_text import LONGEST, say_fault, text_of, told_by
from megacpp_validate.bridge.te_reasons import explain_te_import


class Odd(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (ValueError(), "no text"),
        (ValueError("two\nlines\tand a tab"), "two lines and a tab"),
        (ValueError("\x1b[31mred \udc80 \x00"), "\\x1b[31mred \\udc80 \\x00"),
        (Odd(), "its text cannot be made"),
    ],
)
def test_it_is_one_line_that_any_stream_takes(fault: BaseException, text: str) -> None:
    assert text_of(fault) == text
    text_of(fault).encode("ascii")


def test_of_a_long_text_both_ends_are_kept_and_it_is_explained_at_once() -> None:
    text = text_of(RuntimeError("first" + "x" * 5_000_000 + "last"))
    assert text.startswith("first")
    assert text.endswith("last")
    assert len(text) < LONGEST + 60
    started = time.perf_counter()
    assert len(explain_te_import(RuntimeError("x" * 5_000_000))) < 2 * LONGEST
    assert time.perf_counter() - started < 20  # it was minutes


def test_what_it_was_raised_from_is_told_once() -> None:
    first, last = OSError("libx.so"), ImportError("it failed")
    last.__cause__, first.__cause__ = first, last
    assert told_by(last) == (last, first)
    assert say_fault(last) == "ImportError: it failed (from OSError: libx.so)"
    group = ExceptionGroup("many", [OSError("liby.so")])
    assert say_fault(group) == "ExceptionGroup: many (1 sub-exception) (from OSError: liby.so)"
