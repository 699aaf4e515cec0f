"""Which cells a session has, and what is asked of them: decided before anything is started."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.environments.interpreter import Facts
from megacpp_validate.environments.plan import choose_canary_probes, plan_blank, plan_row, why_not_here
from megacpp_validate.errors import WrongArguments
from megacpp_validate.probes.order import Order, read_order
from tests.environments.places import H200, H200_HOST, target_of


def h200(catalog: Catalog, seed: int = 0) -> Order:
    return plan_blank(target_of(catalog, "h200"), H200_HOST, {}, seed=seed)


REQUESTS: dict[str, tuple[str, dict[str, str], dict[str, str], tuple[str, str], str]] = {
    "te": ("h200", {}, {}, ("te2.20.2", "te"), "h200"),
    "local-version": ("h200", {"te": "2.20.2+cu13"}, {}, ("te2.20.2", "te"), "h200"),
    "absent": ("h200", {"te": "", "te_folder": ""}, {}, ("te-absent", "te"), "h200"),
    "no-metadata": ("h200", {"te": ""}, {}, ("te-unknown", "te"), "h200"),
    "switched-off": ("h200", {}, {"MEGACPP_DISABLE_TE": "1"}, ("native", "native"), "MEGACPP_DISABLE_TE=1"),
    "oddly-switched-off": ("h200", {}, {"MEGACPP_DISABLE_TE": "Please"}, ("native", "native"), "Please"),
    "not-switched-off": ("h200", {}, {"MEGACPP_DISABLE_TE": " No "}, ("te2.20.2", "te"), "h200"),
    "cpu-with-te-installed": ("cpu", {}, {}, ("native", "native"), "cpu"),
}  # fmt: skip


@pytest.mark.parametrize(("target", "facts", "variables", "asked", "because"), REQUESTS.values(), ids=REQUESTS)
def test_what_is_requested_and_why(
    target: str,
    facts: dict[str, str],
    variables: dict[str, str],
    asked: tuple[str, str],
    because: str,
    catalog: Catalog,
) -> None:
    there = H200_HOST.model_copy(update=facts)
    order = plan_blank(target_of(catalog, target), there, variables)
    assert (order.stack, order.requested) == asked
    assert because in order.requested_because


def test_the_cells_of_fp8_are_told_all_they_need(catalog: Catalog) -> None:
    orders = [plan_row(h200(catalog, seed=5), row) for row in catalog.fp8]
    first = orders[0]
    assert (first.cell, first.code) == ("te2.20.2-h200-fp8_delayed", "fp8.recipe")
    assert (first.settings, first.bridge_modules[0]) == ({"recipe": "delayed"}, "imports")
    assert read_order(json.dumps(asdict(first))) == first
    assert [order.probe for order in orders if not order.needs_te] == ["fp8_torchao"]


def test_compositions_come_after_the_modules_and_reach_all_of_them(catalog: Catalog) -> None:
    names = [row.id for row in choose_canary_probes(catalog, ())]
    assert names == [*(module.id for module in catalog.modules), "moe_smoke", "fp8_state"]
    assert [row.id for row in choose_canary_probes(catalog, ("moe_smoke", "imports"))] == ["imports", "moe_smoke"]
    order = plan_row(h200(catalog), catalog.compositions[0])
    assert order.bridge_modules == tuple(module.id for module in catalog.modules)
    with pytest.raises(WrongArguments, match=r"'smoke'.*Next step.*moe_smoke"):
        choose_canary_probes(catalog, ("smoke",))


def other_gpu(name: str, capability: str) -> dict[str, object]:
    return {"gpu": H200.model_copy(update={"name": name, "capability": capability})}


MACHINES: dict[str, tuple[str, dict[str, object], list[str]]] = {
    "h200-on-an-h200": ("h200", {}, []),
    "h200-on-a-laptop": ("h200", {"gpu": None, "why_no_gpu": "no driver"}, ["sm_90", "no driver", "cpu_parity"]),
    "h200-on-a-b200": ("h200", other_gpu("NVIDIA B200", "10.0"), ["sm_90", "NVIDIA B200 is sm_100"]),
    "gb10-on-an-h200": ("gb10", {}, ["aarch64", "x86_64"]),
    "h200-on-a-gh200": ("h200", {"machine": "aarch64"}, ["x86_64", "aarch64"]),
    "cpu-anywhere": ("cpu", {"gpu": None, "machine": "riscv64"}, []),
}


@pytest.mark.parametrize(("target", "facts", "words"), MACHINES.values(), ids=MACHINES)
def test_another_machine_than_the_target_is_told(
    target: str, facts: dict[str, object], words: list[str], catalog: Catalog
) -> None:
    there: Facts = H200_HOST.model_copy(update=facts)
    reason = why_not_here(target_of(catalog, target), there)
    assert bool(reason) == bool(words)
    for word in words:
        assert word in reason
    assert not reason or "Next step" in reason
