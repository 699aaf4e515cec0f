"""The few fields of a receipt that an index needs, without building every check of it.

Nine tenths of a receipt are its checks. Where a text is laid out as `receipt_file.receipt_text` lays it out, the large
lists are cut out of it by their indentation, and what is left is read strictly. Whatever does not fit, be it by a byte,
is read in full by `store.parse_receipt`, which also says what is wrong with it. So an index row that came the quick way
has the fields of its file, and nothing is said of the numbers within its checks; `Fields.validated` tells which.
"""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from .receipt import READABLE, Outcome, cell_id
from .store import ReceiptInvalid, find_timing_faults, parse_receipt

# After the checks, in the order of `Receipt`, what an index has no use for (`find_checks` says why this can be cut).
_CHECKS: Final = b'\n  "checks": ['
_AFTER_CHECKS: Final = b'\n  "backends": '
_LISTS: Final = tuple(
    f'\n  "{name}": ['.encode() for name in ("backends", "packages", "libraries", "quantizers", "compilers")
)
_END_OF_LIST: Final = b"\n  ]"
_FAILED: Final = b'\n      "passed": false'  # of a check; of a part it stands deeper
_UNFIT: Final = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
_CELL: Final = re.compile(r"[\w.+]+(-[\w.+]+){2,}")  # stack, target and probe, as `cell_id` joins them
_LONGEST_REASON: Final = 2000
_LARGEST: Final = 1e18  # below what the integer of a database holds
TEXTS: Final = ("cell", "stack", "target", "probe", "reason", "started")
LATER_TEXTS: Final = ("environment", "image_digest", "lock_hash", "commit")  # older versions have not all of them


@dataclass(frozen=True, slots=True)
class Fields:
    """What an index knows of one receipt.

    Attributes:
        texts: fields of `TEXTS` and `LATER_TEXTS`, and "host", "gpu", "schema_id".
        seconds: wall-clock time by phase.
        numbers: quantity -> value, of those that were measured: "seconds_total", "step_seconds", "timing:NAME".
        compiles_after: kernels compiled just in time after warm-up.
        validated: read in full.
    """

    texts: dict[str, str]
    outcome: Outcome
    peak_memory_mib: float
    compiles_after: int
    seconds: dict[str, float]
    numbers: dict[str, float] = field(default_factory=dict)
    validated: bool = False


def read_fields(text: bytes, path: Path) -> Fields:
    """The quick way where it is open, else in full.

    Raises:
        ReceiptInvalid: it is no receipt, or contradicts itself.
    """
    try:
        return _read_quickly(text, path)
    except _UNFIT:
        return validate_fields(text, path)


def validate_fields(text: bytes, path: Path) -> Fields:
    """In full.

    Raises:
        ReceiptInvalid: it is no receipt, or contradicts itself.
    """
    parse_receipt(text, path)
    try:
        return _take(json.loads(text), validated=True)
    except _UNFIT as fault:
        raise ReceiptInvalid(path, f"a number or a text in it is none that can be compared: {fault}") from fault


