"""What importing a release asks of its surroundings, in sources of a few lines."""
# ruff: noqa: E501 - one case a line: tables

from __future__ import annotations

from pathlib import Path

import pytest

from megacpp_validate.canary.static.findings import ModuleVerdict
from megacpp_validate.canary.static.import_time import read_requirements
from megacpp_validate.evidence.values import Cause
from tests.canary.static.small_sources import Sources, compare, said_by, write_release

INIT = "pytorch/__init__.py"
CHECK = "def _check():\n    if version('flash-attn') < '3':\n        raise ImportError\n"

# a `pytorch/__init__.py` -> what it asks for: (what, library or condition, asked for under)
ASKED: dict[str, tuple[Sources, set[tuple[str, str, str]]]] = {
    "nothing": ("import os\nimport torch\nfrom __future__ import annotations\nimport transformer_engine.common", set()),
    "a-library": ("import einops", {("library", "einops", "")}),
    "from-a-library": ("from onnxscript import opset18", {("library", "onnxscript", "")}),
    "in-a-module-it-imports": ({INIT: "from .deep import layer", "pytorch/deep/__init__.py": "", "pytorch/deep/layer.py": "import einops"}, {("library", "einops", "")}),
    "in-a-module-it-does-not-import": ({INIT: "", "pytorch/deep.py": "import einops"}, set()),
    "in-the-package-above": ({"__init__.py": "import einops"}, {("library", "einops", "")}),
    "in-a-module-of-another-package": ({INIT: "import transformer_engine.common.extra", "common/extra.py": "import einops"}, {("library", "einops", "")}),
    "within-a-function": ("def f():\n    import einops", set()),
    "within-a-function-that-is-called": ("def f():\n    import einops\nf()", {("library", "einops", "")}),
    "within-a-function-that-has-returned": ("def f():\n    if done():\n        return\n    import einops\nf()", set()),
    "optional": ("try:\n    import einops\nexcept ImportError:\n    einops = None", set()),
    "optional-among-others": ("try:\n    import einops\nexcept (ValueError, ModuleNotFoundError):\n    einops = None", set()),
    "caught-as-something-else": ("try:\n    import einops\nexcept ValueError:\n    pass", {("library", "einops", "")}),
    "only-for-types": ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import einops", set()),
    "when-run": ("if __name__ == '__main__':\n    import einops", set()),
    "under-a-condition": ("if torch.cuda.is_available():\n    import einops", {("library", "einops", "torch.cuda.is_available()")}),
    "otherwise": ("if torch.cuda.is_available():\n    pass\nelse:\n    import einops", {("library", "einops", "not (torch.cuda.is_available())")}),
    "when-installed": ("try:\n    v = version('flash-attn-4')\nexcept PackageNotFoundError:\n    v = None\nelse:\n    from flash_attn.cute import interface", {("library", "flash_attn.cute", "flash-attn-4 is installed")}),
    "an-assertion": ("assert torch_version() >= (2, 1)", {("check", "AssertionError if not (torch_version() >= (2, 1))", "")}),
    "a-raise-under-a-test": ("if torch_version() < (2, 1):\n    raise RuntimeError('torch is too old')", {("check", "RuntimeError if torch_version() < (2, 1)", "torch_version() < (2, 1)")}),
    "a-check-that-is-called": (CHECK + "_check()", {("check", "ImportError if version('flash-attn') < '3'", "")}),
    "a-check-that-is-not-called": (CHECK, set()),
    "a-check-that-cannot-fire": ("def _check(old=False):\n    if old:\n        raise ImportError\n_check(old=False)", set()),
    "a-check-called-with-a-constant": ("def _check(old=False):\n    if old:\n        raise ImportError\n_check(old=True)", {("check", "ImportError if old", "")}),
    "a-check-of-another-module": ({INIT: "from transformer_engine.common import _check\n_check()", "common/__init__.py": CHECK}, {("check", "ImportError if version('flash-attn') < '3'", "")}),
    "private-torch": ("from torch._strange import thing", {("library", "torch._strange", "")}),
    "known-private-torch": ("import torch._C", set()),
    "what-comes-with-torch": ("from typing_extensions import deprecated\nimport networkx", set()),
    "a-warning": ("import warnings\nwarnings.warn('slow')", set()),
    "a-circle": ({INIT: "from . import a", "pytorch/a.py": "from . import b\nimport einops", "pytorch/b.py": "from . import a"}, {("library", "einops", "")}),
}  # fmt: skip


