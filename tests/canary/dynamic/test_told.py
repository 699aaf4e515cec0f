"""What is said of a culprit: what was seen, its evidence, and what to do next."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from megacpp_validate.canary.dynamic.step import compare_stacks
from megacpp_validate.canary.dynamic.upgrade_result import StepResult
from megacpp_validate.catalog.bridge import read_catalog
from megacpp_validate.evidence.receipt import Check, Failure, Library, Receipt
from megacpp_validate.evidence.values import Cause
from tests.canary.dynamic.planted import (
    CUBLAS,
    CUDNN,
    KNOWN,
    LIBRARIES,
    MACHINE,
    MODULES,
    blocked,
    cannot_import,
    clean,
    dies,
    fails,
    good,
    keyword,
    raises,
    stack_of,
)

CATALOG = read_catalog()


def step(*red: Receipt) -> StepResult:
    return compare_stacks(clean("te1"), stack_of("te2", *red), CATALOG.modules)


SAID: dict[str, tuple[Receipt, str]] = {
    "keyword": (raises("attention", *keyword("attention")), r"^bridge/attention\.py: keyword `of_attention` "),
    "in-another-file": (raises("layer_spec", *keyword("layer_spec"), bridge="te_layers"), r"^bridge/te_layers\.py: "),
    "argument": (raises("permute", "TypeError", "f() missing 1 required positional argument: 'b'"), r"`b` is required"),
    "arity": (raises("permute", "ValueError", "too many values to unpack (expected 3)"),
              r"^bridge/permute\.py: what a call gives back is something else now"),
    "torch-abi": (cannot_import(text="/x/a.so: undefined symbol: _ZN3c105ErrorC2E"),
                  r"^rebuild the extension against torch 2\.11\.0\+cu130"),
    "parts": (cannot_import(text="/x/a.so: undefined symbol: nvte_new"), r"one release.*nvte_new"),
    "own-library": (cannot_import(text="/x/libtransformer_engine.so: cannot open shared object file: No such file"),
                    r"^install sources, core library and torch extension of one release"),
    "disk": (raises("permute", "OSError", "[Errno 28] No space left on device"), r"^give the process caches"),
    "library": (cannot_import(text="libcudnn.so.9: cannot open shared object file"), r"^install nvidia-cudnn-cu13: "),
    "package": (replace(cannot_import(), failure=None, reason="TE cannot be used: ModuleNotFoundError: No "
                        "module named 'cutlass'. Likely cause: x."), r"^pip install nvidia-cutlass-dsl"),
    "numbers": (fails("permute", "bf16.top2.rows"), r"stay on te1.*until `bf16\.top2\.rows` is in its bounds"),
    "memory": (raises("permute", "OutOfMemoryError", "CUDA out of memory. Tried 2 GiB"), r"less beside it on the GPU"),
    "architecture": (raises("permute", "RuntimeError", "CUDA error: no kernel image is available"), r"for sm_90"),
    "crash": (dies("permute", "SIGSEGV", KNOWN["permute"][1]), r"rebuild the extension.*CUDA_LAUNCH_BLOCKING=1"),
    "entry": (raises("linear_walker", "VendorEntryMissing", "its entry point `linear` is not: gone", bridge="vendor"),
              r"^bridge/imports\.py: `linear` was moved"),
    "core-library": (cannot_import(text="Could not find shared object file for Transformer Engine torch lib."),
                     r"^reinstall sources, core library and torch extension of "),
    "asks-for-something": (replace(cannot_import(), failure=None, reason="TE cannot be used: RuntimeError: TE needs "
                                   "another torch. Likely cause: x."), r"asks for .*\(`TE needs another torch`\)"),
    "ended-itself": (dies("permute", "exit status 3"), r"^read the log beside the receipt of te2-h200-permute"),
    "hang": (dies("permute", "timeout", KNOWN["permute"][1]), r"longer --limit to tell slow from hung"),
}  # fmt: skip


@pytest.mark.parametrize(("red", "wanted"), SAID.values(), ids=SAID)
def test_the_next_step_is_concrete(red: Receipt, wanted: str) -> None:
    (culprit,) = step(red).culprits
    assert re.search(wanted, culprit.next_step), culprit.next_step
    assert "te1" in culprit.next_step


def test_the_second_runtime_is_to_be_removed_where_it_lies() -> None:
    twice = Library("libcudart", "13.0, 12.8", ("/v/nvidia/cu13/lib/libcudart.so.13", "/base/fa3/libcudart.so.12"))
    red = replace(raises("attention", "RuntimeError", "Multiple libcudart libraries found"), libraries=(twice,))
    (culprit,) = step(red).culprits
    assert (culprit.cause, culprit.component) == (Cause.ENVIRONMENT, "second CUDA runtime")
    assert culprit.next_step.startswith("remove the second copy of libcudart at /base/fa3/libcudart.so.12")


def test_the_summary_says_what_was_raised_and_the_evidence_where() -> None:
    said = f"/TE/common/fused_attn/a_b.cu:934 in function operator(): {CUDNN} {'word ' * 60}"
    (culprit,) = step(raises("attention", "RuntimeError", said)).culprits
    assert culprit.summary.startswith(f"attention raises RuntimeError in cuDNN: {CUDNN}")
    assert culprit.summary.endswith("word…")
    assert "a_b.cu:934" in culprit.evidence[0]


@pytest.mark.parametrize(
    "said", ["_permute_kernel() got an unexpected keyword argument 'BLOCK'", "f(): incompatible function arguments. a"]
)
def test_what_fails_within_transformer_engine_is_no_call_to_mend(said: str) -> None:
    made = raises("permute", "TypeError", said)
    frame = '  File "/x/transformer_engine/pytorch/triton/permutation.py", line 9, in run\nTypeError: '
    assert isinstance(made.failure, Failure)
    trace = made.failure.traceback.replace("TypeError: ", frame)
    (culprit,) = step(replace(made, failure=replace(made.failure, traceback=trace))).culprits
    assert culprit.cause is Cause.API
    assert culprit.next_step.startswith("install all parts of 2.0 anew as one (it is raised in transformer_engine/py")
    assert "bridge/permute.py" not in culprit.next_step


def test_a_library_that_changed_with_the_release_is_to_be_told_from_it() -> None:
    after = stack_of("te2", raises("attention", "RuntimeError", CUDNN))
    newer = (replace(LIBRARIES[0], version="9.20.0"), LIBRARIES[1])
    moved = replace(after, receipts=tuple(replace(receipt, libraries=newer) for receipt in after.receipts))
    (culprit,) = compare_stacks(clean("te1"), moved, CATALOG.modules).culprits
    assert (culprit.module, culprit.component) == ("attention", "cuDNN")
    assert "put libcudnn back to 9.14.0 (it is 9.20.0 now) to tell it from the release; or stay" in culprit.next_step


def test_a_lost_entry_point_is_said_with_who_takes_it() -> None:
    checks = tuple(Check(f"accessor.{name}", False) for name in ("moe_unpermute", "rmsnorm"))
    (culprit,) = step(replace(fails("imports"), checks=checks)).culprits
    assert culprit.summary == (
        "imports does not find `moe_unpermute`, `rmsnorm` in Transformer Engine; permute, layer_spec take them."
    )


def test_numbers_that_are_wrong_in_all_that_share_a_product_are_said_to_be() -> None:
    shared = (
        fails("linear_walker", "bf16.bias.forward"),
        fails("layer_spec", "bf16.mlp.forward", "bf16.in_projection.x"),
    )
    (culprit,) = step(*shared).culprits
    assert (culprit.module, culprit.cascades) == ("linear_walker", ("layer_spec",))
    assert "Every layer that runs the matrix product (pytorch/cpp_extensions/gemm.py) is wrong" in culprit.summary
    assert culprit.entry_points == ("linear", "layernorm_linear", "layernorm_mlp")
    assert "take the native path of linear_walker, layer_spec, until" in culprit.next_step


def test_the_scope_is_only_said_to_be_right_where_it_was_looked_at() -> None:
    said = "The scope itself is as it should be"
    low = fails("imports", "fp8.delayed.forward"), fails("expert_gemm", "fp8.delayed.all-busy.forward")
    assert said in step(*low).culprits[0].summary
    assert said not in step(cannot_import(), *(blocked(module) for module in MODULES[1:])).culprits[0].summary


@pytest.mark.parametrize(("cuda", "package"), [("12.8", "nvidia-cublas-cu12 "), ("13.0", "nvidia-cublas ")])
def test_packages_are_named_by_their_cuda(cuda: str, package: str) -> None:
    red = replace(raises("linear_walker", "RuntimeError", CUBLAS), machine=replace(MACHINE, cuda=cuda))
    assert f"pin {package}to a release newer than 13.1.0" in step(red).culprits[0].next_step


def test_numbers_of_another_vendor_are_reported_to_it() -> None:
    (culprit,) = step(fails("attention", "fa3.bf16.gqa4.d128.forward")).culprits
    assert culprit.next_step.endswith("report the check with its receipt to flash-attn")


def test_evidence_quotes_what_was_seen() -> None:
    (culprit,) = step(fails("permute", *(f"bf16.top2.{n}.rows" for n in range(5)))).culprits
    assert culprit.evidence[0] == "check bf16.top2.0.rows: relative-error 0.5 against 0.01"
    assert "and 2 checks more" in culprit.evidence
    assert good("permute").outcome.is_good
