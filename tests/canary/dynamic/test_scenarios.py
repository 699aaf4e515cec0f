"""Faults that are easily blamed on somebody else."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from megacpp_validate.canary.dynamic.slowdown import TimingChange
from megacpp_validate.canary.dynamic.step import StackReceipts, StepResult, compare_stacks
from megacpp_validate.catalog.bridge import read_catalog
from megacpp_validate.diagnosis.blame import Change
from megacpp_validate.evidence.receipt import Check, Library, Part, Receipt
from megacpp_validate.evidence.values import ENVIRONMENT, Cause
from tests.diagnosis.planted import (
    CUBLAS,
    CUDNN,
    KNOWN,
    LIBRARIES,
    MODULES,
    REACHED,
    blocked,
    clean,
    dies,
    fails,
    falls_back,
    keyword,
    raises,
    stack_of,
)

Named = dict[str, tuple[str, ...]]


CATALOG = read_catalog()


def step(*red: Receipt, before: StackReceipts | None = None, rows: tuple[TimingChange, ...] = ()) -> StepResult:
    return compare_stacks(before or clean("te1"), stack_of("te2", *red), CATALOG.modules, rows)


def named(found: StepResult) -> Named:
    return {culprit.module: culprit.cascades for culprit in found.culprits}


CAUSES = {"keyword": Cause.API, "numbers": Cause.NUMERICS, "crash": Cause.BINARY, "hang": Cause.PERFORMANCE}


def shows(module: str, culprit: str, kind: str) -> Receipt:
    """How a fault of a culprit looks in a module that it reaches, itself included."""
    if kind == "numbers":
        return fails(module, *(KNOWN[culprit][2] if module == culprit else REACHED[culprit][module]))
    if kind in ("crash", "hang"):
        return dies(module, "SIGSEGV" if kind == "crash" else "timeout", KNOWN[culprit][1])
    return raises(module, *keyword(culprit))


@pytest.mark.parametrize(("culprit", "kind"), list(product(MODULES, CAUSES)))
def test_a_culprit_is_named_alone_with_all_or_none_of_what_it_reaches(culprit: str, kind: str) -> None:
    reached = sorted(REACHED[culprit], key=MODULES.index)
    for cascade in (reached, reached[:1], []):
        red = [shows(module, culprit, kind) for module in (culprit, *cascade)]
        found = step(*red, *red)
        assert named(found) == {culprit: tuple(cascade)}
        assert (found.culprits[0].cause, found.lost) == (CAUSES[kind], {})


def test_no_receipts_at_all_blame_nobody() -> None:
    nothing = StackReceipts("te2")
    found = compare_stacks(nothing, nothing, CATALOG.modules)
    assert (found.culprits, len(found.lost)) == ((), len(MODULES))


def witness(text: str) -> Receipt:
    """The firewall's probe, stopped by the linear layer that it looks at the scope through."""
    made = raises("imports", "TypeError", text)
    trace = made.failure.traceback.replace("bridge/imports.py", "probes/fp8_linear.py").replace("forward", "is_judged")
    return replace(made, failure=replace(made.failure, traceback=trace))


# Checks of the whole layer that the last probe of the layer spec runs.
WHOLE = ("bf16.whole.gqa4.forward", "bf16.whole.gqa4.grad.rows",
         "bf16.whole.gqa4.grad.self_attention.layernorm_qkv.weight.key")  # fmt: skip
