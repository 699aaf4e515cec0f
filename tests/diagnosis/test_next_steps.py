"""Next steps out of what releases are known to need; and out of the receipts alone where nothing is known."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from megacpp_validate.canary.dynamic.step import StackReceipts, StepResult, compare_stacks
from megacpp_validate.catalog.bridge import read_catalog
from megacpp_validate.catalog.images import read_needs
from megacpp_validate.evidence.receipt import Library, Package, Receipt
from megacpp_validate.evidence.store import read_receipts
from tests.diagnosis.planted import CUDNN, LIBRARIES, cannot_import, clean, dies, fails, raises, stack_of

EVIDENCE = Path(__file__).parents[2] / "docs" / "evidence" / "h200"
CATALOG = read_catalog()
NEEDS = read_needs(CATALOG)
SYMBOL = "libtransformer_engine.so: undefined symbol: cublasLtGroupedMatrixLayoutInit_internal, version libcublasLt"


def real(before: str, after: str) -> StepResult:
    sides = (StackReceipts(name, tuple(read_receipts(EVIDENCE / name).found.values())) for name in (before, after))
    return compare_stacks(*sides, CATALOG.modules, needs=NEEDS)


def planted(*red: Receipt, before: str = "2.12.0") -> StepResult:
    return compare_stacks(clean(f"te{before}"), stack_of(red[0].stack, *red), CATALOG.modules, needs=NEEDS)


def of(te: str, made: Receipt, *libraries: Library) -> Receipt:
    package = Package("transformer_engine", te, "/opt/te/transformer_engine/__init__.py")
    return replace(made, packages=(package,), libraries=libraries or LIBRARIES)


CUDNN_STEP = (
    "pin nvidia-cudnn-cu13>=9.22 (9.14.0 is loaded; a second copy is mapped: remove "
    "/usr/lib/x86_64-linux-gnu/libcudnn.so.9.14.0; "
)
CUBLAS_STEP = "pin nvidia-cublas>=13.2 (13.1.0 is loaded; "


@pytest.mark.parametrize(
    ("before", "after", "begin", "back"),
    [
        ("te2.12.0", "te2.14.1", CUBLAS_STEP, "stay on te2.12.0"),
        ("te2.12.0", "te2.17.1", CUDNN_STEP, "stay on te2.12.0"),
        ("te2.14.1", "te2.17.1", CUDNN_STEP, "choose another release than this one"),  # 2.14.1 fails, too
    ],
)
def test_a_release_whose_need_is_known(before: str, after: str, begin: str, back: str) -> None:
    (culprit,) = real(before, after).culprits
    assert culprit.next_step.startswith(begin)
    assert culprit.next_step.endswith(f", or {back}")


NEWER = Library("libcudnn", "9.22.1", ("/v/nvidia/cudnn/lib/libcudnn.so.9",))
STEPS: dict[str, tuple[Receipt, str]] = {
    # A release that no row speaks of: its symbol is still known.
    "a-known-symbol": (of("9.9", cannot_import("te9.9", SYMBOL)), r"^pin nvidia-cublas>=13\.2 \(13\.1\.0 is loaded; "),
    "an-unknown-one": (of("9.9", cannot_import("te9.9")), r"^pin nvidia-cublas to the release .* has cublasLtNew "),
    "an-unknown-release": (of("9.9", raises("attention", "RuntimeError", CUDNN, stack="te9.9")),
                           r"^pin nvidia-cudnn-cu13 to a release newer than 9\.14\.0"),
    "what-is-loaded-is-new-enough": (of("2.17.1", raises("attention", "RuntimeError", CUDNN, stack="te2.17.1"), NEWER),
                                     r"^pin nvidia-cudnn-cu13 to a release newer than 9\.22\.1"),
    "a-module-that-does-not-use-it": (of("2.17.1", raises("permute", "RuntimeError", CUDNN, stack="te2.17.1")),
                                      r"to a release newer than 9\.14\.0"),
    "a-crash-that-names-nothing": (of("2.17.1", replace(dies("attention", "SIGSEGV", "x.py", stack="te2.17.1"))),
                                   r"^pin nvidia-cudnn-cu13>=9\.22 \(9\.14\.0 is loaded"),
    "of-cuda-12": (of("2.17.1", replace(raises("attention", "RuntimeError", CUDNN, stack="te2.17.1"),
                                        machine=replace(fails("attention").machine, cuda="12.8"))),
                   r"^pin nvidia-cudnn-cu12>=9\.22 "),
    "numbers-are-no-need": (of("2.17.1", fails("attention", "bf16.gqa4.d64.forward", stack="te2.17.1")),
                            r"^stay on te2\.12\.0"),
}  # fmt: skip


@pytest.mark.parametrize(("red", "wanted"), STEPS.values(), ids=STEPS)
def test_what_is_known_is_said_and_nothing_else(red: Receipt, wanted: str) -> None:
    (culprit,) = planted(red).culprits
    assert re.search(wanted, culprit.next_step), culprit.next_step
    assert "te2.12.0" in culprit.next_step


def test_a_need_that_was_not_met_before_either_is_not_what_broke() -> None:
    before = StackReceipts("te2.17.0", tuple(of("2.17.0", receipt) for receipt in clean("te2.17.0").receipts))
    red = of("2.17.1", raises("attention", "RuntimeError", CUDNN, stack="te2.17.1"))
    (culprit,) = compare_stacks(before, stack_of("te2.17.1", red), CATALOG.modules, needs=NEEDS).culprits
    assert "9.22" not in culprit.next_step


# --- searches -------------------------------------------------------------------------------------------

ENDS = [
    ("te2.12.0", "te2.17.1", "`te_bisect -- 2.12.0 2.17.1 --module permute`"),
    ("te2.12.0", "te2.18.0rc1", "`te_bisect -- 2.12.0 2.18.0rc1 --module permute`"),
    ("clean", "faults/permute-shuffled", ""),
    ("te2.20.2", "faults/x", ""),
    ("te2.20.2", "te2.20.2", ""),
    ("te2.20.2-fa4", "te2.20.3", ""),
]


@pytest.mark.parametrize(("before", "after", "wanted"), ENDS)
def test_a_search_is_between_two_releases(before: str, after: str, wanted: str) -> None:
    red = fails("permute", "bf16.top2.rows", stack=after, te="")
    one, other = (
        StackReceipts(name, tuple(replace(r, packages=()) for r in clean(name).receipts)) for name in (before, after)
    )
    receipts = tuple(red if receipt.probe == "permute" else receipt for receipt in other.receipts)
    (culprit,) = compare_stacks(one, replace(other, receipts=receipts), CATALOG.modules).culprits
    assert wanted in culprit.next_step
    assert ("te_bisect" in culprit.next_step) is bool(wanted)
