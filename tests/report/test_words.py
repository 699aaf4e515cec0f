from __future__ import annotations

import re
from typing import get_args

import pytest

from megacpp_validate.canary.firewall.result import FirewallOutcome
from megacpp_validate.canary.static.findings import ChangeKind, Finding, Impact, ModuleVerdict
from megacpp_validate.evidence.values import Cause
from megacpp_validate.report.marks import mark_impact, mark_outcome, mark_verdict
from megacpp_validate.report.sentences.behaviour import BehaviourKind
from megacpp_validate.report.sentences.parameters import ParameterKind
from megacpp_validate.report.sentences.symbols import SymbolKind
from megacpp_validate.report.summaries import (
    first_sentence,
    say_direction,
    summarize_firewall,
    summarize_static,
    summarize_sweep,
)
from megacpp_validate.report.words.findings import (
    LIMITS,
    consequence,
    headline,
    headline_of_fault,
    next_step,
    next_step_of_fault,
)
from tests.report.results import (
    AUTOCAST,
    CASCADE,
    DOWNGRADE,
    EMPTY,
    FIREWALL,
    FOLLOWED,
    PERMUTE,
    REQUIRED,
    SWEEP,
    bare,
    every_finding,
)

FULL = {finding.kind: finding for finding in every_finding() if finding.impact is Impact.BREAKING}

