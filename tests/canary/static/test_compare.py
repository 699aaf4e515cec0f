"""Changes that no signature shows: returns, constructors, wrappers, guards, fields, and what only looks like one."""
# ruff: noqa: E501 - one case a line: tables

from __future__ import annotations

from pathlib import Path

import pytest

from tests.canary.static.small_sources import Case, compare, said_by

F1 = "te.f.require()(1)"
RETURNS = [
    Case("one-to-two-at-the-end", "def f(x) -> 'Tensor':\n    return x.run()", "def f(x) -> 'Tensor':\n    y = x.run()\n    return y, x.lse", F1, {"user return-changed breaking"}),
    Case("mixed-to-two", "def f(x, b):\n    if b: return x, b\n    return x.out", "def f(x, b):\n    if b: return x, b\n    return x.out, None", "y = te.f.require()(1, False)", {"user return-changed breaking"}),
    Case("one-or-two-to-two", "def f(x, b):\n    y, n = x.run()\n    if b: return y, n\n    return y", "def f(x, b):\n    y, n = x.run()\n    if b: return y, n\n    return y, None", "y = te.f.require()(1, False)", {"user return-changed breaking"}),
    Case("unknown-with-one-more", "def f(x):\n    return x.run()", "def f(x):\n    return x.run(), 1", F1, {"user return-changed breaking"}),
    Case("unknown-with-one-more-by-a-name", "def f(x):\n    return x.run()", "def f(x):\n    y = x.run()\n    return y, 1", F1, {"user return-changed breaking"}),
    Case("unknown-with-one-more-at-times", "def f(x):\n    if x: return x.go()\n    return x.run()", "def f(x):\n    if x: return x.go()\n    return x.run(), 1", F1, {"user return-changed risk"}),
    Case("unknown-behind-another", "def f(x):\n    return x.run()", "def f(x):\n    return None, x.run()", F1, {"user return-changed breaking"}),
    Case("unknown-to-two-others", "def f(x):\n    return x.run()", "def f(x):\n    return x.go(), 1", F1, set()),
    Case("unknown-to-three-taken-apart", "def f(x):\n    return x.run()", "def f(x):\n    return x, x, x", "a, b = te.f.require()(1)", {"user return-changed breaking"}),
]  # fmt: skip

OLD = "class L:\n    def __init__(self, size, name=None): ..."
CONSTRUCTORS = [
    Case("new-takes-fewer", OLD, "class L:\n    def __new__(cls, size): ...\n    def __init__(self, size, name=None): ...", "te.L.require()(1, name='a')", {"user parameter-removed name breaking"}),
    Case("new-of-a-base-refuses", OLD, "class B:\n    def __new__(cls, *args, **kwargs):\n        if 'name' in kwargs: raise TypeError('name is gone')\n        return object.__new__(cls)\nclass L(B):\n    def __init__(self, size, name=None): ...", "te.L.require()(1, name='a')", {"user parameter-removed name breaking"}),
    Case("new-takes-all", OLD, "class L:\n    def __new__(cls, *args, **kwargs): return object.__new__(cls)\n    def __init__(self, size, name=None): ...", "te.L.require()(1, name='a')", set()),
    Case("put-in-before", "def f(x, probs, map): ...", "def f(x, dropped=None, probs=None, map=None): ...", "te.f.require()(1, 2, 3)", {"user parameter-reordered probs breaking"}),
    Case("alias-of-an-optional", "class L:\n    def __init__(self, size=None, eps=1): ...", "class L:\n    def __init__(self, shape=None, eps=1, size=None): ...", "te.L.require()(1, eps=2)", {"user parameter-renamed size harmless"}),
    Case("refused-in-kwargs", "def f(x, n=1): ...", "def f(x, **old):\n    if 'n' in old: raise TypeError('n was removed')\n    return x", "te.f.require()(1, n=2)", {"user parameter-removed n breaking"}),
    Case("refused-and-handed-on", "def run(*a, **k): ...\ndef f(x, **kw):\n    n = kw.pop('n', 0)\n    return run(x, **kw)", "def run(*a, **k): ...\ndef f(x, **kw):\n    if 'n' in kw: raise TypeError('n was removed')\n    return run(x, **kw)", "te.f.require()(1, n=2)", {"user parameter-removed n breaking"}),
    Case("popped-by-another-name", "def run(*a, **k): ...\ndef f(x, **kw):\n    a = kw.pop('spread_rows', 0)\n    return run(x, **kw)", "def run(*a, **k): ...\ndef f(x, **kw):\n    a = kw.pop('shard_rows', 0)\n    return run(x, **kw)", "te.f.require()(1, spread_rows=2)", {"user parameter-renamed spread_rows breaking"}),
]  # fmt: skip

