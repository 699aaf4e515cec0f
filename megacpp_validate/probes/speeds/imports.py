"""The firewall and the low-precision scope: what it costs the host to enter and leave, which every layer group pays."""

from __future__ import annotations

from functools import partial

from ..bench import Bench
from ..stopwatch import Stopwatch, Use
from .precision import low_precision, production_precisions

TIMES = 50


def speed(stopwatch: Stopwatch) -> None:
    """Nothing of it runs on the device."""
    stopwatch.add(f"scope.entered-{TIMES}-times", partial(_new_use, stopwatch.bench), on_host_alone=True)


def _new_use(bench: Bench) -> Use:
    te = bench.bridge()
    production_precisions(bench)  # for what it has Transformer Engine forget

    def call() -> None:
        for _ in range(TIMES):
            te.is_te_available()
            with low_precision(bench):
                pass

    return Use(call)