# kind, what else the finding knows, its headline, what its next step must say
TABLE: list[tuple[ChangeKind, dict[str, object], str, str]] = [
    (ChangeKind.REMOVED, {}, "`Thing` is gone", "stay on 2.8.x"),
    (
        ChangeKind.REMOVED,
        {"suggestion": "te.New"},
        "`Thing` is gone; `New` looks like its successor",
        "import `New`",
    ),
    (
        ChangeKind.MOVED,
        {"new": "transformer_engine.pytorch.quantization.Thing"},
        "`Thing` moved from `transformer_engine.pytorch` to `transformer_engine.pytorch.quantization`",
        "import `Thing` from `transformer_engine.pytorch.quantization` first",
    ),
    (
        ChangeKind.RENAMED,
        {"suggestion": "te.New"},
        "`Thing` is now called `New`",
        "take `New` where it is there",
    ),
    (
        ChangeKind.CLASS_BECAME_FUNCTION,
        {},
        "`Thing` was a class and is now a function",
        "not `Thing` as a type",
    ),
    (ChangeKind.FUNCTION_BECAME_CLASS, {}, "`Thing` was a function and is now a class", "make one `Thing`"),
    (ChangeKind.NOT_CALLABLE, {}, "`Thing` can no longer be called", "do not call `Thing`"),
    (
        ChangeKind.PARAMETER_REMOVED,
        {"parameter": "width", "member": "forward"},
        "`Thing.forward` no longer takes `width`",
        "do not pass `width`",
    ),
    (
        ChangeKind.PARAMETER_RENAMED,
        {"parameter": "fp8_recipe", "suggestion": "recipe"},
        "`Thing` takes `recipe` where it took `fp8_recipe`",
        "rename `fp8_recipe=` to `recipe=`",
    ),
    (
        ChangeKind.PARAMETER_REORDERED,
        {"parameter": "width"},
        "`Thing` takes its parameters in another order, `width` among them",
        "pass `width` by keyword",
    ),
    (
        ChangeKind.PARAMETER_REQUIRED,
        {"parameter": "num_out_tokens"},
        "`Thing` now requires `num_out_tokens`",
        "pass `num_out_tokens`",
    ),
    (
        ChangeKind.PARAMETER_KEYWORD_ONLY,
        {"parameter": "w"},
        "`Thing` takes `w` by keyword only",
        "pass `w=` by keyword",
    ),
    (
        ChangeKind.PARAMETER_POSITIONAL_ONLY,
        {"parameter": "w"},
        "`Thing` takes `w` by position only",
        "by position",
    ),
    (
        ChangeKind.DEFAULT_CHANGED,
        {"parameter": "w", "old": "1", "new": "2"},
        "`Thing`: the default of `w` went from `1` to `2`",
        "`1` keeps what 2.8 did",
    ),
    (
        ChangeKind.DEFAULT_MEANING_CHANGED,
        {"parameter": "w"},
        "`Thing`: leaving out `w` means something else now",
        "pass `w` explicitly",
    ),
    (
        ChangeKind.RETURN_CHANGED,
        {"old": "Tensor", "new": "tuple[Tensor, Tensor]"},
        "`Thing` returns something else: `Tensor` became `tuple[Tensor, Tensor]`",
        "take apart what `Thing` returns now",
    ),
    (
        ChangeKind.DEPRECATED,
        {"suggestion": "te.New"},
        "`Thing` is deprecated in favour of `New`",
        "take `New`",
    ),
    (ChangeKind.DEPRECATED, {"parameter": "w"}, "`w` of `Thing` is deprecated", "do without `w` of `Thing`"),
    (
        ChangeKind.GUARD_ADDED,
        {"parameter": "w", "new": "assert w > 0"},
        "`Thing` has a new check of `w`: `assert w > 0`",
        "satisfy the check",
    ),
    (ChangeKind.WARNING_ADDED, {}, "`Thing` has a new warning", "read the warning"),
    (
        ChangeKind.ATTRIBUTE_REMOVED,
        {"member": "weight"},
        "`Thing` no longer has `weight`",
        "do without `weight`",
    ),
    (ChangeKind.DECORATOR_LOST, {}, "`Thing` can no longer be used as a decorator", "with `with`"),
    (ChangeKind.CONTEXT_MANAGER_LOST, {}, "`Thing` can no longer be entered with `with`", "by hand"),
    (
        ChangeKind.IMPORT_REQUIREMENT_ADDED,
        {"parameter": "onnxscript", "new": "import onnxscript"},
        "importing `transformer_engine.pytorch.Thing` now imports `onnxscript`",
        "see that `onnxscript` is in the environment",
    ),
    (
        ChangeKind.IMPORT_REQUIREMENT_ADDED,
        {"new": "cannot import name 'gone' from here"},
        "importing `transformer_engine.pytorch.Thing` fails: `cannot import name 'gone' from here`",
        "stay on 2.8.x",
    ),
    (
        ChangeKind.PARAMETER_REQUIRED,
        {"parameter": "w", "old": "w=-1", "new": "w"},
        "`Thing` now requires `w` (the default was `-1`)",
        "pass `w`; `-1` is what 2.8 took by itself",
    ),
    (
        ChangeKind.DEPRECATED,
        {"new": "use New"},
        "`Thing` is deprecated: `use New`",
        "a later release will drop it",
    ),
]


@pytest.mark.parametrize(("kind", "more", "says", "advises"), TABLE)
def test_what_is_said(kind: ChangeKind, more: dict[str, object], says: str, advises: str) -> None:
    finding = bare(kind, Impact.BREAKING, **more)
    assert headline(finding) == says
    assert advises in next_step(finding, "2.8.0")


def test_the_table_and_the_families_hold_every_kind() -> None:
    assert {row[0] for row in TABLE} == set(ChangeKind)
    families = [set(get_args(family)) for family in (SymbolKind, ParameterKind, BehaviourKind)]
    assert set.union(*families) == set(ChangeKind)
    assert sum(map(len, families)) == len(ChangeKind)


