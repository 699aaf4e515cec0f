"""Blame: the first red module in dependency order; what depends on it is a cascade, any other a second culprit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megacpp_validate.catalog.bridge import BridgeModule, Catalog
from megacpp_validate.diagnosis.blame import blame
from megacpp_validate.diagnosis.culprits import blame_receipts
from megacpp_validate.evidence.receipt import Check, Outcome, Part, Receipt


def module(name: str, *depends_on: str) -> BridgeModule:
    return BridgeModule(id=name, files=["bridge/imports.py"], depends_on=list(depends_on), title=name, native=name)


# base <- left, right; left <- top
MODULES = (module("base"), module("left", "base"), module("right", "base"), module("top", "left"))


def receipt(probe: str, outcome: Outcome, blocked_by: str = "") -> Receipt:
    return Receipt(f"s-t-{probe}", "s", "t", probe, outcome, "", "te", blocked_by=blocked_by)


def file(receipts: list[Receipt], modules: Sequence[BridgeModule] = MODULES) -> dict[str, list[str]]:
    """Culprit -> what is filed under it."""
    return {case.first.module: [red.module for red in case.others] for case in blame(receipts, modules)}


TABLE: dict[str, tuple[dict[str, Outcome], dict[str, list[str]]]] = {
    "cascade": ({"base": Outcome.FAIL, "left": Outcome.ERROR}, {"base": ["left"]}),
    "cascade-over-a-good-one": ({"base": Outcome.FAIL, "left": Outcome.PASS, "top": Outcome.FAIL}, {"base": ["top"]}),
    "cascade-over-a-red-one": ({"left": Outcome.FAIL, "base": Outcome.FAIL, "top": Outcome.FAIL},
                               {"base": ["left", "top"]}),
    "siblings": ({"right": Outcome.FAIL, "left": Outcome.FAIL}, {"left": [], "right": []}),
    "a-sibling-is-no-cause": ({"right": Outcome.FAIL, "top": Outcome.FAIL}, {"right": [], "top": []}),
    "not-run-is-not-red": ({"base": Outcome.NOT_RUN, "left": Outcome.FAIL}, {"left": []}),
    "composition": ({"left": Outcome.FAIL, "moe_smoke": Outcome.FAIL}, {"left": ["moe_smoke"]}),
    "composition-alone": ({"left": Outcome.PASS, "moe_smoke": Outcome.FAIL}, {"moe_smoke": []}),
}  # fmt: skip


@pytest.mark.parametrize(("outcomes", "wanted"), TABLE.values(), ids=TABLE)
def test_blame(outcomes: dict[str, Outcome], wanted: dict[str, list[str]]) -> None:
    found = file([receipt(name, outcome) for name, outcome in outcomes.items()])
    assert (found, list(found)) == (wanted, list(wanted))


def test_a_blocked_cell_is_filed_under_what_blocks_it() -> None:
    receipts = [receipt("left", Outcome.FAIL), receipt("right", Outcome.BLOCKED, "s-t-left")]
    assert file(receipts) == {"left": ["right"]}


def test_a_blocked_cell_is_filed_under_the_cause_of_what_blocks_it() -> None:
    receipts = [receipt("base", Outcome.FAIL), receipt("left", Outcome.FAIL),
                receipt("right", Outcome.BLOCKED, "s-t-left")]  # fmt: skip
    assert file(receipts) == {"base": ["left", "right"]}


@pytest.mark.parametrize(("part", "cascades"), [("inputs", ("layer_spec",)), ("outputs", None)])
def test_what_an_evaluation_overwrites_is_wrong_later_in_a_higher_precision(
    catalog: Catalog, part: str, cascades: tuple[str, ...] | None
) -> None:
    failed = {"native_block": ("bf16.eval", part), "layer_spec": ("fp32.in_projection.forward", "relative-error")}
    receipts = [
        replace(receipt(name, Outcome.FAIL), checks=(Check(check, False, (Part(what, 2.0, 0.0, False, ""),)),))
        for name, (check, what) in failed.items()
    ]
    culprits = blame_receipts(receipts, catalog.modules, None)
    assert [(row.module, row.cascades) for row in culprits] == (
        [("native_block", cascades)] if cascades else [("native_block", ()), ("layer_spec", ())]
    )


def test_the_shipped_modules_blame_the_firewall_for_everything(catalog: Catalog) -> None:
    found = file([receipt(row.id, Outcome.FAIL) for row in catalog.modules], catalog.modules)
    assert found == {"imports": [row.id for row in catalog.modules[1:]]}


names = st.sampled_from(["base", "left", "right", "top", "moe_smoke", "other"])
receipts = st.lists(st.builds(receipt, names, st.sampled_from(Outcome), names.map("s-t-{}".format)))


@given(receipts)
def test_every_red_module_is_filed_once_and_nothing_else_is(given_receipts: list[Receipt]) -> None:
    filed = [name for culprit, others in file(given_receipts).items() for name in (culprit, *others)]
    red = {r.probe for r in given_receipts if not r.outcome.is_good and r.outcome is not Outcome.NOT_RUN}
    assert sorted(filed) == sorted(red)


@given(receipts, st.randoms())
def test_the_order_of_receipts_does_not_matter(given_receipts: list[Receipt], random: object) -> None:
    shuffled = list(given_receipts)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    # Receipts of one cell that differ only in what blocks them are told apart by nothing else.
    if len({r.cell for r in given_receipts}) == len(given_receipts):
        assert file(shuffled) == file(given_receipts)


def test_the_gate_names_a_red_composition_whose_modules_are_good(catalog: Catalog) -> None:
    found = blame_receipts(
        [receipt("attention", Outcome.PASS), receipt("moe_smoke", Outcome.FAIL)], catalog.modules, None
    )
    assert [culprit.module for culprit in found] == ["moe_smoke"]
