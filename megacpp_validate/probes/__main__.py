"""The entry of a probe process: one order on standard input, one receipt in the file that the argument names.

    python -m megacpp_validate.probes RECEIPT.json < ORDER.json

It needs the standard library and torch, nothing else. What a vendor library prints stays in the process's log.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from dataclasses import replace
from pathlib import Path

from ..evidence.receipt import write_receipt
from ..jit.driver_cache import give_back, work_on_copy
from .order import read_order
from .process import run_probe


def main() -> None:
    """Run one probe. The exit status is 0 wherever a receipt was written, whatever is in it."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m megacpp_validate.probes RECEIPT.json < ORDER.json")
    faulthandler.enable()  # a crash in compiled code leaves its Python frames in the log
    path = Path(sys.argv[1]).absolute()
    try:
        order = read_order(sys.stdin.read())
    except ValueError as fault:
        sys.exit(str(fault))
    work_on_copy()  # this process's own: the driver's compiles of other cells must not count as this cell's
    write_receipt(run_probe(replace(order, folder=str(path.parent))), path)
    give_back()
    sys.stdout.flush()
    sys.stderr.flush()
    # Compiled libraries that were loaded side by side crash in their teardown, or wait for a device that is gone: what
    # they were loaded for is written down.
    os._exit(0)


if __name__ == "__main__":
    main()
