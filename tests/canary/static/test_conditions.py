"""Whether a guard can fire with what the bridge passes, and what is said of it."""
# ruff: noqa: E501 - one case a line: tables

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from megacpp_validate.canary.static.bodies import Test as Condition
from megacpp_validate.canary.static.conditions import can_fire
from megacpp_validate.canary.static.surface import UNKNOWN, Argument
from tests.canary.static.small_sources import compare, said_by

BREAKS, MAY, NOTHING = {"user guard-added mode breaking"}, {"user guard-added mode risk"}, set[str]()

# what the new release puts at the head of `f(x, mode=None, *, other=False)`; what the bridge passes; what is said
GUARDS = {
    "fires-always": ("if mode == 'a':\n        raise ValueError", "1, mode='a'", BREAKS),
    "never-fires": ("if mode == 'a':\n        raise ValueError", "1, mode='b'", NOTHING),
    "may-fire": ("if mode == 'a':\n        raise ValueError", "1, mode=text", MAY),
    "assert-holds": ("assert mode in ('a', 'b')", "1, mode='a'", NOTHING),
    "assert-fails": ("assert mode in ('a', 'b')", "1, mode='c'", BREAKS),
    "left-out": ("if mode == 'a':\n        raise ValueError", "1", NOTHING),
    "chained": ("if mode is not None and mode != 'a':\n        raise ValueError", "1, mode='b'", BREAKS),
    "either": ("if mode == 'a' or x > 3:\n        raise ValueError", "1, mode='a'", {"user guard-added mode, x breaking"}),
    "with-what-is-left-out": ("if mode == 'a' and other:\n        raise ValueError", "1, mode='a'", NOTHING),
    "under-a-new-feature": ("if fresh is not None:\n        if mode == 'a':\n            raise ValueError", "1, mode='a'", NOTHING),
    "under-what-cannot-be-known": ("if torch.cuda.device_count() > 1:\n        if mode == 'a':\n            raise ValueError", "1, mode='a'", MAY),
    "after-an-early-return": ("if mode == 'a':\n        return x\n    if mode != 'b':\n        raise ValueError", "1, mode='a'", NOTHING),
    "else-branch": ("if mode == 'a':\n        pass\n    else:\n        raise ValueError", "1, mode='b'", BREAKS),
    "reassigned-before": ("mode = mode.lower()\n    if mode == 'A':\n        raise ValueError", "1, mode='A'", MAY),
    "of-a-constant": ("if not FIXED and mode == 'a':\n        raise ValueError", "1, mode='a'", BREAKS),
    "of-a-state": ("if not READY and mode == 'a':\n        raise ValueError", "1, mode='a'", MAY),
    "not-about-us": ("if torch.cuda.device_count() > 1:\n        raise ValueError", "1, mode='a'", NOTHING),
    "in-a-function-it-calls": ("_check(mode)", "1, mode='a'", MAY),
    "in-a-function-it-calls-never": ("_check(mode)", "1, mode='b'", NOTHING),
    "in-a-function-it-calls-otherwise": ("if mode == 'b':\n        _check(mode)", "1, mode='a'", NOTHING),
}  # fmt: skip


@pytest.mark.parametrize(("head", "arguments", "said"), GUARDS.values(), ids=GUARDS)
def test_a_new_guard_is_told_by_whether_it_can_fire(head: str, arguments: str, said: set[str], tmp_path: Path) -> None:
    check = "import torch\nFIXED = READY = False\ndef start():\n    global READY\n    READY = True\n"
    check += "def _check(kind):\n    if kind == 'a':\n        raise ValueError\n"
    old = f"{check}def f(x, mode=None, *, other=False):\n    return x\n"
    new = f"{check}def f(x, mode=None, *, other=False, fresh=None):\n    {head}\n    return x\n"
    bridge = f"def use(text: str, flag: bool):\n    te.f.require()({arguments})"
    assert said_by(compare(tmp_path, old, new, bridge)) == said


def test_a_guard_that_both_releases_have_is_not_said(tmp_path: Path) -> None:
    code = "def f(mode):\n    if mode == 'a':\n        raise ValueError('no a')\n"
    reworded = code.replace("no a", "a is not there")
    assert not compare(tmp_path / "same", code, code, "te.f.require()('a')").findings
    assert not compare(tmp_path / "reworded", code, reworded, "te.f.require()('a')").findings


