"""A layer that its own probe finds right, and another one sees to be wrong: it computes in high precision where low was
asked for, and whoever only holds it to bounds is content.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from ...evidence.receipt import Receipt
from .blame import Case
from .explain import FIREWALL, WITNESSES

_APPLIED: Final = re.compile(r"fp8\.(\w+)\.\w+\.applied$")
_ROUNDED: Final = re.compile(r"fp8\.(\w+)\..*\.rounded$")
_RAN: Final = "low-precision-ran"


def name_the_layer(case: Case, receipts: Mapping[str, Receipt]) -> Case:
    """The case of the layer that the firewall's probe looks through, where that layer alone leaves the scope.

    The firewall saw no low precision in it, in recipes in which another module shows that it ran: so the scope is well.

    Args:
        case: as it was filed.
        receipts: of all modules.
    """
    layer = WITNESSES[FIREWALL]
    if case.first.module != FIREWALL or case.shared is not None or layer not in receipts:
        return case
    if not receipts[layer].outcome.is_good or any(red.module == layer for red in case.others):
        return case
    if not _missed(case.first.receipt) & _shown(receipts):
        return case
    return Case(replace(case.first, module=layer), case.members)


def _missed(receipt: Receipt) -> set[str]:
    """Recipes that did not run in the layer; empty where a check of the scope itself failed."""
    if any(not check.passed and check.name.startswith(("scope.", "accessor.", "support.")) for check in receipt.checks):
        return set()
    failed = {check.name: {part.name for part in check.parts if not part.passed} for check in receipt.checks}
    found = ((_APPLIED.match(name), parts) for name, parts in failed.items())
    missed = {one[1]: _RAN in parts for one, parts in found if one and parts}
    return set(missed) if missed and all(missed.values()) else set()


def _shown(receipts: Mapping[str, Receipt]) -> set[str]:
    """Recipes that other modules show to have run."""
    checks = (check for receipt in receipts.values() for check in receipt.checks if receipt.probe != FIREWALL)
    rounded = [(found[1], check.passed) for check in checks if (found := _ROUNDED.match(check.name))]
    return {recipe for recipe, passed in rounded if passed} - {recipe for recipe, passed in rounded if not passed}
