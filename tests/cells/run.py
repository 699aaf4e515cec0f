"""The cells that a CPU can run, each in a process of its own: probes, on plain PyTorch and on doubles, and training.

The doubles stand for Transformer Engine and DeepGEMM; what they compute is emulated, so every number is reproducible.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from typing import Any, Final

import pytest

from megacpp_validate.catalog.bridge import ProbeCell, read_catalog
from megacpp_validate.evidence.receipt import Receipt
from megacpp_validate.probes.order import Order, Target

from .boundary import Seen, note_calls

CPU: Final = Target("cpu", "", attention=("sdpa",))
# It emulates the scales of these recipes.
DOUBLE: Final = Target("cpu", "sm_90", ("delayed", "current", "block"), "delayed", ("te", "sdpa"), deep_gemm=True)
NOT_HERE: Final = ("fp8_amax_group", "fp8_loss")  # in processes of their own, which have no double
TRAINING: Final = ("smoke_tiny_experts", "smoke_sparse", "moe_smoke")
STEPS: Final = "4"


def native_orders() -> list[Order]:
    """Bridge modules on plain PyTorch, and short training on two ranks."""
    catalog, blank = read_catalog(), Order("", "native", CPU, "native")
    training = (_order_of(row, blank) for row in (*catalog.smoke, *catalog.compositions) if row.id in TRAINING)
    return [
        *(replace(blank, probe=module.id) for module in catalog.modules),
        *(replace(order, settings={**order.settings, "steps": STEPS}, once=True) for order in training),
    ]


def double_orders() -> list[Order]:
    """Bridge modules and cells of FP8 on the double."""
    catalog, blank = read_catalog(), Order("", "double", DOUBLE, "te")
    return [
        *(replace(blank, probe=module.id, quick=quick) for module in catalog.modules for quick in (False, True)),
        *(replace(_order_of(row, blank), quick=True) for row in catalog.fp8_cells if row.id not in NOT_HERE),
    ]


def _order_of(row: ProbeCell, blank: Order) -> Order:
    return replace(
        blank, probe=row.id, code=row.code, stands_on=tuple(row.stands_on), once=row.once, settings=dict(row.settings)
    )


def run_cells(orders: Iterable[Order], jobs: int) -> Iterator[Receipt]:
    """Run each in a new process, `jobs` at a time; each as soon as it is over."""
    return _run_each(_run, orders, jobs)


def trace_boundary(jobs: int) -> Seen:
    """What all cells on the double pass to Transformer Engine."""
    seen: Seen = {}
    for one in _run_each(_note, double_orders(), jobs):
        for name, kinds in one.items():
            seen[name] = seen.get(name, set()) | kinds
    return seen


def _run_each(run: Callable[[Order], Any], orders: Iterable[Order], jobs: int) -> Iterator[Any]:
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, max_tasks_per_child=1) as pool:
        for one in as_completed([pool.submit(run, order) for order in orders]):
            yield one.result()


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
