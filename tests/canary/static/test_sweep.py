"""Many pairs: what is said of a step, of the step back, and of a row of releases."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacpp_validate.canary.static.findings import Impact, ModuleVerdict
from megacpp_validate.canary.static.sweep import is_downgrade, run_pair
from tests.canary.static.small_sources import compare, compare_source, said_by, write_bridge, write_release
from tests.running_processes import is_running, within

ROOT = Path(__file__).resolve().parents[3]

OLD = """
def permute(tokens, probs, *, num_out=0): ...
class Linear:
    def __init__(self, size, bias=True): ...
"""
NEW = """
def permute(tokens, mask, probs, *, num_out=-1): ...
class Linear:
    def __init__(self, size): ...
    def reset(self): ...
"""
BRIDGE = """
te.permute.require()(1, 2)
layer = te.Linear.require()(8, bias=True)
"""


def test_a_downgrade_is_what_goes_to_an_older_version() -> None:
    pairs = [("2.10.0", "2.9.0"), ("2.9.0.post1", "2.9.0"), ("2.8.0", "2.9.0"), ("2.9.0", "2.9.0"), ("/a", "2.9.0")]
    assert [is_downgrade(*pair) for pair in pairs] == [True, True, False, False, False]


def test_a_call_that_fails_in_both_releases_is_not_this_steps_doing(tmp_path: Path) -> None:
    code = "def f(x): ..."
    result = compare(tmp_path, code, f"{code}\ndef g(): ...", "te.f.require()(1, layout=2)")
    assert not result.findings
    assert [(f.kind, f.parameter) for f in result.unchanged_faults] == [("parameter-removed", "layout")]
    assert {row.module: row.verdict for row in result.modules}["user"] is ModuleVerdict.FAILS_BEFORE


@pytest.mark.parametrize(
    "source",
    [
        "te.f.require()(1, **({'layout': 2} if fused else more))",  # another branch is for another callee
        "te.f.require()(1)\nimport transformer_engine\npath = transformer_engine.__file__",
    ],
)
def test_what_may_hold_in_both_releases_does_not_fail(tmp_path: Path, source: str) -> None:
    code = "def f(x): ..."
    result = compare(tmp_path, code, f"{code}\ndef g(): ...", source)
    assert (result.findings, result.unchanged_faults) == ((), ())


def test_what_only_the_new_release_has_must_fit_it(tmp_path: Path) -> None:
    asked = "if hasattr(te, 'f'):\n    te.f.require()(1)"
    assert not compare(tmp_path / "fits", "", "def f(a): ...", asked).findings
    assert said_by(compare(tmp_path / "guarded", "", "def f(a, b): ...", asked)) == {
        "user parameter-required b breaking"
    }
    insists = compare(tmp_path / "insists", "", "def f(a, b): ...", "te.f.require()(1)")
    assert (said_by(insists), [fault.parameter for fault in insists.unchanged_faults]) == (
        {"user added harmless"},
        ["b"],
    )


CODES = [
    OLD,
    NEW,
    "from contextlib import contextmanager\n@contextmanager\ndef scope(on=True):\n    yield",
    "import einops\nassert version() > 3",
    "def f(x, **kwargs):\n    a = kwargs.pop('a', None)\n    if a is None:\n        raise ValueError",
    "_T = {'Linear': '.linear'}\ndef __getattr__(name):\n    return _T[name]",
    "class Base:\n    def __init__(self, **kw):\n        super().__init__(**kw)\nclass Linear(Base): ...",
    "from .nowhere import *",
    "permute = wrap(3)",
    "import warnings\nwarnings.warn('old', DeprecationWarning)",
]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(CODES), min_size=1, max_size=3))
def test_a_release_has_not_changed_from_itself(tmp_path_factory: pytest.TempPathFactory, parts: list[str]) -> None:
    folder, code = tmp_path_factory.mktemp("same"), "\n".join(parts)
    bridge = f"{BRIDGE}\nte.f.require()(1, a=None)\nwith te.scope.require()(on=False): ...\n"
    result = compare(folder, code, code, bridge)
    assert not result.findings
    assert result.not_consumed == 0
    assert result.changes_not_consumed == ()


def test_what_the_bridge_does_not_consume_is_counted_and_listed_only_when_asked(tmp_path: Path) -> None:
    bridge_source = write_bridge(tmp_path / "bridge", "te.f.require()(1)")
    old = write_release(tmp_path / "old", "def f(x): ...\ndef g(x, y): ...")
    new = write_release(tmp_path / "new", "def f(x): ...\ndef g(x): ...")
    quiet, verbose = (run_pair(old, new, bridge_source, tool="test", verbose=verbose) for verbose in (False, True))
    assert (quiet.not_consumed, quiet.changes_not_consumed) == (1, ())
    assert verbose.not_consumed == 1
    assert "pytorch.g" in verbose.changes_not_consumed[0]


def test_every_module_with_a_line_that_fails_breaks(tmp_path: Path) -> None:
    accessors = """
    def f():
        from transformer_engine.pytorch import f
        return f

    def wrapped():
        return f.require()(1, layout=2)
    """
    bridge = "te.f.require()(1, layout=2)"
    result = compare(tmp_path, "def f(x, layout): ...", "def f(x): ...", bridge, accessors)
    (finding,) = result.findings
    assert (finding.module, finding.modules, finding.impact) == ("imports", ("imports", "user"), Impact.BREAKING)
    assert [(row.module, row.verdict, row.under) for row in result.modules] == [
        ("imports", ModuleVerdict.BREAKS, ""),
        ("user", ModuleVerdict.BREAKS, ""),
    ]


def test_no_worker_outlives_a_killed_tool(tmp_path: Path) -> None:
    """Killed with -9 while cold, it left two workers asleep for ever (issue 20)."""
    code = """
import os, sys, time
from pathlib import Path
from megacpp_validate.canary.static.sweep import _open_pool
from tests.canary.static.test_sweep import report_pid
with _open_pool(2) as pool:
    mark = Path(sys.argv[1])
    mark.write_text(" ".join({str(pid) for pid in pool.map(report_pid, range(8))}))
    time.sleep(600)
"""
    mark = tmp_path / "workers"
    tool = subprocess.Popen([sys.executable, "-c", code, str(mark)], env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert within(120, lambda: mark.exists() and bool(mark.read_text()))
    tool.kill()
    tool.wait()
    assert within(60, lambda: not any(is_running(int(pid)) for pid in mark.read_text().split()))


def report_pid(_: int) -> int:
    return os.getpid()


def test_an_imported_package_does_not_use_all_that_is_below_it(tmp_path: Path) -> None:
    old, code = "class Linear: ...\ndef other(x): ...\n", "import transformer_engine.pytorch as te\nkind = te.Linear\n"
    result = compare_source(tmp_path, old, "class Linear: ...\n", {"train.py": code})
    assert result.not_consumed == 1
