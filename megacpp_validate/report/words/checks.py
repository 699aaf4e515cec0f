"""What a check says: what was seen, what was allowed, and why."""

from __future__ import annotations

from megacpp_validate.evidence.receipt import Check, Part


def say_parts(check: Check, *, all_parts: bool = False) -> list[str]:
    """What was seen and allowed in a check, and where that comes from; of a red one only what is red."""
    shown = [part for part in check.parts if all_parts or not part.passed]
    lines = [f"{part.name} {_number(part.observed)}, {_say_bound(part)} = {part.derivation}" for part in shown]
    return lines + ([check.detail] if check.detail else [])


def say_check(check: Check) -> str:
    """A check with every part in one line."""
    said = "; ".join(say_parts(check, all_parts=True))
    return f"{check.name}: {said}" if said else check.name


def _say_bound(part: Part) -> str:
    return f"{'at least' if part.at_least else 'bound'} {_number(part.bound)}"


def _number(value: float | None) -> str:
    return "not a number" if value is None else f"{value:.3g}"