TABLE: dict[str, tuple[tuple[Receipt, ...], Named]] = {
    "the-linear-layer-is-seen-by-the-firewall-first": (
        (witness(keyword("linear_walker")[1]), *(raises(m, *keyword("linear_walker")) for m in ("linear_walker",
                                                                                                "native_block"))),
        {"linear_walker": ("imports", "native_block")},
    ),
    "its-fp8-numbers-too": (
        (fails("imports", "fp8.delayed.forward", "fp8.delayed.wgrad"), fails("linear_walker", "delayed.bias.forward"),
         fails("native_block", "fp8.delayed.gqa4.d64.swiglu.forward")),
        {"linear_walker": ("imports", "native_block")},
    ),
    "but-a-scope-that-all-layers-suffer-from-is-the-firewalls": (
        (fails("imports", "fp8.delayed.forward"), fails("linear_walker", "delayed.bias.forward"),
         fails("expert_gemm", "fp8.delayed.all-busy.forward"), fails("layer_spec", "delayed.mlp.swiglu.forward")),
        {"imports": ("linear_walker", "expert_gemm", "layer_spec")},
    ),
    "and-one-that-turns-nothing-on": (
        (fails("imports", "scope.delayed.on", "fp8.delayed.forward"), fails("linear_walker", "delayed.bias.forward")),
        {"imports": ("linear_walker",)},
    ),
    "low-precision-explains-nothing-in-bf16": (
        (fails("imports", "fp8.delayed.forward", "amax.step1.input.scale"), fails("attention", "bf16.a.forward")),
        {"imports": (), "attention": ()},
    ),
    "a-lost-entry-explains-what-uses-it": (
        (replace(fails("imports"), checks=(Check("accessor.moe_unpermute", False),)),
         falls_back("permute", "permute.bf16.top2"), fails("attention", "bf16.gqa4.d64.forward")),
        {"imports": ("permute",), "attention": ()},
    ),
    "layer-spec-never-runs-attention": (
        (fails("attention", "bf16.gqa4.d64.forward"), fails("layer_spec", "bf16.norm.unit.forward")),
        {"attention": (), "layer_spec": ()},
    ),
    "what-attention-cannot-lead-to-shows-a-second-fault": (
        (fails("attention", "bf16.gqa4.d64.forward"), fails("native_block", "bf16.gqa4.d64.swiglu.forward"),
         fails("layer_spec", "bf16.mlp.swiglu.forward")),
        {"attention": (), "native_block": ("layer_spec",)},
    ),
    "gradients-explain-no-forward-pass": (
        (fails("attention", "bf16.gqa4.d64.grad.query"), fails("native_block", "bf16.gqa4.d64.swiglu.forward")),
        {"attention": (), "native_block": ()},
    ),
    "but-those-before-them": (
        (fails("attention", "bf16.a.grad.query"), fails("native_block", "bf16.a.grad.rows", "bf16.a.grad.qkv.weight")),
        {"attention": ("native_block",)},
    ),
    "bf16-explains-no-fp32": (
        (fails("linear_walker", "bf16.bias.forward"), fails("native_block", "fp32.gqa4.d64.swiglu.forward")),
        {"linear_walker": (), "native_block": ()},
    ),
    "another-exception-about-another-layer": (
        (raises("attention", "RuntimeError", CUDNN), raises("native_block", *keyword("native_block"))),
        {"attention": (), "native_block": ()},
    ),
    "another-file-of-te": (
        (raises("attention", "RuntimeError", "no such plan", "transformer_engine/pytorch/attention/a.py:1 in f"),
         raises("native_block", "RuntimeError", "no gate", "transformer_engine/pytorch/module/layernorm_mlp.py:1")),
        {"attention": (), "native_block": ()},
    ),
    "one-library-in-forward-here-and-backward-there": (
        (raises("attention", "RuntimeError", f"a.cu:1: {CUDNN}", "transformer_engine/f.py:1 in fused_attn_bwd"),
         raises("native_block", "RuntimeError", f"b.cu:2: {CUDNN}", "transformer_engine/f.py:2 in fused_attn_fwd")),
        {"attention": ("native_block",)},
    ),
    "a-shape-that-is-wrong-stops-who-takes-it": (
        (fails("permute", "bf16.aligned.rows"),
         raises("expert_gemm", "RuntimeError", "split_with_sizes expects split_sizes to sum exactly to 224")),
        {"permute": ("expert_gemm",)},
    ),
    "a-result-of-another-type-stops-who-takes-it": (
        (raises("expert_gemm", "AttributeError", "'tuple' object has no attribute 'backward'"),
         replace(raises("layer_spec", "AttributeError", "'tuple' object has no attribute 'shape'"),
                 checks=falls_back("layer_spec", "fp32.experts").checks)),
        {"expert_gemm": ("layer_spec",)},
    ),
    "flash-attention-beside-the-block": (
        (fails("attention", "fa3.bf16.gqa4.d128.forward"), fails("native_block", "bf16.gqa4.d64.swiglu.forward")),
        {"attention": (), "native_block": ()},
    ),
    "met-by-the-bridge-here-and-inside-te-there": (
        (raises("attention", *keyword("attention")),
         raises("layer_spec", *keyword("attention"), "transformer_engine/pytorch/transformer.py:9 in __init__")),
        {"attention": ("layer_spec",)},
    ),
    "every-module-meets-one-library": (
        tuple(raises(module, "RuntimeError", CUBLAS) for module in MODULES), {ENVIRONMENT: MODULES},
    ),
    "every-process-dies-alike-and-no-library-is-named": (
        tuple(dies(module, "SIGSEGV", "common/__init__.py") for module in MODULES), {"imports": MODULES[1:]},
    ),
    "apart-and-alike-but-of-te-itself": (
        tuple(raises(m, "AttributeError", "'Base' object has no attribute 'fp8_meta'", "transformer_engine/b.py:1 in c")
              for m in ("linear_walker", "expert_gemm")), {"linear_walker": ("expert_gemm",)},
    ),
    "deaths-that-say-nothing-stay-apart": (
        (dies("attention", "no-receipt"), dies("permute", "no-receipt")), {"attention": (), "permute": ()},
    ),
    "so-many-are-one-of-the-host": (
        tuple(dies(m, "no-receipt") for m in MODULES[1:]), {ENVIRONMENT: MODULES[1:]},
    ),
    "killed-from-outside-says-nothing": (tuple(dies(m, "SIGKILL") for m in MODULES), {}),
    "a-whole-layer-has-wrong-numbers-with-attention-and-the-block": (
        (fails("attention", "bf16.gqa4.d64.forward", "bf16.gqa4.d64.grad.key"),
         fails("native_block", "bf16.gqa4.d64.swiglu.forward"), fails("layer_spec", *WHOLE)),
        {"attention": ("native_block", "layer_spec")},
    ),
    "or-with-the-gradients-of-attention": (
        (fails("attention", "bf16.gqa4.d64.grad.key"), fails("layer_spec", *WHOLE[1:])),
        {"attention": ("layer_spec",)},
    ),
    "or-alone": ((fails("layer_spec", *WHOLE),), {"layer_spec": ()}),
    "a-composition-falls-with-its-part": (
        (raises("permute", *keyword("permute")), raises("moe_smoke", *keyword("permute"))), {"permute": ("moe_smoke",)},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("red", "wanted"), TABLE.values(), ids=TABLE)
def test_the_right_one_is_named(red: tuple[Receipt, ...], wanted: Named) -> None:
    found = step(*red)
    assert named(found) == wanted
    assert named(step(*reversed(red))) == wanted


APPLIED = {"imports": "recompute.fp8.delayed.reentrant.grad", "layer_spec": "delayed.whole.gqa4.grad"}


@pytest.mark.parametrize("module", APPLIED)
def test_a_layer_out_of_the_scope_is_a_silent_fallback(module: str) -> None:
    part = Part("low-precision-ran", 0.001, 0.02, False, "half the error", at_least=True)
    checks = (Check(APPLIED[module], False), Check(f"{APPLIED[module]}.applied", False, (part,)))
    (culprit,) = step(replace(fails(module, "seen"), checks=checks)).culprits
    assert (culprit.module, culprit.cause, culprit.cascades) == (module, Cause.SILENT_FALLBACK, ())


def test_what_failed_before_explains_no_new_numbers() -> None:
    old = fails("attention", "bf16.gqa4.d64.forward", stack="te1", te="1")
    found = step(
        fails("attention", "bf16.gqa4.d64.forward"),
        fails("native_block", "bf16.gqa4.d64.swiglu.forward"),
        before=stack_of("te1", old),
    )
    assert named(found) == {"native_block": ()}


def test_what_follows_from_an_old_failure_is_nobodys() -> None:
    dead = stack_of("te1", raises("attention", "RuntimeError", CUDNN, stack="te1"))
    before = replace(dead, receipts=tuple(r for r in dead.receipts if r.probe != "native_block"))
    found = step(*(raises(m, "RuntimeError", CUDNN) for m in ("attention", "native_block")), before=before)
    assert found.culprits == ()
    assert {row.module: row.under for row in found.modules}["native_block"] == "attention"


def test_a_cell_that_nothing_red_blocks_is_lost() -> None:
    found = step(blocked("attention", by="nobody"), blocked("permute"))
    assert found.culprits == ()
    assert set(found.lost) == {"te2-h200-attention", "te2-h200-permute"}
    assert {row.change for row in found.modules if row.module in ("attention", "permute")} == {Change.LOST}


# --- the release is the same ----------------------------------------------------------------------------


def of_one_release(stack: str, *changed: Receipt, **other: object) -> StackReceipts:
    made = stack_of(stack, *changed, te="2.0")
    return replace(made, receipts=tuple(replace(receipt, **other) for receipt in made.receipts))


NEWER = (replace(LIBRARIES[0], version="9.20.0"), LIBRARIES[1])
NUMBERS = fails("attention", "bf16.gqa4.d64.forward")
SAME: dict[str, tuple[tuple[Receipt, ...], tuple[Library, ...], Named, list[tuple[str, str, str]]]] = {
    "another-library-is-to-blame": (
        (NUMBERS, fails("permute", "bf16.top2.rows")), NEWER, {ENVIRONMENT: ("attention", "permute")},
        [("libcudnn", "9.14.0", "9.20.0")],
    ),
    "a-call-that-no-longer-fits-is-no-librarys-doing": (
        (NUMBERS, raises("permute", *keyword("permute"))), NEWER, {ENVIRONMENT: ("attention",), "permute": ()},
        [("libcudnn", "9.14.0", "9.20.0")],
    ),
    "a-patched-release-is-the-modules": ((NUMBERS,), LIBRARIES, {"attention": ()}, []),
    "a-library-on-one-side-alone-is-to-blame-for-nothing": (
        (NUMBERS,), LIBRARIES[:1], {"attention": ()}, [("libcublasLt", LIBRARIES[1].version, "")],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("red", "libraries", "wanted", "versions"), SAME.values(), ids=SAME)
def test_under_the_same_release_a_library_may_be_to_blame(
    red: tuple[Receipt, ...], libraries: tuple[Library, ...], wanted: Named, versions: list[tuple[str, str, str]]
) -> None:
    after = of_one_release("te2", *red, libraries=libraries)
    found = compare_stacks(of_one_release("te1"), after, CATALOG.modules)
    assert named(found) == wanted
    assert [(row.name, row.before, row.after) for row in found.versions] == versions
    first = found.culprits[0]
    if first.module == ENVIRONMENT:
        assert (first.cause, first.component) == (Cause.ENVIRONMENT, "cuDNN")
        assert first.next_step.startswith("put libcudnn back to 9.14.0 (it is 9.20.0 now)")


def test_what_slows_a_module_under_the_same_release_is_to_be_put_back() -> None:
    after = of_one_release("te2", libraries=NEWER)
    rows = row("attention", BF16), row("permute", BF16, 1.0)
    (culprit,) = compare_stacks(of_one_release("te1"), after, CATALOG.modules, rows).culprits
    assert (culprit.module, culprit.component) == (ENVIRONMENT, "cuDNN")
    assert culprit.next_step.startswith("put libcudnn back to 9.14.0 (it is 9.20.0 now), or accept slower: bf16")


# --- slower ---------------------------------------------------------------------------------------------


def row(module: str, name: str, ratio: float = 1.5) -> TimingChange:
    return TimingChange(module=module, name=name, before_ms=2.0, after_ms=2.0 * ratio, ratio=ratio, noise=1.05,
                        slower=ratio > 1.05, derivation="two runs of one stack")  # fmt: skip


BF16, FP8 = "bf16.x.forward-backward", "delayed.x.forward-backward"
SLOW: dict[str, tuple[tuple[TimingChange, ...], Named]] = {
    "nothing": ((row("attention", BF16, 1.01), row("permute", BF16, 0.5)), {}),
    "one": ((row("attention", BF16), row("permute", BF16, 1.0)), {"attention": ()}),
    "what-runs-it": ((row("native_block", BF16), row("linear_walker", BF16), row("permute", BF16, 1.0)),
                     {"linear_walker": ("native_block",)}),
    "two": ((row("attention", BF16), row("permute", BF16)), {"attention": (), "permute": ()}),
    "what-depends-on-two": ((row("attention", BF16), row("permute", BF16), row("layer_spec", BF16),
                             row("expert_gemm", BF16, 1.0), row("linear_walker", BF16, 1.0)),
                            {"attention": ("layer_spec",), "permute": ()}),
    "the-scope": ((row("imports", "scope.entered-50-times"), row("expert_gemm", FP8), row("expert_gemm", BF16, 1.0)),
                  {"imports": ("expert_gemm",)}),
}  # fmt: skip


@pytest.mark.parametrize(("rows", "wanted"), SLOW.values(), ids=SLOW)
def test_who_is_slower(rows: tuple[TimingChange, ...], wanted: Named) -> None:
    found = step(rows=rows)
    assert named(found) == wanted
    assert all(one.cause is Cause.PERFORMANCE and one.evidence and "te1" in one.next_step for one in found.culprits)
    assert found.timings == rows


def test_what_all_modules_share_is_the_environments() -> None:
    found = step(rows=tuple(row(module, BF16, 1.3) for module in MODULES[1:]))
    assert named(found) == {ENVIRONMENT: MODULES[1:]}


def test_what_is_red_is_not_slow_as_well() -> None:
    rows = row("attention", BF16), row("native_block", BF16)
    found = step(falls_back("attention", "attention.bf16.gqa4"), rows=rows)
    assert [(culprit.module, culprit.cause) for culprit in found.culprits] == [("attention", Cause.SILENT_FALLBACK)]