def test_a_guard_about_a_class_that_is_new_is_not_said(tmp_path: Path) -> None:
    old = "def f(x):\n    return x\n"
    new = "class Quantized: ...\ndef f(x):\n    if isinstance(x, Quantized):\n        raise TypeError\n    return x\n"
    assert not compare(tmp_path, old, new, "def use(x):\n    te.f.require()(x)").findings


PRINTED = [
    (
        "if x == 1:\n        if mode == 'a' or mode == 'c':\n            raise ValueError",
        "x == 1 and (mode == 'a' or mode == 'c')",
    ),
    ("if mode == 'a' or x == 1:\n        raise ValueError", "mode == 'a' or x == 1"),
    ("if x == 1:\n        assert mode != 'a' or x == 2", "x == 1 and not (mode != 'a' or x == 2)"),
    ("if x == 1:\n        if (x if x else mode):\n            raise ValueError", "x == 1 and (x if x else mode)"),
]


@pytest.mark.parametrize(("head", "condition"), PRINTED)
def test_a_condition_is_printed_with_the_parentheses_that_it_needs(head: str, condition: str, tmp_path: Path) -> None:
    new = f"def f(x, mode=None):\n    {head}\n    return x\n"
    bridge = "def use(x, text):\n    te.f.require()(x, mode=text)"
    (finding,) = compare(tmp_path, "def f(x, mode=None):\n    return x\n", new, bridge).findings
    assert finding.new.partition(" if ")[2] == condition


X = {"x": Argument((3,), never_none=True)}
TENSOR = Argument(never_none=True, type_name="Tensor")
TRUTHS = [
    ("x == 3", X, True),
    ("x == 4", X, False),
    ("not x", X, False),
    ("x is None", X, False),
    ("x is not None", {"x": Argument(never_none=True)}, True),
    ("x is None", {"x": Argument((None,))}, True),
    ("x == 3", {"x": UNKNOWN}, None),
    ("x == 3", {}, None),
    ("x == 3 or y", X, True),
    ("x == 4 and y", X, False),
    ("x == 3 and y", X, None),
    ("x < 'a'", X, None),  # would raise; nothing is claimed
    ("x in (1, 2)", X, False),
    ("x not in (1, 2)", X, True),
    ("x == 3", {"x": Argument((3, 4))}, None),
    ("x == 5", {"x": Argument((3, 4))}, False),
    ("x.dim() == 3", X, None),
    ("len(x) == 3", X, None),
    ("f(x)", X, None),
    ("x[0]", X, None),
    ("isinstance(x, int)", X, True),
    ("isinstance(x, (str, bytes))", X, False),
    ("isinstance(x, torch.Tensor)", {"x": UNKNOWN}, None),
    ("isinstance(x, torch.Tensor)", {"x": TENSOR}, True),
    ("isinstance(x, (list, tuple))", {"x": TENSOR}, False),
    ("isinstance(x, torch.nn.Parameter)", {"x": TENSOR}, None),
    ("isinstance(x, QuantizedTensor)", {"x": TENSOR}, None),
    ("x is None", {"x": TENSOR}, False),
    ("1 < x < 4", X, True),
    ("0.0 <= x < 3", X, False),
    ("not (x == 3 and not y)", X, None),
    ("lambda: x", X, None),
    ("True", {}, True),
    ("x + 1 == 4", X, True),  # `num_layers <= model_layers - 1` of the CPU offload of 2.20.2
    ("x == -3", {"x": Argument((-3,))}, True),
    ("x == [3]", {"x": Argument(([3],))}, True),
]


@pytest.mark.parametrize(("test", "given", "fires"), TRUTHS, ids=[f"{row[0]} | {list(row[1])}" for row in TRUTHS])
def test_three_values_and_no_guess(test: str, given: dict[str, Argument], fires: bool | None) -> None:
    expression = ast.parse(test, mode="eval").body
    assert can_fire([Condition(expression, wanted=True)], lambda _: given) is fires
    opposite = can_fire([Condition(expression, wanted=False)], lambda _: given)
    if given.get("x", UNKNOWN).values != (3, 4):
        assert opposite is (None if fires is None else not fires)


def test_every_test_on_the_way_must_be_passable() -> None:
    tests = [Condition(ast.parse(text, mode="eval").body, wanted=True) for text in ("x == 3", "y")]
    assert can_fire(tests, lambda _: X) is None
    assert can_fire(tests, lambda _: X | {"y": Argument((False,))}) is False
    assert can_fire(tests, lambda _: X | {"y": Argument((True,))}) is True
    assert can_fire([], lambda _: {}) is True