@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize("impact", Impact)
@pytest.mark.parametrize("kind", ChangeKind)
@pytest.mark.parametrize("is_bare", [False, True])
def test_every_sentence_can_be_read(kind: ChangeKind, impact: Impact, follows: bool, is_bare: bool) -> None:
    finding = bare(kind, impact) if is_bare else FULL[kind].model_copy(update={"impact": impact})
    finding = finding.model_copy(update={"follows": follows})
    for old in ("", "2.8.0"):
        for sentence in (headline(finding), consequence(finding), next_step(finding, old)):
            assert sentence == " ".join(sentence.split()) != ""
            assert sentence.count("`") % 2 == 0
            assert "``" not in sentence
            assert " None " not in f" {sentence} ".replace("gives None", "")
    assert consequence(finding).endswith(".")
    assert not headline(finding).endswith(".")


@pytest.mark.parametrize("kind", ChangeKind)
def test_each_impact_has_a_consequence_of_its_own(kind: ChangeKind) -> None:
    said = {consequence(bare(kind, impact, parameter="width")) for impact in Impact}
    assert len(said) == len(Impact)


@pytest.mark.parametrize("kind", ChangeKind)
def test_the_next_step_says_where(kind: ChangeKind) -> None:
    finding = FULL[kind]
    if kind is ChangeKind.IMPORT_REQUIREMENT_ADDED:  # the environment is the place, not a line of the bridge
        assert "environment" in next_step(finding)
        return
    site = finding.call_sites[0]
    assert next_step(finding).startswith(f"{site.file}:{site.line}: ")


def test_many_call_sites_are_counted_not_listed() -> None:
    sites = tuple(REQUIRED.call_sites[0].model_copy(update={"line": line}) for line in range(1, 6))
    step = next_step(REQUIRED.model_copy(update={"call_sites": sites}))
    assert "permute.py:3 and 2 more: pass `num_out_tokens`" in step


def test_what_the_bridge_follows_asks_for_nothing() -> None:
    assert next_step(FOLLOWED, "2.8.0") == (
        "nothing to do: the bridge already takes `autocast`; "
        "drop the path that only 2.8 needs when 2.8 leaves the matrix"
    )
    assert "by itself" in consequence(FOLLOWED)


def test_a_breaking_finding_is_never_waved_through() -> None:
    finding = FOLLOWED.model_copy(update={"impact": Impact.BREAKING})
    assert "nothing to do" not in next_step(finding)
    assert "by itself" not in consequence(finding)


@pytest.mark.parametrize("kind", [ChangeKind.PARAMETER_REMOVED, ChangeKind.PARAMETER_RENAMED])
def test_an_ignored_field_is_not_called_an_error(kind: ChangeKind) -> None:
    raised = bare(kind, Impact.BREAKING, parameter="margin")
    ignored = raised.model_copy(update={"cause": Cause.SILENT_FALLBACK})
    assert "TypeError" in consequence(raised)
    assert "silently ignored" in consequence(ignored)
    assert "TypeError" not in consequence(ignored)


def test_a_long_source_text_is_one_short_quote() -> None:
    finding = bare(ChangeKind.GUARD_ADDED, Impact.RISK, new="assert x,\n" + "very " * 100 + "`long`")
    assert len(headline(finding)) < 200
    assert headline(finding).endswith("…`")


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (PERMUTE, "Breaks permute (1 of 7 modules)."),
        (CASCADE, "Breaks imports, and with it attention, native_block, layer_spec (4 of 7 modules)."),
        (AUTOCAST, "Nothing breaks; imports at risk."),
        (EMPTY, "Nothing that the bridge consumes changed."),
        (DOWNGRADE, "Nothing breaks: what changed in what the bridge consumes does not touch its calls."),
    ],
)
def test_the_answer(result: object, says: str) -> None:
    assert summarize_static(result) == says  # type: ignore[arg-type]


def test_a_breaking_finding_without_a_red_row_is_still_told() -> None:
    rows = tuple(row.model_copy(update={"verdict": ModuleVerdict.CLEAN}) for row in PERMUTE.modules)
    assert summarize_static(PERMUTE.model_copy(update={"modules": rows})).startswith("Breaks")


