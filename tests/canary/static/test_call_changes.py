"""Binding a call to a signature agrees with Python's own, for signatures and calls of every form."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacpp_validate.canary.static.call_changes import Binding, bind, call_faults, compare_calls
from megacpp_validate.canary.static.findings import ChangeKind, Impact
from megacpp_validate.canary.static.release import Found
from megacpp_validate.canary.static.relocation import likely_rename
from megacpp_validate.canary.static.shapes import Signature, shape_of, signature_of
from megacpp_validate.canary.static.surface import UNKNOWN, Use, UseKind
from megacpp_validate.evidence.values import SourceLine
from tests.canary.static.small_sources import write_release

NAMES = ["a", "b", "c", "d", "args", "kwargs"]


@dataclass(frozen=True)
class Head:
    """The parameters of a function as text."""

    text: str

    def python(self) -> Callable[..., dict[str, object]]:
        """The function itself; called, it tells what each parameter got."""
        space: dict[str, Callable[..., dict[str, object]]] = {}
        exec(f"def f({self.text}): return locals()", space)
        return space["f"]

    def read(self) -> Signature:
        return read_signature(self.text)


@cache
def read_signature(parameters: str) -> Signature:
    with tempfile.TemporaryDirectory() as folder:
        release = write_release(Path(folder), f"def f({parameters}): ...")
        found = release.lookup("transformer_engine.pytorch", "f")
        assert isinstance(found, Found)
        signature = signature_of(release, shape_of(release, found, ()))
    assert signature is not None
    return signature


@st.composite
def heads(draw: st.DrawFn) -> Head:
    names = draw(st.permutations(NAMES[:4]))[: draw(st.integers(0, 4))]
    keyword_only = draw(st.integers(0, len(names)))
    positional, keywords = names[keyword_only:], names[:keyword_only]
    first_default = draw(st.integers(0, len(positional)))
    parts = [name if i < first_default else f"{name}=0" for i, name in enumerate(positional)]
    if positional and draw(st.booleans()):
        parts.insert(draw(st.integers(1, len(positional))), "/")
    if draw(st.booleans()):
        parts.append("*args")
    elif keywords:
        parts.append("*")
    parts += [f"{name}=0" if draw(st.booleans()) else name for name in keywords]
    if draw(st.booleans()):
        parts.append("**kwargs")
    return Head(", ".join(parts))


@st.composite
def calls(draw: st.DrawFn) -> Use:
    positionals = draw(st.integers(0, 4))
    keywords = draw(st.sets(st.sampled_from(NAMES), max_size=4))
    return a_call(positionals, sorted(keywords))


def a_call(positionals: int, keywords: list[str]) -> Use:
    return Use(
        "f", (), UseKind.CALL, "user", SourceLine(file="user.py", line=1),
        positionals=(UNKNOWN,) * positionals, keywords=dict.fromkeys(keywords, UNKNOWN),
    )  # fmt: skip


def bound_by_python(head: Head, use: Use) -> dict[str, object] | None:
    """Parameter -> which argument it gets where Python really calls it; None where Python refuses."""
    try:
        got = head.python()(*range(1, len(use.positionals) + 1), **{name: name for name in use.keywords})
    except TypeError:
        return None
    return {name: value for name, value in got.items() if name not in {"args", "kwargs"} and value != 0}


def accepts(head: Head, binding: Binding) -> bool:
    """Whether Python would take the call: what `**kwargs` swallows is no error, though nobody reads it."""
    swallowed = "**kwargs" in head.text
    return binding.fits or (swallowed and not (binding.surplus or binding.doubled or binding.missing))


@settings(max_examples=100, deadline=None)
@given(heads(), calls())
def test_a_call_is_taken_where_python_takes_it_and_means_the_same(head: Head, use: Use) -> None:
    signature = head.read()
    binding, python = bind(signature, use), bound_by_python(head, use)
    assert accepts(head, binding) is (python is not None)
    if python is not None:
        assert set(binding.given) == set(python)


@settings(max_examples=100, deadline=None)
@given(heads(), heads(), calls())
def test_what_python_took_and_no_longer_takes_is_breaking(old: Head, new: Head, use: Use) -> None:
    before, after = bound_by_python(old, use), bound_by_python(new, use)
    changes = list(compare_calls(old.read(), new.read(), use))
    breaking = [c for c in changes if c.impact is Impact.BREAKING]
    if before is not None and after is None:
        assert breaking
    if before is not None and after == before and "**kwargs" not in (old.text + new.text):
        assert not breaking


@settings(max_examples=60, deadline=None)
@given(heads(), calls())
def test_a_fault_is_named_exactly_where_a_call_does_not_fit(head: Head, use: Use) -> None:
    signature = head.read()
    assert bool(list(call_faults(signature, use))) is not bind(signature, use).fits


RENAMES = [
    ("fp8_group", "x, fp8_group", "x, amax_group", "amax_group"),
    ("scale", "x, scale", "x, factor", ""),
    ("scale", "x, scale", "x", ""),
    ("inp", "inp, mask", "input, mask", "input"),
    ("a", "a, b", "b, c", ""),
    ("fp8_recipe: Recipe=None", "on, fp8_recipe: Recipe=None", "on, recipe: Recipe=None", "recipe"),
    ("scale", "x, scale", "x, **scales", ""),
    ("scale", "x, scale", "x, *scales", ""),
]


@pytest.mark.parametrize(("gone", "old", "new", "wanted"), RENAMES)
def test_what_a_parameter_most_likely_became(gone: str, old: str, new: str, wanted: str) -> None:
    before, after = Head(old).read(), Head(new).read()
    parameter = before.named(gone.partition(":")[0])
    assert parameter is not None
    assert likely_rename(parameter, before, after) == wanted


def test_what_is_open_in_a_call_is_not_missed() -> None:
    signature = Head("a, b").read()
    for use in (
        Use("f", (), UseKind.CALL, "user", SourceLine(file="", line=0), open_positionals=True),
        Use("f", (), UseKind.CALL, "user", SourceLine(file="", line=0), open_keywords=True),
        Use("f", (), UseKind.CALL, "user", SourceLine(file="", line=0), partial=True),
    ):
        assert bind(signature, use).fits
    assert [c.kind for c in call_faults(signature, a_call(2, ["a"]))] == [ChangeKind.PARAMETER_REORDERED]
