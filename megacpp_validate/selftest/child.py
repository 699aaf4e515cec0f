"""One run in a process of its own: a fault is planted, or none, and every probe runs once with its smallest cases.

The server that every run is forked from imports this module, and with it torch, the probes and the bridge; nothing of
a vendor.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import time
import warnings
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from .. import bridge, native, probes
from ..probes.process import run_probe
from .double import use_te_double
from .plant import plant
from .points import PlantPointGone, Trace
from .tasks import Ended, Started, Task

SWITCH: Final = "MEGACPP_DISABLE_TE"
TRIAL: Final = "MEGACPP_TE_TRIAL_SECONDS"

# What torch and numpy import only when a gradient, a seed or a layer without storage is first made: seconds a run.
for _late in ("torch.fx.experimental.symbolic_shapes", "numpy.random", "torch.utils.checkpoint", "torch._dynamo"):
    with suppress(ImportError):
        importlib.import_module(_late)

for _package in (native, bridge, probes):
    for _module in pkgutil.walk_packages(_package.__path__, f"{_package.__name__}."):
        if not _module.name.endswith(".__main__"):
            with suppress(Exception):  # what cannot be imported shows in the receipt of its probe
                importlib.import_module(_module.name)


def run_task(task: Task, pipe: Any) -> None:
    """Do a task and send what happens, step by step."""
    begin = time.perf_counter()
    _be_quiet()
    trace = Trace()
    for variable in [name for name in os.environ if name.startswith((SWITCH, TRIAL))]:
        del os.environ[variable]  # the user's switches are for the user's runs
    if task.requested == "te":
        use_te_double()
    else:
        os.environ[SWITCH] = "1"
    try:
        trace = plant(task.mutant) if task.mutant is not None else trace
    except PlantPointGone as gone:
        pipe.send(Ended(0, str(gone), time.perf_counter() - begin))
        return
    for probe in task.probes:
        pipe.send(Started(probe))
        receipt = run_probe(task.order(probe))
        pipe.send(replace(receipt, checks=tuple(check for check in receipt.checks if not check.passed)))
        _forget()
        if trace.gone:
            break
    pipe.send(Ended(trace.reached, trace.why_gone, time.perf_counter() - begin))


def _be_quiet() -> None:
    """What a damaged wrapper says is no news here; what the probes say is in the receipts."""
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    os.close(sink)
    warnings.simplefilter("ignore")


def _forget() -> None:
    """What one probe leaves behind is no business of the next: in a session each has a process of its own."""
    importlib.import_module("megacpp_validate.bridge.backends").forget_choices()
    te = importlib.import_module("megacpp_validate.bridge.imports")
    if te.is_te_available() and (state := te.fp8_state_manager()) is not None:
        state.reset()
