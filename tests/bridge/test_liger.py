"""The second vendor library stands behind the same firewall; its real wheel is used."""

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
import json
from megacpp_validate.bridge import fused
is_none = fused.fused_linear_cross_entropy() is None
print(json.dumps([fused.is_liger_available(), fused.why_liger_is_unavailable(), is_none]))
"""


def ask(*path: Path, **environment: str) -> tuple[bool, str, bool]:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", ASK]
    shown = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*path, root))), **environment}
    done = subprocess.run(command, env=shown, capture_output=True, text=True, check=True)
    available, why, is_none = json.loads(done.stdout.splitlines()[-1])
    return available, why, is_none


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        wheel = Sources().wheel("0.8.5", "liger-kernel")
    except SourceUnavailable as fault:
        pytest.skip(f"not-run: {fault}")
    site = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


def test_without_it_the_reason_says_how_to_get_it() -> None:
    available, why, is_none = ask()
    assert (available, is_none) == (False, True)
    assert "liger_kernel" in why
    assert "pip install liger-kernel" in why


def test_an_install_that_lacks_triton_is_unavailable_with_the_reason(installed: Path) -> None:
    available, why, is_none = ask(installed)
    if available:
        pytest.skip("not-run: this interpreter has triton, so the install is whole")
    assert is_none
    assert "`triton`" in why


def test_its_switch_is_its_own(installed: Path) -> None:
    available, why, _ = ask(installed, MEGACPP_DISABLE_LIGER="1")
    assert not available
    assert "MEGACPP_DISABLE_LIGER" in why
