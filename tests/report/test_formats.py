from __future__ import annotations

import json
import re
from xml.etree import ElementTree as ET

import pytest

from megacpp_validate.canary.static.findings import ChangeKind, Finding, Impact, StaticResult, Sweep
from megacpp_validate.report import machine
from megacpp_validate.report.github import annotations as github
from megacpp_validate.report.words.findings import LIMITS, consequence, headline, headline_of_fault, next_step, place
from tests.report.reading import READERS, Page, Result, flat, print_terminal, write_annotations, write_html, write_junit
from tests.report.results import CASCADE, DOWNGRADE, EMPTY, EVERYTHING, FIREWALL, GONE, PERMUTE, RESULTS, SWEEP, bare

STATIC = {**RESULTS, "everything": EVERYTHING}
ALL: dict[str, Result] = {**STATIC, "sweep": SWEEP, "firewall": FIREWALL}


def steps_of(result: Result) -> tuple[StaticResult, ...]:
    return result.steps if isinstance(result, Sweep) else (result,) if isinstance(result, StaticResult) else ()


@pytest.mark.parametrize("name", [*STATIC, "sweep"])
@pytest.mark.parametrize("form", READERS)
def test_no_finding_is_left_out(form: str, name: str) -> None:
    text = READERS[form](ALL[name])
    for step in steps_of(ALL[name]):
        for finding in step.findings:
            assert flat(headline(finding)) in text
        for fault in step.unchanged_faults:
            assert flat(headline_of_fault(fault)) in text


@pytest.mark.parametrize("name", STATIC)
@pytest.mark.parametrize("form", READERS)
def test_each_finding_says_what_it_does_and_what_to_do(form: str, name: str) -> None:
    result = STATIC[name]
    text = READERS[form](result)
    for finding in result.findings:
        assert flat(consequence(finding)) in text
        assert flat(next_step(finding, result.old.version)) in text


@pytest.mark.parametrize("form", ["terminal", "html", "junit", "summary"])
def test_each_finding_says_where(form: str) -> None:
    text = READERS[form](EVERYTHING)
    for finding in EVERYTHING.findings:
        for line in (finding.before, finding.after, *finding.call_sites):
            assert line is not None
            assert place(line) in text


@pytest.mark.parametrize("name", STATIC)
@pytest.mark.parametrize("form", ["terminal", "html", "junit", "summary", "json"])
def test_each_module_and_both_releases_are_there(form: str, name: str) -> None:
    result = STATIC[name]
    text = READERS[form](result)
    for row in result.modules:
        assert row.module in text
    assert result.old.version in text
    assert result.new.version in text


@pytest.mark.parametrize("form", ["terminal", "html", "junit", "summary", "json"])
def test_what_is_not_consumed_is_listed_where_asked_for(form: str) -> None:
    text = READERS[form](CASCADE)
    for change in CASCADE.changes_not_consumed:
        assert flat(change) in text


@pytest.mark.parametrize("form", ["terminal", "html", "junit", "summary"])
def test_the_limits_are_told(form: str) -> None:
    for result in (PERMUTE, SWEEP):
        text = READERS[form](result)
        assert all(limit.what in text for limit in LIMITS)


@pytest.mark.parametrize("form", READERS)
def test_nothing_changed_is_said_in_so_many_words(form: str) -> None:
    text = READERS[form](EMPTY)
    assert form == "json" or "Nothing that the bridge consumes changed." in text


@pytest.mark.parametrize("form", ["terminal", "html", "junit", "summary"])
def test_a_downgrade_is_called_one(form: str) -> None:
    assert "This is a downgrade: 2.15.0 is the newer release of the two." in READERS[form](DOWNGRADE)
    assert "downgrade" not in READERS[form](PERMUTE)


@pytest.mark.parametrize("form", ["terminal", "html", "junit", "summary"])
def test_cascades_stand_under_their_cause(form: str) -> None:
    assert "filed under imports" in READERS[form](CASCADE)
    if form in {"terminal", "html"}:  # and the cause names them
        assert "not culprits of their own: attention, native_block, layer_spec" in READERS[form](CASCADE)


