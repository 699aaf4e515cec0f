"""The entry of a prewarm task: one order on standard input, one answer as the last line of standard output.

    python -m megacpp_validate.jit < ORDER

The answer: {task, compiled: [{library, kernel, shape, seconds, cached, looked_for}], seconds, versions, compiler,
include_paths, unwatched, notes, missing, failure}. `missing` says what the task needs and is not here, `failure` what
it raised; the exit status is 0 wherever there is an answer, and 2 where the order cannot be read.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from dataclasses import asdict
from typing import Any

from . import monitor
from .compiles import seen_since
from .driver_cache import give_back
from .order import JitOrder, Lacking, WrongOrder, read_jit_order
from .stack import read_compiler, read_include_paths, read_versions
from .start import start_compiling

_LONGEST = 8000


def run_task(order: JitOrder) -> dict[str, Any]:
    """Run a task in this process; whatever it raises is in the answer."""
    start_compiling()
    moment, began = monitor.mark(), time.perf_counter()
    failure = missing = ""
    try:
        importlib.import_module(f"{__package__}.tasks_{order.code}").compile_task(order)
    except Lacking as lacking:
        missing = str(lacking)
    except Exception as fault:
        traceback.print_exc()
        failure = f"{type(fault).__name__}: {fault}"[:_LONGEST]
    monitor.mark()  # looks at what is seen in files alone
    seconds = round(time.perf_counter() - began, 3)
    told = monitor.describe_jit()
    return {
        "task": order.task,
        "compiled": [asdict(one) for one in seen_since(moment)],
        "seconds": seconds,
        "versions": read_versions(),
        "compiler": read_compiler(),
        "include_paths": read_include_paths(),
        "unwatched": told["unwatched"],
        "notes": list(told["notes"]),
        "missing": missing,
        "failure": failure,
    }


def main() -> int:
    """Run the task of standard input."""
    try:
        order = read_jit_order(sys.stdin.read())
    except WrongOrder as fault:
        sys.stderr.write(f"{fault}\n")
        return 2
    answer = run_task(order)
    give_back()
    sys.stdout.write(f"\n{json.dumps(answer)}\n")
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # compile pools and libraries that were loaded side by side crash or wait in their teardown