def is_another_file(text: bytes, path: Path) -> bool:
    """Whether a text is whole JSON and claims to be no receipt: the result of a verb, a list of files.

    What lies under the name of a cell and does not say what else it is was a receipt that something overwrote.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return False
    said = data if isinstance(data, dict) else {}
    schema = said.get("schema_id")
    if "cell" in said or str(schema).startswith("megacpp-validate/receipt/"):
        return False
    return (isinstance(schema, str) and schema != "") or not _CELL.fullmatch(path.stem)


def shorten_reason(reason: str) -> str:
    """A reason as an index keeps it: every item of a list can be wrong."""
    return reason if len(reason) <= _LONGEST_REASON else f"{reason[:_LONGEST_REASON]} ..."


def _read_quickly(text: bytes, path: Path) -> Fields:
    """Raises `ValueError` or what comes of a wrong type where it is not laid out as expected, or looks wrong."""
    if not (text.startswith(b'{\n  "cell": ') and text.endswith(b"\n}\n")):
        raise ValueError("another layout")
    short, checks = _cut_lists(text)
    data = _DECODER.decode(short.decode("utf-8"))
    if short.count(b'\n  "') != len(data):
        raise ValueError("a key that is there twice")
    fields = _take(data, validated=False)
    failed = text.find(_FAILED, checks.start, checks.stop) >= 0
    checked = data["checks"] is None
    if fields.outcome.is_good and (failed or not checked):
        raise ValueError("good, and its checks are not")
    if fields.outcome.is_good and (data["failure"] is not None or data["blocked_by"]):
        raise ValueError("good, and something stands in its way")
    if (fields.outcome is Outcome.FAIL and not failed) or (
        fields.outcome is Outcome.BLOCKED and not data["blocked_by"]
    ):
        raise ValueError("bad, and nothing says why")
    if path.stem != fields.texts["cell"]:
        raise ValueError("another name")
    return fields


def find_checks(text: bytes) -> tuple[int, int]:
    """Where the checks of a text begin and where what follows them does, by its layout.

    In a text laid out as `receipt_file` does it, two spaces behind a line end begin a key of the receipt itself: no
    string of JSON holds a line end.

    Raises:
        ValueError: it has no checks, or in another place.
    """
    start, rest = text.find(_CHECKS), text.rfind(_AFTER_CHECKS)
    if start < 0 or rest < start:
        raise ValueError("no checks, or in another place")
    return start, rest


def _cut_lists(text: bytes) -> tuple[bytes, slice]:
    """The text with null for each long list that holds something, and where the checks stand."""
    start, rest = find_checks(text)
    head, tail = text[: start + len(_CHECKS) - 1], text[rest:]
    if text.startswith(b"],", start + len(_CHECKS)):
        pieces, position = [head, b"[],"], 0
    elif text.endswith(_END_OF_LIST + b",", 0, rest):
        pieces, position = [head, b"null,"], 0
    else:
        raise ValueError("checks without an end")
    for opening in _LISTS:
        start = tail.find(opening + b"\n", position)
        if start < 0:
            continue
        end = tail.find(_END_OF_LIST, start)
        if end < 0:
            raise ValueError("a list without an end")
        pieces += [tail[position : start + len(opening) - 1], b"null"]
        position = end + len(_END_OF_LIST)
    return b"".join([*pieces, tail[position:]]), slice(len(head), rest)


def _take(data: dict[str, Any], *, validated: bool) -> Fields:
    """The fields out of a receipt's JSON; each held to its type."""
    machine = data["machine"]
    texts = {name: data[name] for name in TEXTS} | {name: data.get(name, "") for name in LATER_TEXTS}
    texts |= {"host": machine.get("host", ""), "gpu": machine.get("gpu", ""), "schema_id": data["schema_id"]}
    if not all(isinstance(value, str) for value in texts.values()):
        raise TypeError("no text")
    if texts["schema_id"] not in READABLE or texts["cell"] != cell_id(texts["stack"], texts["target"], texts["probe"]):
        raise ValueError("another schema, or another cell")
    seconds = {name: _number(value) for name, value in data["seconds"].items()}
    compiles = [_number(value) for value in data["jit"]["after"].values()]
    after, memory = int(_number(sum(compiles))), _number(data["peak_memory_mib"])
    if min([memory, *compiles, *seconds.values()]) < 0:
        raise ValueError("a number below nothing")
    if any(find_timing_faults(map(_timing, data.get("timings", ())))):
        raise ValueError("a median that is not that of its rounds, or a timing twice")
    numbers = {f"seconds_{name}": seconds[name] for name in ("total", "probe") if name in seconds}
    numbers |= {"peak_memory_mib": memory} if memory else {}
    numbers |= {"compiles_after": float(after)}
    numbers |= {f"timing:{_text(row['name'])}": _number(row["median_ms"]) for row in data.get("timings", ())}
    numbers |= _take_training(data.get("training", ()))
    return Fields(texts, Outcome(data["outcome"]), memory, after, seconds, numbers, validated)


def _take_training(records: list[dict[str, Any]]) -> dict[str, float]:
    """Of the run that the cell is about, which is the first; the others are what it is compared with."""
    if not records:
        return {}
    record = records[0]
    times = [step["seconds"] for step in record["steps"]]
    whole, phases = _number(record["whole_ns"]), record["phases_ns"]
    numbers = {"tokens_per_second": _number(record["tokens_per_second"])}
    numbers |= {"goodput": _number(phases.get("step", 0)) / whole} if whole else {}
    # The first step compiles and warms up, as in `TrainingRecord.step_median`.
    return numbers | ({"step_seconds": _number(statistics.median(times[1:] or times))} if times else {})


def _timing(row: dict[str, Any]) -> tuple[str, str, list[float], float]:
    return _text(row["name"]), _text(row["clock"]), [*map(_number, row["rounds_ms"])], _number(row["median_ms"])


def _refuse_constant(name: str) -> float:
    raise ValueError(f"the number {name}")


_DECODER: Final = json.JSONDecoder(parse_constant=_refuse_constant)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("no text")
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("no number")
    if not -_LARGEST < (number := float(value)) < _LARGEST:  # nor is NaN
        raise ValueError(f"the number {number:g}")
    return number
