"""The entry of a prewarm task: one order on standard input, one answer as the last line of standard output.

    python -m megacpp_validate.jit < ORDER

The answer: {task, compiled: [{library, kernel, shape, seconds, cached, looked_for}], seconds, versions, compiler,
include_paths, unwatched, missing, failure}. `missing` names what the task needs and this host lacks, `failure`
what it raised; the exit status is 0 wherever there is an answer, and 2 where the order cannot be read.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from sysconfig import get_path
from typing import Any, Final

from . import monitor
from .driver_cache import give_back
from .tasks import TASKS, JitOrder, Lacking

_LONGEST: Final = 8000  # characters of a failure
# Name in the answer -> names of the distribution, the first that is installed.
_PACKAGES: Final = {
    "torch": ("torch",),
    "triton": ("triton",),
    "cutlass": ("nvidia-cutlass-dsl",),
    "flash-attn-4": ("flash-attn-4",),
    "quack-kernels": ("quack-kernels",),
    "apache-tvm-ffi": ("apache-tvm-ffi",),
    "deep-gemm": ("deep-gemm", "sgl-deep-gemm"),
    "transformer-engine": ("transformer-engine", "transformer-engine-torch"),
}
_HEADERS: Final = "include"


def run_task(order: JitOrder) -> dict[str, Any]:
    """Run a task in this process; whatever it raises is in the answer."""
    monitor.start_compiling()
    moment, began = monitor.mark(), time.perf_counter()
    failure = missing = ""
    try:
        TASKS[order.code](order)
    except Lacking as lacking:
        missing = str(lacking)
    except Exception as fault:
        traceback.print_exc()
        failure = f"{type(fault).__name__}: {fault}"[:_LONGEST]
    monitor.mark()  # looks at what is seen in files alone
    seconds = round(time.perf_counter() - began, 3)
    return {
        "task": order.task,
        "compiled": [asdict(one) for one in monitor.seen_since(moment)],
        "seconds": seconds,
        "versions": read_versions(),
        "compiler": read_compiler(),
        "include_paths": read_include_paths(),
        "unwatched": monitor.unwatched(),
        "missing": missing,
        "failure": failure,
    }


# --- what the caches depend on, as it is installed here ---------------------------------------------------------------


def read_versions() -> dict[str, str]:
    """Versions of what compiles and of what is compiled; what is not installed is not there."""
    found = {"python": platform.python_version()}
    for name, distributions in _PACKAGES.items():
        for distribution in distributions:
            with suppress(PackageNotFoundError):
                found[name] = version(distribution)
                break
    with suppress(Exception):  # without torch, or with one that is damaged, the rest still counts
        import torch

        found["torch"] = str(torch.__version__)
        found["cuda"] = torch.version.cuda or ""
        found["isa"] = str(torch.backends.cpu.get_cpu_capability())
        found["c++ headers"] = os.pathsep.join((str(Path(torch.__file__).with_name(_HEADERS)), get_path(_HEADERS)))
    found["working folder"] = str(Path.cwd())
    found["c++"] = _output([os.environ.get("CXX") or "g++", "--version"]).partition("\n")[0].strip()
    return found


def read_compiler() -> dict[str, str]:
    """What compiles CUDA C++: path and version of nvcc; empty where there is none."""
    path = _nvcc()
    printed = _output([path, "--version"]) if path else ""
    release = re.search(r"release [\d.]+, V([\d.]+)", printed)
    return {"path": path, "version": release[1] if release else ""}


def read_include_paths() -> list[str]:
    """Where DeepGEMM's and CUDA's headers lie: both are in the key of DeepGEMM's kernels, as paths."""
    folders = [Path(entry or ".", "deep_gemm", _HEADERS) for entry in sys.path]
    found = [str(folder.resolve()) for folder in folders if folder.is_dir()][:1]
    return found + ([str(Path(path).resolve().parents[1] / _HEADERS)] if (path := _nvcc()) else [])


def _nvcc() -> str:
    homes = (os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH"))
    found = [str(Path(home, "bin/nvcc")) for home in homes if home and Path(home, "bin/nvcc").is_file()]
    return found[0] if found else shutil.which("nvcc") or ""


def _output(command: list[str]) -> str:
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, check=False, capture_output=True, text=True, timeout=20).stdout
    return ""


# --- the process ------------------------------------------------------------------------------------------------------


def main() -> int:
    """Run the task of standard input."""
    answer = run_task(JitOrder(**json.load(sys.stdin)))
    give_back()
    sys.stdout.write(f"\n{json.dumps(answer)}\n")
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # compile pools and libraries that were loaded side by side crash or wait in their teardown
