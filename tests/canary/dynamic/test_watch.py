"""Which releases the watch judges: each once, whatever the index does in between."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version

from megacpp_validate.canary.dynamic.upgrade_result import UpgradeResult
from megacpp_validate.canary.dynamic.watch import (
    IndexNotBelieved,
    WatchPlan,
    choose_last_good,
    decide_release,
    plan_gpu_steps,
    plan_watch,
    put_release,
)
from megacpp_validate.canary.dynamic.watch_result import Listed, Standing, WatchState
from megacpp_validate.canary.firewall.result import FirewallCase, FirewallOutcome, FirewallResult
from megacpp_validate.canary.static.findings import ChangeKind, Finding, Impact, ReleaseSource, StaticResult
from megacpp_validate.evidence.values import Cause

ONE, OTHER = "1" * 64, "2" * 64


def listed(*versions: str, **changes: object) -> list[Listed]:
    return [
        Listed(version=version, has_wheel=True, wheel_sha256=ONE).model_copy(update=changes) for version in versions
    ]


def look(rows: list[Listed], state: WatchState | None = None, *, prereleases: bool = False) -> WatchPlan:
    return plan_watch(
        rows, state, pinned="2.20.2", prereleases=prereleases, distribution="transformer-engine", now="2026-11-22"
    )


def judge_all(plan: WatchPlan, code: int = 0) -> WatchState:
    state = plan.state
    for row in plan.judge:
        against = choose_last_good(state, "2.20.2", row.version)
        state = put_release(
            state, row.model_copy(update={"standing": Standing.JUDGED, "code": code, "against": against})
        )
    return state


def standing(state: WatchState) -> dict[str, str]:
    return {row.version: row.standing.value for row in state.releases}


def test_a_first_run_judges_what_is_newer_than_the_pin_and_a_second_one_nothing() -> None:
    plan = look(listed("2.21.0", "2.17.1", "2.20.2", "2.20.10", "2.9.0"))
    assert [row.version for row in plan.judge] == ["2.20.10", "2.21.0"]  # by version, not by letters
    assert standing(plan.state)["2.17.1"] == "known"
    again = look(listed("2.21.0", "2.17.1", "2.20.2", "2.20.10", "2.9.0"), judge_all(plan))
    assert (again.judge, again.changed) == ((), ())


def test_a_patch_of_an_older_series_is_new_too() -> None:
    state = judge_all(look(listed("2.17.1", "2.20.2")))
    (row,) = look(listed("2.17.1", "2.17.2", "2.20.2"), state).judge
    assert row.version == "2.17.2"
    assert choose_last_good(state, "2.20.2", "2.17.2") == "2.20.2"  # nothing older is known to be good


@pytest.mark.parametrize("name", ["2.21.0rc1", "2.21.0.dev3", "2.21.0a1"])
def test_a_pre_release_is_left_out_by_rule_and_told(name: str) -> None:
    plan = look(listed("2.20.2", name))
    assert (plan.judge, standing(plan.state)[name]) == ((), "left-out")
    assert "pre-release" in plan.changed[0].reason
    assert [row.version for row in look(listed("2.20.2", name), prereleases=True).judge] == [name]
    assert look(listed("2.20.2", "2.20.2.post1")).judge  # a post-release is a release


def test_a_release_without_its_wheel_waits_and_is_judged_when_it_is_there() -> None:
    first = look([*listed("2.20.2"), *listed("2.21.0", has_wheel=False)])
    assert first.judge == ()
    assert "no pure-Python wheel" in first.changed[0].reason
    (row,) = look(listed("2.20.2", "2.21.0"), first.state).judge
    assert (row.version, row.reason) == ("2.21.0", "")


def test_one_that_is_yanked_before_it_was_judged_is_left_out_until_it_is_back() -> None:
    first = look([*listed("2.20.2"), *listed("2.21.0", yanked="wrong wheel")])
    assert first.judge == ()
    assert "wrong wheel" in first.changed[0].reason
    assert look(listed("2.20.2", "2.21.0"), first.state).judge


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (listed("2.20.2"), "deleted"),
        ([*listed("2.20.2"), *listed("2.21.0", yanked="bad sums")], "yanked: bad sums"),
        ([*listed("2.20.2"), *listed("2.21.0", yanked="")], "yanked: no reason"),
        ([*listed("2.20.2"), *listed("2.21.0", wheel_sha256=OTHER)], "another file"),
    ],
)
def test_what_happens_to_a_judged_release_is_told_once_and_nothing_is_judged_again(
    now: list[Listed], said: str
) -> None:
    state = judge_all(look(listed("2.20.2", "2.21.0")))
    plan = look(now, state)
    assert plan.judge == ()
    assert said in plan.changed[0].withdrawn
    assert look(now, plan.state).changed == ()
    assert plan_gpu_steps(plan.state, ["h200"]) == ()  # nobody runs what was withdrawn
    assert look(listed("2.20.2", "2.21.0"), plan.state).changed[0].withdrawn == ""


def test_an_index_without_the_pinned_release_is_not_believed() -> None:
    state = judge_all(look(listed("2.20.2", "2.21.0")))
    with pytest.raises(IndexNotBelieved, match=r"not 2\.20\.2, which is pinned"):
        look(listed("2.21.0"), state)
    with pytest.raises(IndexNotBelieved):
        look([], state)


def test_only_what_was_open_on_a_gpu_too_is_a_release_to_judge_against() -> None:
    state = judge_all(look(listed("2.20.2", "2.21.0", "2.22.0")))
    assert choose_last_good(state, "2.20.2", "2.23.0") == "2.20.2"
    seen = next(row for row in state.releases if row.version == "2.21.0")
    better = put_release(state, seen.model_copy(update={"gpu_code": 0}))
    assert choose_last_good(better, "2.20.2", "2.23.0") == "2.21.0"
    assert choose_last_good(better, "2.20.2", "2.21.0") == "2.20.2"  # never against itself
    for change in ({"gpu_code": 1}, {"gpu_code": 0, "code": 1}, {"gpu_code": 0, "withdrawn": "deleted"}):
        worse = put_release(state, seen.model_copy(update=change))
        assert choose_last_good(worse, "2.20.2", "2.23.0") == "2.20.2", change


def answer(*cases: tuple[str, str], breaks: bool = False) -> UpgradeResult:
    finding = Finding(
        module="permute",
        modules=("permute",),
        kind=ChangeKind.REMOVED,
        impact=Impact.BREAKING,
        cause=Cause.API,
        symbol="a.b",
    )
    source = ReleaseSource(version="2.20.2", wheel="w", sha256="")
    findings = (finding,) if breaks else ()
    static = StaticResult(tool="t", old=source, new=source, downgrade=False, modules=(), findings=findings)
    rows = tuple(
        FirewallCase(case=release, damage="d", release=release, compiled="none", outcome=FirewallOutcome(outcome))
        for release, outcome in cases
    )
    firewall = FirewallResult(tool="t", python="3", torch="2", cases=rows)
    return UpgradeResult(tool="t", target="", tiers=("static", "firewall"), static=(static,), firewall=firewall)


@pytest.mark.parametrize(
    ("result", "code", "said"),
    [
        (answer(("2.20.2", "pass")), 0, ""),
        (answer(("2.20.2", "pass"), breaks=True), 1, ""),
        (answer(("2.20.2", "fail"), breaks=True), 1, ""),
        (answer(("2.20.2", "pass"), ("2.21.0", "fail")), 1, ""),
        # Seen on a machine under load: a case that hangs by plan was ended late, and 2.19.0 stood accused of it.
        (answer(("2.20.2", "fail"), ("2.21.0", "pass")), 4, "not 2.21.0's doing"),
        (answer(("2.20.2", "not-run")), 4, "did not run 2.20.2"),
    ],
)
def test_a_release_is_blamed_for_its_own_faults_alone(result: UpgradeResult, code: int, said: str) -> None:
    found, words = decide_release(result, "2.21.0")
    assert (found, bool(words)) == (code, bool(said))
    assert said in words


def test_what_no_gpu_has_seen_waits_for_each_target() -> None:
    state = judge_all(look(listed("2.20.2", "2.21.0")))
    assert [(step.old, step.new, step.target) for step in plan_gpu_steps(state, ["h200", "b200"])] == [
        ("2.20.2", "2.21.0", "h200"),
        ("2.20.2", "2.21.0", "b200"),
    ]


NAMES = ("2.17.2", "2.20.2", "2.20.3", "2.21.0", "2.21.0rc1", "2.22.0")
ROWS = st.tuples(st.sampled_from(NAMES), st.booleans(), st.sampled_from([None, "", "why"]))


@settings(max_examples=30)
@given(
    nights=st.lists(st.lists(ROWS, max_size=6, unique_by=lambda row: row[0]), min_size=1, max_size=4), data=st.data()
)
def test_no_release_is_judged_twice_and_the_order_of_a_listing_is_no_matter(
    nights: list[list[tuple[str, bool, str | None]]], data: st.DataObject
) -> None:
    state: WatchState | None = None
    seen: list[str] = []
    for night in nights:
        rows = [Listed(version=name, has_wheel=wheel, yanked=yanked) for name, wheel, yanked in night]
        rows += [] if any(row.version == "2.20.2" for row in rows) else listed("2.20.2")
        plan = look(rows, state)
        assert look(data.draw(st.permutations(rows)), state) == plan
        seen += [row.version for row in plan.judge]
        state = judge_all(plan)
        assert [row.version for row in state.releases] == sorted(standing(state), key=Version)
    assert len(seen) == len(set(seen))
