"""One cell in a process of its own, which ends in a receipt, whatever happens to it.

A probe writes its receipt into a folder of this run; what can be believed is put in its place when the process has
ended well. So a receipt of an earlier run is never taken for one of this run, and a cell that died has one that says
so.
"""

from __future__ import annotations

import errno
import glob
import json
import os
import re
import shutil
import signal
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from ..evidence.receipt import Failure, Outcome, Receipt
from ..evidence.receipt_file import write_receipt
from ..evidence.store import ReceiptInvalid, read_receipt
from ..probes.order import Order
from ..process import Ended, NotStarted, Processes
from .environment import Environment
from .plan import receipt_without_probe

_MODULE: Final = "megacpp_validate.probes"
_LAST_WORDS: Final = 1200  # characters
_FRAME: Final = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')  # as faulthandler writes it
_OF_A_STACK: Final = ("Current thread 0x", "Thread 0x", "Extension modules:")


@dataclass(frozen=True)
class Cell:
    """One cell to run.

    Attributes:
        environment: where.
        order: what.
        folder: of its receipt; its log lies beside.
        limit_s: seconds that it may take.
    """

    environment: Environment
    order: Order
    folder: Path
    limit_s: float

    @property
    def place(self) -> Path:
        """Of its receipt."""
        return self.folder / f"{self.order.cell}.json"

    @property
    def log(self) -> Path:
        """What its process wrote to its standard streams."""
        return self.folder / f"{self.order.cell}.log"

    def forget(self) -> None:
        """Remove what an earlier run left of it."""
        for left in self.folder.glob(f"{glob.escape(self.order.cell)}.*"):
            left.unlink()

    def run(self, work: Path, processes: Processes) -> Receipt:
        """Run it and write its receipt.

        Args:
            work: a folder that is not there yet, for this cell alone: what a vendor library drops there is nobody's
                evidence. It is gone afterwards.
            processes: that it becomes one of.

        Raises:
            Stopped: everything was stopped; there is no receipt then.
            OSError: the receipt, the log or the folder `work` cannot be written.
        """
        place, given, own = work / self.place.name, work / "order", work / "folder"
        own.mkdir(parents=True)
        given.write_text(json.dumps(asdict(self.order)), encoding="utf-8")
        started = datetime.now(UTC).isoformat(timespec="seconds")
        try:
            receipt = self._run(place, given, own, started, processes)
            self._keep(work)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        write_receipt(receipt, self.place)
        return receipt

    def _keep(self, work: Path) -> None:
        """Put what the probe left beside its receipt beside the one that is believed: whole files, or none."""
        for left in sorted(work.glob(f"{glob.escape(self.order.cell)}.*")):
            if left.name != self.place.name and left.is_file() and not left.is_symlink():
                aside = self.folder / f".{left.name}.part"
                shutil.copyfile(left, aside)
                aside.replace(self.folder / left.name)

    def _run(self, place: Path, given: Path, own: Path, started: str, processes: Processes) -> Receipt:
        turnstile = (Path(self.order.turnstile).parent,) if self.order.turnstile else ()
        call = self.environment.call(_MODULE, str(place), shares=(place.parent, *turnstile))
        self.log.open("wb").close()  # a log that cannot be written is no fault of the probe
        try:
            ended = processes.run(call, folder=own, limit_s=self.limit_s, log=self.log, given=given, ask_where=True)
        except OSError as fault:
            reason = f"the process could not be started: {fault}"
            outcome = Outcome.NOT_RUN if isinstance(fault, NotStarted) else Outcome.ERROR
            return replace(receipt_without_probe(self.order, outcome, reason), started=started)
        if ended.code == 0:
            try:
                return _check_it_is(self.order, read_receipt(place), place)
            except ReceiptInvalid as fault:
                died = _say_no_receipt(self.order, ended, fault.reason)
        else:
            died = _say_death(self.order, ended, self.limit_s)
        return replace(died, started=started, seconds={"total": round(ended.seconds, 3)})


def _check_it_is(order: Order, receipt: Receipt, place: Path) -> Receipt:
    """The receipt, if it answers this order."""
    asked = (order.cell, order.seed, order.requested, order.environment)
    if (receipt.cell, receipt.seed, receipt.requested, receipt.environment) != asked:
        raise ReceiptInvalid(place, f"it answers another order than cell, seed, request and environment {asked}")
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
    elif (no_space := os.strerror(errno.ENOSPC)) in ended.words:  # nobody's fault but the disk's, and no evidence
        outcome, kind = Outcome.NOT_RUN, f"exit status {ended.code}"
        text = f"{no_space}: it ended with {kind} and could not write a receipt; its last words: {said}"
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
