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

from .. import bridge, native, probes
from ..bridge import backends
from ..bridge import imports as te
from ..evidence.receipt import Receipt
from ..evidence.selftest import SelftestRun
from ..probes.process import run_probe
from .faults import Trace
from .plant import PlantPointGone, plant, use_te_double
from .tasks import Task

# What torch and numpy import only when a gradient, a seed or a layer without storage is first made: seconds a run.
for _late in ("torch.fx.experimental.symbolic_shapes", "numpy.random", "torch.utils.checkpoint", "torch._dynamo"):
    with suppress(ImportError):
        importlib.import_module(_late)

for _package in (native, bridge, probes):
    for _module in pkgutil.walk_packages(_package.__path__, f"{_package.__name__}."):
        if not _module.name.endswith(".__main__"):
            with suppress(Exception):  # what cannot be imported shows in the receipt of its probe
                importlib.import_module(_module.name)


def run_task(task: Task) -> SelftestRun:
    """Run a task in this process, which is of no use for anything else afterwards."""
    begin = time.perf_counter()
    _be_quiet()
    for variable in [name for name in os.environ if name.startswith("MEGACPP_")]:
        del os.environ[variable]  # the user's switches are for the user's runs
    if task.requested == "te":
        use_te_double()
    else:
        os.environ["MEGACPP_DISABLE_TE"] = "1"
    run = SelftestRun(task.mutant.id if task.mutant else "", task.requested, task.seed, ())
    try:
        trace = plant(task.mutant) if task.mutant else Trace()
        receipts = tuple(_run_probe(task, probe) for probe in task.probes)
        run = replace(run, receipts=receipts, reached=trace.reached)
    except PlantPointGone as gone:
        run = replace(run, planted=False, trouble=str(gone))
    return replace(run, seconds=round(time.perf_counter() - begin, 3))


def _run_probe(task: Task, probe: str) -> Receipt:
    """The receipt of a probe, with failed checks alone; what the probe leaves behind is taken away."""
    receipt = run_probe(task.order(probe))
    backends.forget_choices()
    if te.is_te_available() and (state := te.fp8_state_manager()) is not None:
        state.reset()
    return replace(receipt, checks=tuple(check for check in receipt.checks if not check.passed))


def _be_quiet() -> None:
    """Discard what a damaged wrapper prints; what the probes find is in the receipts."""
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    warnings.simplefilter("ignore")