SCOPED = "class M:\n    @classmethod\n    def on(cls): ..."
NAMES = [
    Case("class-became-a-factory", SCOPED, "class _M:\n    @classmethod\n    def on(cls): ...\ndef M(): return _M()", "te.M.require().on()", {"user attribute-removed on breaking"}),
    Case("enum-became-a-literal", "import enum\nclass F(enum.Enum):\n    A = 1", "from typing import Literal\nF = Literal['A']", "te.F.require().A", {"user attribute-removed A breaking"}),
    Case("enum-alias", "import enum\nclass F(enum.Enum):\n    A = 1", "import enum\nclass F(enum.Enum):\n    B = 1\n    A = B", "te.F.require().A", set()),
]  # fmt: skip

HELPER = "import torch\nclass Q: ...\ndef is_custom(x):\n    if x is None or isinstance(x, torch.Tensor):\n        return False\n    if not isinstance(x, (Q,)): raise AssertionError('x')\n    return True\n"
PLAIN_LAYER = (
    "class Q: ...\nclass L:\n    def __init__(self, size, fused=False, **kw): ...\n    def forward(self, x): ...\n"
)
FUSED_LAYER = """import warnings
class Q: ...
def resolve(fused, split):
    if not (fused or split):
        return fused, split
    return True, True
class L:
    def __init__(self, size, fused=False, split=False, **kw):
        fused, split = resolve(fused, split)
        self.fused = fused
        if size > 1 and self.fused:
            warnings.warn("slow")
    def forward(self, x):
        if self.fused and x > 1: raise ValueError("x")
"""
GUARDS = [
    Case("type-that-we-pass", "def f(x, rows): ...", "import torch\ndef f(x, rows):\n    if not isinstance(rows, torch.Tensor): raise TypeError('rows')", "te.f.require()(1, list(range(3)))", {"user guard-added rows breaking"}),
    Case("type-that-is-taken", "def f(x, rows): ...", "def f(x, rows):\n    if not isinstance(rows, (list, tuple)): raise TypeError('rows')", "te.f.require()(1, list(range(3)))", set()),
    Case("abstract-type", "def f(x, rows): ...", "from collections.abc import Sequence\ndef f(x, rows):\n    if not isinstance(rows, Sequence): raise TypeError('rows')", "te.f.require()(1, list(range(3)))", {"user guard-added rows risk"}),
    Case("type-of-an-annotated-parameter", "def f(x, n): ...", "def f(x, n):\n    if isinstance(n, int): raise TypeError('n')", "def g(n: int):\n    te.f.require()(1, n)", {"user guard-added n breaking"}),
    Case("text-that-has-to-be-called", "def f(x, act): ...", "def f(x, act):\n    if not callable(act): raise TypeError('act')", "te.f.require()(1, 'gelu')", {"user guard-added act breaking"}),
    Case("named-on-the-way", "def f(x, kind): ...", "def f(x, kind):\n    if (k := kind) not in ('a', 'b'): raise ValueError(k)", "te.f.require()(1, 'b')", set()),
    Case("within-bounds", "def f(x, p): ...", "def f(x, p):\n    if not 0.0 <= p < 1.0: raise ValueError('p')", "te.f.require()(1, 0.0)", set()),
    Case("out-of-bounds", "def f(x, p): ...", "def f(x, p):\n    if not 0.0 < p < 1.0: raise ValueError('p')", "te.f.require()(1, 0.0)", {"user guard-added p breaking"}),
    # DotProductAttention.forward of 2.20.2: query_layer may be left out beside a packed qkv_layer
    Case("none-that-the-old-release-refused", "def f(x, y=1): ...", "def f(x=None, y=1, packed=None):\n    if packed is None:\n        if x is None or y is None: raise ValueError('x')", "def g(x):\n    te.f.require()(x)", set()),
    Case("none-that-the-old-release-took", "def f(x: int | None, y=1): ...", "def f(x=None, y=1):\n    if x is None: raise ValueError('x')", "def g(x):\n    te.f.require()(x)", {"user guard-added x risk"}),
    # is_custom() of tensor/utils.py returns for a tensor before it raises
    Case("early-return-of-a-helper", "def f(x): ...", HELPER + "def f(x): return is_custom(x)", "import torch\ndef g(x: torch.Tensor):\n    te.f.require()(x)", set()),
    Case("early-return-that-may-not-be-taken", "def f(x): ...", HELPER + "def f(x): return is_custom(x)", "import torch\ndef g(x: torch.Tensor = None, y=1):\n    te.f.require()(x)", {"user guard-added x risk"}),
    Case("of-what-the-object-itself-has", "class L:\n    def forward(self, x): ...", HELPER + "class L:\n    def forward(self, x):\n        q = self.quantizer()\n        return is_custom(q)", "def g(layer, x):\n    te.L.require().forward(layer, x)", set()),
    # GroupedLinear(single_grouped_weight=False) of 2.20.2
    Case("field-of-an-argument-that-nobody-passes", PLAIN_LAYER, FUSED_LAYER, "def g(n, x):\n    layer = te.L.require()(n)\n    return layer(x)", set()),
    Case("field-of-an-argument-that-is-passed", PLAIN_LAYER, FUSED_LAYER, "def g(n, x, fused):\n    layer = te.L.require()(n, fused=fused)\n    return layer(x)", {"user guard-added x risk", "user warning-added fused, size risk"}),
    Case("field-of-an-argument-that-may-be-passed", PLAIN_LAYER, FUSED_LAYER, "def g(n, x, rest):\n    layer = te.L.require()(n, **rest)\n    return layer(x)", {"user guard-added x risk"}),
    Case("last-raise", "def f(x, kind):\n    if kind == 'a': return 1\n    if kind == 'b': return 2\n    raise ValueError('kind')", "def f(x, kind):\n    if kind == 'a': return 1\n    if kind == 'c': return 2\n    raise ValueError('kind')", "te.f.require()(1, 'b')", {"user guard-added breaking"}),
]  # fmt: skip

