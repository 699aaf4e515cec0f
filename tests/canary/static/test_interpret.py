"""What the canary reads in the bridge's code: each way of consuming a value, and what it cannot follow."""
# ruff: noqa: E501 - one case a line: tables

from __future__ import annotations

from pathlib import Path

import pytest

from megacpp_validate.canary.static.derive import BridgeFile, BridgeUnreadable, derive_surface
from megacpp_validate.canary.static.surface import Argument, Use, UseKind
from megacpp_validate.canary.static.sweep import read_surface
from megacpp_validate.canary.static.unlisted import unlisted_files
from megacpp_validate.catalog.bridge import Catalog
from tests.canary.static.small_sources import write_bridge

NAME, CALL, ATTRIBUTE = UseKind.NAME, UseKind.CALL, UseKind.ATTRIBUTE
CONTEXT, DECORATOR, CLASS = UseKind.CONTEXT, UseKind.DECORATOR, UseKind.CLASS

Row = tuple[str, UseKind]
PLAIN = "def f():\n    from transformer_engine.pytorch import f\n    return f"


def shown(use: Use) -> Row:
    path = "".join(step if step == "()" else f".{step}" for step in use.path)
    return f"{use.accessor}{path}", use.kind


# code -> each use but the names themselves, as "accessor.path" and kind
CONSUMED: dict[str, tuple[str, list[Row]]] = {
    "called": ("te.Layer.require()(8)", [("Layer", CALL)]),
    "called-twice": ("layer = te.Layer.require()(8)\nlayer(1)", [("Layer", CALL), ("Layer()", CALL)]),
    "a-method": ("layer = te.Layer.require()(8)\nlayer.reset()", [("Layer", CALL), ("Layer().reset", CALL)]),
    "an-attribute": ("layer = te.Layer.require()(8)\nlayer.weight", [("Layer", CALL), ("Layer().weight", ATTRIBUTE)]),
    "a-class-attribute": ("te.Layer.require().kind", [("Layer.kind", ATTRIBUTE)]),
    "an-attribute-of-an-attribute": ("te.Layer.require().a.b", [("Layer.a", ATTRIBUTE), ("Layer.a.b", ATTRIBUTE)]),
    "self": (
        "class Mine:\n    def run(self, x):\n        return self.inner(x)\n    def __init__(self):\n        self.inner = te.Layer.require()(8)",
        [("Layer", CALL), ("Layer()", CALL)],
    ),
    "self-of-another-class": (
        "class A:\n    def __init__(self):\n        self.inner = te.Layer.require()(8)\nclass B:\n    def run(self, x):\n        return self.inner(x)",
        [("Layer", CALL)],
    ),
    "a-function-that-hands-on": (
        "def make():\n    return te.Layer.require()(8)\ndef use():\n    return make().weight",
        [("Layer", CALL), ("Layer().weight", ATTRIBUTE)],
    ),
    "a-function-below-that-hands-on": (
        "def use():\n    return make().weight\ndef make():\n    return te.Layer.require()(8)",
        [("Layer().weight", ATTRIBUTE), ("Layer", CALL)],
    ),
    "a-function-that-hands-on-what-the-module-knows": (
        "layer = te.Layer.require()\ndef use():\n    return make().weight\ndef make():\n    return layer(8)",
        [("Layer().weight", ATTRIBUTE), ("Layer", CALL)],
    ),
    "functions-that-call-each-other": (
        "def one(n):\n    return other(n)\ndef other(n):\n    return one(n)\nte.Layer.require()(one(3))",
        [("Layer", CALL)],
    ),
    "getattr": ("getattr(te.Layer.require(), 'kind')", [("Layer.kind", ATTRIBUTE)]),
    "getattr-f-string": ("def f(i): getattr(te.Layer.require()(8), f'weight{i}')", [("Layer", CALL), ("Layer().weight{}", ATTRIBUTE)]),
    "getattr-of-anything": ("def f(n): getattr(te.Layer.require(), n)", [("Layer.{}", ATTRIBUTE)]),
    "getattr-of-something-else": ("getattr(other, 'x', te.f.require()(1))", [("f", CALL)]),
    "partial-of-something-else": ("from functools import partial\npartial(other, a=te.f.require()(1))", [("f", CALL)]),
    "hasattr": ("hasattr(te.Layer.require(), 'kind')", [("Layer.kind", ATTRIBUTE)]),
    "isinstance": ("def f(x): return isinstance(x, te.Layer.require())", [("Layer", CLASS)]),
    "isinstance-of-two": ("def f(x): return isinstance(x, (te.A.require(), te.B.require()))", [("A", CLASS), ("B", CLASS)]),
    "issubclass": ("def f(x): return issubclass(x, te.Layer.require())", [("Layer", CLASS)]),
    "subclass": ("class Mine(te.Layer.require()): ...", [("Layer", CLASS)]),
    "handed-on-as-a-type": ("def f() -> type | None:\n    return te.Layer()", [("Layer", CLASS)]),
    "handed-on-as-types": ("def f() -> dict[str, type | None]:\n    return {'a': te.A(), 'b': te.B()}", [("A", CLASS), ("B", CLASS)]),
    "with": ("with te.scope.require()(on=True): ...", [("scope", CALL), ("scope()", CONTEXT)]),
    "with-as": ("with te.scope.require()() as s:\n    s.go()", [("scope", CALL), ("scope()", CONTEXT)]),
    "with-two": ("with te.a.require()(), te.b.require()(): ...", [("a", CALL), ("a()", CONTEXT), ("b", CALL), ("b()", CONTEXT)]),
    "decorator": ("@te.wrap.require()\ndef f(): ...", [("wrap", DECORATOR)]),
    "decorator-that-is-made": ("@te.wrap.require()(1)\ndef f(): ...", [("wrap", CALL), ("wrap()", DECORATOR)]),
    "partial": ("from functools import partial\npartial(te.f.require(), 1, a=2)", [("f", CALL)]),
    "partial-of-the-module": ("import functools\nfunctools.partial(te.f.require(), 1, a=2)", [("f", CALL)]),
    "partial-then-called": ("from functools import partial\ng = partial(te.f.require(), 1)\ng(2)", [("f", CALL), ("f", CALL)]),
    "in-an-argument": ("te.f.require()(te.g.require()(1))", [("g", CALL), ("f", CALL)]),
    "in-a-keyword": ("te.f.require()(a=te.g.require()(1))", [("g", CALL), ("f", CALL)]),
    "in-a-comprehension": ("[te.f.require()(i) for i in range(3)]", [("f", CALL)]),
    "in-a-loop": ("f = te.f.require()\nfor i in range(3):\n    f(i)", [("f", CALL)]),
    "in-a-lambda": ("lambda x: te.f.require()(x)", [("f", CALL)]),
    "in-a-try": ("try:\n    te.f.require()(1)\nexcept ValueError:\n    te.g.require()(2)\nfinally:\n    te.h.require()(3)", [("f", CALL), ("g", CALL), ("h", CALL)]),
    "in-a-while": ("while te.f.require()(1): ...", [("f", CALL)]),
    "in-a-match": ("match 3:\n    case 3:\n        te.f.require()(1)", [("f", CALL)]),
    "in-an-assert": ("assert te.f.require()(1)", [("f", CALL)]),
    "in-a-raise": ("raise te.f.require()(1)", [("f", CALL)]),
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
    "deleted-is-not-followed": ("x = [te.A.require()]\nx[0](1)", []),
    "type-annotation": ("def f(x: int) -> str: ...\nte.f.require()", []),
}  # fmt: skip


