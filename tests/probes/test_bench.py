"""The bench of a probe: what passes there, what fails, and what it writes down."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megacpp_validate.bridge.backends import Choice, Refusal
from megacpp_validate.bridge.errors import WrongShape
from megacpp_validate.probes.bench import Bench
from megacpp_validate.probes.bounds import Roundings
from megacpp_validate.probes.order import Order, Target

WHERE: dict[str, Any] = {"stack": "te2.20.2", "target": Target("cpu", "")}


def new_bench(requested: str = "te", **more: Any) -> Bench:
    return Bench(Order(probe="imports", requested=requested, **{**WHERE, **more}))


class FromTe(torch.autograd.Function):
    """Stands for a function of Transformer Engine."""

    __module__ = "transformer_engine.pytorch.module.linear"

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return g * 2


def on_te() -> Any:
    return FromTe.apply(torch.ones(2, requires_grad=True))


def on_torch() -> Any:
    return torch.ones(2, requires_grad=True) * 2


def chose(observed: str) -> Choice:
    refusals = () if observed == "te" else (Refusal("te", "planted", "planted refusal"),)
    return Choice("imports", "te", observed, refusals)


# what is requested, what must have run, what the wrapper claims, what made the output, whether that passes
RAN_ON = [
    ("te", "", "te", on_te, True),
    ("te", "", "native", on_torch, False),  # a fallback that owns up
    ("te", "", "te", on_torch, False),  # a silent one: it claims what did not run
    ("te", "", "native", on_te, False),  # it claims less than what ran
    ("te", "fa3", "fa3", on_te, False),
    ("te", "sdpa", "sdpa", on_torch, True),  # refused by the documented list: SDPA must take it
    ("native", "", "native", on_torch, True),
    ("native", "", "sdpa", on_torch, True),  # native, by whichever way torch takes
    ("native", "", "te", on_torch, False),
    ("native", "", "native", on_te, False),
    ("native", "sdpa", "native", on_torch, False),
]


@pytest.mark.parametrize(("requested", "wanted", "claimed", "made", "passed"), RAN_ON)
def test_a_fallback_or_a_false_claim_fails(requested: str, wanted: str, claimed: str, made: Any, passed: bool) -> None:
    bench = new_bench(requested)
    bench.ran_on("path", chose(claimed), made(), wanted=wanted)
    (check,) = bench.checks
    assert (check.name, check.passed) == ("path.backend", passed)
    (backend,) = bench.backends
    assert (backend.path, backend.requested, backend.claimed) == ("path", wanted or requested, claimed)
    assert backend.observed == (("te",) if made is on_te else ("native",))
    assert backend.reasons == (() if claimed == "te" else ("te: planted refusal",))


def test_a_path_without_an_output_cannot_have_run_on_a_vendor() -> None:
    bench = new_bench()
    bench.ran_on("path", chose("te"))
    bench.ran_on("path", chose("te"), torch.ones(2))
    with torch.no_grad():
        bench.ran_on("path", chose("te"), on_te())
    assert [check.passed for check in bench.checks] == [False, False, False]


def raises(error: BaseException) -> Any:
    def call() -> None:
        raise error

    return call


@pytest.mark.parametrize(
    ("call", "passed", "words"),
    [
        (raises(WrongShape("no. Next step: reshape.")), True, "WrongShape: no"),
        (raises(WrongShape("no.")), False, "WrongShape: no"),
        (raises(RuntimeError("CUDA error: an illegal access")), False, "RuntimeError instead of WrongShape"),
        (lambda: None, False, "nothing was raised; WrongShape was expected"),
    ],
)
def test_bad_input_must_be_refused_by_the_right_class_with_a_next_step(call: Any, passed: bool, words: str) -> None:
    bench = new_bench()
    bench.refuses("bad", WrongShape, call)
    (check,) = bench.checks
    assert (check.name, check.passed) == ("bad", passed)
    assert words in check.detail


# --- tensors ----------------------------------------------------------------------------------------------


def test_the_seed_makes_the_values_and_nothing_else_does() -> None:
    torch.manual_seed(1)
    first = new_bench(seed=5)
    torch.manual_seed(2)
    torch.randn(100)
    again, other = new_bench(seed=5), new_bench(seed=6)
    made = [(bench.randn(3, 4), bench.rand(5), bench.randint(9, 6)) for bench in (first, again, other)]
    assert all(torch.equal(one, two) for one, two in zip(made[0], made[1], strict=True))
    assert not any(torch.equal(one, two) for one, two in zip(made[0], made[2], strict=True))


# --- checks -----------------------------------------------------------------------------------------------


def test_a_scope_prefixes_what_is_made_inside() -> None:
    bench = new_bench()
    bench.check("before", True)
    with bench.scope("bf16"), bench.scope("gqa4"):
        bench.check("forward", True, "seen")
        bench.compare("grad", torch.ones(2), torch.ones(2).double(), roundings=Roundings((("fp32", 1),), 1))
    bench.check("after", False)
    assert [(check.name, check.passed) for check in bench.checks] == [
        ("before", True),
        ("bf16.gqa4.forward", True),
        ("bf16.gqa4.grad", True),
        ("after", False),
    ]
    assert bench.checks[1].detail == "seen"
    assert bench.checks[2].parts
