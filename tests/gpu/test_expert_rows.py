"""The prewarm task for the rows of experts, on a real GPU: on an empty cache it reaches what it is there for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from megacpp_validate import jit
from megacpp_validate.bridge import imports as te
from megacpp_validate.jit.monitor import unwatched
from megacpp_validate.jitcache.layout import cache_variables

torch = pytest.importorskip("torch", reason="not-run: there is no torch")
pytestmark = pytest.mark.filterwarnings("default")  # what a release warns of while it is imported is no reason to skip
HOPPER = 9
KERNEL = "cast_transpose_optimized_kernel"


def test_every_number_of_rows_compiles_kernels_of_several_shapes_forward_and_backward(tmp_path: Path) -> None:
    """Casts of weights alone, all that calls with rows for every expert leave, are e4m3 and of one kernel."""
    if not torch.cuda.is_available():
        pytest.skip("not-run: there is no CUDA device")
    if not te.is_te_available():
        pytest.skip(f"not-run: {te.why_te_is_unavailable()}")
    if torch.cuda.get_device_capability()[0] != HOPPER:
        pytest.skip("not-run: these kernels are Hopper's")
    if unwatched():
        pytest.skip(f"not-run: compiles cannot be seen here: {unwatched()}")
    path = os.pathsep.join(filter(None, (str(Path(jit.__file__).parents[2]), os.environ.get("PYTHONPATH"))))
    given = {"task": "t", "code": "expert_rows", "arch": "sm_90a", "root": str(tmp_path),
             "settings": {"size": "small", "recipes": "delayed"}}  # fmt: skip
    variables = {**cache_variables(tmp_path, "sm_90a"), "PYTHONPATH": path}
    ended = subprocess.run(
        [sys.executable, "-m", "megacpp_validate.jit"], input=json.dumps(given), capture_output=True, text=True,
        check=False, cwd="/", env={**os.environ, **variables}, timeout=300,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-2000:]
    told = json.loads(ended.stdout.strip().splitlines()[-1])
    assert (told["failure"], told["missing"]) == ("", ""), ended.stderr[-2000:]
    names = [one["kernel"] for one in told["compiled"] if KERNEL in one["kernel"]]
    seen = Counter(name for kernel in names for name in ("e4m3", "e5m2") if name in kernel)
    assert min(seen["e4m3"], seen["e5m2"]) >= 10, f"two files a kernel, five kernels or more of each: {seen}"
