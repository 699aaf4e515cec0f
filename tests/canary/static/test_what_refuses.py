"""What lets a call fail that its signature does not show, and what only looks as if it did."""
# ruff: noqa: E501 - one case a line: tables

from __future__ import annotations

from pathlib import Path

import pytest

from megacpp_validate.canary.static.call_changes import is_refused
from megacpp_validate.canary.static.findings import ReleaseSource
from megacpp_validate.canary.static.release import Release
from megacpp_validate.canary.static.source_files import SourceFiles
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
    Case("class-became-a-factory", SCOPED, "class _M:\n    @classmethod\n    def on(cls): ...\ndef M(): return _M()", "te.M.require().on()", {"user attribute-removed on breaking", "user class-became-function harmless"}),
    Case("enum-became-a-literal", "import enum\nclass F(enum.Enum):\n    A = 1", "from typing import Literal\nF = Literal['A']", "te.F.require().A", {"user attribute-removed A breaking"}),
    Case("enum-alias", "import enum\nclass F(enum.Enum):\n    A = 1", "import enum\nclass F(enum.Enum):\n    B = 1\n    A = B", "te.F.require().A", set()),
    Case("registered-name-left-to-an-f-string", "class L:\n    def __init__(self):\n        self.register_parameter('norm_weight', 1)\n        for n in self.names: self.add(f'{n}_weight')", "class L:\n    def __init__(self):\n        self.register_parameter('norm_gamma', 1)\n        for n in self.names: self.add(f'{n}_weight')", "layer = te.L.require()()\nlayer.norm_weight", {"user attribute-removed norm_weight breaking"}),
]  # fmt: skip
DEEP = "def f(x): ...\ndef h(x): ..."

GUARDS = [
    Case("type-that-we-pass", "def f(x, rows): ...", "import torch\ndef f(x, rows):\n    if not isinstance(rows, torch.Tensor): raise TypeError('rows')", "te.f.require()(1, list(range(3)))", {"user guard-added rows breaking"}),
    Case("type-that-is-taken", "def f(x, rows): ...", "def f(x, rows):\n    if not isinstance(rows, (list, tuple)): raise TypeError('rows')", "te.f.require()(1, list(range(3)))", set()),
    Case("abstract-type", "def f(x, rows): ...", "from collections.abc import Sequence\ndef f(x, rows):\n    if not isinstance(rows, Sequence): raise TypeError('rows')", "te.f.require()(1, list(range(3)))", {"user guard-added rows risk"}),
    Case("type-of-an-annotated-parameter", "def f(x, n): ...", "def f(x, n):\n    if isinstance(n, int): raise TypeError('n')", "def g(n: int):\n    te.f.require()(1, n)", {"user guard-added n breaking"}),
    Case("text-that-has-to-be-called", "def f(x, act): ...", "def f(x, act):\n    if not callable(act): raise TypeError('act')", "te.f.require()(1, 'gelu')", {"user guard-added act breaking"}),
    Case("named-on-the-way", "def f(x, kind): ...", "def f(x, kind):\n    if (k := kind) not in ('a', 'b'): raise ValueError(k)", "te.f.require()(1, 'b')", set()),
    Case("within-bounds", "def f(x, p): ...", "def f(x, p):\n    if not 0.0 <= p < 1.0: raise ValueError('p')", "te.f.require()(1, 0.0)", set()),
    Case("out-of-bounds", "def f(x, p): ...", "def f(x, p):\n    if not 0.0 < p < 1.0: raise ValueError('p')", "te.f.require()(1, 0.0)", {"user guard-added p breaking"}),
    Case("last-raise", "def f(x, kind):\n    if kind == 'a': return 1\n    if kind == 'b': return 2\n    raise ValueError('kind')", "def f(x, kind):\n    if kind == 'a': return 1\n    if kind == 'c': return 2\n    raise ValueError('kind')", "te.f.require()(1, 'b')", {"user guard-added breaking"}),
    Case("list-lost-it-behind-a-cast", "K = ('a', 'b')\ndef f(x, kind):\n    kind = kind.strip()\n    assert kind in K, 'kind'", "K = ('a', 'c')\ndef f(x, kind):\n    kind = kind.strip()\n    assert kind in K, 'kind'", "te.f.require()(1, 'b')", {"user guard-added kind risk"}),
]  # fmt: skip

