"""Changes that no signature shows where the call stands: wrappers, bases, scopes, and what comes back."""
# ruff: noqa: E501 - one case a line: tables

from __future__ import annotations

from pathlib import Path

import pytest

from tests.canary.static.small_sources import Case, compare, said_by

TAKES = "class Layer:\n    def __init__(self, size): ..."
SCOPE = "from contextlib import contextmanager\n@contextmanager\ndef scope(on=True):\n    yield\n"
ENTERS = "def f():\n    with te.scope.require()(on=True):\n        pass"
PLAIN_SCOPE = "def scope(on=True):\n    return {}\n"
MANAGER = "class State:\n    {} = 1\nclass Manager:\n    state = State()"
CHECKS = "def check(mode):\n    if not isinstance(mode, str): raise TypeError('mode')\n"
CHECKED_CLASS = (
    CHECKS
    + "class scope:\n    def __init__(self, mode=None):\n        self._mode = mode\n    def __enter__(self):\n        check(self._mode)\n    def __exit__(self, *a): ..."
)
CHECKED_FUNCTION = (
    CHECKS + "from contextlib import contextmanager\n@contextmanager\ndef scope(mode=None):\n    check(mode)\n    yield"
)
ENTERS_MODE = "def f(mode):\n    with te.scope.require()(mode=mode):\n        pass"

ROUNDABOUT = [
    Case("factory-that-hands-all-on", TAKES, "class _L:\n    def __init__(self, size): ...\ndef Layer(*args, **kwargs):\n    return _L(*args, **kwargs)", "te.Layer.require()(size=8)", {"user class-became-function harmless"}),
    Case("factory-of-something-else", TAKES, "class _L:\n    def __init__(self, width): ...\ndef Layer(*args, **kwargs):\n    return _L(*args, **kwargs)", "te.Layer.require()(size=8)", {"user class-became-function harmless", "user parameter-removed size breaking", "user parameter-required width breaking"}),
    Case("scope-that-returns-a-tuple", SCOPE, PLAIN_SCOPE.format("1, 2"), ENTERS, {"user context-manager-lost breaking"}),
    Case("scope-that-returns-a-call", SCOPE, PLAIN_SCOPE.format("sorted('')"), ENTERS, set()),
    Case("held-by-a-class", MANAGER.format("amax"), MANAGER.format("amaxes"), "def f():\n    m = te.Manager.require()\n    return getattr(m.state, 'amax')", {"user attribute-removed amax breaking"}),
    Case("checked-on-entry-now-at-once", CHECKED_CLASS, CHECKED_FUNCTION, ENTERS_MODE, {"user class-became-function harmless"}),
    Case("checked-on-entry", CHECKED_CLASS.replace("check(self._mode)", "pass"), CHECKED_CLASS, ENTERS_MODE, {"user guard-added mode risk"}),
    Case("enumeration-of-other-values", "from enum import Enum\nclass F(Enum):\n    A = 1", "from enum import Enum\nclass F(Enum):\n    A = 2", "x = te.F.require().A", {"user return-changed risk"}),
    Case("enumeration-of-other-classes", "from enum import Enum\nclass V:\n    x = 1\nclass F(Enum):\n    A = V(1)", "from enum import Enum\nclass V:\n    x = 1\nclass F(Enum):\n    A = V(2)", "x = te.F.require().A", {"user return-changed risk"}),
    Case("enumeration-with-one-more", "from enum import Enum\nclass F(Enum):\n    A = 1", "from enum import Enum\nclass F(Enum):\n    B = 0\n    A = 1", "x = te.F.require().A", set()),
]  # fmt: skip

DECORATED = "import functools\ndef made({0}):\n    def mark(function):\n        @functools.wraps(function)\n        def wrapper(*args, **kwargs):\n            {1}\n            return function(*args, **kwargs)\n        return wrapper\n    return mark\n@made({2})\ndef f(x, {3}=1): ..."
PLAIN = "def f(x, y=1): ..."
F12 = "te.f.require()(1, y=2)"
WARNS = DECORATED.format("", "if 'y' in kwargs: warnings.warn('y', FutureWarning)", "", "y")
METHODS = "class M:\n    {}\n{}"


def decorated(name: str, said: set[str], body: str, *, head: str = "", given: str = "", parameter: str = "y") -> Case:
    """A function that gets a decorator with this first statement in its wrapper."""
    return Case(name, PLAIN, DECORATED.format(head, body, given, parameter), F12, said)