@pytest.mark.parametrize("form", READERS)
def test_a_finding_whose_module_has_no_row_is_not_lost(form: str) -> None:
    stray = GONE.model_copy(update={"module": "stray", "modules": ("stray",)})
    assert flat(headline(stray)) in READERS[form](PERMUTE.model_copy(update={"findings": (stray,)}))


@pytest.mark.parametrize("form", READERS)
def test_a_release_that_could_not_be_read_is_told(form: str) -> None:
    text = READERS[form](SWEEP)
    assert "2.5.0" in text
    assert "the wheel has no folder transformer_engine" in text


@pytest.mark.parametrize("form", READERS)
def test_a_sweep_without_steps_is_no_success(form: str) -> None:
    empty = Sweep(steps=(), unreadable={"2.5.0": "gone"})
    assert "gone" in READERS[form](empty)
    assert 'class="answer good"' not in write_html(empty)


@pytest.mark.parametrize("form", READERS)
def test_no_case_of_the_firewall_is_left_out(form: str) -> None:
    text = READERS[form](FIREWALL)
    for case in FIREWALL.cases:
        assert case.case in text
        for problem in case.problems:
            assert problem in text


@pytest.mark.parametrize("form", ["terminal", "html", "junit", "json"])
def test_each_case_says_all_of_it(form: str) -> None:
    text = READERS[form](FIREWALL)
    for case in FIREWALL.cases:
        assert flat(case.damage) in text
        assert flat(case.reason) in text
        assert case.ended in text
        for path in case.native_paths.values():
            assert path in text


def test_html_counts_agree() -> None:
    page = Page(write_html(EVERYTHING))
    cards = [attributes for tag, attributes in page.tags if tag == "article"]
    assert len(cards) == len(EVERYTHING.findings) + len(EVERYTHING.unchanged_faults)
    assert "22 breaking, 22 risk, 22 harmless" in page.text


def test_sweep_grid_has_a_cell_for_every_step_and_module() -> None:
    page = Page(write_html(SWEEP))
    rows = [a for tag, a in page.tags if tag == "tr" and "step-row" in (a.get("class") or "")]
    cells = [a for tag, a in page.tags if "cell" in (a.get("class") or "").split()]
    assert len(rows) == len(SWEEP.steps) == 28
    assert len(cells) == 28 * 7
    happened = [a for a in rows if "uneventful" not in (a.get("class") or "")]
    assert len(happened) == 3


def test_each_cell_that_opens_has_its_panel() -> None:
    page = Page(write_html(SWEEP))
    wanted = [attributes["aria-controls"] for tag, attributes in page.tags if tag == "button"]
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert wanted
    assert len(ids) == len(set(ids))
    assert set(wanted) <= set(ids)
    panels = {a["id"] for tag, a in page.tags if tag == "tr" and a.get("class") == "panel-row"}
    assert panels == set(wanted)


@pytest.mark.parametrize("name", ALL)
def test_a_page_asks_for_nothing_from_elsewhere(name: str) -> None:
    source = write_html(ALL[name])
    page = Page(source)
    assert page.open == []
    for tag, attributes in page.tags:
        assert tag not in {"link", "img", "iframe", "object", "form"}
        assert not {"src", "srcset", "action"} & set(attributes)
        assert (attributes.get("href") or "#").startswith("#")
    assert not re.search(r"url\(|@import|https?://", source)


def test_links_within_a_page_lead_somewhere() -> None:
    page = Page(write_html(CASCADE))
    ids = {attributes.get("id") for _, attributes in page.tags}
    links = [attributes["href"] for tag, attributes in page.tags if tag == "a"]
    assert links
    assert all(str(link).removeprefix("#") in ids for link in links)


