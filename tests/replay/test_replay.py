"""Decisions are as they were recorded; the slow groups, and every scenario of the large ones, with `--thorough`."""

from __future__ import annotations

import pytest

from .groups import GROUPS
from .harness import (
    NOT_RUN,
    OTHER_FORM,
    Group,
    Recording,
    Scenario,
    decide,
    differences,
    read_recording,
    record,
    terms,
)

LOST = (NOT_RUN, OTHER_FORM)


def replayed(group: Group, every: int) -> tuple[Recording, Recording]:
    """What was recorded of every so many scenarios, and what is decided now."""
    chosen = {one.id for number, one in enumerate(group.scenarios()) if number % every == 0}
    before = {key: row for key, row in read_recording(group.name).items() if key in chosen}
    return before, record(group, chosen)


@pytest.mark.parametrize("group", [one for one in GROUPS if not one.slow], ids=lambda one: one.name)
def test_decisions_are_as_recorded(group: Group, request: pytest.FixtureRequest) -> None:
    every = 1 if request.config.getoption("--thorough", default=False) else group.every
    _judge(*replayed(group, every))


@pytest.mark.thorough
@pytest.mark.parametrize("group", [one for one in GROUPS if one.slow], ids=lambda one: one.name)
def test_slow_decisions_are_as_recorded(group: Group) -> None:
    _judge(*replayed(group, 1))


def _judge(before: Recording, after: Recording) -> None:
    left = differences(before, after)
    lacking = [one for one in left if isinstance(one.after, dict) and NOT_RUN in one.after]
    if lacking and len(lacking) == len(left):
        pytest.skip(f"not-run: {len(lacking)} scenarios, the first: {lacking[0]}")
    assert not left, "\n".join(map(str, left))


@pytest.mark.parametrize("group", GROUPS, ids=lambda one: one.name)
def test_every_scenario_is_recorded(group: Group) -> None:
    assert read_recording(group.name).keys() == {one.id for one in group.scenarios()}


def test_an_altered_decision_is_reported() -> None:
    (group,) = (one for one in GROUPS if one.name == "policy")
    after = record(group, {"all"})
    before = {"all": read_recording("policy")["all"]}
    assert differences(before, after) == []
    before["all"]["production"] = "refused"
    (found,) = differences(before, after)
    assert (found.name, found.before, found.after) == ("production", "refused", "allowed")


def test_what_is_gone_new_or_cannot_be_read_is_a_difference() -> None:
    row = {"exit": 0, "a": 1}
    for before, after in (({"x": row}, {}), ({}, {"x": row}), *(({"x": row}, {"x": {key: ""}}) for key in LOST)):
        assert [one.name for one in differences(before, after)] == ["*"]
    assert [one.name for one in differences({"x": row}, {"x": {"exit": 0}})] == ["a"]
    broken = Scenario("x", ("fp8-policy", "--format", "json"), lambda ended: {"key": ended.data["no such key"]})
    assert OTHER_FORM in decide(broken)


def test_terms_are_what_a_sentence_names() -> None:
    text = "pin nvidia-cudnn-cu13>=9.22 (9.14.0 answers): see `fused_attn` in a/b.py:12, or set NVTE_FUSED_ATTN."
    assert terms(text) == ["9.14.0", "NVTE_FUSED_ATTN", "a/b.py:12", "fused_attn", "nvidia-cudnn-cu13>=9.22"]
