"""The scan of M compiled by torch.compile: the same arithmetic, in fewer passes over memory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from ..native.mamba import ssd_chunked
from .backends import Choice, Refusal, choose
from .deep_gemm_cast import TRITON

Scan = Callable[..., tuple[Any, Any]]


def compiled_scan(device: Any) -> tuple[Scan, Choice]:
    """A scan to be called as `native.mamba.ssd_chunked` is, and which it is: "compiled" or "eager", recorded.

    What is compiled is compiled at the first call of each shape, dtype and kind of pass, for all layers of the process
    together. It is one graph or an error: a part that was left out would be slow without a word.

    Args:
        device: where the tensors will lie.
    """
    choice = choose(
        "compiled_scan", [("compiled", partial(why_not_compiled, torch.device(device))), ("eager", lambda: None)]
    )
    return (_compile() if choice.observed == "compiled" else ssd_chunked), choice


def why_not_compiled(device: Any) -> Refusal | None:
    """Why torch.compile cannot be asked on this machine for that kind of device.

    Looked for is what it starts: on the CPU the C++ compiler of torch's Inductor (`torch._inductor.config.cpp.cxx`), on
    CUDA Triton, and the C compiler that Triton builds its launchers with (`triton.runtime.build`).
    """
    if device.type == "cpu":
        wanted = (os.environ.get("CXX", "g++"),)
        return None if _is_there(wanted) else _no_compiler("C++", wanted, "CXX")
    if device.type != "cuda":
        return Refusal("compiled", "device", f"the scan is compiled on CPU and CUDA; the tensors lie on {device.type}")
    if not TRITON.is_available():
        return Refusal("compiled", "triton-unavailable", TRITON.why_unavailable())
    some = (os.environ["CC"],) if "CC" in os.environ else ("gcc", "clang")
    return None if _is_there(some) else _no_compiler("C", some, "CC")


@cache
def _compile() -> Scan:
    compiled: Scan = torch.compile(ssd_chunked, dynamic=False, fullgraph=True)
    return compiled


def _is_there(names: tuple[str, ...]) -> bool:
    return any(shutil.which(name) is not None for name in names)


def _no_compiler(language: str, names: tuple[str, ...], variable: str) -> Refusal:
    return Refusal(
        "compiled",
        "no-compiler",
        f"torch.compile needs a {language} compiler, and there is no {' or '.join(names)} to be run. Next step: "
        f"install one, or name one in {variable}",
    )
