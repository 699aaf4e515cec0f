"""Each kind of change in sources of a few lines: what is said of it depends on how the bridge uses the name."""
# ruff: noqa: E501 - one case a line: tables

from __future__ import annotations

from pathlib import Path

import pytest

from megacpp_validate.evidence.values import Cause
from tests.canary.static.small_sources import Case, compare, said_by

CLASS = "class Layer:\n    def __init__(self, size): ...\n"
FUNCTION = "def Layer(size): ...\n"
CALLS = "te.Layer.require()(8)"
SUBCLASSES = "class Mine(te.Layer.require()): ..."
ISINSTANCE = "def f(x):\n    return isinstance(x, te.Layer.require())"

NOW_RAISES = [
    Case("always-raises", "def f(x): return x", "def f(x): raise NotImplementedError('gone')", "te.f.require()(1)", {"user guard-added breaking"}),
    Case("asserts-false", "def f(x): return x", "def f(x):\n    assert False, 'gone'", "te.f.require()(1)", {"user guard-added breaking"}),
    Case("raised-before-too", "def f(x): raise ValueError('a')", "def f(x): raise ValueError('a')", "te.f.require()(1)", set()),
    Case("raises-where-nothing-matched", "def f(x):\n    if x: return 1", "def f(x):\n    if x: return 1\n    raise ValueError('x')", "te.f.require()(1)", set()),
    Case("became-async", "def f(x): return x", "async def f(x): return x", "te.f.require()(1)", {"user return-changed breaking"}),
    Case("only-while-type-checking", "def f(x): return x", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .deep import f", "te.f.require()(1)", {"user removed breaking"}),
    Case("default-respelled", "class E:\n    x = 1\ndef f(a, m=E.x): ...", "from transformer_engine import pytorch\nclass E:\n    x = 1\ndef f(a, m=pytorch.E.x): ...", "te.f.require()(1)", set()),
    Case("default-of-another-name", "def f(a, m=E.x): ...", "def f(a, m=E.y): ...", "te.f.require()(1)", {"user default-changed m risk"}),
]  # fmt: skip

STANDING_IN_THE_WAY = [
    Case("left-at-its-default", "def f(x, n=None): return x", "def f(x, n=None):\n    if n is None: raise ValueError('n')\n    return x", "te.f.require()(1)", {"user guard-added n breaking"}),
    Case("narrowed-list-same-words", "def f(x, kind):\n    if kind not in ('a', 'b'): raise ValueError('kind is not known')", "def f(x, kind):\n    if kind not in ('a',): raise ValueError('kind is not known')", "te.f.require()(1, kind='b')", {"user guard-added kind breaking"}),
    Case("narrowed-constant", "KINDS = ('a', 'b')\ndef f(x, kind):\n    assert kind in KINDS, 'kind is not known'", "KINDS = ('a',)\ndef f(x, kind):\n    assert kind in KINDS, 'kind is not known'", "te.f.require()(1, kind='b')", {"user guard-added kind breaking"}),
    Case("constant-that-holds-it", "def f(x, kind): ...", "KINDS = ('a', 'b')\ndef f(x, kind):\n    assert kind in KINDS, 'kind is not known'", "te.f.require()(1, kind='b')", set()),
    Case("behind-an-isinstance-of-a-builtin", "def f(x, bias): ...", "def f(x, bias):\n    if not isinstance(x, int): raise TypeError('x')\n    if not bias: raise ValueError('bias')", "te.f.require()(1, bias=False)", {"user guard-added bias breaking"}),
    Case("default-through-a-constant", "def f(x, eps=1e-5): ...", "EPS = 1e-6\ndef f(x, eps=EPS): ...", "te.f.require()(1)", {"user default-changed eps risk"}),
    Case("registered-name-gone", "class L:\n    def __init__(self): self.register_parameter('weight', 1)", "class L:\n    def __init__(self): self.register_parameter('kernel', 1)", "layer = te.L.require()()\nlayer.weight", {"user attribute-removed weight breaking"}),
    Case("no-forward-left", "class L:\n    def forward(self, x): ...", "class L:\n    def run(self, x): ...", "layer = te.L.require()()\nlayer(1)", {"user not-callable breaking"}),
]  # fmt: skip

DEFINITIONS = [
    Case("subclassed", CLASS, FUNCTION, SUBCLASSES, {"user class-became-function breaking"}),
    Case("compared-as-a-class", CLASS, FUNCTION, ISINSTANCE, {"user class-became-function breaking"}),
    Case("only-called", CLASS, FUNCTION, CALLS, set()),
    Case("function-became-class", FUNCTION, CLASS, CALLS, set()),
    Case("method-became-property", "class Layer:\n    def size(self): ...", "class Layer:\n    @property\n    def size(self): ...", "te.Layer.require()().size()", {"user not-callable breaking"}),
    Case("method-became-attribute", "class Layer:\n    def size(self): ...", "class Layer:\n    size = 8", "te.Layer.require()().size()", {"user not-callable breaking"}),
    Case("function-became-constant", "def available(): ...", "available = True", "te.available.require()()", {"user not-callable breaking"}),
    Case("classmethod-became-instance-method", "class State:\n    @classmethod\n    def reset(cls): ...", "class State:\n    def reset(self): ...", "te.State.require().reset()", {"user parameter-required self breaking"}),
    Case("classmethod-became-staticmethod", "class State:\n    @classmethod\n    def reset(cls, hard=False): ...", "class State:\n    @staticmethod\n    def reset(hard=False): ...", "te.State.require().reset(hard=True)", set()),
]  # fmt: skip

APPLY = (
    "import torch\nclass Layer(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x, {}args, *w): ..."
)
DEFINITIONS += [
    Case("apply-of-an-autograd-function", APPLY.format(""), APPLY.format("splits, "), "te.Layer.require().apply(1, 2, *rest())", {"user parameter-reordered args breaking"}),
    Case("apply-of-a-module", APPLY.format("").replace("autograd.Function", "nn.Module"), APPLY.format("splits, ").replace("autograd.Function", "nn.Module"), "te.Layer.require().apply(1, 2, *rest())", set()),
]  # fmt: skip
TAKES = "class Layer:\n    def __init__(self, size): ..."
DEFINITIONS += [
    Case("became-a-lambda", FUNCTION, "Layer = lambda size: size", CALLS, set()),
    Case("became-one-of-another-library", CLASS, "import torch\nLayer = torch.nn.Linear", CALLS, set()),
    Case("became-one-of-two", CLASS, "A = B = V = int\nLayer = A if V else B", CALLS, set()),
    Case("method-under-another-name", "class Layer:\n    def run(self): ...", "class Layer:\n    def go(self): ...\n    run = go", "te.Layer.require()().run()", set()),
    # parallel_cross_entropy, 2.4.0 to 2.20.2: `_input` stays as an alias of the first parameter
    Case("required-name-kept-as-an-alias", "def f(_input, target): ...", "def f(inp, target, *, _input=None): ...", "te.f.require()(1, 2)", {"user parameter-renamed _input harmless"}),
    Case("constructor-gone", TAKES, "class Layer: ...", CALLS, {"user parameter-removed size breaking"}),
    Case("constructor-of-another-library", TAKES, "import torch\nclass Layer(torch.nn.Module): ...", CALLS, set()),
    Case("constructor-by-new", TAKES, "class Layer:\n    def __new__(cls): ...", CALLS, {"user parameter-removed size breaking"}),
    Case("constructor-made-by-a-decorator", "import attrs\n" + TAKES, "import attrs\n@attrs.define\nclass Layer:\n    size: int", CALLS, set()),
]  # fmt: skip

SCOPE = "from contextlib import contextmanager\n@contextmanager\ndef scope(on=True):\n    yield\n"
SCOPE_CLASS = "class scope:\n    def __init__(self, on=True): ...\n    def __enter__(self): ...\n    def __exit__(self, *a): ...\n"
CALLABLE_SCOPE = SCOPE_CLASS + "    def __call__(self, function): ...\n"
DECORATES = "@te.scope.require()(on=True)\ndef f(): ..."
ENTERS = "def f():\n    with te.scope.require()(on=True):\n        pass"

SCOPES = [
    Case("decorator-lost", SCOPE, SCOPE_CLASS, DECORATES, {"user decorator-lost breaking"}),
    Case("decorator-kept-by-call", SCOPE, CALLABLE_SCOPE, DECORATES, set()),
    Case("entered-as-a-class", SCOPE, SCOPE_CLASS, ENTERS, set()),
    Case("exit-gone", SCOPE_CLASS, SCOPE_CLASS.replace("__exit__", "leave"), ENTERS, {"user context-manager-lost breaking"}),
    Case("contextmanager-decorator-gone", SCOPE, SCOPE.replace("@contextmanager\n", ""), ENTERS, {"user context-manager-lost breaking"}),
]  # fmt: skip


def call(name: str, old: str, new: str, arguments: str, said: set[str]) -> Case:
    """A function whose parameters change."""
    return Case(name, f"def f({old}): ...", f"def f({new}): ...", f"te.f.require()({arguments})", said)


PARAMETERS = [
    call("keyword-gone", "x, scale=1", "x", "1, scale=2", {"user parameter-removed scale breaking"}),
    call("keyword-renamed", "x, amax_group=None", "x, amax_reduction_group=None", "1, amax_group=2", {"user parameter-renamed amax_group breaking"}),
    call("positional-renamed", "inp, mask", "inp, masks", "1, 2", {"user parameter-renamed mask harmless"}),
    call("swallowed-by-kwargs", "x, scale=1", "x, **kwargs", "1, scale=2", {"user parameter-removed scale risk"}),
    call("positional-only", "x, y", "x, y, /", "x=1, y=2", {"user parameter-positional-only x breaking", "user parameter-positional-only y breaking"}),
    call("keyword-only", "x, y", "x, *, y", "1, 2", {"user parameter-keyword-only y breaking"}),
    call("reordered", "x, probs, mask", "x, mask, probs", "1, 2, 3", {"user parameter-reordered probs breaking"}),
    call("swallowed-by-args-and-named-now", "x, *w", "x, out, *w", "1, 2", {"user parameter-reordered out breaking"}),
    call("starred-into-args-and-named-now", "x, *w", "x, out=None, *w", "1, *rest()", {"user parameter-reordered out breaking"}),
    call("newly-required", "x", "x, layout", "1", {"user parameter-required layout breaking"}),
    call("lost-its-default", "x, layout='a'", "x, layout", "1", {"user parameter-required layout breaking"}),
    call("default-changed", "x, eps=1e-5", "x, eps=1e-6", "1", {"user default-changed eps risk"}),
    call("default-of-another-type", "x, eps=0", "x, eps=0.0", "1", set()),
    call("default-that-is-false-now", "x, eps=0", "x, eps=False", "1", {"user default-changed eps risk"}),
    # general_gemm of 2.10.0: `workspace` is gone from the middle, and the call gives `out_dtype` twice
    call("positional-gone-from-the-middle", "a, b, ws, dt=None", "a, b, dt=None", "1, 2, 3, dt=4", {"user parameter-removed ws breaking"}),
    call("default-changed-that-may-be-passed", "x, eps=1e-5", "x, eps=1e-6", "1, **rest()", set()),
    call("old-name-kept-as-alias", "x, row_map", "x, pad_offsets, row_map=None", "1, 2", {"user parameter-renamed row_map harmless"}),
]  # fmt: skip

CLASSES = [
    Case("constructor-of-a-base", "class Base:\n    def __init__(self, size, *, bias=True): ...\nclass Layer(Base): ...", "class Base:\n    def __init__(self, size): ...\nclass Layer(Base): ...", "te.Layer.require()(8, bias=False)", {"user parameter-removed bias breaking"}),
    Case("super-takes-the-rest", "class Base:\n    def __init__(self, size, bias=True): ...\n" "class Layer(Base):\n    def __init__(self, name, **kwargs):\n        super().__init__(**kwargs)", "class Base:\n    def __init__(self, size): ...\n" "class Layer(Base):\n    def __init__(self, name, **kwargs):\n        super().__init__(**kwargs)", "te.Layer.require()('a', size=8, bias=False)", {"user parameter-removed bias breaking"}),
    Case("forward-of-an-instance", "class Layer:\n    def forward(self, x, mask=None): ...", "class Layer:\n    def forward(self, x, attention_mask=None): ...", "def f(x):\n    layer = te.Layer.require()()\n    return layer(x, mask=None)", {"user parameter-renamed mask breaking"}),
    Case("attribute-gone", "class Layer:\n    def reset(self): ...", "class Layer: ...", "def f(): te.Layer.require()().reset()", {"user attribute-removed reset breaking"}),
    Case("attribute-moved-to-a-base", "class Layer:\n    def reset(self): ...", "class Base:\n    def reset(self): ...\nclass Layer(Base): ...", "def f(): te.Layer.require()().reset()", set()),
    Case("instance-attribute-gone", "class Layer:\n    def __init__(self):\n        self.weight = 1", "class Layer:\n    def __init__(self):\n        self.kernel = 1", "def f(): return te.Layer.require()().weight", {"user attribute-removed weight breaking"}),
    Case("attribute-registered-by-f-string", "class Layer:\n    def __init__(self):\n        self.weight0 = 1", "class Layer:\n    def __init__(self):\n        for i in range(4):\n            self.register_parameter(f'weight{i}', None)", "def f(): return te.Layer.require()().weight0", set()),
    Case("registered-f-string-renamed", "class Layer:\n    def __init__(self):\n        self.register_parameter(f'weight{0}', None)", "class Layer:\n    def __init__(self):\n        self.register_parameter(f'kernel{0}', None)", "def f(i): return getattr(te.Layer.require()(), f'weight{i}')", {"user attribute-removed weight{} risk"}),
    Case("enum-member-gone", "from enum import Enum\nclass Format(Enum):\n    E4M3 = 1\n    HYBRID = 2", "from enum import Enum\nclass Format(Enum):\n    E4M3 = 1", "def f(): return te.Format.require().HYBRID", {"user attribute-removed HYBRID breaking"}),
    Case("attribute-asked-for-with-a-default", "class Layer:\n    def reset(self): ...", "class Layer: ...", "def f(): return getattr(te.Layer.require()(), 'reset', None)", set()),
    Case("attribute-asked-for-with-hasattr", "class Layer:\n    def reset(self): ...", "class Layer: ...", "def f(): return hasattr(te.Layer.require()(), 'reset')", set()),
]  # fmt: skip

HOLDS = "class Layer:\n    def __init__(self):\n        self.meta = {}\n    def keep(self, key):\n        self.meta[key].scale = 1\n        "
READS = "def f():\n    layer = te.Layer.require()()\n    return layer.meta['forward'].inverse"
CLASSES += [
    Case("element-that-the-class-reads-no-more", HOLDS + "self.meta[key].inverse = 1", HOLDS, READS, {"user attribute-removed inverse risk"}),
    Case("element-that-the-class-reads", HOLDS + "self.meta[key].inverse = 1", HOLDS + "return self.meta[key].inverse", READS, set()),
    Case("element-that-the-class-never-read", HOLDS, HOLDS, READS, set()),
]  # fmt: skip

RECIPE = "from pydantic.dataclasses import dataclass\n@dataclass()\nclass Recipe:\n    margin: int = 0\n"
PLAIN_RECIPE = RECIPE.replace("pydantic.dataclasses", "dataclasses")
MAKES = "te.Recipe.require()(margin=0, interval=1)"

DATACLASSES = [
    Case("field-gone-pydantic", RECIPE + "    interval: int = 1\n", RECIPE, MAKES, {"user parameter-removed interval risk"}),
    Case("field-gone-standard-library", PLAIN_RECIPE + "    interval: int = 1\n", PLAIN_RECIPE, MAKES, {"user parameter-removed interval breaking"}),
    Case("field-default-changed", RECIPE + "    algo: str = 'max'\n", RECIPE + "    algo: str = 'most_recent'\n", "te.Recipe.require()(margin=0)", {"user default-changed algo risk"}),
    Case("field-newly-required", RECIPE, RECIPE.replace(" = 0", ""), "te.Recipe.require()()", {"user parameter-required margin breaking"}),
    Case("field-of-a-base", RECIPE + "@dataclass()\nclass Mine(Recipe):\n    b: int = 1\n", RECIPE.replace("margin", "slack") + "@dataclass()\nclass Mine(Recipe):\n    b: int = 1\n", "te.Mine.require()(margin=0, b=1)", {"user parameter-renamed margin risk"}),
    Case("fields-made-keyword-only", RECIPE, RECIPE.replace("dataclass()", "dataclass(kw_only=True)"), "te.Recipe.require()(3)", {"user parameter-keyword-only margin breaking"}),
    Case("class-variable-is-no-field", RECIPE, RECIPE + "    from typing import ClassVar\n    kind: ClassVar[str]\n", "te.Recipe.require()(margin=1)", set()),
]  # fmt: skip


def body(name: str, old: str, new: str, arguments: str, said: set[str], *, parameters: str = "x, mode=None") -> Case:
    """A function whose body changes."""
    head = f"import warnings\nLIMIT = 1\ndef f({parameters}):\n    "
    bridge = f"def use(x: int, mode: str, flag: bool):\n    {arguments}"
    return Case(name, head + old.replace("\n", "\n    "), head + new.replace("\n", "\n    "), bridge, said)


WARNS = "if mode is not None:\n    warnings.warn('slow')\nreturn x"
DEPRECATES = "if mode is not None:\n    warnings.warn('mode is deprecated', DeprecationWarning)\nreturn x"
DEPRECATES_ALL = "warnings.warn('f will go', DeprecationWarning)\nreturn x"
PICKS_A = "if mode is None:\n    mode = 'a'\nreturn x"
PASSES = "te.f.require()(x, mode='a')"
LEAVES_OUT = "te.f.require()(x)"

BODIES = [
    body("warning-about-what-is-passed", "return x", WARNS, PASSES, {"user warning-added mode risk"}),
    body("warning-about-what-is-not-passed", "return x", WARNS, LEAVES_OUT, set()),
    body("warning-was-there", WARNS, WARNS.replace("slow", "very slow"), PASSES, set()),
    body("warning-became-an-error", WARNS, WARNS.replace("warnings.warn", "raise ValueError"), PASSES, {"user guard-added mode breaking"}),
    body("argument-deprecated", "return x", DEPRECATES, PASSES, {"user deprecated mode risk"}),
    body("argument-deprecated-not-passed", "return x", DEPRECATES, LEAVES_OUT, set()),
    body("function-deprecated", "return x", DEPRECATES_ALL, LEAVES_OUT, {"user deprecated risk"}),
    body("deprecation-was-there", DEPRECATES_ALL, DEPRECATES_ALL, LEAVES_OUT, set()),
    body("none-resolved-differently", PICKS_A, PICKS_A.replace("'a'", "'b'"), LEAVES_OUT, {"user default-meaning-changed mode risk"}),
    body("none-resolved-differently-not-leaned-on", PICKS_A, PICKS_A.replace("'a'", "'b'"), PASSES, set()),
    body("or-resolved-differently", "mode = mode or 'a'\nreturn x", "mode = mode or 'b'\nreturn x", LEAVES_OUT, {"user default-meaning-changed mode risk"}),
    body("ternary-resolved-differently", "mode = 'a' if mode is None else mode\nreturn x", "mode = 'b' if mode is None else mode\nreturn x", LEAVES_OUT, {"user default-meaning-changed mode risk"}),
    body("another-value-returned", "return x, mode", "return x, mode, 1", "a, b = te.f.require()(x)", {"user return-changed breaking"}),
    body("same-values-in-another-order", "return x, mode", "return mode, x", "a, b = te.f.require()(x)", {"user return-changed breaking"}),
    body("same-values-in-another-order-kept-whole", "return x, mode", "return mode, x", "te.f.require()(x)", set()),
    body("same-number-returned", "return x, mode", "return x, 1", "a, b = te.f.require()(x)", set()),
    body("number-returned-is-unknown", "return x, mode", "return sorted(x)", "a, b = te.f.require()(x)", set()),
]  # fmt: skip

CONSTANT = "LIMIT = 1\ndef f(x, limit=LIMIT): ..."
KEYS = "def f(x, **kwargs):\n    mode = kwargs.pop('mode', 'a')\n    tp = kwargs.pop('tp', None)\n    return x"

MORE_BODIES = [
    Case("constant-behind-a-default", CONSTANT, CONSTANT.replace("1", "2"), "te.f.require()(3)", {"user default-meaning-changed limit risk"}),
    Case("constant-behind-a-default-passed", CONSTANT, CONSTANT.replace("1", "2"), "te.f.require()(3, limit=3)", set()),
    Case("decorated-as-deprecated", "def f(x): ...", "from warnings import deprecated\n@deprecated('use g')\ndef f(x): ...", "te.f.require()(3)", {"user deprecated risk"}),
    Case("class-decorated-as-deprecated", "class f: ...", "from warnings import deprecated\n@deprecated('use g')\nclass f: ...", "te.f.require()()", {"user deprecated risk"}),
    Case("key-no-longer-popped", KEYS, KEYS.replace("    tp = kwargs.pop('tp', None)\n", ""), "te.f.require()(3, tp=1)", {"user parameter-removed tp risk"}),
    Case("key-popped-under-another-name", KEYS, KEYS.replace("'tp'", "'tp_group'"), "te.f.require()(3, tp=1)", {"user parameter-renamed tp risk"}),
    Case("default-of-a-popped-key", KEYS, KEYS.replace("'a'", "'b'"), "te.f.require()(3, tp=1)", {"user default-changed mode risk"}),
    Case("keys-handed-on", KEYS, "def run(*args, **options): ...\ndef f(x, **kwargs):\n    return run(x, **kwargs)", "te.f.require()(3, tp=1)", {"user parameter-removed tp risk"}),
]  # fmt: skip

BASE = "class Base:\n    def __init__(self, *, size, dtype=None): ...\n"
LOOKS = "class L(Base):\n    def __init__(self, old=None, **kwargs):\n        if 'dtype' in kwargs: pass\n        kwargs['dtype'] = old\n        super().__init__(**kwargs)"
DATACLASSES += [
    Case("field-not-in-init", RECIPE + "    interval: int = 1\n", RECIPE.replace("dataclass\n", "dataclass\nfrom dataclasses import field\n", 1) + "    interval: int = field(default=1, init=False)\n", MAKES, {"user parameter-removed interval risk"}),
    Case("dataclass-under-another-name", RECIPE + "    interval: int = 1\n", RECIPE.replace("@dataclass()", "recipe = dataclass()\n@recipe"), MAKES, {"user parameter-removed interval risk"}),
    Case("key-only-looked-at", BASE + LOOKS, BASE.replace("dtype", "kind") + LOOKS, "te.L.require()(size=8, dtype=1)", {"user parameter-removed dtype breaking"}),
]  # fmt: skip

IN_A_BRANCH = {
    "except": "try:\n    import gone\nexcept ImportError:\n",
    "finally": "try:\n    import gone\nfinally:\n",
    "match": "match 3:\n    case 3:\n    ",
}
CHECKS_X = "    def f(x):\n            if x == 1: raise ValueError('x')"
MORE_BODIES += [
    Case(
        f"defined-in-{name}",
        f"{head}    def f(x): ...",
        head + CHECKS_X,
        "te.f.require()(1)",
        {"user guard-added x breaking"},
    )
    for name, head in IN_A_BRANCH.items()
]

EVERY = [
    *NOW_RAISES, *STANDING_IN_THE_WAY, *DEFINITIONS, *SCOPES, *PARAMETERS, *CLASSES, *DATACLASSES, *BODIES, *MORE_BODIES,
]  # fmt: skip


@pytest.mark.parametrize("case", EVERY, ids=[case.name for case in EVERY])
def test_what_is_said_depends_on_how_the_bridge_uses_it(case: Case, tmp_path: Path) -> None:
    assert said_by(compare(tmp_path, case.old, case.new, case.bridge)) == case.said


SWALLOWED = [
    ("pydantic-dataclass", RECIPE + "    interval: int = 1\n", RECIPE, MAKES, Cause.SILENT_FALLBACK),
    ("standard-dataclass", PLAIN_RECIPE + "    interval: int = 1\n", PLAIN_RECIPE, MAKES, Cause.API),
    ("kwargs-never-read", "def f(x, scale=1): ...", "def f(x, **kwargs): ...", "te.f.require()(1, scale=2)", Cause.SILENT_FALLBACK),
    ("no-kwargs", "def f(x, scale=1): ...", "def f(x): ...", "te.f.require()(1, scale=2)", Cause.API),
]  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "bridge", "cause"), [row[1:] for row in SWALLOWED], ids=[r[0] for r in SWALLOWED]
)
def test_an_argument_that_is_silently_dropped_is_told_from_one_that_raises(
    old: str, new: str, bridge: str, cause: Cause, tmp_path: Path
) -> None:
    (finding,) = compare(tmp_path, old, new, bridge).findings
    assert finding.cause is cause


def test_a_finding_says_where_it_stands_in_both_releases_and_at_each_call_site(tmp_path: Path) -> None:
    bridge = "te.f.require()(1, scale=2)\n\nte.f.require()(1, scale=3)"
    (finding,) = compare(tmp_path, "def f(x, scale=1): ...", "\n\ndef f(x): ...", bridge).findings
    assert finding.before is not None
    assert finding.after is not None
    assert (finding.before.file, finding.before.line) == ("transformer_engine/pytorch/__init__.py", 1)
    assert finding.after.line == 3
    assert [(site.file, site.line) for site in finding.call_sites] == [("user.py", 2), ("user.py", 4)]