@pytest.mark.parametrize(("code", "wanted"), CONSUMED.values(), ids=CONSUMED)
def test_each_way_of_consuming_is_read(code: str, wanted: list[Row], tmp_path: Path) -> None:
    uses = write_bridge(tmp_path, code).uses
    assert sorted(shown(use) for use in uses if use.kind is not NAME) == sorted(wanted)


def the_call(code: str, tmp_path: Path) -> Use:
    (use,) = [use for use in write_bridge(tmp_path, code).uses if use.kind is CALL]
    return use


ARGUMENTS = {
    "positionals": ("te.f.require()(1, x)", {"positionals": (Argument((1,), never_none=True), Argument())}),
    "keywords": ("te.f.require()(a=None)", {"keywords": {"a": Argument((None,))}}),
    "star": ("te.f.require()(1, *x)", {"open_positionals": True, "positionals": (Argument((1,), never_none=True),)}),
    "double-star": ("te.f.require()(**x)", {"open_keywords": True, "keywords": {}}),
    "partial": ("import functools\nfunctools.partial(te.f.require(), a=1)", {"partial": True, "keywords": {"a": Argument((1,), never_none=True)}}),
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
    "none": ("None", Argument((None,))),
    "negative": ("-1", Argument((-1,), never_none=True)),
    "a-bool": ("flag", Argument((True, False), never_none=True)),
    "a-choice": ("mode", Argument(("bshd", "sbhd"), never_none=True)),
    "an-optional": ("maybe", Argument()),
    "an-optional-bool": ("tristate", Argument((True, False, None))),
    "a-string": ("text", Argument(never_none=True, type_name="str")),
    "a-list": ("[text]", Argument(never_none=True, type_name="list")),
    "list-of": ("list(rows)", Argument(never_none=True, type_name="list")),
    "a-comparison": ("text == 'a'", Argument((True, False), never_none=True)),
    "negated": ("not flag", Argument((True, False), never_none=True)),
    "one-of-two": ("'a' if flag else 'b'", Argument(("a", "b"), never_none=True)),
    "one-or-none": ("'a' if flag else None", Argument(("a", None))),
    "a-local": ("kept", Argument(("x",), never_none=True)),
    "a-tensor-method": ("rows.float()", Argument(never_none=True)),
    "anything": ("rows", Argument()),
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


PRESENCE = {
    "if-there": ("a = te.A()\nif a is not None:\n    te.f.require()(1)", {"A"}, set()),
    "if-not-there": ("a = te.A()\nif a is None:\n    te.f.require()(1)", set(), {"A"}),
    "else": ("a = te.A()\nif a is None:\n    pass\nelse:\n    te.f.require()(1)", {"A"}, set()),
    "after-a-return": ("def g():\n    a = te.A()\n    if a is None:\n        return\n    te.f.require()(1)", {"A"}, set()),
    "after-a-raise": ("def g():\n    if te.A() is not None:\n        raise ValueError\n    te.f.require()(1)", set(), {"A"}),
    "not": ("a = te.A()\nif not a:\n    te.f.require()(1)", set(), {"A"}),
    "nested": ("a, b = te.A(), te.B()\nif a is not None:\n    if b is None:\n        te.f.require()(1)", {"A"}, {"B"}),
    "and": ("a = te.A()\ndef g(x):\n    if a is not None and x:\n        te.f.require()(1)", {"A"}, set()),
    "and-says-nothing-of-the-rest": ("a = te.A()\ndef g(x):\n    if a is not None and x:\n        return\n    te.f.require()(1)", set(), set()),
    "or-of-the-rest": ("a, b = te.A(), te.B()\ndef g():\n    if a is None or b is None:\n        return\n    te.f.require()(1)", {"A", "B"}, set()),
    "within-an-and": ("a = te.A()\na is not None and te.f.require()(1)", {"A"}, set()),
    "within-an-or": ("a = te.A()\na is not None or te.f.require()(1)", set(), {"A"}),
    "asserted": ("a = te.A()\nassert a is not None\nte.f.require()(1)", {"A"}, set()),
    "or-says-nothing": ("a = te.A()\ndef g(x):\n    if a is None or x:\n        te.f.require()(1)", set(), set()),
    "another-test": ("def g(x):\n    if x:\n        te.f.require()(1)", set(), set()),
    "one-branch-of-an-elif": ("a, b = te.A(), te.B()\nif a is not None:\n    pass\nelif b is not None:\n    te.f.require()(1)", {"B"}, {"A"}),
    "outside": ("a = te.A()\nif a is None:\n    pass\nte.f.require()(1)", set(), set()),
}  # fmt: skip


@pytest.mark.parametrize(("code", "present", "absent"), PRESENCE.values(), ids=PRESENCE)
def test_under_which_accessors_a_use_is_reached(code: str, present: set[str], absent: set[str], tmp_path: Path) -> None:
    use = the_call(code, tmp_path)
    assert (set(use.present), set(use.absent)) == (present, absent)


def test_optional_is_what_is_asked_for_without_insisting(tmp_path: Path) -> None:
    code = "te.A()\nte.B.require()\ngetattr(te.B.require(), 'x', None)\ngetattr(te.B.require(), 'y')\nhasattr(te.B.require(), 'z')"
    told = {shown(use): use.optional for use in write_bridge(tmp_path, code).uses}
    assert told == {
        ("A", NAME): True,
        ("B", NAME): False,
        ("B.x", ATTRIBUTE): True,
        ("B.y", ATTRIBUTE): False,
        ("B.z", ATTRIBUTE): True,
    }


IMPORTS = {
    "from . import imports": "from . import imports\nimports.f.require()(1)",
    "as": "from . import imports as te\nte.f.require()(1)",
    "from .imports": "from .imports import f\nf.require()(1)",
    "from .imports as": "from .imports import f as g\ng.require()(1)",
    "by the full path": "from bridge.imports import f\nf.require()(1)",
    "from the package": "from bridge import imports as te\nte.f.require()(1)",
    "import as": "import bridge.imports as te\nte.f.require()(1)",
}


@pytest.mark.parametrize("code", IMPORTS.values(), ids=IMPORTS)
def test_an_accessor_is_known_however_it_is_imported(code: str, tmp_path: Path) -> None:
    folder = tmp_path / "bridge"
    folder.mkdir()
    (folder / "imports.py").write_text(PLAIN)
    (folder / "user.py").write_text(code)
    files = [BridgeFile(name, folder / f"{name}.py", f"{name}.py") for name in ("imports", "user")]
    assert [shown(use) for use in derive_surface(files, ["imports", "user"]).uses if use.kind is CALL] == [("f", CALL)]


def test_an_accessor_is_read_with_its_places_in_order(tmp_path: Path) -> None:
    accessors = """
    @TE.entry(required=True)
    def f():
        try:
            from transformer_engine.new import f
        except ImportError:
            from transformer_engine.old import g as f
        return f
    """
    accessor = write_bridge(tmp_path, "te.f()", accessors).accessors["f"]
    assert [symbol.path for symbol in accessor.symbols] == ["transformer_engine.new.f", "transformer_engine.old.g"]
    assert [site.line for site in accessor.sites] == [5, 7]


def read(folder: Path, imports: str | bytes | None, user: str | bytes = "") -> None:
    for name, code in (("imports", imports), ("user", user)):
        if code is not None:
            (folder / f"{name}.py").write_bytes(code.encode() if isinstance(code, str) else code)
    files = [BridgeFile(name, folder / f"{name}.py", f"bridge/{name}.py") for name in ("imports", "user")]
    derive_surface(files, ["imports", "user"])


@pytest.mark.parametrize(
    ("imports", "user", "named"),
    [
        ("def f(:", "", "bridge/imports.py"),
        (PLAIN, "te.f(", "bridge/user.py"),
        (PLAIN, b"\xff\xfe", "bridge/user.py"),
        (PLAIN, "\x00", "bridge/user.py"),
        (None, "", "bridge/imports.py"),
        ("", "", "imports.py"),
        ("def f():\n    import torch\n    return torch", "", "imports.py"),
        (PLAIN, "x = 3", "nothing"),
    ],
    ids=[
        "syntax-error",
        "syntax-error-in-a-user",
        "not-text",
        "null-byte",
        "missing",
        "empty",
        "no-accessor",
        "no-use",
    ],
)
def test_a_bridge_that_cannot_be_read_is_refused_by_name(
    imports: str | None, user: str | bytes, named: str, tmp_path: Path
) -> None:
    with pytest.raises(BridgeUnreadable, match="Next step") as refused:
        read(tmp_path, imports, user)
    assert named in str(refused.value)


def test_the_real_bridge_is_read_whole(catalog: Catalog) -> None:
    surface = read_surface(catalog)
    used = {use.accessor for use in surface.uses}
    assert used == set(surface.accessors), "an accessor that nothing calls"
    assert {use.module for use in surface.uses if use.kind is CALL} == {m.id for m in catalog.modules}


# file -> its code, beside `imports.py` (of module imports) and `user.py` (of module user); which further ones are read
UNLISTED: dict[str, tuple[dict[str, str], set[tuple[str, str]]]] = {
    "none": ({"user": "from . import imports as te"}, set()),
    "of-who-imports-it": ({"user": "from .more import g", "more": "from . import imports"}, {("user", "bridge/more.py")}),
    "of-who-comes-first": ({"imports": "from .more import g", "user": "from .more import g", "more": "from .imports import f"}, {("imports", "bridge/more.py")}),
    "through-another": ({"user": "from . import a", "a": "from .more import g", "more": "from . import imports"}, {("user", "bridge/more.py")}),
    "of-nobody": ({"user": "", "more": "from . import imports"}, {("imports", "bridge/more.py")}),
    "without-accessors": ({"user": "from .more import g", "more": "import torch"}, set()),
}  # fmt: skip


@pytest.mark.parametrize(("codes", "wanted"), UNLISTED.values(), ids=UNLISTED)
def test_a_file_that_no_module_lists_counts_as_the_first_that_imports_it(
    codes: dict[str, str], wanted: set[tuple[str, str]], tmp_path: Path
) -> None:
    for name, code in {"imports": "", **codes}.items():
        (tmp_path / f"{name}.py").write_text(code)
    listed = [BridgeFile(name, tmp_path / f"{name}.py", f"bridge/{name}.py") for name in ("imports", "user")]
    assert {(file.module, file.shown) for file in unlisted_files(listed, ["imports", "user"])} == wanted


def test_every_file_of_the_real_bridge_that_asks_an_accessor_is_read(catalog: Catalog) -> None:
    read_files = {use.site.file.rpartition("/")[2] for use in read_surface(catalog).uses}
    assert {"pending_amax.py", "amax_region.py", "recompute.py"} <= read_files