DECORATORS = [
    decorated("raises-whatever-comes", {"user guard-added breaking"}, "raise RuntimeError('gone')"),
    decorated("raises-at-times", set(), "if off(): raise RuntimeError('off')"),
    decorated("refuses-a-keyword", {"user guard-added breaking"}, "if old in kwargs: raise TypeError(old)", head="old", given="'y'"),
    decorated("refuses-another-keyword", set(), "if old in kwargs: raise TypeError(old)", head="old", given="'z'"),
    decorated("warns", {"user deprecated risk"}, "warnings.warn('f goes', DeprecationWarning)"),
    decorated("raises-in-a-loop", set(), "for other in kwargs.keys() - {'y'}: raise TypeError(other)"),
    decorated("raises-what-it-catches", set(), "try:\n                if 'y' in kwargs: raise KeyError\n            except KeyError: pass"),
    Case("warned-and-refuses", WARNS, WARNS.replace("warnings.warn('y', FutureWarning)", "raise TypeError('y')"), F12, {"user guard-added breaking"}),
    Case("warned-and-warns", WARNS, WARNS.replace("'y', F", "'y!', F"), F12, set()),
    Case("submodule-of-that-name", {"pytorch/__init__.py": PLAIN}, {"pytorch/__init__.py": "from transformer_engine.pytorch import f", "pytorch/f.py": ""}, F12, {"user not-callable breaking"}),
    Case("value-became-a-method", METHODS.format("on = 1", ""), METHODS.format("def on(self): ...", ""), "x = te.M.require().on", {"user return-changed breaking"}),
    Case("value-became-one-of-the-class", METHODS.format("on = 1", ""), "class of_class: ...\n" + METHODS.format("@of_class\n    def on(cls): ...", ""), "x = te.M.require().on", set()),
    Case("value-became-a-property", METHODS.format("on = 1", ""), METHODS.format("@property\n    def on(self): ...", ""), "x = te.M.require().on", set()),
    Case("none-means-something-else", "def f(y=None):\n    y = 1 if y is None else y", "def f(y=None):\n    y = 2 if y is None else y", "def g(y=None):\n    te.f.require()(y=y)", {"user default-meaning-changed y risk"}),
    Case("none-is-never-passed", "def f(y=None):\n    y = 1 if y is None else y", "def f(y=None):\n    y = 2 if y is None else y", "def g(y=3):\n    te.f.require()(y=y)", set()),
    Case("kind-with-a-name-in-the-list", PLAIN, "def f(x, y=1):\n    if y not in ('a', 'b', 'c'): raise ValueError(y)", "Kind = Literal['a', 'b']\ndef g(y: Kind):\n    te.f.require()(1, y=y)", set()),
    Case("kind-with-a-name-not-in-the-list", PLAIN, "def f(x, y=1):\n    if y not in ('a', 'c'): raise ValueError(y)", "Kind = Literal['b', 'd']\ndef g(y: Kind):\n    te.f.require()(1, y=y)", {"user guard-added y breaking"}),
]  # fmt: skip

HEAD = "import torch\ndef three(a):\n    return a, 1, 2\ndef f(x: torch.Tensor, y=1):\n    {0}"
UNPACKS = "a, b = te.f.require()(1)"


def gives(name: str, new: str, said: set[str]) -> Case:
    """A function of two values that returns something else."""
    return Case(name, HEAD.format("return x, y"), HEAD.format(new), UNPACKS, said)


GIVES = [
    gives("through-a-helper-of-three", "return three(x)", {"user return-changed breaking"}),
    gives("through-a-helper-that-nobody-knows", "return torch.ops.three(x)", set()),
    gives("one-on-one-way", "if y: return x\n    return x, y", {"user return-changed risk"}),
    gives("kept-under-a-name", "both = x, y\n    return both", set()),
]  # fmt: skip


GETS = "def __getattr__(name):\n    if name in _OLD:\n        from .deep import f as g\n        {}\n        return g\n    raise AttributeError(name)\n_OLD = ('f',)"
EITHER = (
    "def g():\n    first = te.f()\n    if first is not None:\n        return first(1)\n    return te.h.require()(1)"
)
LAZY = [
    Case("the-other-way-is-gone-too", "def f(x): ...\ndef h(x): ...", "", EITHER, {"user removed breaking"}),
    Case("the-other-way-is-left", "def f(x): ...\ndef h(x): ...", "def h(x): ...", EITHER, set()),
    Case("lazily-deprecated", {"pytorch/__init__.py": GETS.format("pass"), "pytorch/deep.py": PLAIN}, {"pytorch/__init__.py": GETS.format("warnings.warn('f goes', DeprecationWarning)"), "pytorch/deep.py": PLAIN}, F12, {"user deprecated risk"}),
]  # fmt: skip

EVERY = [*ROUNDABOUT, *DECORATORS, *LAZY, *GIVES]


@pytest.mark.parametrize("case", EVERY, ids=[case.name for case in EVERY])
def test_what_is_said_of_what_no_signature_shows(case: Case, tmp_path: Path) -> None:
    assert said_by(compare(tmp_path, case.old, case.new, case.bridge)) == case.said
