"""Members of enumerations, and what they stand for."""

from __future__ import annotations

import griffe


def enum_values(one: griffe.Object | None, other: griffe.Object | None) -> tuple[str, str] | None:
    """The values of an enumeration's member in two releases, where they differ."""
    if not isinstance(one, griffe.Attribute) or not isinstance(other, griffe.Attribute):
        return None
    if not is_enumeration(other.parent):
        return None
    values = _member_value(one), _member_value(other)
    return None if values[0] == values[1] or "auto" in values[0] + values[1] else values


def _member_value(member: griffe.Attribute) -> str:
    """The value of an enumeration's member, that of the other one where it is an alias."""
    holder = member.parent
    aliased = holder.members.get(str(member.value)) if isinstance(holder, griffe.Class) else None
    value = aliased.value if isinstance(aliased, griffe.Attribute) else member.value
    return " ".join(str(value).split())


def is_enumeration(holder: object) -> bool:
    """Whether a class is an enumeration."""
    return isinstance(holder, griffe.Class) and any(str(base).endswith(("Enum", "Flag")) for base in holder.bases)
