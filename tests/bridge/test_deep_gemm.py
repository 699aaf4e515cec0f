"""DeepGEMM stands behind the same firewall; its real wheel is used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from megacpp_validate.canary.static.sources import Sources, SourceUnavailable

ASK = """
import json, sys
from megacpp_validate.bridge import deep_gemm
before = sorted(name for name in sys.modules if name.partition(".")[0] in ("deep_gemm", "tvm_ffi"))
found = deep_gemm.grouped_fp8_gemm()
print(json.dumps([before, deep_gemm.is_deep_gemm_available(), deep_gemm.why_deep_gemm_is_unavailable(), found is None]))
"""


def ask(*path: Path, **environment: str) -> tuple[list[str], bool, str, bool]:
    root = Path(__file__).parents[2]
    shown = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*path, root))), **environment}
    done = subprocess.run([sys.executable, "-c", ASK], env=shown, capture_output=True, text=True, check=True)
    before, available, why, is_none = json.loads(done.stdout.splitlines()[-1])
    return before, available, why, is_none


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        wheel = Sources().wheel("0.1.3", "sgl-deep-gemm")
    except SourceUnavailable as fault:
        pytest.skip(f"not-run: {fault}")
    site = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


def test_without_it_the_reason_says_how_to_get_it() -> None:
    before, available, why, is_none = ask()
    assert (before, available, is_none) == ([], False, True)
    assert "deep_gemm" in why
    assert "pip install sgl-deep-gemm==0.1.3" in why


def test_the_real_wheel_without_what_it_needs_is_unavailable_with_the_reason(installed: Path) -> None:
    _, available, why, is_none = ask(installed)
    if available:
        pytest.skip("not-run: this interpreter has tvm_ffi and CUDA, so the install is whole")
    assert is_none
    assert "Next step" in why


def test_an_import_that_asserts_without_a_word_gets_words(tmp_path: Path) -> None:
    (tmp_path / "deep_gemm.py").write_text("assert None is not None\n")
    _, available, why, _ = ask(tmp_path)
    assert not available
    assert "CUDA_HOME" in why


def test_its_switch_is_its_own() -> None:
    _, available, why, _ = ask(MEGACPP_DISABLE_DEEP_GEMM="1")
    assert not available
    assert "MEGACPP_DISABLE_DEEP_GEMM" in why
