"""Other libraries than Transformer Engine: trees of a few lines, each with what a step does to the code that uses them."""
# ruff: noqa: E501 - one case a line: tables

from __future__ import annotations

from pathlib import Path

import pytest

from megacpp_validate.canary.static.library import LIBRARIES
from megacpp_validate.canary.static.project import Project, Source
from megacpp_validate.canary.static.sources import Sources
from megacpp_validate.canary.static.sweep import run_pair
from tests.canary.static.small_sources import write_files

# fmt: off
ALIAS = "from ._C import new, other\nold = new\n"
ACCESSOR = "entry = object()\n@entry\ndef load():\n    {}\nload.require()(1)\n"
EITHER = ACCESSOR.format("try: from deep_gemm import new as f\n    except ImportError: from deep_gemm import other as f\n    return f")
BY_NAME = "import importlib\n" + ACCESSOR.format("return importlib.import_module('flash_attn_interface').f")
DRIVER = {"triton/__init__.py": "", "triton/runtime/__init__.py": "from .driver import driver", "triton/runtime/driver.py": "driver = make()"}
LAZY = "def __getattr__(name):\n    own = {'f'}\n    if name in own:\n        return getattr(importlib.import_module('liger_kernel.transformers.a'), name)\n    raise AttributeError(name)"
LIGER = {"liger_kernel/__init__.py": "", "liger_kernel/transformers/__init__.py": LAZY, "liger_kernel/transformers/a.py": "def f(a): ..."}

# (library, its files in OLD, in NEW, code that uses it, findings as "kind impact line [successor or condition]")
CASES = {
    "an-alias-that-is-gone": ("deep-gemm", {"deep_gemm/__init__.py": ALIAS}, {"deep_gemm/__init__.py": "from ._C import new"}, "from deep_gemm import old\nold(1, 2)", {"renamed breaking 1 deep_gemm.new"}),
    "names-of-the-binary": ("deep-gemm", {"deep_gemm/__init__.py": ALIAS}, {"deep_gemm/__init__.py": "from . import _C\n" + ALIAS}, "from deep_gemm import new\nfrom deep_gemm._C import x\nnew(1)", set()),
    "the-preferred-one-is-gone": ("deep-gemm", {"deep_gemm/__init__.py": ALIAS}, {"deep_gemm/__init__.py": "from ._C import other"}, EITHER, {"removed risk 7"}),
    "every-one-is-gone": ("deep-gemm", {"deep_gemm/__init__.py": ALIAS}, {"deep_gemm/__init__.py": ""}, EITHER, {"removed breaking 7"}),
    "a-module-through-import-module": ("flash-attn-3", {"flash_attn_interface.py": "def f(a): ..."}, {"flash_attn_interface.py": "def f(a, b): ..."}, BY_NAME, {"parameter-required breaking 6"}),
    "a-name-in-the-place-of-its-module": ("triton", DRIVER, DRIVER, "import triton\ntriton.runtime.driver.active.x()", set()),
    "a-member-called-cls": ("flash-attn", {"flash_attn/__init__.py": "class A:\n    cls = 1"}, {"flash_attn/__init__.py": ""}, "from flash_attn import A", {"removed breaking 1"}),
    "a-name-of-another-library-in-its-package": ("flash-attn-4", {"flash_attn/cute/__init__.py": "f = g = 1"}, {"flash_attn/cute/__init__.py": "g = 1"}, "from flash_attn import flash_attn_func\nfrom flash_attn.cute import f", {"removed breaking 2"}),
    "a-lazy-name": ("liger-kernel", LIGER, LIGER | {"liger_kernel/transformers/a.py": "def f(): ..."}, "from liger_kernel.transformers import f\nf(1)", {"parameter-removed breaking 2"}),
    "a-library-by-its-module": ("flash-attn", {"flash_attn/__init__.py": "import flash_3\nf = 1"}, {"flash_attn/__init__.py": "f = 1\nif ROCM:\n    import aiter\nelse:\n    import flash_3._C"}, "from flash_attn import f", {"import-requirement-added risk 1 only if ROCM"}),
}
# fmt: on


@pytest.mark.parametrize("name", CASES)
def test_a_step_of_a_library_is_judged_as_the_code_uses_it(name: str, tmp_path: Path) -> None:
    key, old, new, code, said = CASES[name]
    for side, files in (("old", old), ("new", new), ("tree", {"user.py": code})):
        write_files(tmp_path / side, files)
    library = LIBRARIES[key]
    releases = [Sources(library=library).release(str(tmp_path / side)) for side in ("old", "new")]
    result = run_pair(*releases, Source(Project([tmp_path / "tree"], library=library)), tool="test")
    found = {f"{f.kind} {f.impact} {f.call_sites[0].line} {f.suggestion}".strip() for f in result.findings}
    assert (found, result.unchanged_faults, result.library) == (said, (), library.title)
