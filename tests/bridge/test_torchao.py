"""torchao stands behind the same firewall; the release of the test group is used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="not-run: there is no torch")

ASK = """
import json, sys
if {blocked}:
    sys.modules["torchao"] = None
from megacpp_validate.bridge import torchao
before = sorted(name for name in sys.modules if name.partition(".")[0] == "torchao" and sys.modules[name])
found = [entry() is not None for entry in (
    torchao.convert_to_float8_training, torchao.float8_linear_config, torchao.float8_linear,
    torchao.precompute_scales, torchao.cast_to_float8)]
print(json.dumps([before, torchao.is_torchao_available(), torchao.why_torchao_is_unavailable(), found]))
"""


def ask(*, blocked: bool = False, **environment: str) -> tuple[list[str], bool, str, list[bool]]:
    shown = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **environment}
    command = [sys.executable, "-c", ASK.format(blocked=blocked)]
    done = subprocess.run(command, env=shown, capture_output=True, text=True, check=True)
    before, available, why, found = json.loads(done.stdout.splitlines()[-1])
    return before, available, why, found


def test_every_entry_point_is_found_and_nothing_is_imported_before_it_is_asked_for() -> None:
    before, available, why, found = ask()
    if not available:
        pytest.skip(f"not-run: {why}")
    assert (before, why, found) == ([], "", [True] * 5)


def test_without_it_the_reason_says_how_to_get_it() -> None:
    _, available, why, found = ask(blocked=True)
    assert (available, any(found)) == (False, False)
    assert "pip install torchao==0.16.0" in why


def test_its_switch_is_its_own() -> None:
    _, available, why, found = ask(MEGACPP_DISABLE_TORCHAO="1")
    assert (available, any(found)) == (False, False)
    assert "MEGACPP_DISABLE_TORCHAO" in why
