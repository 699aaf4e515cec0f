"""What importing the bridge brings along: a training tree waits for it, and so does every case of the firewall."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="not-run: there is no torch")

HEAVY = ("torch.distributed.fsdp", "torch._dynamo", "torch._inductor", "torchao", "triton", "transformer_engine")
IMPORT = """
import importlib, pkgutil, sys, torch
before = set(sys.modules)
import megacpp_validate.bridge as bridge
for found in pkgutil.iter_modules(bridge.__path__, bridge.__name__ + "."):
    importlib.import_module(found.name)
print(*sorted(set(sys.modules) - before))
"""


def test_no_module_of_the_bridge_imports_what_takes_long() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
    brought = done.stdout.split()
    assert len(brought) > 30
    assert [name for name in brought if name.startswith(HEAVY)] == []
