"""The bridge in a training tree: a copy runs where nothing else of this package is, and its import takes no time."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
BEFORE = """
import torch
query = torch.randn(1, 32, 8, 128)
key = value = torch.randn(1, 8, 8, 128)
model = torch.nn.Sequential()
model.q_proj = torch.nn.Linear(64, 64)
"""
LOOP = """
from my_trainer.bridge.fp8_scope import SINGLE_OWNER, low_precision

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows, losses = torch.randn(16, 64), []
for step in range(5):
    with low_precision(target="cpu", amax_reduction_group=SINGLE_OWNER) as scope:
        loss = (model.q_proj(rows) - rows).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print("trained", losses[-1] < losses[0], scope.choice.observed)
import sys
print("ours", [name for name in sys.modules if name.startswith("megacpp_validate")])
"""


def test_a_copy_runs_the_readme_s_snippet_and_trains(tmp_path: Path) -> None:
    package = tmp_path / "my_trainer"
    for name in ("bridge", "native"):
        source = PROJECT / "megacpp_validate" / name
        shutil.copytree(source, package / name, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "__init__.py").touch()
    readme = (PROJECT / "README.md").read_text(encoding="utf-8")
    (snippet,) = re.findall(r"```python\n(from megacpp_validate\.bridge.*?)```", readme, re.DOTALL)
    code = BEFORE + snippet.replace("megacpp_validate", "my_trainer") + LOOP
    run = [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{code}"]
    ended = subprocess.run(
        run, cwd=tmp_path, env={"PATH": ""}, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "observed='sdpa'" in ended.stdout
    assert "trained True native" in ended.stdout
    assert "ours []" in ended.stdout


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
