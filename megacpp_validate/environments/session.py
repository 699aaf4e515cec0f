"""A session: every cell in a process of its own, side by side, and each ends in a receipt, whatever happens to it.

A probe writes its receipt into a folder of this run; what can be believed is put in its place when the process has
ended well. So a receipt of an earlier run is never taken for one of this run, and a cell that died has one that says
so.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from ..evidence.receipt import Failure, Outcome, Receipt
from ..evidence.receipt_file import write_receipt
from ..evidence.store import ReceiptInvalid, read_receipt
from ..probes.order import Order
from .interpreter import Environment
from .plan import receipt_without_probe
from .processes import Ended, Processes

_MODULE: Final = "megacpp_validate.probes"
_LAST_WORDS: Final = 1200  # characters
_FRAME: Final = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')  # as faulthandler writes it
_OF_A_STACK: Final = ("Current thread 0x", "Thread 0x", "Extension modules:")

Progress = Callable[[str, Receipt | None], None]
"""Called with a cell when it starts (None) and when it has ended, from one thread at a time."""


@dataclass(frozen=True)
class Session:
    """How the cells of a session are run.

    Attributes:
        environment: where.
        folder: of the receipts; a cell's log lies beside its receipt.
        limit_s: seconds that one cell may take.
        jobs: cells at a time.
    """

    environment: Environment
    folder: Path
    limit_s: float
    jobs: int

    def run(
        self, orders: Sequence[Order], processes: Processes, progress: Progress = lambda *_: None
    ) -> tuple[Receipt, ...]:
        """Run every order; receipts in the order of the orders.

        Raises:
            OSError: the folder cannot be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for order in orders:
            forget_cell(self.folder, order.cell)
        one_at_a_time = threading.Lock()

        def told(cell: str, receipt: Receipt | None) -> None:
            with one_at_a_time:
                progress(cell, receipt)

        with tempfile.TemporaryDirectory(prefix="megacpp-") as work:

            def run(order: Order) -> Receipt:
                told(order.cell, None)
                receipt = self._run_cell(order, Path(work), processes)
                write_receipt(receipt, self.folder / f"{order.cell}.json")
                told(order.cell, receipt)
                return receipt

            with ThreadPoolExecutor(max_workers=max(1, self.jobs)) as pool:
                try:
                    return tuple(pool.map(run, orders))
                except BaseException:  # an interrupt too: nothing may keep running behind it
                    processes.stop()
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise

    def _run_cell(self, order: Order, work: Path, processes: Processes) -> Receipt:
        place, given = work / f"{order.cell}.json", work / f"{order.cell}.order"
        log = self.folder / f"{order.cell}.log"
        given.write_text(json.dumps(asdict(order)), encoding="utf-8")
        own = work / order.cell  # a working folder of its own: what a vendor library drops there is nobody's evidence
        own.mkdir()
        started = datetime.now(UTC).isoformat(timespec="seconds")
        try:
            ended = processes.run(
                self.environment.command(_MODULE, str(place)),
                env=self.environment.variables,
                folder=own,
                limit_s=self.limit_s,
                log=log,
                given=given,
                ask_where=True,
            )
        except OSError as fault:
            reason = f"the process could not be started: {fault}"
            return replace(receipt_without_probe(order, Outcome.ERROR, reason), started=started)
        finally:
            shutil.rmtree(own, ignore_errors=True)
        if ended.code == 0:
            try:
                return _check_it_is(order, read_receipt(place), place)
            except ReceiptInvalid as fault:
                died = _say_no_receipt(order, ended, fault.reason)
        else:
            died = _say_death(order, ended, self.limit_s)
        return replace(died, started=started, seconds={"total": round(ended.seconds, 3)})


def forget_cell(folder: Path, cell: str) -> None:
    """Remove what an earlier run left of a cell."""
    for suffix in (".json", ".log"):
        (folder / f"{cell}{suffix}").unlink(missing_ok=True)


def _check_it_is(order: Order, receipt: Receipt, place: Path) -> Receipt:
    """The receipt, if it answers this order."""
    asked = (order.cell, order.seed, order.requested)
    if (receipt.cell, receipt.seed, receipt.requested) != asked:
        raise ReceiptInvalid(place, f"it answers another order than cell, seed and request {asked}")
    return receipt


def _say_no_receipt(order: Order, ended: Ended, reason: str) -> Receipt:
    """A process that ended as if all were well, and is not believed."""
    said = _last_words(ended)
    text = f"the process ended well and left no receipt that can be believed ({reason}); its last words: {said}"
    failure = Failure("no-receipt", said, _frame(ended.words), ended.words[-20_000:])
    return replace(receipt_without_probe(order, Outcome.ERROR, text), failure=failure)


def _say_death(order: Order, ended: Ended, limit_s: float) -> Receipt:
    """A process that was killed, by us or by what it ran."""
    said, frame = _last_words(ended), _frame(ended.words)
    where = f" in {frame}" if frame else ""
    if ended.code is None:
        outcome, kind = Outcome.TIMEOUT, "timeout"
        text = f"killed after {limit_s:g} s{where}; its last words: {said}"
    elif ended.code < 0:
        outcome, kind = Outcome.ERROR, _name_signal(-ended.code)
        text = f"died of {kind}{where}; its last words: {said}"
    else:
        outcome, kind = Outcome.ERROR, f"exit status {ended.code}"
        text = f"ended with {kind} before it wrote a receipt; its last words: {said}"
    failure = Failure(kind, said, frame, ended.words[-20_000:])
    return replace(receipt_without_probe(order, outcome, text), failure=failure)


def _name_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_words(ended: Ended) -> str:
    """The end of the log without the stacks that faulthandler adds, which are told apart."""
    lines = [line.strip() for line in ended.words.splitlines()]
    spoken = [line for line in lines if line and not _FRAME.match(line) and not line.startswith(_OF_A_STACK)]
    return " | ".join(spoken)[-_LAST_WORDS:] or "nothing"


def _frame(words: str) -> str:
    """Where a process was when it died: the innermost frame that faulthandler wrote of the thread that died."""
    _, _, current = words.rpartition("Current thread")
    found = _FRAME.search(current or words)
    return f"{found[1]}:{found[2]} in {found[3]}" if found else ""
