"""Names that a module makes only when they are asked for, read from its source."""

from __future__ import annotations

import ast
from textwrap import dedent

import pytest

from megacpp_validate.canary.static.lazy_names import lazy_target

MODULE = "transformer_engine.pytorch"

TABLE = """
_PLACES = {"Linear": "transformer_engine.pytorch.module.linear", "Norm": ".module.norm"}

def __getattr__(name):
    if name in _PLACES:
        return getattr(importlib.import_module(_PLACES[name]), name)
    raise AttributeError(name)
"""
PAIRS = """
_PLACES = {"Linear": (".module", "TrueLinear"), "Norm": ("transformer_engine.norm", "Norm")}

def __getattr__(name):
    module, original = _PLACES[name]
    return getattr(importlib.import_module(module, __name__), original)
"""
BRANCHES = """
def __getattr__(name):
    if name == "Linear":
        from .module.linear import Linear
        return Linear
    if name in ("Norm", "RMSNorm"):
        from transformer_engine.norms import Norm, RMSNorm
        return locals()[name]
    elif name == "Old":
        from ..common import New as Old
        return Old
    raise AttributeError(name)
"""
ATTACH = """
import lazy_loader
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={"module.linear": ["Linear"], "norms": ("Norm", "RMSNorm")},
)
"""
REFUSED = """
_REMOVED = {"Linear": "module.linear"}

def __getattr__(name):
    if name in _REMOVED:
        raise ImportError(f"{name} is gone")
    raise AttributeError(name)
"""
OPAQUE = """
def __getattr__(name):
    return make(name)
"""

ROWS = [
    ("a-table", TABLE, "Linear", "transformer_engine.pytorch.module.linear.Linear"),
    ("a-relative-table", TABLE, "Norm", "transformer_engine.pytorch.module.norm.Norm"),
    ("not-in-the-table", TABLE, "Other", ""),
    ("pairs", PAIRS, "Linear", "transformer_engine.pytorch.module.TrueLinear"),
    ("absolute-pairs", PAIRS, "Norm", "transformer_engine.norm.Norm"),
    ("a-branch", BRANCHES, "Linear", "transformer_engine.pytorch.module.linear.Linear"),
    ("a-branch-for-two", BRANCHES, "RMSNorm", "transformer_engine.norms.RMSNorm"),
    ("a-branch-with-another-name", BRANCHES, "Old", "transformer_engine.common.New"),
    ("in-no-branch", BRANCHES, "Other", ""),
    ("attached", ATTACH, "Linear", "transformer_engine.pytorch.module.linear.Linear"),
    ("attached-in-a-tuple", ATTACH, "RMSNorm", "transformer_engine.pytorch.norms.RMSNorm"),
    ("not-attached", ATTACH, "Other", ""),
    ("refused", REFUSED, "Linear", ""),
    ("made-by-code", OPAQUE, "Linear", None),
    ("another-table-in-the-module", '_T = {"Linear": 3}\n' + TABLE, "Linear", f"{MODULE}.module.linear.Linear"),
]


@pytest.mark.parametrize(("code", "name", "target"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_where_a_lazy_name_comes_from(code: str, name: str, target: str | None) -> None:
    assert lazy_target(ast.parse(dedent(code)), MODULE, name) == target


def test_a_table_that_has_nothing_to_do_with_names_does_not_make_code_readable() -> None:
    tree = ast.parse('_BITS = {"fp8": 8}\n' + OPAQUE)
    assert lazy_target(tree, MODULE, "Linear") is None