IMPORTS = [
    Case("minimum-in-a-condition", "f = 1", "import sys\nif sys.version_info < (3, 30):\n    raise RuntimeError('too old')\nf = 1", "te.f.require()", {"imports import-requirement-added risk"}),
    Case("newer-python", "def f(x): ...\nfrom . import deep", {"pytorch/__init__.py": "def f(x): ...\nfrom . import deep", "pytorch/deep.py": "def g[T](x: T): ...\nmatch = 1 if else\n"}, F1, {"imports import-requirement-added risk"}),
]  # fmt: skip
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
    Case("factory-that-hands-all-on", TAKES, "class _L:\n    def __init__(self, size): ...\ndef Layer(*args, **kwargs):\n    return _L(*args, **kwargs)", "te.Layer.require()(size=8)", set()),
    Case("factory-of-something-else", TAKES, "class _L:\n    def __init__(self, width): ...\ndef Layer(*args, **kwargs):\n    return _L(*args, **kwargs)", "te.Layer.require()(size=8)", {"user parameter-removed size breaking", "user parameter-required width breaking"}),
    Case("scope-that-returns-a-tuple", SCOPE, PLAIN_SCOPE.format("1, 2"), ENTERS, {"user context-manager-lost breaking"}),
    Case("scope-that-returns-a-call", SCOPE, PLAIN_SCOPE.format("sorted('')"), ENTERS, set()),
    Case("held-by-a-class", MANAGER.format("amax"), MANAGER.format("amaxes"), "def f():\n    m = te.Manager.require()\n    return getattr(m.state, 'amax')", {"user attribute-removed amax breaking"}),
    Case("checked-on-entry-now-at-once", CHECKED_CLASS, CHECKED_FUNCTION, ENTERS_MODE, set()),
    Case("checked-on-entry", CHECKED_CLASS.replace("check(self._mode)", "pass"), CHECKED_CLASS, ENTERS_MODE, {"user guard-added mode risk"}),
]  # fmt: skip

APPLIED = (
    "import torch\nclass F(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x, y): ...\nf = F.apply"
)
PLAIN = "def f(x, y=1): ..."
F12 = "te.f.require()(1, y=2)"
METHODS = "class M:\n    {}\n{}"


DECORATORS = [
    # parallel_cross_entropy of 2.4.0 is `CrossEntropyFunction.apply`
    Case("autograd-function-applied", "def f(x, y): ...", APPLIED, "te.f.require()(1, y=2)", {"user parameter-positional-only y breaking"}),
    Case("autograd-function-applied-by-place", "def f(x, y): ...", APPLIED, "te.f.require()(1, 2)", set()),
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

EVERY = [
    *RETURNS, *CONSTRUCTORS, *NAMES, *GUARDS, *IMPORTS, *ROUNDABOUT, *DECORATORS, *LAZY, *GIVES,
]  # fmt: skip


@pytest.mark.parametrize("case", EVERY, ids=[case.name for case in EVERY])
def test_what_is_said_of_what_no_signature_shows(case: Case, tmp_path: Path) -> None:
    assert said_by(compare(tmp_path, case.old, case.new, case.bridge)) == case.said