def test_other_answers() -> None:
    assert summarize_sweep(SWEEP) == "2 of 28 steps break the bridge, 1 puts it at risk; 1 release could not be read."
    assert summarize_sweep(SWEEP.model_copy(update={"steps": ()})).startswith("No step")
    assert summarize_firewall(FIREWALL) == "The firewall fails in 1, was not tried in 1, holds in 3 of 5 cases."
    passed = tuple(case for case in FIREWALL.cases if case.outcome is FirewallOutcome.PASS)
    assert summarize_firewall(FIREWALL.model_copy(update={"cases": passed})) == "The firewall holds in 3 cases."
    assert summarize_firewall(FIREWALL.model_copy(update={"cases": ()})).startswith("No case ran")
    assert say_direction(DOWNGRADE) == "This is a downgrade: 2.15.0 is the newer release of the two."
    assert say_direction(PERMUTE) == ""


def test_no_two_marks_of_a_sort_look_alike() -> None:
    verdicts = [mark_verdict(verdict) for verdict in ModuleVerdict]
    impacts = [mark_impact(impact) for impact in Impact]
    outcomes = [mark_outcome(outcome) for outcome in FirewallOutcome]
    for marks in (verdicts, impacts, outcomes):
        for field in ("symbol", "letter", "word"):
            assert len({getattr(mark, field) for mark in marks}) == len(marks)
        assert all(mark.letter.isascii() for mark in marks)


def test_the_limits_name_what_a_static_tier_cannot_see() -> None:
    told = " ".join(f"{limit.what} {limit.why} {limit.seen_by}" for limit in LIMITS).lower()
    for word in (
        "numerics",
        "c++",
        "cuda",
        "cublas",
        "cudnn",
        "nccl",
        "driver",
        "performance",
        "attention",
        "body",
    ):
        assert word in told
    assert all("tier" in limit.seen_by for limit in LIMITS)


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("TE 2.17.1 fails in libfoo.so.1: no. Likely cause: x.", "TE 2.17.1 fails in libfoo.so.1: no."),
        ("one\ntwo", "one two"),
        ("", ""),
        ("is `a`. `b` is not", "is `a`."),
    ],
)
def test_first_sentence(text: str, first: str) -> None:
    assert first_sentence(text) == first


def test_the_value_has_no_words_on_it() -> None:
    assert not {"headline", "consequence", "next_step"} & set(dir(Finding))


@pytest.mark.parametrize("kind", [ChangeKind.GUARD_ADDED, ChangeKind.WARNING_ADDED])
def test_the_message_of_a_check_is_told_and_not_taken_for_a_name(kind: ChangeKind) -> None:
    finding = bare(kind, Impact.RISK, suggestion="Keys and values must match!")
    assert "It says: `Keys and values must match!`." in consequence(finding)
    assert "Keys" not in next_step(finding, "2.8.0")


def test_a_check_at_import_is_a_risk_that_the_environment_may_pass() -> None:
    finding = bare(ChangeKind.IMPORT_REQUIREMENT_ADDED, Impact.RISK, new="RuntimeError if cudnn < MIN_CUDNN")
    assert headline(finding).endswith("has a new check: `RuntimeError if cudnn < MIN_CUDNN`")
    assert "see that the environment passes the check" in next_step(finding, "2.8.0")


def test_an_import_under_a_condition_says_when() -> None:
    more = {"parameter": "flash_attn", "suggestion": "only if fa4 is there"}
    finding = bare(ChangeKind.IMPORT_REQUIREMENT_ADDED, Impact.RISK, **more)
    assert "asked for only if: `fa4 is there`." in consequence(finding)


def test_a_fault_of_both_releases_is_not_told_as_a_change() -> None:
    for kind in (ChangeKind.PARAMETER_REMOVED, ChangeKind.PARAMETER_REQUIRED):
        finding = bare(kind, Impact.BREAKING, parameter="w")
        assert not re.search(r"no longer|now", headline_of_fault(finding))
        assert "stay on" not in next_step_of_fault(finding, "2.8.0")
