"""The cells that a CPU can run, each in a process of its own: probes, on plain PyTorch and on doubles, and training.

The doubles stand for Transformer Engine and DeepGEMM; what they compute is emulated, so every number is reproducible.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from typing import Any, Final

import pytest

from megacpp_validate.catalog.bridge import ProbeCell, read_catalog
from megacpp_validate.evidence.receipt import Receipt
from megacpp_validate.probes.order import Order, Target

from .boundary import Seen, note_calls

RECIPES: Final = ("delayed", "current", "block")
TARGETS: Final = {
    "native": Target("cpu", "", attention=("sdpa",)),
    "double": Target("cpu", "sm_90", RECIPES, "delayed", ("te", "sdpa"), deep_gemm=True),  # whose scales it emulates
}
NOT_HERE: Final = ("fp8_amax_group", "fp8_loss")  # in processes of their own, which have no double
TRAINING: Final = ("smoke_tiny_train", "smoke_tiny_experts", "smoke_sparse")
STEPS: Final = "4"


def list_orders() -> dict[str, Order]:
    """One order a cell: bridge modules on both paths, cells of FP8 on the double, training runs on two ranks."""
    catalog = read_catalog()
    orders: dict[str, Order] = {}
    for path, target in TARGETS.items():
        requested = "native" if path == "native" else "te"
        for module in catalog.modules:
            for quick in (False, True):
                order = Order(module.id, path, target, requested, quick=quick)
                orders[f"{order.cell}{'.quick' if quick else ''}"] = order
    blank = Order("", "double", TARGETS["double"], "te")
    row: ProbeCell
    for row in catalog.fp8_cells:
        if row.id not in NOT_HERE:
            order = replace(blank, probe=row.id, code=row.code, stands_on=tuple(row.stands_on), once=row.once)
            orders[order.cell] = replace(order, settings=dict(row.settings), quick=True)
    blank = Order("", "native", TARGETS["native"], "native")
    for row in [*catalog.smoke, *catalog.compositions]:
        if row.id in (*TRAINING, "moe_smoke"):
            settings = {**row.settings, "steps": STEPS}
            order = replace(blank, probe=row.id, code=row.code, stands_on=tuple(row.stands_on), settings=settings)
            orders[order.cell] = replace(order, once=True)
    small = replace(orders["native-cpu-smoke_tiny_train"], probe="smoke_small", stands_on=("imports", "layer_spec"))
    settings = {"size": "small", "precision": "fp32", "steps": "3", "learning_rate": "3e-3"}
    return {**orders, small.cell: replace(small, settings=settings)}


def run_cells(orders: dict[str, Order], jobs: int) -> Iterator[tuple[str, Receipt]]:
    """Run each in a new process, `jobs` at a time; each as soon as it is over."""
    return _run_each(_run, orders, jobs)


def trace_boundary(jobs: int) -> Seen:
    """What all cells on the double pass to Transformer Engine."""
    seen: Seen = {}
    for _, one in _run_each(
        _note, {cell: order for cell, order in list_orders().items() if order.requested == "te"}, jobs
    ):
        for name, kinds in one.items():
            seen[name] = seen.get(name, set()) | kinds
    return seen


def _run_each(run: Any, orders: dict[str, Order], jobs: int) -> Iterator[tuple[str, Any]]:
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, max_tasks_per_child=1) as pool:
        running = {pool.submit(run, order): cell for cell, order in orders.items()}
        for one in as_completed(running):
            yield running[one], one.result()


def _note(order: Order) -> Seen:
    notes: list[Seen] = []
    _run(order, lambda: notes.append(note_calls()))
    return dict(notes[0])


def _run(order: Order, prepare: Callable[[], None] = lambda: None) -> Receipt:
    warnings.simplefilter("ignore")
    for variable in [name for name in os.environ if name.startswith("MEGACPP_")]:
        del os.environ[variable]
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    if order.requested == "te":
        from megacpp_validate.selftest.plant import use_te_double
        from tests.deep_gemm_double import install

        use_te_double()
        install(pytest.MonkeyPatch())
    else:
        os.environ["MEGACPP_DISABLE_TE"] = "1"
    from megacpp_validate.probes.process import run_probe

    sys.argv = sys.argv[:1]
    prepare()
    with tempfile.TemporaryDirectory() as folder:
        return run_probe(replace(order, folder=folder))