@pytest.mark.parametrize(("code", "wanted"), ASKED.values(), ids=ASKED)
def test_what_an_import_asks_for(code: Sources, wanted: set[tuple[str, str, str]], tmp_path: Path) -> None:
    found = read_requirements(write_release(tmp_path, code))
    assert {(r.what, r.text, r.condition) for r in found} == wanted


LAYER = "class Linear:\n    def __init__(self, size): ...\n"
USES = "te.Linear.require()(8)"
SAID = "imports import-requirement-added"

VERSION = "from torch import torch_version\n"
ADDED = {
    "a-library": ("", "import einops\n", {f"{SAID} einops risk"}),
    "a-library-that-was-there": ("import einops\n", "import einops\n", set()),
    "a-library-less": ("import einops\n", "", set()),
    "was-optional": ("try:\n    import einops\nexcept ImportError:\n    pass\n", "import einops\n", {f"{SAID} einops risk"}),
    "asked-for-at-times-now-always": ("import torch\nif torch.version.cuda:\n    import einops.a\n", "import einops.a\n", {f"{SAID} einops risk"}),
    "a-minimum-version": ("", f"{VERSION}assert torch_version() >= (2, 1)\n", {f"{SAID} risk"}),
    "a-higher-minimum-version": (f"{VERSION}assert torch_version() >= (2, 1)\n", f"{VERSION}assert torch_version() >= (2, 6)\n", {f"{SAID} risk"}),
    "a-check-of-its-own": ("", "assert len([1]) == 1\n", {f"{SAID} harmless"}),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new", "said"), ADDED.values(), ids=ADDED)
def test_what_a_release_asks_for_that_the_one_before_did_not(
    old: str, new: str, said: set[str], tmp_path: Path
) -> None:
    result = compare(tmp_path, old + LAYER, new + LAYER, USES)
    assert said_by(result) == said
    assert {f.cause for f in result.findings} <= {Cause.ENVIRONMENT}


LOADS = "from transformer_engine.pytorch.linear import Linear\n"


def package(init: str = LOADS, **files: str) -> Sources:
    """`pytorch/__init__.py`, and other modules of `pytorch` by name."""
    return {INIT: init, "pytorch/linear.py": LAYER, **{f"pytorch/{name}.py": text for name, text in files.items()}}


BREAKS = {f"{SAID} breaking"}
ENDS: dict[str, tuple[Sources, set[str]]] = {
    "nothing-changed": (package(), set()),
    "a-name-that-is-not-there": (package(LOADS + "from .linear import Conv"), BREAKS),
    "a-module-that-is-not-there": (package(LOADS + "from .conv import Conv"), BREAKS),
    "a-module-that-is-not-there-imported-plainly": (package(LOADS + "import transformer_engine.pytorch.conv"), BREAKS),
    "a-submodule": (package(LOADS + "from . import other", other=""), set()),
    "caught": (package(LOADS + "try:\n    from .conv import Conv\nexcept ImportError:\n    Conv = None\nConv"), set()),
    "a-circle-of-modules": (package(LOADS + "from . import a", a="from . import b", b="from . import a"), set()),
    "no-python-of-this-version": (package(LOADS + "from . import a", a="def f(:"), {f"{SAID} risk"}),
}  # fmt: skip


@pytest.mark.parametrize(("new", "said"), ENDS.values(), ids=ENDS)
def test_what_ends_an_import_whatever_surrounds_it(new: Sources, said: set[str], tmp_path: Path) -> None:
    assert said_by(compare(tmp_path, package(), new, USES)) == said


def test_an_import_that_ends_takes_every_module_with_it(tmp_path: Path) -> None:
    broken = package(LOADS + "from .conv import Conv")
    assert not compare(tmp_path / "both", broken, broken, USES).findings
    result = compare(tmp_path, package(), broken, USES)
    (finding,) = result.findings
    assert (finding.module, finding.modules) == ("imports", ("imports", "user"))
    assert {row.module: (row.verdict, row.under) for row in result.modules} == {
        "imports": (ModuleVerdict.BREAKS, ""),
        "user": (ModuleVerdict.CASCADE, "imports"),
    }
    assert finding.new == "ModuleNotFoundError: no transformer_engine.pytorch.conv among the sources"