RECIPE = "from pydantic import Field\nfrom pydantic.dataclasses import dataclass\nfrom typing import Callable, Literal, Optional, Union\n@dataclass\nclass R:\n    "
FIELDS = [
    Case("literal-without-it", RECIPE + "algo: Literal['max', 'last'] = 'max'", RECIPE + "algo: Literal['largest'] = 'largest'", "te.R.require()(algo='max')", {"user guard-added algo breaking"}),
    Case("literal-beside-any-text", RECIPE + "algo: Literal['max'] = 'max'", RECIPE + "algo: Union[Literal['largest'], str] = 'largest'", "te.R.require()(algo='max')", set()),
]  # fmt: skip

IMPORTS = [
    Case("minimum-in-a-condition", "f = 1", "import sys\nif sys.version_info < (3, 30):\n    raise RuntimeError('too old')\nf = 1", "te.f.require()", {"imports import-requirement-added risk"}),
    Case("newer-python", "def f(x): ...\nfrom . import deep", {"pytorch/__init__.py": "def f(x): ...\nfrom . import deep", "pytorch/deep.py": "def g[T](x: T): ...\nmatch = 1 if else\n"}, F1, {"imports import-requirement-added risk"}),
]  # fmt: skip
EVERY = [*RETURNS, *CONSTRUCTORS, *NAMES, *GUARDS, *FIELDS, *IMPORTS]


@pytest.mark.parametrize("case", EVERY, ids=[case.name for case in EVERY])
def test_what_is_said_of_a_call_that_something_else_refuses(case: Case, tmp_path: Path) -> None:
    old, new = (
        {"pytorch/deep.py": DEEP} | (dict(code) if not isinstance(code, str) else {"pytorch/__init__.py": code})
        for code in (case.old, case.new)
    )
    assert said_by(compare(tmp_path, old, new, case.bridge)) == case.said


@pytest.mark.parametrize(
    ("annotation", "refused"),
    [
        ("Literal['a']", True),
        ("Optional[Literal['a', 'x']]", False),
        ("Union[Literal['a'], Callable]", True),
        ("Union[Literal['a'], Callable[[int], int]] | None", True),
        ("Literal['a'] | str", False),
        ("Literal[MODES]", False),
        ("int", False),
        ("", False),
    ],
)
def test_which_texts_an_annotation_takes(annotation: str, refused: bool) -> None:
    assert is_refused(annotation, "x") is refused


# --- files as Python reads them ---------------------------------------------------------------------------------------


def _lay(folder: Path) -> Path:
    for name in ("pytorch", "common/recipe"):
        (folder / "transformer_engine" / name).mkdir(parents=True)
    for name in ("", "pytorch/", "common/", "common/recipe/"):
        (folder / "transformer_engine" / name / "__init__.py").write_text("")
    return folder / "transformer_engine"


def _release(folder: Path) -> Release:
    return Release(ReleaseSource(version="x", wheel="a folder", sha256=""), folder)


def test_a_file_is_read_in_the_encoding_that_it_says(tmp_path: Path) -> None:
    package = _lay(tmp_path)
    (package / "pytorch" / "marked.py").write_bytes(b"\xef\xbb\xbfMARKED = 1\n")
    (package / "pytorch" / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nNAME = 'caf\xe9'\n")
    release = _release(tmp_path)
    assert release.text("transformer_engine/pytorch/latin.py").endswith("NAME = 'café'\n")
    assert all(not release.why_unreadable(file) for file in release.files())
    assert {"marked", "latin"} <= set(release.tree["pytorch"].members)
    assert "NAME" in release.tree["pytorch.latin"].members


def test_a_folder_that_holds_itself_is_read_once_and_links_are_followed(tmp_path: Path) -> None:
    real = tmp_path / "real"
    package = _lay(real)
    (package / "pytorch" / "loop").symlink_to(package / "pytorch")
    (package / "pytorch" / "gone.py").symlink_to(tmp_path / "nowhere.py")
    (package / "pytorch" / "folder.py").mkdir()
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "transformer_engine").symlink_to(package)
    assert (
        SourceFiles(real).names
        == SourceFiles(linked).names
        == [f"transformer_engine/{name}__init__.py" for name in ("", "common/", "common/recipe/", "pytorch/")]
    )
