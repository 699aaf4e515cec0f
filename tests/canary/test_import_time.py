"""What importing a release asks of its surroundings, in sources of a few lines."""
# ruff: noqa: E501 - one case a line: tables

from __future__ import annotations

from pathlib import Path

import pytest
from small_sources import Sources, compare, said_by, write_release

from megacpp_validate.canary.import_time import read_requirements
from megacpp_validate.evidence.findings import Cause

INIT = "pytorch/__init__.py"
CHECK = "def _check():\n    if version('flash-attn') < '3':\n        raise ImportError\n"

# a `pytorch/__init__.py` -> what it asks for: (what, library or condition, asked for under)
ASKED: dict[str, tuple[Sources, set[tuple[str, str, str]]]] = {
    "nothing": ("import os\nimport torch\nfrom __future__ import annotations\nimport transformer_engine.common", set()),
    "a-library": ("import einops", {("library", "einops", "")}),
    "a-library-deep": ("import onnx.helper", {("library", "onnx", "")}),
    "from-a-library": ("from onnxscript import opset18", {("library", "onnxscript", "")}),
    "in-a-module-it-imports": ({INIT: "from .deep import layer", "pytorch/deep/__init__.py": "", "pytorch/deep/layer.py": "import einops"}, {("library", "einops", "")}),
    "in-a-module-it-does-not-import": ({INIT: "", "pytorch/deep.py": "import einops"}, set()),
    "in-the-package-above": ({"__init__.py": "import einops"}, {("library", "einops", "")}),
    "in-a-module-of-another-package": ({INIT: "import transformer_engine.common.extra", "common/extra.py": "import einops"}, {("library", "einops", "")}),
    "within-a-function": ("def f():\n    import einops", set()),
    "within-a-class": ("class A:\n    def f(self):\n        import einops", set()),
    "optional": ("try:\n    import einops\nexcept ImportError:\n    einops = None", set()),
    "optional-by-exception": ("try:\n    import einops\nexcept Exception:\n    einops = None", set()),
    "optional-among-others": ("try:\n    import einops\nexcept (ValueError, ModuleNotFoundError):\n    einops = None", set()),
    "optional-bare": ("try:\n    import einops\nexcept:\n    einops = None", set()),
    "caught-as-something-else": ("try:\n    import einops\nexcept ValueError:\n    pass", {("library", "einops", "")}),
    "only-for-types": ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import einops", set()),
    "when-run": ("if __name__ == '__main__':\n    import einops", set()),
    "under-a-condition": ("if torch.cuda.is_available():\n    import einops", {("library", "einops", "torch.cuda.is_available()")}),
    "otherwise": ("if torch.cuda.is_available():\n    pass\nelse:\n    import einops", {("library", "einops", "not (torch.cuda.is_available())")}),
    "when-installed": (
        "try:\n    v = version('flash-attn-4')\nexcept PackageNotFoundError:\n    v = None\nelse:\n    from flash_attn.cute import interface",
        {("library", "flash_attn.cute", "flash-attn-4 is installed")},
    ),
    "an-assertion": ("assert torch_version() >= (2, 1)", {("check", "AssertionError if not (torch_version() >= (2, 1))", "")}),
    "a-raise-under-a-test": ("if torch_version() < (2, 1):\n    raise RuntimeError('torch is too old')", {("check", "RuntimeError if this line is reached", "torch_version() < (2, 1)")}),
    "a-check-that-is-called": (CHECK + "_check()", {("check", "ImportError if version('flash-attn') < '3'", "")}),
    "a-check-that-is-not-called": (CHECK, set()),
    "a-check-that-cannot-fire": ("def _check(old=False):\n    if old:\n        raise ImportError\n_check(old=False)", set()),
    "a-check-called-with-a-constant": ("def _check(old=False):\n    if old:\n        raise ImportError\n_check(old=True)", {("check", "ImportError if old", "")}),
    "a-check-of-another-module": (
        {INIT: "from transformer_engine.common import _check\n_check()", "common/__init__.py": CHECK},
        {("check", "ImportError if version('flash-attn') < '3'", "")},
    ),
    "private-torch": ("from torch._strange import thing", {("library", "torch._strange", "")}),
    "known-private-torch": ("import torch._C", set()),
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

ADDED = {
    "a-library": ("", "import einops\n", {f"{SAID} einops risk"}),
    "a-library-that-was-there": ("import einops\n", "import einops\n", set()),
    "a-library-less": ("import einops\n", "", set()),
    "was-optional": ("try:\n    import einops\nexcept ImportError:\n    pass\n", "import einops\n", {f"{SAID} einops risk"}),
    "asked-for-at-times-now-always": ("if torch.version.cuda:\n    import einops.a\n", "import einops.a\n", {f"{SAID} einops risk"}),
    "a-minimum-version": ("", "assert torch_version() >= (2, 1)\n", {f"{SAID} risk"}),
    "a-higher-minimum-version": ("assert torch_version() >= (2, 1)\n", "assert torch_version() >= (2, 6)\n", {f"{SAID} risk"}),
    "a-check-of-its-own": ("", "assert len([1]) == 1\n", {f"{SAID} harmless"}),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new", "said"), ADDED.values(), ids=ADDED)
def test_what_a_release_asks_for_that_the_one_before_did_not(
    old: str, new: str, said: set[str], tmp_path: Path
) -> None:
    result = compare(tmp_path, old + LAYER, new + LAYER, USES)
    assert said_by(result) == said
    assert {f.cause for f in result.findings} <= {Cause.ENVIRONMENT}


def test_the_place_is_named_in_the_new_release(tmp_path: Path) -> None:
    (finding,) = compare(tmp_path, LAYER, f"{LAYER}\nimport einops", USES).findings
    assert finding.after is not None
    assert (finding.after.file, finding.after.line) == ("transformer_engine/pytorch/__init__.py", 4)
    assert finding.new == "import einops"
