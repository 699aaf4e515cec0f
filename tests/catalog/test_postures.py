"""The posture of a run: what is shipped reads clean and is a run that can be, and a wrong file is told as a whole."""

from __future__ import annotations

from typing import Any

import pytest

from megacpp_validate.bridge.features import PRESETS
from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.catalog.postures import Posture, merge_orders, read_postures, settings_of
from megacpp_validate.training.smoke.order import SmokeOrder


@pytest.fixture(scope="module")
def posture(catalog: Catalog) -> Posture:
    return read_postures(catalog)


def order_of(settings: dict[str, Any]) -> SmokeOrder:
    return SmokeOrder(**merge_orders({"plan": {}, "size": "small", "steps": 8}, settings))


def test_every_feature_has_two_arms_that_differ_in_the_same_fields(posture: Posture) -> None:
    for feature in posture.features:
        off, on = feature.off.as_order, feature.on.as_order
        assert off != on, feature.id
        for arm in (off, on):
            assert arm.keys() == on.keys(), feature.id
            assert all(arm[key].keys() == on[key].keys() for key in on if isinstance(on[key], dict)), feature.id
        assert feature.table == "further" or feature.id in getattr(posture, feature.table)


def test_every_arm_is_an_order_that_can_be(posture: Posture) -> None:
    for feature in posture.features:
        for arm in (feature.off, feature.on):
            for switches in (None, dict.fromkeys(posture.switches, False)):
                settings = merge_orders(settings_of(posture, switches), feature.both.as_order)
                order = order_of(merge_orders(settings, arm.as_order))
                order.refuse()
                assert order.read_features() is not None


def test_the_posture_of_a_run(posture: Posture) -> None:
    order = order_of(settings_of(posture))
    forms, features = order.read_forms(), order.read_features()
    assert (forms.moe, forms.compiled_scan, forms.fused_residual_norm, forms.fused_mla_ingress) == (
        "jagged", True, True, True,
    )  # fmt: skip
    assert features == PRESETS["production"]
    assert order.changes == {}  # a tax that is off leaves the size as it is
    assert (order.profile, order.watch, order.audit) == (True, True, False)


def test_a_tax_and_a_further_feature_are_on_where_they_are_asked_for(posture: Posture) -> None:
    order = order_of(settings_of(posture, {"trajectory_loss": True, "recompute": True, "fused_mamba": False}))
    assert order.read_size().trajectory_coefficient > 0
    assert order.read_forms().recompute
    assert not order.read_features().mamba_in_projection