def test_junit_counts_agree() -> None:
    root = ET.fromstring(write_junit(CASCADE))
    assert root.attrib["tests"] == "7"
    assert root.attrib["failures"] == "4"
    failed = {case.attrib["name"] for case in root.iter("testcase") if case.find("failure") is not None}
    assert failed == {"imports", "attention", "native_block", "layer_spec"}


def test_junit_lets_a_risk_pass_and_says_so() -> None:
    root = ET.fromstring(write_junit(PERMUTE))
    case = next(case for case in root.iter("testcase") if case.attrib["name"] == "attention")
    assert case.find("failure") is None
    assert "risk: `DotProductAttention.forward`" in case.findtext("system-out", "")


def test_junit_fails_a_clean_row_with_a_breaking_finding() -> None:
    rows = tuple(row.model_copy(update={"verdict": "clean"}) for row in PERMUTE.modules)
    root = ET.fromstring(write_junit(PERMUTE.model_copy(update={"modules": rows})))
    assert root.attrib["failures"] == "1"


def test_junit_of_the_firewall() -> None:
    root = ET.fromstring(write_junit(FIREWALL))
    assert {key: root.attrib[key] for key in ("tests", "failures", "errors", "skipped")} == {
        "tests": "5",
        "failures": "1",
        "errors": "0",
        "skipped": "1",
    }
    skipped = root.find(".//skipped")
    assert skipped is not None
    assert skipped.attrib["message"] == "no wheel of flash-attn-4 on the index"


def test_junit_of_a_sweep_calls_an_unread_release_an_error() -> None:
    root = ET.fromstring(write_junit(SWEEP))
    assert root.attrib["tests"] == str(28 * 7 + 1)
    assert root.attrib["errors"] == "1"


def test_annotations_have_the_level_of_the_impact() -> None:
    lines = write_annotations(EVERYTHING).splitlines()
    levels = [line.split("::")[1].split(" ")[0] for line in lines]
    assert levels.count("error") == 22
    assert levels.count("warning") == 22 + 1
    assert levels.count("debug") == 22
    first = EVERYTHING.findings[0]
    assert lines[0].startswith(f"::error file={first.call_sites[0].file},line={first.call_sites[0].line},title=")


def test_an_annotation_without_a_place_names_none() -> None:
    result = PERMUTE.model_copy(update={"findings": (bare(ChangeKind.REMOVED, Impact.BREAKING),)})
    assert write_annotations(result).startswith("::error title=")


@pytest.mark.parametrize("name", ALL)
def test_json_is_the_model_and_stable(name: str) -> None:
    text = machine.to_json(ALL[name])
    assert machine.read_json(text) == ALL[name]
    assert machine.to_json(machine.read_json(text)) == text
    data = json.loads(text)
    assert text == json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def test_json_holds_the_sentences() -> None:
    written = json.loads(machine.to_json(PERMUTE))["findings"][0]
    assert written["headline"] == "`moe_permute_with_probs` now requires `num_out_tokens` (the default was `-1`)"
    assert written["next_step"].startswith("megacpp_validate/bridge/permute.py:25: pass `num_out_tokens`")


@pytest.mark.parametrize("text", ["{}", "[]", '{"schema_id": "other/1"}', "no json"])
def test_json_of_something_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"schema_id|Expecting"):
        machine.read_json(text)


def test_summary_tables_are_whole() -> None:
    for result in ALL.values():
        tables = re.findall(r"(?:^\|.*\n)+", github.render_step_summary(result), flags=re.MULTILINE)
        assert tables
        for table in tables:
            assert len({line.count("|") for line in table.splitlines()}) == 1


def test_harmless_findings_are_hidden_until_asked_for() -> None:
    def told(finding: Finding, verbose: bool) -> bool:
        return flat(headline(finding)) in flat(print_terminal(EVERYTHING, verbose=verbose))

    harmless = next(finding for finding in EVERYTHING.findings if finding.impact is Impact.HARMLESS)
    assert not told(harmless, False)
    assert told(harmless, True)
    assert all(told(finding, False) for finding in EVERYTHING.findings if finding.impact is not Impact.HARMLESS)
