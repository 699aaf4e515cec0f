"""Names as an import statement reaches them, where they went, and which of the bridge's paths is taken."""
# ruff: noqa: E501 - one case a line: tables

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from megacpp_validate.canary.static.findings import ReleaseSource
from megacpp_validate.canary.static.release import Absent, Found, Opaque, Release, ReleaseUnreadable
from megacpp_validate.canary.static.sources import Sources as RealSources
from tests.canary.static.small_sources import Sources, compare, compare_source, said_by, write_release

INIT = "pytorch/__init__.py"
TE = "transformer_engine.pytorch"
CLASS = "class Linear:\n    def __init__(self, size): ...\n"

# every way in which `from transformer_engine.pytorch import Linear` has been seen to work
WAYS: dict[str, Sources] = {
    "defined-there": CLASS,
    "re-exported": {INIT: "from .linear import Linear", "pytorch/linear.py": CLASS},
    "through-several-hops": {INIT: "from transformer_engine.pytorch.module import Linear", "pytorch/module/__init__.py": "from .layers import Linear", "pytorch/module/layers.py": "from ..impl import TrueLinear as Linear", "pytorch/impl.py": CLASS.replace("Linear", "TrueLinear")},
    "star": {INIT: "from .linear import *", "pytorch/linear.py": CLASS},
    "star-of-star": {INIT: "from .module import *", "pytorch/module/__init__.py": "from .linear import *", "pytorch/module/linear.py": CLASS},
    "star-with-all": {INIT: "from .linear import *", "pytorch/linear.py": "__all__ = ['Linear']\n" + CLASS},
    "lazy-table": {INIT: "_T = {'Linear': '.linear'}\ndef __getattr__(name):\n    return load(_T[name], name)", "pytorch/linear.py": CLASS},
    "lazy-table-of-pairs": {INIT: "_T = {'Linear': ('.linear', 'TrueLinear')}\ndef __getattr__(name):\n    module, original = _T[name]\n    return load(module, original)", "pytorch/linear.py": CLASS.replace("Linear", "TrueLinear")},
    "lazy-table-beside-another": {INIT: "_N = {'Linear': 3}\n_T = {'Linear': 'transformer_engine.pytorch.linear'}\ndef __getattr__(name):\n    return load(_T[name], name)", "pytorch/linear.py": CLASS},
    "lazy-branch-of-two-under-another-name": {INIT: "def __getattr__(name):\n    if name in ('Norm', 'Linear'):\n        from .linear import TrueLinear as Linear\n        return locals()[name]", "pytorch/linear.py": CLASS.replace("Linear", "TrueLinear")},
    "lazy-branch": {INIT: "def __getattr__(name):\n    if name == 'Linear':\n        from .linear import Linear\n        return Linear", "pytorch/linear.py": CLASS},
    "lazy-loader": {INIT: "import lazy_loader as lazy\n__getattr__, __dir__, __all__ = lazy.attach(__name__, submod_attrs={'linear': ['Linear']})", "pytorch/linear.py": CLASS},
    "lazy-loader-attach": {INIT: "from lazy_loader import attach\n__getattr__, __dir__, __all__ = attach(__name__, submod_attrs={'linear': ['Linear']})", "pytorch/linear.py": CLASS},
    "assigned": {INIT: "from . import linear\nLinear = linear.Linear", "pytorch/linear.py": CLASS},
    "assigned-alias": {INIT: "from .linear import TrueLinear\nLinear = TrueLinear", "pytorch/linear.py": CLASS.replace("Linear", "TrueLinear")},
    "under-a-condition": {INIT: "try:\n    from .linear import Linear\nexcept ImportError:\n    Linear = None", "pytorch/linear.py": CLASS},
    "a-deprecated-shim": {INIT: "from .old import Linear", "pytorch/old.py": "import warnings\nwarnings.warn('moved to linear', DeprecationWarning)\nfrom .linear import Linear", "pytorch/linear.py": CLASS},
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_a_name_is_found_however_it_is_provided(way: str, tmp_path: Path) -> None:
    found = write_release(tmp_path, WAYS[way]).lookup(TE, "Linear")
    assert isinstance(found, Found)
    assert not found.wrapped
    assert found.obj.name.endswith("Linear")
    assert "__init__" in found.obj.members


@pytest.mark.parametrize("way", WAYS)
def test_a_change_is_seen_through_every_way(way: str, tmp_path: Path) -> None:
    new = WAYS[way]
    new = (
        new.replace("size", "width")
        if isinstance(new, str)
        else {k: v.replace("size", "width") for k, v in new.items()}
    )
    assert said_by(compare(tmp_path, CLASS, new, "te.Linear.require()(size=8)")) >= {
        "user parameter-removed size breaking"
    }


@pytest.mark.parametrize("way", WAYS)
def test_another_way_to_the_same_class_is_no_change(way: str, tmp_path: Path) -> None:
    said = said_by(compare(tmp_path, CLASS, WAYS[way], "te.Linear.require()(size=8)"))
    assert said - {"imports import-requirement-added lazy_loader risk"} == set()


ABSENT: dict[str, tuple[Sources, type]] = {
    "nowhere": ("", Absent),
    "star-without-it-in-all": ({INIT: "from .linear import *", "pytorch/linear.py": "__all__ = ['Other']\nOther = 1\n" + CLASS}, Absent),
    "private-through-star": ({INIT: "from .linear import *", "pytorch/linear.py": "_Linear = 1"}, Absent),
    "not-in-the-lazy-table": ("_T = {'Other': '.other'}\ndef __getattr__(name):\n    return load(_T[name], name)", Absent),
    "refused-by-a-branch": ("_GONE = {'Linear': 'linear'}\ndef __getattr__(name):\n    if name in _GONE:\n        raise ImportError(name)\n    raise AttributeError(name)", Absent),
    "made-by-code-beside-a-table-of-numbers": ("_BITS = {'fp8': 8}\ndef __getattr__(name):\n    return make(name)", Opaque),
    "made-by-code": ("def __getattr__(name):\n    return make(name)", Opaque),
    "lazy-target-gone": ("_T = {'Linear': '.linear'}\ndef __getattr__(name):\n    return load(_T[name], name)", Absent),
    "imported-from-where-it-is-not": ({INIT: "from .linear import Linear", "pytorch/linear.py": ""}, Absent),
    "from-another-library": ("from torch.nn import Linear", Opaque),
    "defined-through-itself": ({INIT: "from .a import Linear", "pytorch/a.py": "from .b import Linear", "pytorch/b.py": "from .a import Linear"}, Opaque),
}  # fmt: skip


@pytest.mark.parametrize(("code", "kind"), ABSENT.values(), ids=ABSENT)
def test_a_name_that_is_not_there_and_one_that_only_running_would_tell(
    code: Sources, kind: type, tmp_path: Path
) -> None:
    assert isinstance(write_release(tmp_path, code).lookup(TE, "Linear"), kind)


class Went(NamedTuple):
    """Where a name went, and what must be said: kind, impact, suggestion."""

    new: Sources
    said: set[str]
    suggestion: str = ""


OLD: Sources = {INIT: "from .module import Linear", "pytorch/module.py": CLASS}
WENT = {
    "definition-moved-and-re-export-kept": Went({INIT: "from .linear import Linear", "pytorch/linear.py": CLASS}, set()),
    "re-export-gone": Went({INIT: "", "pytorch/module.py": CLASS}, {"user moved breaking"}, f"{TE}.module.Linear"),
    "moved-to-a-nearer-package-first": Went({INIT: "", "pytorch/layers/deep.py": CLASS, "pytorch/nn/__init__.py": "from ..layers.deep import Linear"}, {"user moved breaking"}, f"{TE}.nn.Linear"),
    "moved-and-imported-by-a-module-before-it": Went({INIT: "", "pytorch/linear.py": CLASS, "pytorch/attention.py": "from .linear import Linear"}, {"user moved breaking"}, f"{TE}.linear.Linear"),
    "renamed": Went({INIT: "from .module import LinearV2", "pytorch/module.py": CLASS.replace("Linear", "LinearV2")}, {"user renamed breaking"}, f"{TE}.LinearV2"),
    "removed": Went("class Zz: ...", {"user removed breaking"}),
    "a-name-that-was-there-before-is-no-rename": Went({INIT: ""}, {"user removed breaking"}),
    "may-still-be-made-by-code": Went("def __getattr__(name):\n    return make(name)", set()),
}  # fmt: skip


@pytest.mark.parametrize("went", WENT.values(), ids=WENT)
def test_where_a_name_went(went: Went, tmp_path: Path) -> None:
    result = compare(tmp_path, OLD, went.new, "te.Linear.require()(8)")
    assert said_by(result) == went.said
    assert {f.suggestion for f in result.findings} == ({went.suggestion} if went.said else set())


BOTH_PLACES = """
def linear():
    try:
        from transformer_engine.pytorch.new import Linear
    except ImportError:
        from transformer_engine.pytorch.old import Linear
    return Linear
"""


def test_an_accessor_with_two_places_follows_a_move_either_way(tmp_path: Path) -> None:
    one, other = {"pytorch/old.py": CLASS}, {"pytorch/new.py": CLASS}
    for name, (old, new) in {"up": (one, other), "down": (other, one)}.items():
        (finding,) = compare(tmp_path / name, old, new, "te.linear.require()(8)", BOTH_PLACES).findings
        assert (finding.kind, finding.impact, finding.follows) == ("moved", "harmless", True)


def test_an_accessor_with_two_places_meets_what_changed_on_the_way(tmp_path: Path) -> None:
    new = {"pytorch/new.py": CLASS.replace("size", "size, layout")}
    result = compare(tmp_path, {"pytorch/old.py": CLASS}, new, "te.linear.require()(8)", BOTH_PLACES)
    assert said_by(result) == {"user moved harmless", "user parameter-required layout breaking"}


IS_NONE = """
def use():
    scope = te.autocast()
    if scope is None:
        return te.fp8_autocast.require()(fp8_recipe=1)
    return scope(recipe=1)
"""
TESTS = {
    "is-none": IS_NONE,
    "is-not-none": "def use():\n    scope = te.autocast()\n    if scope is not None:\n        return scope(recipe=1)\n    return te.fp8_autocast.require()(fp8_recipe=1)",
    "walrus": "def use():\n    if (scope := te.autocast()) is not None:\n        return scope(recipe=1)\n    return te.fp8_autocast.require()(fp8_recipe=1)",
    "asked-in-the-test": "def use():\n    if te.autocast() is not None:\n        return te.autocast.require()(recipe=1)\n    else:\n        return te.fp8_autocast.require()(fp8_recipe=1)",
    "truth": "def use():\n    scope = te.autocast()\n    if scope:\n        return scope(recipe=1)\n    return te.fp8_autocast.require()(fp8_recipe=1)",
    "not": "def use():\n    scope = te.autocast()\n    if not scope:\n        return te.fp8_autocast.require()(fp8_recipe=1)\n    return scope(recipe=1)",
    "if-else": "def use():\n    scope = te.autocast()\n    return scope(recipe=1) if scope is not None else te.fp8_autocast.require()(fp8_recipe=1)",
    "raises": "def use():\n    scope = te.autocast()\n    if scope is None:\n        old = te.fp8_autocast()\n        if old is None:\n            raise RuntimeError\n        return old(fp8_recipe=1)\n    return scope(recipe=1)",
}  # fmt: skip
BEFORE = "def fp8_autocast(fp8_recipe): ..."
AFTER = "def autocast(recipe): ..."


@pytest.mark.parametrize("bridge", TESTS.values(), ids=TESTS)
def test_a_bridge_with_two_paths_follows_a_rename(bridge: str, tmp_path: Path) -> None:
    for name, (old, new) in {"up": (BEFORE, AFTER), "down": (AFTER, BEFORE)}.items():
        assert said_by(compare(tmp_path / name, old, new, bridge)) == set()


@pytest.mark.parametrize("bridge", TESTS.values(), ids=TESTS)
def test_a_new_path_that_does_not_fit_breaks(bridge: str, tmp_path: Path) -> None:
    result = compare(tmp_path, BEFORE, AFTER.replace("recipe", "layout"), bridge)
    assert "user parameter-removed recipe breaking" in said_by(result)
    assert "user parameter-required layout breaking" in said_by(result)


@pytest.mark.parametrize("bridge", TESTS.values(), ids=TESTS)
def test_a_path_that_is_not_taken_is_not_judged(bridge: str, tmp_path: Path) -> None:
    both = f"{BEFORE}\n{AFTER}"
    assert not said_by(compare(tmp_path / "a", both, f"{BEFORE.replace('fp8_recipe', 'x')}\n{AFTER}", bridge))
    assert not said_by(compare(tmp_path / "b", both, AFTER, bridge))


def test_what_the_bridge_can_do_without_is_a_risk(tmp_path: Path) -> None:
    bridge = "def use():\n    check = te.check()\n    if check is not None:\n        return check()\n    return False"
    (finding,) = compare(tmp_path, "def check(): ...", "", bridge).findings
    assert (finding.kind, finding.impact, finding.cause) == ("removed", "risk", "silent-fallback")


def test_a_none_that_is_used_unasked_breaks(tmp_path: Path) -> None:
    assert said_by(compare(tmp_path, "def check(): ...", "", "def use():\n    return te.check()()")) == {
        "user removed breaking"
    }


BASE, STORAGE = (
    "class LayerBase:\n    def data(self): ...\n    def scale(self): ...",
    "class LayerStorage:\n    def data(self): ...",
)
# MXFP8TensorBase of `tensor._internal`, 2.8.0 to 2.9.0: the module is gone, and the class has another name
RENAMED_ON_THE_WAY: dict[str, tuple[Sources, set[str]]] = {
    "in-a-new-module": ({"pytorch/storage.py": STORAGE}, {f"moved {TE}.storage.LayerStorage"}),
    "in-a-module-that-was-there": ({"pytorch/rest.py": STORAGE}, {"removed "}),
    "with-other-members": ({"pytorch/storage.py": STORAGE.replace("data", "place")}, {"removed "}),
    "of-another-kind": ({"pytorch/storage.py": "def LayerStorage(data, scale): ..."}, {"removed "}),
}  # fmt: skip


@pytest.mark.parametrize(("new", "said"), RENAMED_ON_THE_WAY.values(), ids=RENAMED_ON_THE_WAY)
def test_a_name_that_moved_and_was_renamed_on_the_way(new: Sources, said: set[str], tmp_path: Path) -> None:
    old = {"pytorch/internal.py": BASE, "pytorch/rest.py": ""}
    code = {"a.py": "from transformer_engine.pytorch.internal import LayerBase"}
    assert {f"{f.kind} {f.suggestion}" for f in compare_source(tmp_path, old, new, code).findings} == said


def test_a_module_that_is_deprecated_on_import_is_a_risk(tmp_path: Path) -> None:
    warns = "import warnings\nwarnings.warn('use other', DeprecationWarning)\n"
    shim = {INIT: warns + "from .linear import Linear", "pytorch/linear.py": CLASS}
    for place, new in {"": {INIT: warns + CLASS}, f"{TE}.linear.Linear": shim}.items():
        (finding,) = compare(tmp_path / f"to-{place}", CLASS, new, "te.Linear.require()(8)").findings
        assert (finding.kind, finding.impact, finding.suggestion) == ("deprecated", "risk", place)


def test_a_file_that_is_not_python_does_not_stop_the_reading_of_others(tmp_path: Path) -> None:
    release = write_release(tmp_path, {INIT: CLASS, "pytorch/broken.py": "def ("})
    assert isinstance(release.lookup(TE, "Linear"), Found)


def test_a_release_without_the_package_says_so(tmp_path: Path) -> None:
    release = Release(ReleaseSource(version="1", wheel="a folder", sha256=""), tmp_path)
    with pytest.raises(ReleaseUnreadable, match=r"holds no transformer_engine\.pytorch.*Next step"):
        _ = release.tree


def test_a_release_that_is_not_python_says_where(tmp_path: Path) -> None:
    release = write_release(tmp_path, "x = 1\ndef f(a, scale: ...")
    with pytest.raises(ReleaseUnreadable, match=r"pytorch/__init__\.py has an edit.*line 2.*Next step"):
        _ = release.tree


def test_a_stored_tree_that_was_cut_short_is_loaded_anew(tmp_path: Path) -> None:
    write_release(tmp_path / "te", CLASS)
    source = ReleaseSource(version="1", wheel="a folder", sha256="abc")
    _ = Release(source, tmp_path / "te", tmp_path / "cache").tree
    (stored,) = [p for p in (tmp_path / "cache").iterdir() if p.name.startswith("abc-")]
    whole = stored.read_text()
    lacking = whole.replace('"Linear"', '"Missing"')  # a tree all the same, but not that of this release
    _ = Release(source.model_copy(update={"sha256": "xyz"}), tmp_path / "te", tmp_path / "xyz").tree
    another = next((tmp_path / "xyz").iterdir()).read_text()  # kept of another release
    for damage in (whole[: len(whole) // 2], lacking, another, "{}", "null", "", "\x00"):
        stored.write_text(damage)
        assert isinstance(Release(source, tmp_path / "te", tmp_path / "cache").lookup(TE, "Linear"), Found)
        assert stored.read_text() == whole
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [stored.name]


def test_a_folder_above_the_package_is_asked_for(tmp_path: Path) -> None:
    write_release(tmp_path, CLASS)
    assert RealSources(tmp_path / "cache").release(str(tmp_path)).version == str(tmp_path)


def test_a_file_is_read_in_the_encoding_that_it_says(tmp_path: Path) -> None:
    release, package = write_release(tmp_path, ""), tmp_path / "transformer_engine"
    (package / "pytorch" / "marked.py").write_bytes(b"\xef\xbb\xbfMARKED = 1\n")
    (package / "pytorch" / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nNAME = 'caf\xe9'\n")
    assert release.text("transformer_engine/pytorch/latin.py").endswith("NAME = 'café'\n")
    assert all(not release.why_unreadable(file) for file in release.files())
    assert {"marked", "latin"} <= set(release.tree["pytorch"].members)
    assert "NAME" in release.tree["pytorch.latin"].members
