"""What a report site counts: each receipt once, each run at its date, and no score that a newer selftest denies."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from megacpp_validate.evidence.index import read_store
from tests.report.test_selftest import CLEAN, GOOD, SURVIVOR

from megacpp_validate.canary.dynamic.score import Evidence, Rate, SuiteScore, score_selftest
from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.catalog.needs import read_needs
from megacpp_validate.cli.gate.report_sources import Judge, find_outdated, find_rates, find_scores, read_rows
from megacpp_validate.evidence.selftest import SelftestResult
from megacpp_validate.evidence.store import read_receipt
from megacpp_validate.report.results import Result
from megacpp_validate.report.site import pages as site_pages
from megacpp_validate.report.site.environments import Environment, merge_facts, pair_facts
from megacpp_validate.report.site.paths import cell_page
from megacpp_validate.report.site.trends import find_trends
from megacpp_validate.report.site.values import SiteFacts, SiteRow
from megacpp_validate.report.site.whole import StackSeen
from tests.report.reading import Page
from tests.report.site_stores import EVIDENCE, NOW, add, make_site
from tests.report.test_site_truth import CELL, GREEN, RED, arrange

TIMED = replace(GREEN, probe_seconds=1.0)
DAYS = ("2026-11-19T00:00:00+00:00", "2026-11-20T00:00:00+00:00", "2026-11-21T00:00:00+00:00")


@pytest.mark.parametrize(
    ("row", "counted"),
    [
        (TIMED, True),
        (replace(TIMED, same_as="good/a.json"), False),
        (replace(TIMED, started=""), False),
        (replace(TIMED, started=DAYS[0][:-6]), False),  # without a zone
        (replace(TIMED, contradicts="b"), False),
        (replace(TIMED, only_times=True), False),
        (replace(TIMED, started="2999-01-01T00:00:00+00:00"), False),
    ],
)
def test_what_is_a_point_of_a_trend(row: SiteRow, counted: bool) -> None:
    older = (replace(TIMED, started=day, run=day[:10]) for day in DAYS[:2])
    (trend,) = find_trends(arrange(*older, row))
    assert len(trend.points) == 2 + counted


def test_of_copies_the_first_stands_for_all() -> None:
    copy = replace(RED, run="zz", path="zz/a.json", same_as=RED.path)
    for rows in ((RED, copy), (copy, RED)):
        cell = arrange(*rows)
        assert (cell.newest, cell.receipts, cell.copies, cell.not_good, cell.earlier) == (RED, 1, 1, 1, ())
    undated = replace(GREEN, started="", run="undated")
    again = replace(GREEN, run="zz", path="zz/a.json", same_as=GREEN.path)
    assert arrange(GREEN, undated, again, replace(RED, started=DAYS[0])).earlier == (replace(RED, started=DAYS[0]),)


def test_a_site_counts_as_the_history_does(catalog: Catalog, tmp_path: Path) -> None:
    store = tmp_path / "store"
    first = read_receipt(EVIDENCE / "h200" / "te2.20.2" / f"{CELL}.json")
    for day, seconds in zip(DAYS, (5.0, 5.0, 30.0), strict=True):
        add(store / day[:10], replace(first, started=day, seconds={"probe": seconds, "total": 60.0}))
    for name in ("archive", "backup"):  # the slow run is then half of all files, and no news
        shutil.copytree(store / DAYS[2][:10], store / name)
    for number in range(2):
        add(store / f"undated{number}", replace(first, started="", seed=number, seconds={"probe": 30.0}))
    make_site(catalog, store, tmp_path / "site")
    text = Page((tmp_path / "site" / cell_page(CELL)).read_text()).text
    assert "History: 5 receipts, and 2 more of the same bytes" in text
    assert "30 s, 6.00 x the median of 2 earlier (5 s)" in text
    assert text.count("· copy") == 2
    index, _ = read_store(store, tmp_path / "index.sqlite")
    assert [point.value for point in index.trend(CELL, "seconds_probe").points] == [5.0, 5.0, 30.0]


def test_a_copy_is_no_second_run_that_shows_the_noise(catalog: Catalog, tmp_path: Path) -> None:
    name = "te2.20.2-h200-attention"
    receipt = read_receipt(EVIDENCE / "h200" / "te2.20.2" / f"{name}.json")
    add(tmp_path / "store" / "run", receipt)

    def noise() -> set[bool]:
        rows, _, _ = read_rows(tmp_path / "store", tmp_path / "index.sqlite")
        judge = Judge(catalog, read_needs([module.id for module in catalog.modules]), rows, tmp_path / "store")
        sides = (StackSeen(stack, {"attention": receipt}) for stack in ("te2.20.1", "te2.20.2"))
        return {row.noise > 0 for row in judge("h200", *sides).timings}

    shutil.copytree(tmp_path / "store" / "run", tmp_path / "store" / "run" / "again")
    assert noise() == {False}
    add(tmp_path / "store" / "run" / "again", replace(receipt, started=NOW))
    assert noise() == {True}


def test_training_in_a_doubted_cell_is_told_so(catalog: Catalog, tmp_path: Path) -> None:
    smoke = read_receipt(EVIDENCE / "smoke" / "small" / "te2.20.2-h200-smoke_small_delayed.json")
    for run, why in (("a", "one"), ("b", "other")):
        add(tmp_path / "store" / run, replace(smoke, requested_because=why))
    make_site(catalog, tmp_path / "store", tmp_path / "site")
    source = (tmp_path / "site" / "training.html").read_text()
    assert "1 training run, 1 of them in a cell that is not good or in doubt" in Page(source).text
    assert Page(source).text.count("▲ pass, contradicted") == 2  # in the table, and over its curve
    assert 'class="answer risk"' in source
    assert "✓ pass" not in Page(source).text


def test_the_order_of_receipts_is_no_difference_of_environments() -> None:
    one, other = (
        [Environment("c", "s", "t", probe, "r", "", {"commit": commit, "tool": "x"}) for probe, commit in order]
        for order in ((("a", "1"), ("b", "2")), (("a", "2"), ("b", "1")))
    )
    assert [pair.differs for pair in pair_facts(merge_facts(one), merge_facts(other))] == [False, False]
    assert merge_facts(one)["commit"] == "1 | 2"
    assert pair_facts(merge_facts(one), merge_facts(one[:1]))[0].differs


FULL = {GOOD.mutant.id, SURVIVOR.mutant.id}
RED_TABLE = replace(CLEAN, mutants=(GOOD, SURVIVOR), finished_at="2026-11-22T20:00:00+00:00")
GREEN_TABLE = replace(RED_TABLE, mutants=(GOOD, replace(GOOD, mutant=SURVIVOR.mutant, blamed=("permute",))))
OF_TE = score_selftest(CLEAN, Evidence(source="te.json"))[0].model_copy(update={"id": "te-blame"})


def publish(table: SelftestResult, day: str) -> SuiteScore:
    rates = score_selftest(
        replace(table, finished_at=day), Evidence(source="docs/selftest.json", committed="2026-11-22")
    )
    return SuiteScore(rates=(*rates, OF_TE))


def tell_score(read: dict[str, Result | SuiteScore]) -> tuple[tuple[Rate, ...], str]:
    """The rates that a site shows, and the text of the page about them."""
    rates = find_rates(read, FULL, NOW)
    facts = SiteFacts(
        "store", "a test", NOW, (), (), scores=find_scores(read), rates=rates, outdated=find_outdated(read, rates),
        mutants=frozenset(FULL),
    )  # fmt: skip
    table, text = (
        Page(render(facts)).text for render in (lambda of: site_pages.render_index(of, ()), site_pages.render_score)
    )
    for said in ("▲ outdated", "may be newer"):
        assert (said in table) == (said in text)  # the first page hides nothing of it
    return rates, text


@pytest.mark.parametrize("day", ["2026-11-21T00:00:00+00:00", "2026-11-22T00:00:00+00:00", "", "2999-01-01"])
def test_a_published_score_does_not_hide_a_newer_selftest(day: str) -> None:
    rates, text = tell_score({"score.json": publish(GREEN_TABLE, day), "selftest.json": RED_TABLE})
    assert [(rate.id, rate.hits, rate.trials) for rate in rates] == [
        ("kill-rate", 1, 2), ("blame-accuracy", 1, 1), ("false-alarms", 0, 200), ("te-blame", 1, 1),
    ]  # fmt: skip
    assert "did not find everything" in text
    assert "▲ outdated It was published as 2 of 2" in text
    assert re.search(r"turn a probe red\s*1 of 2\s*50.0%", text)


def test_a_later_published_score_stays() -> None:
    later = publish(RED_TABLE, "2026-11-22T23:00:00+00:00")
    older = replace(GREEN_TABLE, finished_at=DAYS[0])
    rates, text = tell_score({"score.json": later, "selftest.json": older})
    assert rates == later.rates
    assert "did not find everything" in text  # although the kill table that lies here did
    assert "outdated" not in text
    same = publish(GREEN_TABLE, GREEN_TABLE.finished_at)
    rates, text = tell_score({"score.json": same, "selftest.json": GREEN_TABLE})
    assert rates == same.rates
    assert "The selftest found every planted fault" in text
    assert find_rates({"score.json": same}, FULL, NOW) == same.rates


def test_a_newer_run_of_some_mutants_is_named() -> None:
    published = publish(GREEN_TABLE, DAYS[2])
    part = replace(RED_TABLE, mutants=(SURVIVOR,))
    rates, text = tell_score({"score.json": published, "part.json": part})
    assert rates == published.rates
    assert re.search(r"part\.json may be newer than these rates, and is of 1 of 2 mutants of the matrix", text)
    _, text = tell_score({"score.json": published, "part.json": replace(part, finished_at=DAYS[0])})
    assert "may be newer" not in text
