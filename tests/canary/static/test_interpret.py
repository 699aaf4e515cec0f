"""What is read in a project's code: each way of using Transformer Engine, guards by release, and what is not followed."""
# ruff: noqa: E501 - one case a line: tables

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megacpp_validate.canary.static.interpret import Interpreter
from megacpp_validate.canary.static.project import Source, SourceUnused
from megacpp_validate.canary.static.release import Release
from megacpp_validate.canary.static.surface import Argument, Use, UseKind
from megacpp_validate.report.describe.changes import headline
from megacpp_validate.report.describe.static import describe_static
from megacpp_validate.report.document import Paragraph
from tests.canary.static.small_sources import compare_source, write_bridge, write_release

NAME, CALL, ATTRIBUTE = UseKind.NAME, UseKind.CALL, UseKind.ATTRIBUTE
CONTEXT, DECORATOR, CLASS = UseKind.CONTEXT, UseKind.DECORATOR, UseKind.CLASS

Row = tuple[str, UseKind]


def shown(use: Use) -> Row:
    path = "".join(step if step == "()" else f".{step}" for step in use.path)
    return f"{use.accessor.rpartition('.')[2]}{path}", use.kind


def read(source: Source, release: Release) -> list[Use]:
    return [use for uses in Interpreter(source, release).read().values() for use in uses]


def uses_of(code: str, folder: Path) -> list[Use]:
    """Uses of a release that has whatever the code names."""
    names = dict.fromkeys(re.findall(r"\bte\.(\w+)", code))
    release = write_release(folder / "release", "".join(f"{name} = make()\n" for name in names))
    return read(write_bridge(folder / "bridge", code), release)


# code -> each use but the names themselves, as "accessor.path" and kind
CONSUMED: dict[str, tuple[str, list[Row]]] = {
    "a-method": ("layer = te.Layer.require()(8)\nlayer.reset()", [("Layer", CALL), ("Layer().reset", CALL)]),
    "a-class-attribute": ("te.Layer.require().kind", [("Layer.kind", ATTRIBUTE)]),
    "an-attribute-of-an-attribute": ("te.Layer.require().a.b", [("Layer.a", ATTRIBUTE), ("Layer.a.b", ATTRIBUTE)]),
    "self": ("class Mine:\n    def run(self, x):\n        return self.inner(x)\n    def __init__(self):\n        self.inner = te.Layer.require()(8)", [("Layer", CALL), ("Layer()", CALL)]),
    "self-of-another-class": ("class A:\n    def __init__(self):\n        self.inner = te.Layer.require()(8)\nclass B:\n    def run(self, x):\n        return self.inner(x)", [("Layer", CALL)]),
    "a-function-below-that-hands-on": ("def use():\n    return make().weight\ndef make():\n    return te.Layer.require()(8)", [("Layer().weight", ATTRIBUTE), ("Layer", CALL)]),
    "a-function-that-hands-on-what-the-module-knows": ("layer = te.Layer.require()\ndef use():\n    return make().weight\ndef make():\n    return layer(8)", [("Layer().weight", ATTRIBUTE), ("Layer", CALL)]),
    "functions-that-call-each-other": ("def one(n):\n    return other(n)\ndef other(n):\n    return one(n)\nte.Layer.require()(one(3))", [("Layer", CALL)]),
    "getattr-f-string": ("def f(i): getattr(te.Layer.require()(8), f'weight{i}')", [("Layer", CALL), ("Layer().weight{}", ATTRIBUTE)]),
    "getattr-of-anything": ("def f(n): getattr(te.Layer.require(), n)", [("Layer.{}", ATTRIBUTE)]),
    "hasattr": ("hasattr(te.Layer.require(), 'kind')", []),
    "isinstance-of-two": ("def f(x): return isinstance(x, (te.A.require(), te.B.require()))", [("A", CLASS), ("B", CLASS)]),
    "subclass": ("class Mine(te.Layer.require()): ...", [("Layer", CLASS)]),
    "with-as": ("with te.scope.require()() as s:\n    s.go()", [("scope", CALL), ("scope()", CONTEXT)]),
    "decorator": ("@te.wrap.require()\ndef f(): ...", [("wrap", DECORATOR)]),
    "decorator-that-is-made": ("@te.wrap.require()(1)\ndef f(): ...", [("wrap", CALL), ("wrap()", DECORATOR)]),
    "partial-then-called": ("from functools import partial\ng = partial(te.f.require(), 1)\ng(2)", [("f", CALL), ("f", CALL)]),
    "in-an-argument": ("te.f.require()(te.g.require()(1))", [("g", CALL), ("f", CALL)]),
    "in-a-comprehension": ("[te.f.require()(i) for i in range(3)]", [("f", CALL)]),
    "in-a-loop": ("f = te.f.require()\nfor i in range(3):\n    f(i)", [("f", CALL)]),
    "in-a-lambda": ("lambda x: te.f.require()(x)", [("f", CALL)]),
    "in-a-try": ("try:\n    te.f.require()(1)\nexcept ValueError:\n    te.g.require()(2)\nfinally:\n    te.h.require()(3)", [("f", CALL), ("g", CALL), ("h", CALL)]),
    "in-a-while": ("while te.f.require()(1): ...", [("f", CALL)]),
    "in-a-match": ("match 3:\n    case 3:\n        te.f.require()(1)", [("f", CALL)]),
    "in-an-assert": ("assert te.f.require()(1)", [("f", CALL)]),
    "in-a-nested-function": ("def f():\n    layer = te.Layer.require()\n    def g():\n        return layer(1)\n    return g", [("Layer", CALL)]),
    "in-an-async-function": ("async def f():\n    async with te.scope.require()(): ...", [("scope", CALL), ("scope()", CONTEXT)]),
    "chained-assignment": ("a = b = te.Layer.require()\na(1)\nb(2)", [("Layer", CALL), ("Layer", CALL)]),
    "tuple-assignment": ("a, b = te.A.require(), te.B.require()\na(1)\nb(2)", [("A", CALL), ("B", CALL)]),
    "annotated-assignment": ("a: object = te.A.require()\na(1)", [("A", CALL)]),
    "walrus": ("if (a := te.A()) is not None:\n    a(1)", [("A", CALL)]),
    "or": ("(te.A() or te.B.require())(1)", [("A", CALL)]),
    "starred": ("def f(v, k): te.f.require()(*v, **k)", [("f", CALL)]),
    "rebound": ("a = te.A.require()\na = 3\na(1)", []),
    "shadowed-by-a-parameter": ("a = te.A.require()\ndef f(a):\n    a(1)", []),
    "unpacked": ("a, b = te.f.require()(1)\na.go()", [("f", CALL)]),
    "in-a-list": ("x = [te.A.require()]\nx[0](1)", [("A", CALL)]),
    "in-a-list-that-changes": ("x = []\nx.append(te.A.require())\nx[i] = te.B.require()\nfor j, f in enumerate(x):\n    f(j)", [("A", CALL), ("B", CALL)]),
}  # fmt: skip


