"""One cell in a process of its own, which ends in a receipt, whatever happens to it; and when a receipt is an answer.

A probe writes its receipt into a folder of this run. A receipt that answers the order is moved into its place when the
process has ended well, so a receipt of an earlier run never passes for one of this run. A run that was killed half way
and is started again runs only the cells that have no answer.
"""

from __future__ import annotations

import glob
import json
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from ..diagnosis.diagnose import NO_SPACE, NOT_STARTED, find_retry_fault
from ..errors import InfrastructureFailed, writing_to
from ..evidence.receipt import Failure, Outcome, Receipt, write_receipt
from ..evidence.store import ReceiptInvalid, read_receipt
from ..probes.order import TIMED, Order
from ..process import Ended, Processes
from .interpreter import InterpreterEnvironment

_ATTEMPT: Final = re.compile(r"\.attempt-\d+\.log$")  # the output of an attempt that a fault of the cluster ended
_MODULE: Final = "megacpp_validate.probes"


@dataclass(frozen=True)
class Cell:
    """One cell to run.

    Attributes:
        environment: where.
        order: what.
        folder: of its receipt; its log lies beside.
        limit_s: seconds that it may take.
        seconds: that it is expected to take.
        gpus: that it needs for itself; 0 where it shares one, or needs none.
        problem: why it is not run; empty where it is.
    """

    environment: InterpreterEnvironment
    order: Order
    folder: Path
    limit_s: float
    seconds: float = 0.0
    gpus: int = 0
    problem: str = ""

    @property
    def place(self) -> Path:
        """Of its receipt."""
        return self.folder / f"{self.order.cell}.json"

    @property
    def log(self) -> Path:
        """What its process wrote to its standard streams."""
        return self.folder / f"{self.order.cell}.log"

    def run(self, work: Path, processes: Processes) -> Receipt:
        """Run it and write its receipt; an older one stays until this one is whole.

        Args:
            work: a folder that does not exist yet, for this cell alone: what a vendor library drops there is no
                evidence. It is removed afterwards.
            processes: that it becomes one of.

        Raises:
            Stopped: everything was stopped; there is no receipt then.
            OSError: the receipt, the log or the folder `work` cannot be written.
        """
        (work / "folder").mkdir(parents=True)
        (work / "order").write_text(json.dumps(asdict(self.order)), encoding="utf-8")
        try:
            receipt = self._run(work, processes)
            bring_home(receipt, work, self.folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return receipt

    def _run(self, work: Path, processes: Processes) -> Receipt:
        started, place = datetime.now(UTC).isoformat(timespec="seconds"), work / self.place.name
        device = (Path(self.order.turnstile).parent,) if self.order.turnstile else ()
        call = self.environment.call(_MODULE, str(place), shares=(work, *device))
        self.log.open("wb").close()  # a log that cannot be written is no fault of the probe
        try:
            ended = processes.run(
                call, folder=work / "folder", limit_s=self.limit_s, log=self.log, given=work / "order", ask_where=True
            )
        except OSError as fault:
            refused = receipt_without_probe(self.order, Outcome.NOT_RUN, f"{NOT_STARTED}: {fault}")
            return replace(refused, started=started)
        try:
            receipt = read_receipt(place)
            reason = f"it answers another order than {self.order.cell} with its seed, request and environment"
            if ended.code == 0 and answers(self.order, receipt):
                return receipt
        except ReceiptInvalid as invalid:
            reason = invalid.reason
        died = _explain_death(self.order, ended, self.limit_s, reason)
        return replace(died, started=started, seconds={"total": round(ended.seconds, 3)})


def answers(order: Order, receipt: Receipt) -> bool:
    """Whether a receipt that a probe has just written is of this order."""
    wanted = (order.cell, order.seed, order.requested, order.environment)
    return (receipt.cell, receipt.seed, receipt.requested, receipt.environment) == wanted


def bring_home(receipt: Receipt, work: Path, folder: Path) -> None:
    """Put a receipt into its folder, after what its probe left beside it: whole files, or none.

    What an earlier run left of the cell is removed last, so that there is a whole receipt at any time.

    Raises:
        OSError: the folder cannot be written.
    """
    pattern, kept = f"{glob.escape(receipt.cell)}.*", {f"{receipt.cell}.json", f"{receipt.cell}.log"}
    for left in sorted(work.glob(pattern)):
        if left.name != f"{receipt.cell}.json" and left.is_file() and not left.is_symlink():
            aside = folder / f".{left.name}.part"
            shutil.copyfile(left, aside)
            aside.replace(folder / left.name)
            kept.add(left.name)
    write_receipt(receipt, folder / f"{receipt.cell}.json")
    for old in folder.glob(pattern):
        if old.name not in kept and not _ATTEMPT.search(old.name) and old.is_file():
            old.unlink()


def _explain_death(order: Order, ended: Ended, limit_s: float, reason: str) -> Receipt:
    """The receipt of a process that was killed, or that left none that can be used, for the reason given."""
    where, status = f" in {ended.frame}" if ended.frame else "", f"exit status {ended.code}"
    outcome, kind, text = Outcome.ERROR, status, f"ended with {status} before it wrote a receipt"
    if ended.code is None:
        outcome, kind, text = Outcome.TIMEOUT, "timeout", f"killed after {limit_s:g} s{where}"
    elif number := _name_signal(ended.code):
        kind, text = number, f"died of {number}{where}"
    elif ended.code == 0:
        kind, text = "no-receipt", f"the process ended well and left no receipt that can be used ({reason})"
    elif NO_SPACE in ended.words:  # of the disk alone, and no evidence
        outcome, text = Outcome.NOT_RUN, f"{NO_SPACE}: it ended with {status} and could not write a receipt"
    failure = Failure(kind, ended.last_words, ended.frame, ended.words[-20_000:])
    reason = f"{text}; its last words: {ended.last_words}"
    return replace(receipt_without_probe(order, outcome, reason), failure=failure)


def _name_signal(code: int) -> str:
    """The signal that ended a process, or a container, whose exit status is 128 more; empty for none."""
    number = -code if code < 0 else code - 128
    if number in set(signal.Signals):
        return signal.Signals(number).name
    return f"signal {number}" if code < 0 else ""


def receipt_without_probe(order: Order, outcome: Outcome, reason: str) -> Receipt:
    """The receipt of a cell whose probe could not write one."""
    same = ("cell", "stack", "probe", "requested", "requested_because", "seed", "lock_hash", "image_digest", "commit",
            "tool", "environment")  # fmt: skip
    return Receipt(
        target=order.target.id, outcome=outcome, reason=reason, **{name: getattr(order, name) for name in same}
    )


# --- which receipts are answers --------------------------------------------------------------------------------------


def is_done(order: Order, receipt: Receipt) -> bool:
    """Whether a receipt of an earlier run answers an order.

    A receipt of another order or environment is no answer, and neither is one of a cell that did not run, that was
    ended from outside or by a full disk, that took too long once, or that lacks the timings that the order requests.
    """
    same = answers(order, receipt) and (receipt.tool, receipt.commit) == (order.tool, order.commit)
    ran = receipt.outcome is not Outcome.NOT_RUN and NO_SPACE not in receipt.reason and not find_retry_fault(receipt)
    late = receipt.outcome is Outcome.TIMEOUT and not receipt.retries  # it has not been run again alone
    untimed = order.times and order.probe in TIMED and receipt.outcome is Outcome.PASS and not receipt.timings
    return bool(order.environment) and same and ran and not late and not untimed


def find_done(order: Order, place: Path) -> Receipt | None:
    """The receipt of an earlier run that answers this order; None where there is none that is whole."""
    try:
        receipt = read_receipt(place)
    except ReceiptInvalid:
        return None
    return receipt if is_done(order, receipt) else None


@contextmanager
def own_folder(folder: Path, option: str = "--receipts") -> Iterator[None]:
    """Hold a folder against a second run. The lock ends with the process, whatever kills the process.

    Args:
        option: that names the folder.

    Raises:
        InfrastructureFailed: another run holds it.
        WrongArguments: it cannot be written.
        OSError: its disk is full.
    """
    with writing_to(folder, "files", option):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(folder / ".lock", timeout=0):
                yield
        except Timeout as fault:
            raise InfrastructureFailed(
                f"another run writes to {folder}. Likely cause: the command was started twice, or an earlier one runs "
                f"in the background. Next step: wait for the other run, or name another folder with {option}."
            ) from fault
