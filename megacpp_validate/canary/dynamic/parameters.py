"""Parameters of a layer of Transformer Engine that are there now and were not, or the other way round.

A layer that has a parameter more is met in three ways: it cannot take the place of a plain layer, weights cannot be
copied into it by name, and the names of a whole layer are other ones. All three tell the parameter, by its last word.
"""

from __future__ import annotations

import re
from typing import Final

from ...evidence.receipt import Check, Receipt
from .entries import entries_in
from .raised import Raised

_LISTED: Final = re.compile(r"'([\w.]+)': ")
_MISMATCH: Final = re.compile(r"parameters (\{[^{}]*\}), not (\{[^{}]*\})")
_NO_ATTRIBUTE: Final = re.compile(r"'(\w+)' object has no attribute '(\w+)'")
_PART: Final = re.compile(r"^(?:query|key|value|qkv)_")  # as the bridge splits the projection of the block
_UNKNOWN: Final = re.compile(r"(?:Unexpected|Missing) key\(s\) in state_dict: (.*?)\.?\s*(?:$|\n)")


def odd_parameters(receipt: Receipt, before: Receipt | None, raised: Raised | None) -> frozenset[str]:
    """Last words of the names of parameters that a failure is about; empty where it is about none.

    Args:
        receipt: of the failure.
        before: of the same probe; what it listed is taken for as it should be.
        raised: what the failure raised; None where only checks failed.
    """
    if raised is not None:
        return _of_text(raised)
    known = {check.name: check for check in before.checks} if before is not None else {}
    found: frozenset[str] = frozenset()
    for check in receipt.checks:
        if not check.passed:
            found |= odd_in_check(check, known.get(check.name))
    return found


def odd_in_check(check: Check, before: Check | None) -> frozenset[str]:
    """The same of one failed check that lists the parameters of a layer."""
    if not check.name.endswith(".parameters") or before is None:
        return frozenset()
    return _new_or_lost(_LISTED.findall(check.detail), _LISTED.findall(before.detail))


def _of_text(raised: Raised) -> frozenset[str]:
    if found := _MISMATCH.search(raised.text):
        return _new_or_lost(_LISTED.findall(found[1]), _LISTED.findall(found[2]))
    if raised.kind == "KeyError" and (key := re.fullmatch(r"'([\w.]+)'", raised.text.strip())):
        return frozenset({_last(key[1])})
    if (lost := _NO_ATTRIBUTE.match(raised.text)) and entries_in(lost[1]):
        return frozenset({lost[2]})
    if found := _UNKNOWN.search(raised.text):
        return frozenset(_last(name) for name in re.findall(r"[\w.]+", found[1]))
    return frozenset()


def meet(some: frozenset[str], others: frozenset[str]) -> bool:
    """Whether two failures are about one parameter; a weight that is split has the part's name before its own."""
    return bool({_PART.sub("", name) for name in some} & {_PART.sub("", name) for name in others})


def _new_or_lost(now: list[str], wanted: list[str]) -> frozenset[str]:
    return frozenset(_last(name) for name in set(now) ^ set(wanted))


def _last(name: str) -> str:
    return name.rpartition(".")[2]