@pytest.mark.parametrize(("code", "wanted"), CONSUMED.values(), ids=CONSUMED)
def test_each_way_of_consuming_is_read(code: str, wanted: list[Row], tmp_path: Path) -> None:
    uses = uses_of(code, tmp_path)
    assert sorted(shown(use) for use in uses if use.kind is not NAME) == sorted(wanted)


def the_call(code: str, tmp_path: Path) -> Use:
    (use,) = [use for use in uses_of(code, tmp_path) if use.kind is CALL]
    return use


ARGUMENTS = {
    "positionals": ("te.f.require()(1, x)", {"positionals": (Argument((1,), never_none=True), Argument())}),
    "keywords": ("te.f.require()(a=None)", {"keywords": {"a": Argument((None,))}}),
    "star": ("te.f.require()(1, *x)", {"open_positionals": True, "positionals": (Argument((1,), never_none=True),)}),
    "double-star": ("te.f.require()(**x)", {"open_keywords": True, "keywords": {}}),
    "partial": ("import functools\nfunctools.partial(te.f.require(), a=1)", {"partial": True, "keywords": {"a": Argument((1,), never_none=True)}}),
    "dictionary-of-another-call": ("def made():\n    return {'a': 1}\nother = made()\nother['b'] = 2\nte.f.require()(**made())", {"keywords": {"a": Argument((1,), never_none=True)}}),
    "unpacked": ("a, b, c = te.f.require()(1)", {"unpack": 3}),
    "not-unpacked": ("a = te.f.require()(1)", {"unpack": 0}),
    "unpacked-open": ("a, *b = te.f.require()(1)", {"unpack": 0}),
}  # fmt: skip


