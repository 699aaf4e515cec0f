"""Receipts as rows of plain data, and what differs between two sets of rows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final, NamedTuple

HOME: Final = Path(__file__).resolve().parent
RENAMED: Final = HOME / "renamed.json"
# Speeds are timed only on request, states of other releases are loaded where they are, FlashAttention 4 is an extra.
_NOT_ALWAYS: Final = re.compile(r"speed|from\.|(attention\.)?fa4\b(?!\.present)")
CHECKS: Final = HOME.parents[1] / "matrix" / "checks.json"
GOOD: Final = ("pass", "expected-unsupported")
Row = dict[str, Any]
_MEASURED: Final = re.compile(r"(?<== )[^ ,;)]+|\d+\.\d+(e[-+]?\d+)?|\d+e[-+]\d+")


def row_of(receipt: Mapping[str, Any], *, measured: bool = True) -> Row:
    """Outcome, checks, backends and losses of a cell.

    Args:
        receipt: as its JSON file has it.
        measured: whether bounds that follow from measured values are kept; on a GPU these differ from run to run.
    """
    backends = {
        f"{row['path']}: {row['requested']}, {row['claimed']}, {'+'.join(row['observed'])}"
        for row in receipt.get("backends", ())
    }
    losses = {
        record["name"]: [[_hex(step["loss"]), _hex(step["grad_norm"])] for step in record["steps"]]
        for record in receipt.get("training", ())
    }
    return {
        "outcome": receipt["outcome"],
        "checks": {check["name"]: _check_row(check, measured=measured) for check in receipt["checks"]},
        "backends": sorted(backends),
        "losses": losses if measured else {},
    }


def _check_row(check: Mapping[str, Any], *, measured: bool) -> list[Any]:
    """`passed`, then part, bound, and where the bound comes from; values in it are left out."""
    parts = []
    for part in check["parts"]:
        from_values = part["name"].endswith("-native")
        bound = "" if part["bound"] is None or (from_values and not measured) else f"{part['bound']:.6g}"
        sign = ">=" if part.get("at_least") else "<="
        parts.append(f"{part['name']} {sign} {bound}: {_MEASURED.sub('#', part['derivation'])}")
    return [check["passed"], *parts]


def _hex(value: float | None) -> str:
    return "" if value is None else float(value).hex()


def differences(before: Mapping[str, Row], after: Mapping[str, Row], *, partly: bool = False) -> Iterator[str]:
    """What changed in the cells of `after`, and cells that vanished; names moved by `renamed.json` are no change.

    Args:
        before, after: cell -> row.
        partly: whether `after` may lack cells, speeds, and what a cell that was not run would have checked.
    """
    renamed = read_renamed()
    for cell, old in before.items():
        new = after.get(cell)
        if new is None or (partly and new["outcome"] == "not-run"):
            if not partly:
                yield f"{cell}: vanished"
            continue
        if old["outcome"] != new["outcome"]:
            yield f"{cell}: {old['outcome']} -> {new['outcome']}"
        rules = _rules_of(cell, renamed)
        expected: Row = {}
        for name, check in old["checks"].items():
            moved = _moved(name, rules)
            # A check with another bound, which its rule gives a reason for, keeps its verdict.
            expected[moved.name] = [check[0], *new["checks"].get(moved.name, [])[1:]] if moved.is_other else check
        expected.pop("", None)
        for name in expected.keys() | new["checks"].keys():
            was, now = expected.get(name), new["checks"].get(name)
            if was != now and not (partly and now is None and name.startswith("speed.")):
                yield f"{cell}: {name}: {_differing(was, now)}"
        if old["losses"] != new["losses"]:
            yield f"{cell}: losses: {old['losses']} -> {new['losses']}"
        paths = {one for one in set(old["backends"]) ^ set(new["backends"]) if not (partly and one.startswith("speed"))}
        yield from (f"{cell}: backend {'-' if one in old['backends'] else '+'} {one}" for one in sorted(paths))
    yield from (f"{cell}: new" for cell in after.keys() - before.keys())


def _rules_of(cell: str, renamed: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Mapping[str, Any]]:
    return [rule for cells, rules in renamed.items() if fnmatch(cell, cells) for rule in rules]


class _Moved(NamedTuple):
    name: str
    is_other: bool = False


def _moved(name: str, rules: Sequence[Mapping[str, Any]]) -> _Moved:
    """The new name of a check; "" where another one holds it."""
    for rule in rules:
        if found := re.fullmatch(rule["old"], name):
            return _Moved(found.expand(rule["new"]), rule.get("other_bound", False))
    return _Moved(name)


def _differing(was: list[Any] | None, now: list[Any] | None) -> str:
    if was is None or now is None:
        return "vanished" if now is None else "new"
    if was[0] != now[0] or len(was) != len(now):
        return f"{was} -> {now}"
    return "; ".join(f"{old} -> {new}" for old, new in zip(was, now, strict=True) if old != new)


def read_renamed() -> dict[str, list[dict[str, Any]]]:
    """Cells, with "*" -> rules: a pattern of old names, the new name ("": another check or test holds it), and why."""
    return dict(json.loads(RENAMED.read_text(encoding="utf-8")))


def read_rows(name: str) -> dict[str, Any]:
    """A recorded file: cell -> row."""
    kept = json.loads((HOME / f"{name}.json").read_text(encoding="utf-8"))
    derivations = kept.pop("derivations", {})
    for row in kept.values():
        for check in row["checks"].values():
            check[1:] = [_put(part, derivations.__getitem__) for part in check[1:]]
    return dict(kept)


def required_evidence() -> dict[str, dict[str, Row]]:
    """Target -> probe -> what every good run of the cell leaves: checks with their number of parts, and backends.

    Without what depends on an option, on other releases or on an extra package.
    """
    renamed, found = read_renamed(), dict[str, dict[str, Row]]()
    # A cell that fails made all of its checks; on a CPU training is cut short, and fails for that.
    for name, stack, whole in (("h200", "te2.20.2-h200-", (*GOOD, "fail")), ("cpu", "native-cpu-", GOOD)):
        for cell, row in read_rows(name).items():
            rules = _rules_of(cell, renamed)
            checks = {
                _moved(check, rules).name: len(parts) - 1
                for check, parts in row["checks"].items()
                if not _NOT_ALWAYS.match(check)
            }
            checks.pop("", None)
            if cell.startswith(stack) and "." not in cell.removeprefix(stack) and row["outcome"] in whole:
                paths = {path for one in row["backends"] if not _NOT_ALWAYS.match(path := one.partition(": ")[0])}
                kept = {"checks": dict(sorted(checks.items())), "backends": sorted(paths)}
                found.setdefault(name, {})[cell.removeprefix(stack)] = kept
    return found


def write_evidence() -> None:
    """Write what the release gate requires of each cell to the matrix, a line a probe."""
    targets = (
        f' "{target}": {{\n' + ",\n".join(f'  "{probe}": {json.dumps(row)}' for probe, row in probes.items()) + "\n }"
        for target, probes in required_evidence().items()
    )
    CHECKS.write_text("{\n" + ",\n".join(targets) + "\n}\n", encoding="utf-8")


def write_rows(name: str, rows: Mapping[str, Row]) -> None:
    """Write cell -> row with one check a line, so that a change can be read; derivations once, at the end."""
    numbers: dict[str, str] = {}
    kept: dict[str, Any] = deepcopy(dict(rows))
    for row in kept.values():
        for check in row["checks"].values():
            check[1:] = [_put(part, lambda text: numbers.setdefault(text, f"d{len(numbers)}")) for part in check[1:]]
    whole = {**kept, "derivations": {number: text for text, number in numbers.items()}}
    (HOME / f"{name}.json").write_text(f"{_lines(whole)}\n", encoding="utf-8")


def _put(part: str, other: Callable[[str], str]) -> str:
    """A part with other words for its derivation."""
    bound, _, derivation = part.partition(": ")
    return f"{bound}: {other(derivation)}"


def _lines(value: Any, indent: int = 1) -> str:
    if not isinstance(value, Mapping) or not value:
        return json.dumps(value)
    lines = (f"{' ' * indent}{json.dumps(key)}: {_lines(value[key], indent + 1)}" for key in sorted(value))
    return "{\n" + ",\n".join(lines) + f"\n{' ' * (indent - 1)}}}"
