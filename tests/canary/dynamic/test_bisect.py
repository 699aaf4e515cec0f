"""A point judged by receipts: the module's own failure, another's that stands in its way, and what was not loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megacpp_validate.canary.dynamic.bisect import BisectOptions, judge_receipts, run_bisect
from megacpp_validate.canary.dynamic.search import BisectResult, SearchEnd, Verdict
from megacpp_validate.canary.static.sources import Sources, SourceUnavailable
from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.diagnosis.blame import read_order
from megacpp_validate.evidence.receipt import Failure, Library, Outcome, Package, Receipt
from megacpp_validate.evidence.store import read_receipts

EVIDENCE = Path(__file__).parents[3] / "docs" / "evidence" / "h200"

# What an H200 showed of the releases in docs/evidence: (release, module): the verdict, and a word of the reason.
SEEN: dict[tuple[str, str], tuple[Verdict, str]] = {
    ("2.12.0", "attention"): (Verdict.GOOD, "pass"),
    ("2.14.1", "imports"): (Verdict.BAD, "cublasLtGroupedMatrixLayoutInit_internal"),
    ("2.14.1", "attention"): (Verdict.CANNOT_TELL, "blocked by imports, which is import-error"),
    ("2.14.1", "layer_spec"): (Verdict.CANNOT_TELL, "blocked by imports"),
    ("2.17.1", "attention"): (Verdict.BAD, "fused_attn"),
    ("2.17.1", "native_block"): (Verdict.BAD, "attention, on which the module depends, red too"),
    ("2.17.1", "permute"): (Verdict.GOOD, "pass"),
    ("2.20.2", "native_block"): (Verdict.GOOD, "pass"),
}


def below(module: str, catalog: Catalog) -> tuple[str, ...]:
    found = read_order(catalog.modules).below[module]
    return tuple(row.id for row in catalog.modules if row.id in found)


@pytest.mark.parametrize(("release", "module"), SEEN)
def test_what_an_h200_showed_is_judged_as_a_person_would(catalog: Catalog, release: str, module: str) -> None:
    receipts = tuple(read_receipts(EVIDENCE / f"te{release}").found.values())
    answer = judge_receipts(module, below(module, catalog), receipts, {"te": release})
    verdict, word = SEEN[release, module]
    assert answer.verdict is verdict
    assert word in answer.reason


def receipt(probe: str, outcome: Outcome = Outcome.PASS, **more: object) -> Receipt:
    one = Receipt(f"te1-h200-{probe}", "te1", "h200", probe, outcome, f"{probe} is {outcome.value}", "te")
    return replace(one, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("own", "below", "verdict"),
    [
        (Outcome.PASS, Outcome.PASS, Verdict.GOOD),
        (Outcome.EXPECTED_UNSUPPORTED, Outcome.PASS, Verdict.GOOD),
        (Outcome.PASS, Outcome.ERROR, Verdict.GOOD),
        (Outcome.FAIL, Outcome.PASS, Verdict.BAD),
        (Outcome.ERROR, Outcome.PASS, Verdict.BAD),
        (Outcome.ERROR, Outcome.ERROR, Verdict.BAD),
        (Outcome.TIMEOUT, Outcome.PASS, Verdict.BAD),
        (Outcome.IMPORT_ERROR, Outcome.PASS, Verdict.BAD),
        (Outcome.IMPORT_ERROR, Outcome.IMPORT_ERROR, Verdict.CANNOT_TELL),
        (Outcome.BLOCKED, Outcome.IMPORT_ERROR, Verdict.CANNOT_TELL),
        (Outcome.NOT_RUN, Outcome.PASS, Verdict.CANNOT_TELL),
    ],
)
def test_every_outcome_has_a_verdict(own: Outcome, below: Outcome, verdict: Verdict) -> None:
    answer = judge_receipts("attention", ("imports",), [receipt("imports", below), receipt("attention", own)], {})
    assert answer.verdict is verdict
    assert answer.reason


def test_the_table_above_has_every_outcome() -> None:
    marks = test_every_outcome_has_a_verdict.pytestmark  # type: ignore[attr-defined]
    assert {row[0] for mark in marks for row in mark.args[1]} == set(Outcome)


@pytest.mark.parametrize("outcome", [Outcome.PASS, Outcome.FAIL])
def test_what_ran_without_transformer_engine_says_nothing_of_it(outcome: Outcome) -> None:
    own = receipt("attention", outcome, requested="native", requested_because="MEGACPP_DISABLE_TE=1 turns it off")
    answer = judge_receipts("attention", (), [own], {"te": "2.17.1"})
    assert answer.verdict is Verdict.CANNOT_TELL
    assert "MEGACPP_DISABLE_TE=1" in answer.reason


@pytest.mark.parametrize(
    ("kind", "message", "verdict"),
    [
        ("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 64.00 MiB", Verdict.CANNOT_TELL),
        ("OSError", "[Errno 28] No space left on device", Verdict.CANNOT_TELL),
        ("SIGKILL", "nothing", Verdict.CANNOT_TELL),
        ("SIGSEGV", "nothing", Verdict.BAD),
        ("RuntimeError", "CUDA error: uncorrectable ECC error encountered", Verdict.CANNOT_TELL),
        ("RuntimeError", "CUDA error: CUDA-capable device(s) is/are busy or unavailable", Verdict.CANNOT_TELL),
        ("exit status 137", "nothing", Verdict.CANNOT_TELL),
        ("RuntimeError", "CUDA error: an illegal memory access was encountered", Verdict.BAD),
        ("TypeError", "forward() got an unexpected keyword argument", Verdict.BAD),
    ],
)
def test_what_the_machine_does_is_no_fault_of_a_release(kind: str, message: str, verdict: Verdict) -> None:
    own = receipt("attention", Outcome.ERROR, failure=Failure(kind, message))
    answer = judge_receipts("attention", (), [own], {"te": "2.17.1"})
    assert answer.verdict is verdict


def test_no_receipt_is_no_answer() -> None:
    answer = judge_receipts("attention", ("imports",), [receipt("imports")], {})
    assert answer.verdict is Verdict.CANNOT_TELL


@pytest.mark.parametrize(
    ("axis", "wanted", "loaded", "verdict"),
    [
        ("cudnn", "9.14.0", Library("libcudnn", "9.14.0"), Verdict.GOOD),
        ("cudnn", "9.14.0.64", Library("libcudnn", "9.14.0"), Verdict.GOOD),
        ("cudnn", "9.21.0", Library("libcudnn", "9.14.0"), Verdict.CANNOT_TELL),
        ("cudnn", "9.1", Library("libcudnn", "9.14.0"), Verdict.CANNOT_TELL),
        ("cudnn", "9.21.0", Library("libcudnn", "9.14.0, 9.21.0"), Verdict.CANNOT_TELL),
        ("cudnn", "9.21.0", Library("libcudnn", ""), Verdict.GOOD),
        ("cudnn", "9.21.0", Library("libcublas", "13.1.0"), Verdict.GOOD),
        ("torch", "2.11.0", Package("torch", "2.11.0+cu130", "f"), Verdict.GOOD),
        ("torch", "2.11.0", Package("torch", "2.13.0", "f"), Verdict.CANNOT_TELL),
        ("te", "2.17.1", Package("transformer_engine", "2.20.2", "f"), Verdict.CANNOT_TELL),
        ("my-kernels", "3", Package("my_kernels", "4", "f"), Verdict.GOOD),
    ],
)
def test_a_point_that_loaded_something_else_says_nothing(
    axis: str, wanted: str, loaded: Library | Package, verdict: Verdict
) -> None:
    place = "libraries" if isinstance(loaded, Library) else "packages"
    seen = receipt("attention", **{place: (loaded,)})
    answer = judge_receipts("attention", (), [seen], {axis: wanted})
    assert answer.verdict is verdict
    assert verdict is Verdict.GOOD or f"{axis} {wanted} was to be loaded" in answer.reason


def test_two_backends_of_one_family_are_no_second_copy() -> None:
    both = (Package("flash_attn", "2.8.3", "f"), Package("flash_attn_3", "3.0.0", "g"))
    seen = receipt("attention", packages=both)
    assert judge_receipts("attention", (), [seen], {"flash-attn": "2.8.3"}).verdict is Verdict.GOOD
    assert judge_receipts("attention", (), [seen], {"flash-attn": "2.7.0"}).verdict is Verdict.CANNOT_TELL


# --- by sources -----------------------------------------------------------------------------------------------------

# Down from 2.5.0, where the bridge's keywords are new: 2.2.0 does not know `name` of Linear (module/linear.py) nor
# `align_size` of Fp8Padding (module/fp8_padding.py); see tests/canary/static/test_real_releases.py.
RELEASES = ("2.5.0", "2.3.0", "2.2.0", "2.1.0")


def search(catalog: Catalog, module: str, monkeypatch: pytest.MonkeyPatch) -> BisectResult:
    monkeypatch.setattr(Sources, "versions", lambda _: list(RELEASES))
    result = run_bisect(catalog, BisectOptions(RELEASES[0], RELEASES[-1], module, static=True))
    if any("could not be fetched" in point.reason for point in result.points):
        pytest.skip(f"not-run: {result.points[-1].reason}")
    return result


@pytest.mark.thorough
def test_the_first_release_that_breaks_a_module_is_found(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    result = search(catalog, "linear_walker", monkeypatch)
    (turn,) = result.culprits
    assert (result.end, turn.last_good, turn.first_bad) == (SearchEnd.FOUND, "2.3.0", ("2.2.0",))
    bad = next(point for point in result.points if point.choices == ("2.2.0",))
    assert "pytorch.Linear`: parameter removed (name)" in bad.reason


def test_a_placeholder_on_the_index_is_not_built_and_not_bad(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Sources.release

    def release(self: Sources, version: str) -> object:
        if version == "2.3.0":
            raise SourceUnavailable("transformer_engine-2.3.0.whl holds no package")
        return real(self, version)

    monkeypatch.setattr(Sources, "release", release)
    result = search(catalog, "permute", monkeypatch)
    assert (result.end, result.culprits[0].first_bad) == (SearchEnd.NARROWED, ("2.3.0", "2.2.0"))
    assert {point.choices[0] for point in result.points if point.verdict is Verdict.CANNOT_BUILD} == {"2.3.0"}