@pytest.mark.parametrize(("code", "wanted"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_what_a_call_passes_is_read(code: str, wanted: dict[str, object], tmp_path: Path) -> None:
    use = the_call(code, tmp_path)
    assert {name: getattr(use, name) for name in wanted} == wanted


KNOWN = {
    "a-literal": ("'a'", Argument(("a",), never_none=True)),
    "negative": ("-1", Argument((-1,), never_none=True)),
    "a-bool": ("flag", Argument((True, False), never_none=True)),
    "a-choice": ("mode", Argument(("bshd", "sbhd"), never_none=True)),
    "an-optional": ("maybe", Argument()),
    "an-optional-bool": ("tristate", Argument((True, False, None))),
    "a-string": ("text", Argument(never_none=True, type_name="str")),
    "a-list": ("[text]", Argument(never_none=True, type_name="list")),
    "negated": ("not flag", Argument((True, False), never_none=True)),
    "one-of-two": ("'a' if flag else 'b'", Argument(("a", "b"), never_none=True)),
    "one-or-none": ("'a' if flag else None", Argument(("a", None))),
    "a-tensor-method": ("rows.float()", Argument(never_none=True)),
    "a-call": ("make()", Argument()),
}


@pytest.mark.parametrize(("expression", "wanted"), KNOWN.values(), ids=KNOWN)
def test_what_is_known_of_an_argument(expression: str, wanted: Argument, tmp_path: Path) -> None:
    code = (
        "from typing import Any, Literal\n"
        "def use(flag: bool, mode: Literal['bshd', 'sbhd'], maybe: str | None, tristate: bool | None, text: str, rows: Any):\n"
        f"    kept = 'x'\n    te.f.require()({expression})"
    )
    assert the_call(code, tmp_path).positionals == (wanted,)


HEAD = "import transformer_engine.pytorch as te\n"
LAYER = (
    "class Layer:\n    def __init__(self, size, bias=True): ...\n    def forward(self, x, scale=1): ...\n"
    "    def scale_by(self, x, scale=1): ...\n    def state_dict(self, x, scale=1): ...\n"
)
NO_BIAS = LAYER.replace(", bias=True", "")
NO_SCALE = LAYER.replace(", scale=1", "")
AT_LEAST = (
    "from importlib.metadata import version\nfrom packaging.version import parse\n"
    "def below(have):\n    return parse(have) < parse('2')\ndef old(name):\n    return parse(version(name)) < parse('2')"
)
BIAS, SCALE = "parameter-removed bias", "parameter-removed scale"
MINIMUM = "from packaging.version import Version\ndef is_te_min_version(text):\n    import transformer_engine as te\n    return Version(str(te.__version__)) >= Version(text)\n"

# how plain code uses `Layer(bias=)` or `forward(scale=)`; both are gone in release 2.0 -> file:line and what is said
PLAIN_CODE: dict[str, tuple[dict[str, str], str]] = {
    "import-whole": ({"a.py": "import transformer_engine.pytorch\ntransformer_engine.pytorch.Layer(8, bias=True)"}, f"a.py:2 {BIAS}"),
    "from-import": ({"a.py": "from transformer_engine.pytorch import Layer as L\nL(8, bias=True)"}, f"a.py:2 {BIAS}"),
    "from-package": ({"a.py": "from transformer_engine import pytorch as te\nte.Layer(8, bias=True)"}, f"a.py:2 {BIAS}"),
    "wildcard": ({"a.py": "from transformer_engine.pytorch import *\nLayer(8, bias=True)"}, f"a.py:2 {BIAS}"),
    "within-a-function": ({"a.py": "def f():\n    import transformer_engine.pytorch as te\n    te.Layer(8, bias=True)"}, f"a.py:3 {BIAS}"),
    "import-module": ({"a.py": "import importlib\nte = importlib.import_module('transformer_engine.pytorch')\nte.Layer(8, bias=True)"}, f"a.py:3 {BIAS}"),
    "getattr": ({"a.py": HEAD + "getattr(te, 'Layer')(8, bias=True)"}, f"a.py:2 {BIAS}"),
    "keywords-of-a-dictionary": ({"a.py": HEAD + "def f(on):\n    kw = {'size': 8}\n    if on:\n        kw['bias'] = True\n    te.Layer(**kw)"}, f"a.py:6 {BIAS}"),
    "keywords-of-a-function": ({"a.py": HEAD + "def extra():\n    return dict(bias=True)\nte.Layer(8, **extra())"}, f"a.py:4 {BIAS}"),
    "handed-on-by-a-function": ({"a.py": HEAD + "def make(size, **kw):\n    print(size)\n    return te.Layer(size, **kw)\nmake(8, bias=True)"}, f"a.py:5 {BIAS}"),
    "handed-on-by-a-method": ({"a.py": HEAD + "class A:\n    def make(self, *args, **kw):\n        return te.Layer(*args, **kw)\n    def f(self):\n        return self.make(8, bias=True)"}, f"a.py:6 {BIAS}"),
    "subclass-of-a-subclass": ({"a.py": HEAD + "class Mine(te.Layer): ...", "b.py": "from a import Mine\nclass Its(Mine):\n    def __init__(self):\n        super().__init__(8, bias=True)"}, f"b.py:4 {BIAS}"),
    "subclass-that-is-made": ({"a.py": HEAD + "class Mine(te.Layer):\n    def __init__(self, *args, **kw):\n        super().__init__(*args, **kw)\nMine(8, bias=True)"}, f"a.py:5 {BIAS}"),
    "method-of-a-base": ({"a.py": HEAD + "class Mine(te.Layer):\n    def forward(self, x):\n        return super().forward(x, scale=2)"}, f"a.py:4 {SCALE}"),
    "field-by-its-name": ({"a.py": HEAD + "class Mine:\n    def __init__(self):\n        self.layer = te.Layer(8)\n    def run(self, x):\n        return self._modules['layer'].forward(x, scale=2)"}, f"a.py:6 {SCALE}"),
    "field-of-a-base": ({"a.py": HEAD + "class Base:\n    def __init__(self):\n        self.layer = te.Layer(8)\nclass Mine(Base):\n    def run(self, x):\n        return self.layer.forward(x, scale=2)"}, f"a.py:7 {SCALE}"),
    "returned": ({"a.py": HEAD + "def make():\n    return te.Layer(8)\ndef f(x):\n    return make().forward(x, scale=2)"}, f"a.py:5 {SCALE}"),
    "passed-on": ({"a.py": HEAD + "def build(cls):\n    return cls(8, bias=True)\nbuild(te.Layer)"}, f"a.py:3 {BIAS}"),
    "re-exported": ({"pkg/__init__.py": "from .a import *", "pkg/a.py": "from transformer_engine.pytorch import Layer", "use.py": "from pkg import Layer\nLayer(8, bias=True)"}, f"use.py:2 {BIAS}"),
    "relative": ({"pkg/__init__.py": "", "pkg/a.py": HEAD, "pkg/b.py": "from . import a\na.te.Layer(8, bias=True)"}, f"pkg/b.py:2 {BIAS}"),
    "narrowed-by-isinstance": ({"a.py": HEAD + "def f(model, x):\n    return [m.forward(x, scale=2) for m in model if isinstance(m, te.Layer)]"}, f"a.py:3 {SCALE}"),
    "annotated": ({"a.py": HEAD + "def f(m: 'te.Layer | None', x):\n    m.forward(x, scale=2)"}, f"a.py:3 {SCALE}"),
    "declared-and-iterated": ({"a.py": HEAD + "class Mine:\n    layers: list[te.Layer]\n    def run(self, x):\n        for i, layer in enumerate(self.layers[1:]):\n            layer.forward(x, scale=i)"}, f"a.py:6 {SCALE}"),
    "matched": ({"a.py": HEAD + "def f(m, x):\n    match m:\n        case te.Layer() if x:\n            m.forward(x, scale=2)"}, f"a.py:5 {SCALE}"),
    "partial": ({"a.py": "from functools import partial\n" + HEAD + "partial(te.Layer, bias=True)"}, f"a.py:3 {BIAS}"),
    "only-class-with-that-method": ({"a.py": "from transformer_engine.pytorch import Layer\ndef make():\n    def go(one, x):\n        one.scale_by(x, scale=2)\n    return Layer(8), go"}, "a.py:4 parameter-removed scale"),
    "method-of-torch": ({"a.py": "from transformer_engine.pytorch import Layer\ndef go(one, x):\n    one.state_dict(x, scale=2)"}, ""),
    "method-of-a-class-of-ones-own": ({"a.py": "from transformer_engine.pytorch import Layer\nclass Mine:\n    def scale_by(self, x, scale): ...\ndef go(one, x):\n    one.scale_by(x, scale=2)"}, ""),
    # alive under the new release
    "guard-of-another-file": ({"u.py": MINIMUM, "a.py": "from u import is_te_min_version\n" + HEAD + "if is_te_min_version('1.5'):\n    te.Layer(8, bias=True)"}, f"a.py:4 {BIAS}"),
    "guard-by-the-version-in-a-module": ({"u.py": "import transformer_engine as te\nfrom packaging.version import Version\nTE = Version(te.__version__)\ndef at_least(text):\n    return TE >= Version(text)\n", "a.py": "from u import at_least\n" + HEAD + "if not at_least('2.0'):\n    te.Layer(8, bias=True)"}, ""),
    "keyword-under-a-guard": ({"a.py": MINIMUM + HEAD + "kw = {}\nif is_te_min_version('1.5'):\n    kw['bias'] = True\nte.Layer(8, **kw)"}, f"a.py:9 {BIAS}"),
    "keys-taken-out-in-a-loop": ({"a.py": HEAD + "kw = {'bias': True}\nfor k in set(kw) - names():\n    kw.pop(k)\nte.Layer(8, **kw)"}, ""),
    "call-that-the-old-release-refuses": ({"a.py": HEAD + "te.Layer(8, True, 3, bias=True)"}, ""),
    "file-that-the-old-release-does-not-import": ({"a.py": HEAD + "from transformer_engine.pytorch import Other\nte.Layer(8, bias=True)"}, f"a.py:3 {BIAS}"),
    "caught-and-raised": ({"a.py": HEAD + "try:\n    te.Layer(8, bias=True)\nexcept TypeError as e:\n    raise RuntimeError from e"}, f"a.py:3 {BIAS}"),
    "caught-as-something-else": ({"a.py": HEAD + "try:\n    te.Layer(8, bias=True)\nexcept KeyError:\n    pass"}, f"a.py:3 {BIAS}"),
    "listed-positionals": ({"a.py": HEAD + "args = [8, True]\nte.Layer(*args)"}, "a.py:3 parameter-removed bias"),
    "test-of-another-file": ({"a.py": HEAD + "def is_layer(x):\n    return isinstance(x, te.Layer)", "b.py": "from a import is_layer\ndef f(y):\n    if is_layer(y):\n        y.forward(1, scale=2)"}, f"b.py:4 {SCALE}"),
    # not alive under the new release
    "guard-by-version": ({"a.py": "import transformer_engine\nfrom packaging import version\n" + HEAD + "if version.parse(transformer_engine.__version__) < version.parse('2.0'):\n    te.Layer(8, bias=True)"}, ""),
    "guard-by-metadata": ({"a.py": "from importlib.metadata import version\n" + HEAD + "OLD = int(version('transformer-engine').split('.')[0]) < 2\nif OLD:\n    te.Layer(8, bias=True)"}, ""),
    "guard-by-tuple": ({"a.py": "import transformer_engine as t\n" + HEAD + "V = tuple(int(x) for x in t.__version__.split('.')[:2])\nif V < (2, 0):\n    te.Layer(8, bias=True)"}, ""),
    "guard-that-returns": ({"a.py": MINIMUM + HEAD + "def f():\n    if is_te_min_version('2.0'):\n        return None\n    return te.Layer(8, bias=True)"}, ""),
    "guard-that-does-not-hand-on": ({"a.py": MINIMUM + HEAD + "def make(*args, **kw):\n    if is_te_min_version('2.0'):\n        return None\n    return te.Layer(*args, **kw)\nmake(8, bias=True)"}, ""),
    "loop-that-does-not-hand-on": ({"a.py": HEAD + "def make(*args, **kw):\n    for one in found():\n        return one\n    return te.Layer(*args, **kw)\nmake(8, bias=True)"}, ""),
    "guard-that-raises": ({"a.py": MINIMUM + HEAD + "def f():\n    if is_te_min_version('2.0'):\n        raise ValueError\n    return te.Layer(8, bias=True)"}, ""),
    "guard-beside-what-is-not-known": ({"a.py": MINIMUM + HEAD + "def f(n):\n    if n == 1:\n        pass\n    elif n == 2 and not is_te_min_version('1.5'):\n        te.Layer(8, bias=True)"}, ""),
    "test-that-is-skipped": ({"a.py": MINIMUM + HEAD + "import pytest\n@pytest.mark.skipif(is_te_min_version('2.0'), reason='gone')\ndef test():\n    te.Layer(8, bias=True)"}, ""),
    "test-that-is-not-skipped": ({"a.py": MINIMUM + HEAD + "import pytest\n@pytest.mark.skipif(not is_te_min_version('1.0'), reason='old')\nclass TestIt:\n    def test(self):\n        te.Layer(8, bias=True)"}, f"a.py:10 {BIAS}"),
    "function-that-the-old-release-takes": ({"a.py": MINIMUM + HEAD + "def new():\n    te.Layer(8)\ndef old():\n    te.Layer(8, bias=True)\nmake = new if is_te_min_version('2.0') else old"}, ""),
    "helper-options": (
        {"a.py": HEAD + "from h import options\ndef f():\n    te.Layer(8, **options())",
         "h.py": "from i import KEY\ndef options():\n    return {KEY: True}", "i.py": "KEY = 'bias'"},
        f"a.py:4 {BIAS}",
    ),
    "helper-hands-on": (
        {"a.py": HEAD + "from h import f\nf(te.Layer(8))", "h.py": "def f(layer):\n    return layer(1, scale=2)"},
        f"h.py:2 {SCALE}",
    ),
    "helper-of-another-file-that-uses-it": (
        {"a.py": HEAD + "import h\nte.Layer(8)\nh.f(1)", "h.py": "from z import g\ndef f(x):\n    return g(x)",
         "z.py": HEAD + "te.Layer(8, bias=True)\ndef g(x): ..."},
        f"z.py:2 {BIAS}",
    ),
    **{
        f"helper-version-{name}": ({"a.py": f"{asks}:\n    {HEAD}    te.Layer(8, bias=True)", "h.py": AT_LEAST,
                                    "g.py": "from h import old\nOLD = old('transformer-engine')"}, "")
        for name, asks in {
            "by-name": "from h import old\nif old('transformer-engine')", "constant": "import g\nif g.OLD",
            "given": "import transformer_engine as t\nfrom h import below\nif below(t.__version__)",
        }.items()
    },
    "not-transformer-engine": ({"a.py": HEAD + "te.Layer(8)\nimport torch\ntorch.Layer(8, bias=True)"}, ""),
}  # fmt: skip


def said(folder: Path, old: str, new: str, files: dict[str, str]) -> str:
    findings = compare_source(folder, old, new, files).findings
    return "; ".join(
        f"{f.call_sites[0].file}:{f.call_sites[0].line} {f.kind} {f.parameter}"
        for f in findings
        if f.impact != "harmless"
    )


@pytest.mark.parametrize(("files", "wanted"), PLAIN_CODE.values(), ids=PLAIN_CODE)
def test_plain_code_is_judged_at_the_line(files: dict[str, str], wanted: str, tmp_path: Path) -> None:
    new = NO_SCALE if any("scale" in text for text in files.values()) else NO_BIAS
    assert said(tmp_path, LAYER, new, files) == wanted


F = "def f(old=1): ..."
SHIM = {"pytorch/fp8.py": "from .quantization import f", "pytorch/quantization.py": F}
CAUGHT = HEAD + "try:\n    f = te.fp8.f\nexcept AttributeError:\n    f = "
# an `__init__.py` of release 2.0, which keeps a module `fp8`, and code -> what is said of `te.fp8`
SUBMODULES: dict[str, tuple[str, dict[str, str], str]] = {
    # te.fp8.check_mxfp8_support() of accelerate, 2.8.0 to 2.9.0
    "imported-by-nobody": ("", {"a.py": HEAD + "te.fp8.f()"}, "a.py:2 not-loaded breaking"),
    "by-its-whole-name": ("", {"a.py": "import transformer_engine.pytorch\ntransformer_engine.pytorch.fp8.f()"}, "a.py:2 not-loaded breaking"),
    "imported-by-this-file": ("", {"a.py": HEAD + "def g():\n    import transformer_engine.pytorch.fp8\nte.fp8.f()"}, ""),
    "taken-by-this-file": ("", {"a.py": HEAD + "te.fp8.f()\nfrom transformer_engine.pytorch.fp8 import f"}, ""),
    "imported-by-another-file": ("", {"a.py": HEAD + "te.fp8.f()", "b.py": "from transformer_engine.pytorch import fp8"}, "a.py:2 not-loaded risk"),
    "imported-by-its-name": ("", {"a.py": HEAD + "import importlib\nimportlib.import_module('transformer_engine.pytorch.fp8')\nte.fp8.f()"}, ""),
    "imported-by-its-relative-name": ("", {"a.py": HEAD + "import importlib\nPACKAGE = 'transformer_engine.pytorch'\nimportlib.import_module('.fp8', PACKAGE)\nte.fp8.f()"}, ""),
    "imported-by-its-relative-name-in-a-package": ("", {"a.py": HEAD + "import importlib\nimportlib.import_module('.fp8', package='transformer_engine.pytorch')\nte.fp8.f()"}, ""),
    "set-by-the-code": ("from . import quantization", {"a.py": HEAD + "if not hasattr(te, 'fp8'):\n    te.fp8 = te.quantization\nte.fp8.f()"}, ""),
    "patched": ("", {"a.py": "from unittest import mock\nimport transformer_engine\nmock.patch('transformer_engine.pytorch.fp8.f')"}, ""),
    "imported-in-a-function": ("def g():\n    from . import (  # later\n        quantization,\n        fp8,\n    )", {"a.py": HEAD + "te.fp8.f()"}, ""),
    "imported-by-its-whole-name": ("import transformer_engine.pytorch.fp8 as q, os", {"a.py": HEAD + "te.fp8.f()"}, ""),
    "imported-for-its-names": ("from .fp8 import *", {"a.py": HEAD + "te.fp8.f()"}, ""),
    "loaded-when-asked-for": ("def __getattr__(name):\n    return load(name)", {"a.py": HEAD + "te.fp8.f()"}, ""),
    "loaded-in-a-loop": ("for name in ('fp8',):\n    importlib.import_module(f'.{name}', __name__)", {"a.py": HEAD + "te.fp8.f()"}, ""),
    "caught": ("", {"a.py": CAUGHT + "None"}, "a.py:3 not-loaded risk"),
    "caught-and-replaced": ("from .quantization import f", {"a.py": CAUGHT + "te.f"}, ""),
    "asked-for": ("", {"a.py": HEAD + "if hasattr(te, 'fp8'):\n    te.fp8.f()"}, ""),
}  # fmt: skip


@pytest.mark.parametrize(("init", "files", "wanted"), SUBMODULES.values(), ids=SUBMODULES)
def test_a_submodule_is_there_where_something_imports_it(
    init: str, files: dict[str, str], wanted: str, tmp_path: Path
) -> None:
    old = {"pytorch/__init__.py": "from .fp8 import f", "pytorch/fp8.py": F}
    findings = compare_source(tmp_path, old, SHIM | {"pytorch/__init__.py": init}, files).findings
    sites = [(one, one.call_sites[0]) for one in findings if one.impact != "harmless"]
    assert "; ".join(f"{at.file}:{at.line} {one.kind} {one.impact}" for one, at in sites) == wanted


# a helper that imports by texts; the whole file names the package in texts only
GET = "import importlib\ndef get(module, name, alt=None):\n    try:\n        found = importlib.import_module(module)\n        return getattr(found, name), True\n    except ImportError:\n        print(name)\n    except AttributeError:\n        pass\n    return alt, False\n"

# code that imports `f`, which release 2.0 has no more -> what is said, and how bad it is
LOST = {
    "import": ("from transformer_engine.pytorch import f\nf()", {"removed breaking"}),
    "attribute": (HEAD + "te.f()", {"removed breaking"}),
    "caught": ("try:\n    from transformer_engine.pytorch import f\nexcept ImportError:\n    f = None\nif f is not None:\n    f()", {"removed risk caught"}),
    "suppressed": ("import contextlib\nwith contextlib.suppress(ImportError):\n    from transformer_engine.pytorch import f", {"removed risk caught"}),
    "caught-with-others": ("try:\n    from transformer_engine.pytorch import f, g\n    HAVE = True\nexcept ImportError:\n    HAVE = False\nif HAVE:\n    f()\n    g()", {"removed risk caught"}),
    "caught-and-raised-again": ("try:\n    from transformer_engine.pytorch import f\nexcept ImportError as fault:\n    raise RuntimeError from fault", {"removed breaking"}),
    "from-another-place": ("try:\n    from transformer_engine.pytorch import f\nexcept ImportError:\n    from transformer_engine.pytorch import g as f\nf()", set()),
    "attribute-caught": (HEAD + "try:\n    f = te.f\nexcept AttributeError:\n    f = None", {"removed risk caught"}),
    "attribute-caught-with-others": (HEAD + "try:\n    f = te.f\nexcept (ImportError, AttributeError):\n    f = None", {"removed risk caught"}),
    "attribute-caught-by-a-named-group": (HEAD + "LOST = (ImportError, AttributeError)\ntry:\n    te.f()\nexcept LOST:\n    pass", {"removed risk caught"}),
    "attribute-caught-as-an-import": (HEAD + "try:\n    f = te.f\nexcept ImportError:\n    f = None", {"removed breaking"}),
    "attribute-from-another-place": (HEAD + "def get():\n    try:\n        return te.f\n    except AttributeError:\n        return te.g", set()),
    "attribute-caught-and-exits": (HEAD + "import sys\ntry:\n    f = te.f\nexcept AttributeError:\n    print('too new')\n    sys.exit(1)", {"removed breaking"}),
    "name-caught-as-a-module": ("try:\n    from transformer_engine.pytorch import f\nexcept ModuleNotFoundError:\n    f = None", {"removed breaking"}),
    "caught-and-raised-for-this-release": (MINIMUM + "try:\n    from transformer_engine.pytorch import f\nexcept ImportError:\n    if is_te_min_version('2.0'):\n        raise\n    f = None", {"removed breaking"}),
    "else-of-a-try": (HEAD + "try:\n    import os\nexcept AttributeError:\n    pass\nelse:\n    te.f()", {"removed breaking"}),
    "folded-name": (HEAD + "getattr(te, 'f' + '')()", {"removed breaking"}),
    "formatted-name": (HEAD + "end = 'f'\ngetattr(te, f'{end}')()", {"removed breaking"}),
    "patched": ("from unittest import mock\nimport transformer_engine\nwith mock.patch('transformer_engine.pytorch.f'):\n    pass", {"removed breaking"}),
    "patched-by-a-decorator": ("from unittest.mock import patch\n" + HEAD + "@patch.object(te, 'f')\ndef test(f): ...", {"removed breaking"}),
    "set-by-pytest": (HEAD + "def test(monkeypatch):\n    monkeypatch.setattr('transformer_engine.pytorch.f', None)", {"removed breaking"}),
    "set-as-an-attribute": (HEAD + "te.f = None", {"removed risk caught"}),
    "bound-before-the-fault": ("try:\n    from transformer_engine.pytorch import g\n    from transformer_engine.pytorch import f\nexcept ImportError:\n    pass\ng(old=1)", {"removed risk caught", "parameter-removed breaking"}),
    "set-by-the-code": (HEAD + "setattr(te, 'f', None)", set()),
    "module-that-refuses": ("import transformer_engine\nfrom packaging.version import Version\nassert Version(transformer_engine.__version__) < Version('2.0')\n" + HEAD + "te.f()", {"refused breaking"}),
    "module-that-raises": ("import transformer_engine\nfrom packaging.version import Version\nif Version(transformer_engine.__version__) >= Version('2.0'):\n    raise ImportError\n" + HEAD + "te.f()", {"refused breaking"}),
    "lost-module-by-its-name": ("import importlib\nimportlib.import_module('transformer_engine.pytorch.deep')", {"removed breaking"}),
    "wildcard-of-a-lost-module": ("from transformer_engine.pytorch.deep import *", {"removed breaking"}),
    "guard-that-nobody-can-evaluate": (HEAD + "import transformer_engine\nif helper(transformer_engine.__version__):\n    te.f()", {"removed risk guarded"}),
    "guard-kept-under-a-name": (HEAD + "import re, transformer_engine\nOLD = int(re.match('[0-9]+', transformer_engine.__version__).group()) < 2\ndef f():\n    if OLD:\n        te.f()", {"removed risk guarded"}),
    "guard-that-leaves": (HEAD + "import transformer_engine\ndef f():\n    if helper(transformer_engine.__version__):\n        return\n    te.f()", {"removed risk guarded"}),
    "guard-of-a-keyword": (HEAD + "import transformer_engine\nkw = {}\nif helper(transformer_engine.__version__):\n    kw['old'] = 1\nte.g(**kw)", {"parameter-removed risk guarded"}),
    "keyword-beside-a-guard": (HEAD + "import transformer_engine\nkw = {'old': 1}\nif helper(transformer_engine.__version__):\n    kw['new'] = 1\nte.g(**kw)", {"parameter-removed breaking"}),
    "keyword-that-the-new-release-wants": (MINIMUM + HEAD + "kw = {'old': 1} if not is_te_min_version('2.0') else {'new': 1}\nte.h(**kw)", set()),
    "guard-of-something-else": (HEAD + "import torch\nif helper(torch.__version__):\n    te.f()", {"removed breaking"}),
    "guard-of-another-package": ("from megatron.core.utils import is_te_min_version\n" + HEAD + "if not is_te_min_version('1.5', check_equality=False):\n    te.f()", {"removed risk guarded"}),
    "guard-of-another-package-by-its-texts": ("import utils\n" + HEAD + "if utils.compare_versions('transformer-engine', '<', '2.0'):\n    te.f()", {"removed risk guarded"}),
    "guard-of-another-package-in-both-ways": ("from megatron.core.utils import is_te_min_version\nif is_te_min_version('2.0'):\n    from transformer_engine.pytorch import new\nelse:\n    from transformer_engine.pytorch import f", {"removed risk guarded"}),
    "guard-of-another-package-that-cannot-tell": ("from megatron.core.utils import is_te_min_version\n" + HEAD + "if is_te_min_version('0.9'):\n    te.f()", {"removed breaking"}),
    "guard-of-another-package-by-numbers": ("from megatron.core.utils import te_version_below\n" + HEAD + "if te_version_below(2, 0):\n    te.f()", {"removed risk guarded"}),
    "guard-of-a-package-of-which-the-tree-has-a-part": ("from plugin.guards import is_te_min_version\n" + HEAD + "if not is_te_min_version('1.5'):\n    te.f()", {"removed risk guarded"}),
    "guard-of-something-else-by-name": ("from megatron.core.utils import is_torch_min_version\n" + HEAD + "if is_torch_min_version('1.5'):\n    te.f()", {"removed breaking"}),
    "version-of-a-name-that-is-not-known": ("import operator\nimport sys\nfrom importlib.metadata import version\nfrom packaging.version import parse\n" + HEAD + "if operator.lt(parse(version(sys.argv[1])), parse('1.5')):\n    te.f()", {"removed risk guarded"}),
    "version-by-operator": ("import operator\nimport sys\nfrom importlib.metadata import version\nfrom packaging.version import parse\n" + HEAD + "if operator.lt(parse(version('transformer-engine')), parse('0.9')):\n    te.f()", set()),
    "constant-of-another-package": ("from compat import TE_VERSION\nfrom packaging.version import Version\n" + HEAD + "if TE_VERSION >= Version('1.5'):\n    te.g()\nelse:\n    te.f()", {"removed risk guarded"}),
    "constant-of-another-package-alone": ("import compat\nfrom packaging.version import Version\n" + HEAD + "OLD = Version(compat.TE_VERSION) < Version('1.5')\ndef run():\n    if OLD:\n        te.f()", {"removed risk guarded"}),
    "constant-of-another-package-that-cannot-tell": ("from compat import TE_VERSION\n" + HEAD + "if TE_VERSION >= '0.9':\n    te.f()", {"removed breaking"}),
    "constant-named-by-a-number": ("from compat import TE_GE_2_0\n" + HEAD + "if not TE_GE_2_0:\n    te.f()", {"removed risk guarded"}),
    "choice-of-another-package": ("from compat import HAS_NEW_TE\n" + HEAD + "if HAS_NEW_TE:\n    te.g()\nelse:\n    te.f()", {"removed risk guarded"}),
    "choice-of-another-package-that-returns": ("import compat\n" + HEAD + "def run():\n    if not compat.has_new_te():\n        return te.f()\n    return te.g()", {"removed risk guarded"}),
    "choice-of-another-package-in-an-expression": ("from compat import HAS_NEW_TE\n" + HEAD + "f = te.g if HAS_NEW_TE else te.f", {"removed risk guarded"}),
    "choice-of-another-package-between-imports": ("from compat import HAS_NEW_TE\nif HAS_NEW_TE:\n    from transformer_engine.pytorch import g\nelse:\n    from transformer_engine.pytorch import f", {"removed risk guarded"}),
    "choice-by-a-version-that-cannot-tell": ("from megatron.core.utils import is_te_min_version\n" + HEAD + "if is_te_min_version('0.9'):\n    te.f()\nelse:\n    te.g()", {"removed breaking"}),
    "import-caught-by-any-exception": ("try:\n    from transformer_engine.pytorch import g\nexcept Exception:\n    from transformer_engine.pytorch import f as g\ng()", set()),
    "choice-with-one-use": ("from compat import HAVE_TE\n" + HEAD + "if HAVE_TE:\n    te.f()\nelse:\n    native()", {"removed breaking"}),
    "choice-by-the-machine": ("import torch\n" + HEAD + "if torch.cuda.is_available():\n    te.f()\nelse:\n    te.g()", {"removed breaking"}),
    "choice-of-the-tree": (HEAD + "def run(new_te):\n    if new_te:\n        te.g()\n    else:\n        te.f()", {"removed breaking"}),
    "guard-known-beside-something-else": (MINIMUM + HEAD + "def f(config):\n    if config.fp8 and is_te_min_version('1.0'):\n        te.f()", {"removed breaking"}),
    "helper-that-imports-by-texts": (GET + "f, HAVE = get('transformer_engine.pytorch', 'f')\nif HAVE:\n    f()", {"removed risk caught"}),
    "module-of-a-helper-that-imports-by-texts": (GET + "f, HAVE = get('transformer_engine.pytorch.deep', 'f')\nif HAVE:\n    f()", {"removed risk caught"}),
    "what-a-helper-imports-by-texts": (GET + "g, _ = get('transformer_engine.pytorch', 'g')\ndef run():\n    g(old=1)", {"parameter-removed breaking"}),
    "guard-by-a-helper-that-imports-by-texts": (GET + "from transformer_engine import pytorch as te\n_, NEW = get('transformer_engine.pytorch', 'new')\nif not NEW:\n    te.f()", {"removed breaking"}),
    "guard-by-a-helper-that-finds-it": (GET + "from transformer_engine import pytorch as te\n_, OLD = get('transformer_engine.pytorch', 'f')\nif OLD:\n    te.f()", {"removed risk caught"}),
    "helper-that-insists": ("import importlib\ndef get(module, name):\n    return getattr(importlib.import_module(module), name)\nf = get('transformer_engine.pytorch', 'f')", {"removed breaking"}),
    "call-in-a-try-that-fits-the-new-release": (HEAD + "def run():\n    try:\n        return te.h(new=1)\n    except TypeError:\n        return te.h()", {"parameter-required risk guarded"}),
    "call-in-a-try-that-does-not": (HEAD + "def run():\n    try:\n        return te.h(old=1)\n    except TypeError:\n        return te.h()", {"parameter-removed risk caught", "parameter-required breaking", "parameter-required risk caught"}),
    "call-in-a-try-for-any-exception": (HEAD + "def run():\n    try:\n        return te.h(new=1)\n    except Exception:\n        return te.h()", {"parameter-required risk guarded"}),
    "call-in-a-try-beside-another": (HEAD + "def run(x):\n    try:\n        y = prepare(x)\n        return te.h(new=y)\n    except TypeError:\n        return te.h()", {"parameter-required risk guarded"}),
    "call-in-a-try-behind-a-subscript": (HEAD + "def run():\n    try:\n        return te.h(new=1)[0]\n    except TypeError:\n        return te.h()[0]", {"parameter-required risk guarded"}),
    "call-in-a-try-that-does-not-fit-beside-another": (HEAD + "def run(x):\n    try:\n        y = prepare(x)\n        return te.h(old=y)\n    except TypeError:\n        return te.h()", {"parameter-removed risk caught", "parameter-required breaking", "parameter-required risk caught"}),
    "tests-that-are-skipped-without-a-module": ("import pytest\npytest.importorskip('transformer_engine.pytorch.deep')", {"removed risk caught"}),
    "what-skipped-tests-use": ("import pytest\nte = pytest.importorskip('transformer_engine.pytorch')\nte.f()", {"removed breaking"}),
    "path-as-one-text": ("import importlib\ndef get(path):\n    module, name = path.rsplit('.', 1)\n    return getattr(importlib.import_module(module), name)\nf = get('transformer_engine.pytorch.f')", {"removed breaking"}),
    "asked-for": (HEAD + "if hasattr(te, 'f'):\n    te.f()\nelse:\n    te.g()", set()),
    "type-checking": ("from typing import TYPE_CHECKING\nimport transformer_engine.pytorch\nif TYPE_CHECKING:\n    from transformer_engine.pytorch import f", set()),
}  # fmt: skip


@pytest.mark.parametrize(("code", "wanted"), LOST.values(), ids=LOST)
def test_a_lost_import_is_one_finding(code: str, wanted: set[str], tmp_path: Path) -> None:
    both = "def f(): ...\ndef g(old=0, new=0): ...\ndef h(old=0, new=0): ..."
    old = {"pytorch/__init__.py": both, "pytorch/deep.py": ""}
    findings = compare_source(
        tmp_path, old, "def g(new=0): ...\ndef h(*, new): ...", {"a.py": code, "x/plugin/guards.py": ""}
    ).findings
    assert {" ".join(filter(None, (one.kind, one.impact, one.doubt))) for one in findings} == wanted


ASKS = {
    "a-set-of-versions": "from packaging.specifiers import SpecifierSet\nif SpecifierSet('<2.0').contains(V):",
    "in-a-set-of-versions": "from packaging.specifiers import SpecifierSet\nif Version(V) in SpecifierSet('<2.0'):",
    "arithmetic-of-parts": "a, b = V.split('.')\nif int(a) * 100 + int(b) < 200:",
    "parts-and-the-rest": "a, *rest = V.split('.')\nif int(a) < 2:",
    "mapped-parts": "if tuple(map(int, V.split('.'))) < (2, 0):",
    "joined-parts": "if float('.'.join(V.split('.')[:2])) < 2.0:",
    "release-of-a-version": "if Version(V).release[:2] < (2, 0):",
    "formatted": "if f'{Version(V).major}.{Version(V).minor}' == '1.0':",
    "a-distribution-that-may-lack": "from importlib.metadata import version, PackageNotFoundError\ntry:\n    v = version('transformer_engine')\nexcept PackageNotFoundError:\n    v = '0'\nif Version(v) < Version('2.0'):",
    "a-module-that-may-lack": "import importlib.util\nif importlib.util.find_spec('transformer_engine.pytorch.deep'):",
    "listed": "if 'f' in dir(te):",
    "listed-under-a-name": "names = dir(te)\nif 'f' in names:",
    "variables": "if 'f' in vars(te):",
    "dictionary": "if 'f' in te.__dict__:",
    "parameters": "import inspect\nif 'old' in inspect.signature(te.g).parameters:",
    "keys-of-parameters": "import inspect\nif 'old' in inspect.signature(te.g).parameters.keys():",
    "names-of-the-code": "if 'old' in te.g.__code__.co_varnames:",
    "not-listed": "if 'f' not in dir(te):\n    pass\nelse:",
    "of-a-package-without-init": "from tree.sub.guards import is_old\nif is_old():",  # the tree itself is the package
}


@pytest.mark.parametrize("guard", ASKS.values(), ids=ASKS)
def test_a_guard_of_the_release_is_evaluated(guard: str, tmp_path: Path) -> None:
    old = {"pytorch/__init__.py": "def f(): ...\ndef g(old=1): ...", "pytorch/deep.py": ""}
    code = f"{HEAD}import transformer_engine\nfrom packaging.version import Version\nV = transformer_engine.__version__\n{guard}\n    te.f()"
    guards = "import transformer_engine as te\nfrom packaging.version import Version\ndef is_old(): return Version(te.__version__) < Version('2.0')"
    result = compare_source(tmp_path, old, "def g(): ...", {"a.py": code, "sub/guards.py": guards})
    assert [(one.kind, one.impact) for one in result.findings] == []
    plain = compare_source(tmp_path / "plain", old, "def g(): ...", {"a.py": f"{HEAD}te.f()"})
    assert [one.kind for one in plain.findings] == ["removed"]


def test_the_verdict_belongs_to_the_line(tmp_path: Path) -> None:
    plain = "from transformer_engine.pytorch import f"
    files = {
        "a.py": f"{plain}\nimport os\n{plain}",
        "b.py": f"try:\n    {plain}\nexcept ImportError:\n    f = None",
        "c.py": plain,
    }
    result = compare_source(tmp_path, "def f(): ...", "", files)
    assert [(row.module, row.verdict) for row in result.modules] == [
        ("a.py", "breaks"),
        ("b.py", "risk"),
        ("c.py", "breaks"),
    ]
    lines = {one.impact: [f"{site.file}:{site.line}" for site in one.call_sites] for one in result.findings}
    assert lines == {"breaking": ["a.py:1", "a.py:3", "c.py:1"], "risk": ["b.py:2"]}
    cases = [case for case in describe_static(result).cases if case.place is not None]
    assert [(case.group, str(case.place)) for case in cases] == [
        ("a.py", "a.py:1"), ("a.py", "a.py:3"), ("c.py", "c.py:1"), ("b.py", "b.py:2")]  # fmt: skip


# what no release ever had -> how it is said
NEVER = {
    "te.Layer(8, biass=True)": "`Layer` does not take `biass`; this fails in 1.0 already",
    "te.nothing()": "`nothing` does not exist; this fails in 1.0 already",
}


@pytest.mark.parametrize(("code", "words"), NEVER.items(), ids=NEVER)
def test_what_fails_in_both_releases_is_said_to(code: str, words: str, tmp_path: Path) -> None:
    result = compare_source(tmp_path, LAYER, LAYER, {"a.py": HEAD + code})
    document = describe_static(result)
    assert [row.verdict for row in result.modules] == ["fails-before"]
    assert "already fails under 1.0: a.py" in document.summary
    assert f"a.py:2: {words}" in [block.text for block in document.blocks if isinstance(block, Paragraph)]


def test_a_name_that_is_new_is_said_to_be(tmp_path: Path) -> None:
    (finding,) = compare_source(tmp_path, "", LAYER, {"a.py": HEAD + "te.Layer(8)"}).findings
    assert (finding.kind, finding.impact, headline(finding, "1.0")) == (
        "added",
        "harmless",
        "`Layer` is new; 1.0 does not have it",
    )


LOADS = "def load(model, state):\n    model.load_state_dict(state)\n"
STATES = {
    "of-its-own-layers": {"a.py": f"{HEAD}te.Layer(8)  # fp8\n{LOADS}"},
    "of-layers-of-another-file": {"a.py": f"import b\nSIZES = {{'transformer_engine': 1}}\n{LOADS}", "b.py": f"{HEAD}te.Layer(8)  # fp8"},
    "beside-the-file": {"x/a.py": f"from b import make\nSIZES = {{'transformer_engine': 1}}\n{LOADS}", "x/b.py": f"{HEAD}te.Layer(8)  # fp8", "y/b.py": ""},
    "of-another-library": {"a.py": f"import transformers\nSIZES = {{'transformer_engine': 1}}\n{LOADS}", "b.py": f"{HEAD}te.Layer(8)  # fp8"},
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
def test_a_state_is_loaded_where_layers_can_be(name: str, tmp_path: Path) -> None:
    base = "class TransformerEngineBaseModule:\n    def set_extra_state(self, state):\n        {}\n"
    old, new = (
        {"pytorch/__init__.py": LAYER, "pytorch/module/__init__.py": "", "pytorch/module/base.py": base.format(body)}
        for body in ("return", "if isinstance(state, int): raise RuntimeError")
    )
    found = [(one.member, one.impact) for one in compare_source(tmp_path, old, new, STATES[name]).findings]
    assert found == ([] if name == "of-another-library" else [("set_extra_state", "risk")])


def test_rows_come_after_those_that_they_import(tmp_path: Path) -> None:
    files = {
        "a.py": "from z import make\n" + HEAD + "te.Layer(8)",
        "z.py": HEAD + "def make():\n    return te.Layer(8, bias=True)",
    }
    result = compare_source(tmp_path, LAYER, NO_BIAS, files)
    assert [(row.module, row.verdict) for row in result.modules] == [("z.py", "breaks"), ("a.py", "clean")]


@pytest.mark.parametrize(
    "code", ["", "import torch", "def f(:", "# import transformer_engine", '"""transformer_engine"""']
)
def test_a_tree_without_a_use_is_refused(code: str, tmp_path: Path) -> None:
    with pytest.raises(SourceUnused, match="uses Transformer Engine"):
        compare_source(tmp_path, LAYER, NO_BIAS, {"a.py": code})


def test_what_cannot_be_read_is_named_and_the_rest_is_judged(tmp_path: Path) -> None:
    deep = HEAD + "x = te" + ".Layer" * 900
    files = {"a.py": HEAD + "te.Layer(8, bias=True)", "deep.py": deep, "old.py": "print 'transformer_engine'"}
    files |= {"silent.py": "print 'torch'"}
    result = compare_source(tmp_path, LAYER, NO_BIAS, files)
    assert (result.exit, set(result.not_read)) == (1, {"deep.py", "old.py"})
    assert result.not_read["old.py"].startswith("SyntaxError: Missing parentheses in call to 'print'")
    assert result.not_read["old.py"].endswith("(old.py, line 1)")
    assert "a.py breaks" in [f"{row.module} {row.verdict}" for row in result.modules]


def test_a_file_that_uses_the_library_and_cannot_be_read_is_missing_evidence(tmp_path: Path) -> None:
    files = {"a.py": HEAD + "te.Layer(8)", "old.py": HEAD + "print 'x'"}
    assert compare_source(tmp_path, LAYER, NO_BIAS, files).exit == 4
