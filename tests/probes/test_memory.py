"""What calls leave behind: a rise with every call is seen, and what is made once is none. And evaluations."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")

from megacpp_validate.probes.observe import (  # noqa: E402
    CALLS,
    WARM_UP,
    bytes_kept,
    check_eval,
    check_memory,
    check_steady,
    use_of,
)

CALLS_IN_ALL = WARM_UP + CALLS
Keeps = Callable[[Any, Any], None]


class Layer(torch.nn.Module):
    """A product that hands its input and output to somebody."""

    def __init__(self, keeps: Keeps) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8, 8))
        self.keeps = keeps

    def forward(self, rows: Any) -> Any:
        out = rows @ self.weight
        self.keeps(rows, out)
        return out


def kept_by(keeps: Keeps) -> float:
    return bytes_kept("cpu", use_of(Layer(keeps), (torch.ones(4, 8),), nullcontext, {}))


def test_a_call_that_keeps_nothing() -> None:
    assert kept_by(lambda rows, out: None) == 0.0


def one_more(kept: list[Any], what: str) -> Keeps:
    return {
        "input": lambda rows, out: kept.append(rows.detach()),
        "output": lambda rows, out: kept.append(out.detach()),
        "graph": lambda rows, out: kept.append(out),
        "cycle": lambda rows, out: kept.append([out.detach(), kept]),
    }[what]


@pytest.mark.parametrize("what", ["input", "output", "graph", "cycle"])
def test_one_tensor_of_every_call_is_seen(what: str) -> None:
    assert kept_by(one_more([], what)) >= 4 * 8 * 4


def once_at(call: int, cache: dict[Any, Any]) -> Keeps:
    """A workspace that is made in one call."""
    calls: list[int] = []

    def keep(rows: Any, out: Any) -> None:
        calls.append(1)
        if len(calls) == call:
            cache["workspace"] = torch.empty(1000)

    return keep


@pytest.mark.parametrize("call", range(1, CALLS_IN_ALL + 1))
def test_what_is_made_once_is_no_rise(call: int) -> None:
    assert kept_by(once_at(call, {})) == 0.0


def test_the_collector_is_left_as_it_was() -> None:
    gc.unfreeze()  # another test of this process may have frozen its objects
    with pytest.raises(KeyError):
        bytes_kept("cpu", lambda: {}[0])
    assert gc.get_freeze_count() == 0


MIB = 2**20


@pytest.mark.parametrize(
    ("readings", "kept", "passed"),
    [
        ((0, 0, 0, 0), 0.0, True),
        ((0, MIB, 2 * MIB, 3 * MIB), float(MIB), False),
        ((0, MIB, MIB, 2 * MIB), 0.0, True),  # one call without a rise
        ((MIB, 0, MIB, 2 * MIB), 0.0, True),
        ((0, 512, 1024, 1536), 512.0, True),  # a scale, not a tensor of the call
        ((0, 8 * MIB, 8 * MIB + 12288, 9 * MIB), 12288.0, False),  # an amax history at least
    ],
)
def test_on_a_gpu_the_allocator_counts(
    monkeypatch: pytest.MonkeyPatch, readings: tuple[int, ...], kept: float, passed: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "memory_allocated", iter(readings).__next__)
    check = check_memory("bf16", "cuda", lambda: None)
    assert (check.name, check.passed, check.parts[0].observed) == ("bf16.memory", passed, kept)
    assert ("memory grows" in check.detail) is not passed


def scale_late(rows: Any, out: Any, calls: list[int]) -> None:
    calls.append(len(calls))
    if len(calls) % 5 == 0:
        out.data.mul_(1.01)


FAULTS: dict[str, tuple[str, Callable[..., None]]] = {
    "outputs": ("outputs", scale_late),
    "gradients": ("gradients", lambda rows, out, calls: calls.append(1) or out.register_hook(lambda g: g * len(calls))),
    "generator": ("generators-moved", lambda rows, out, calls: torch.rand(1)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_layer_that_changes_with_its_uses_is_seen(fault: str) -> None:
    part, keeps = FAULTS[fault]
    calls: list[int] = []
    use = use_of(Layer(lambda rows, out: keeps(rows, out, calls)), (torch.ones(4, 8),), nullcontext, {})
    check = check_steady("bf16", use, draws=False)
    assert [one.name for one in check.parts if not one.passed] == [part]
    quiet = use_of(Layer(lambda rows, out: None), (torch.ones(4, 8),), nullcontext, {})
    assert check_steady("bf16", quiet, draws=False).passed


# --- evaluation -------------------------------------------------------------------------------------------------------

low: list[bool] = []


@contextmanager
def low_precision() -> Iterator[None]:
    low.append(True)
    yield
    low.pop()


class Evaluated(torch.nn.Module):
    """A product, rounded to FP8 in the scope, with a fault without gradients: in where, of what it computes, after."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))
        self.fault, self.buffer = fault, torch.empty(4, 8)

    def forward(self, rows: Any, rope: Any) -> Any:
        fault = "" if torch.is_grad_enabled() else self.fault
        weight = self.weight
        if low and fault != "high":
            weight = weight + (weight.to(torch.float8_e4m3fn).float() - weight).detach()
        out = rows @ weight * (1.01 if fault == "scaled" else 1.5 if fault == "far" else 1.0)
        taken = {"input": rows, "parameter": self.weight.data, "option": rope[1]}
        if fault in taken:
            taken[fault].mul_(2)
        return self.buffer.copy_(out) if fault == "buffer" else out


@pytest.mark.parametrize(
    ("fault", "plain", "in_scope"),
    [
        ("", [], []),
        *((taken, ["inputs"], ["inputs"]) for taken in ("input", "parameter", "option")),
        ("buffer", ["earlier-outputs"], ["earlier-outputs"]),
        ("scaled", ["outputs"], []),  # less than what another rounding to FP8 may change
        ("far", ["outputs"], ["outputs"]),
        ("high", [], ["outputs", "low-precision-ran"]),
    ],
)
def test_an_evaluation_that_differs_from_training_is_seen(fault: str, plain: list[str], in_scope: list[str]) -> None:
    rows = (torch.randn(4, 8, generator=torch.Generator().manual_seed(1)),)
    for enter, wanted in ((nullcontext, plain), (low_precision, in_scope)):
        layer = Evaluated(fault)
        check = check_eval("fp8", layer, rows, enter, {"rope": (torch.ones(1), torch.ones(1))})
        assert [one.name for one in check.parts if not one.passed] == wanted
