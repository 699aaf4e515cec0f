"""The permute probe: both backends pass as they are, and every planted fault fails a check."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")

from megacpp_validate.bridge import permute as bridge  # noqa: E402
from megacpp_validate.bridge.backends import Refusal  # noqa: E402
from megacpp_validate.native import permute as native  # noqa: E402
from megacpp_validate.probes import permute as probe_module  # noqa: E402
from tests.probes import planted_numbers  # noqa: E402
from tests.probes.planted_numbers import failed, half_of_the_rows, in_gradient, run_probe  # noqa: E402

Fault = Callable[[Any], Any]


run = partial(run_probe, probe_module)


def first(fault: Fault) -> Fault:
    return lambda given: (fault(given[0]), *given[1:])


def second(fault: Fault) -> Fault:
    return lambda given: (given[0], given[1] if given[1] is None else fault(given[1]), *given[2:])


def floating(fault: Fault) -> Fault:
    """Bytes of FP8 stay as they are: faults of values are looked for in values."""
    return lambda tensor: fault(tensor) if tensor.dtype.is_floating_point else tensor


VALUES: dict[str, Fault] = {
    **planted_numbers.VALUES,
    "half zeros": half_of_the_rows,
    "shuffled": lambda tensor: tensor.roll(1, 0),
    "gradient zeroed": in_gradient(torch.zeros_like),
    "gradient scaled": in_gradient(lambda gradient: gradient * 1.01),
    "gradient shuffled": in_gradient(lambda gradient: gradient.roll(1, 0)),
}


def plant(monkeypatch: pytest.MonkeyPatch, name: str, fault: Callable[..., Any]) -> None:
    """`fault` sees what the function of the bridge gives, and what it was given."""
    original = getattr(bridge, name)
    monkeypatch.setattr(bridge, name, lambda *given, **more: fault(original(*given, **more)))


@pytest.mark.parametrize("seed", range(5))
def test_the_native_path_passes(seed: int) -> None:
    bench = run(seed=seed)
    assert failed(bench) == set()
    assert {row.claimed for row in bench.backends} == {"native"}


@pytest.mark.usefixtures("te_double")
def test_te_passes_and_is_seen() -> None:
    bench = run("te")
    assert failed(bench) == set()
    assert {row.claimed for row in bench.backends if "te" in row.observed} == {"te"}
    native_rows = [row.path for row in bench.backends if row.claimed == "native"]
    assert all("empty" in path or "alone" in path or path == "permute" for path in native_rows)


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("what", ["rows", "row_probs", "tokens"])
def test_faults_of_values_on_the_native_path(monkeypatch: pytest.MonkeyPatch, kind: str, what: str) -> None:
    name = "unpermute" if what == "tokens" else "permute"
    place = {"rows": first, "row_probs": second, "tokens": lambda fault: fault}[what]
    plant(monkeypatch, name, place(floating(VALUES[kind])))
    found = failed(run())
    part = {"rows": ("rows", "grad.tokens"), "row_probs": ("row_probs", "grad.probs"), "tokens": ("sum.", "weighted.")}
    assert any(word in check for check in found for word in part[what]), found


# On the native path every kind of fault is planted in every place; here those of each kind that are hardest to see.
OF_TE = {
    "rows": ("half zeros", "x1.01", "shuffled", "one NaN", "gradient shuffled"),
    "row_probs": ("x1.01", "gradient scaled"),
    "tokens": ("sign", "x1.01", "gradient zeroed"),
    "chunks": ("shuffled", "gradient scaled"),
}


@pytest.mark.usefixtures("te_double")
@pytest.mark.parametrize(("what", "kind"), [(what, kind) for what, kinds in OF_TE.items() for kind in kinds])
def test_faults_of_values_in_what_te_returns(monkeypatch: pytest.MonkeyPatch, kind: str, what: str) -> None:
    name = {"tokens": "te_unpermute", "chunks": "te_sort_chunks"}.get(what, "te_permute")
    place = {"rows": first, "row_probs": second}.get(what, lambda fault: fault)
    plant(monkeypatch, name, place(floating(VALUES[kind])))
    assert failed(run("te"))


def _swap_two_rows(given: Any) -> Any:
    rows, row_probs, ids = given
    return rows, row_probs, ids if len(ids) < 2 else torch.cat([ids[1:2], ids[:1], ids[2:]])


def _bytes_rounded(given: Any) -> Any:
    rows, *others = given
    return (rows & 0xFE if rows.dtype == torch.uint8 else rows, *others)


@pytest.mark.parametrize(
    ("name", "fault", "caught_by"),
    [
        ("permute", _swap_two_rows, "fp32.top2.dropped.sum.forward"),
        ("permute", _bytes_rounded, "float8_e4m3fn.jagged.rows"),
        ("sort_chunks", lambda rows: rows.roll(1, 0), "bf16.chunks.rows"),
        ("sort_chunks", lambda rows: rows.flip(0), "float8_e5m2.jagged.sorted"),
        ("pad_rows", first(floating(lambda rows: rows + 1)), "bf16.aligned.rows"),
        ("to_padded", lambda padded: padded.roll(1, 1), "bf16.padded.rows"),
        ("drop_over_capacity", lambda kept: kept & (kept.cumsum(0) <= 2), "bf16.padded.counts"),
        ("drop_over_capacity", lambda kept: kept.flip(0), "bf16.padded.rows"),
    ],
)  # fmt: skip
def test_faults_of_order_on_the_native_path(
    monkeypatch: pytest.MonkeyPatch, name: str, fault: Fault, caught_by: str
) -> None:
    plant(monkeypatch, name, fault)
    assert caught_by in failed(run())


def test_padding_that_leaks_into_the_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    original = bridge.unpad_rows
    leak: dict[str, Fault] = {
        "bf16.aligned.back.forward": lambda rows: 0 * rows.sum(0),
        "bf16.aligned.back.grad.rows": lambda rows: rows.nan_to_num().sum(0) - rows.detach().nan_to_num().sum(0),
    }
    for check, fault in leak.items():

        def leaking(rows: Any, counts: Any, align: int, fault: Fault = fault) -> Any:
            taken = original(rows, counts, align)
            return taken + fault(rows) if taken.is_floating_point() else taken

        monkeypatch.setattr(bridge, "unpad_rows", leaking)
        assert failed(run()) == {check}


@pytest.mark.parametrize("times", [0, 2])
def test_probabilities_not_applied_and_applied_twice(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    def weighted(rows: Any, ids: Any, *, num_tokens: int, row_probs: Any = None) -> Any:
        weights = row_probs if row_probs is None else row_probs**times
        return native.unpermute(rows, ids, num_tokens=num_tokens, row_probs=weights)

    monkeypatch.setattr(bridge, "unpermute", weighted)
    found = failed(run())
    assert "bf16.top2.dropped.weighted.forward" in found
    assert not any(".sum." in check for check in found)


@pytest.mark.usefixtures("te_double")
def test_weights_that_te_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    original = bridge.te_unpermute
    monkeypatch.setattr(bridge, "te_unpermute", lambda *given, **more: original(*given, **{**more, "probs": None}))
    assert "bf16.top2.dropped.weighted.forward" in failed(run("te"))


@pytest.mark.usefixtures("te_double")
def test_rows_that_te_weights_on_the_way_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def weighted(given: Any) -> Any:
        rows, row_probs, row_map = given
        has_weights = len(row_probs) == len(rows) and rows.dtype.is_floating_point
        return rows * row_probs[:, None].to(rows.dtype) if has_weights else rows, row_probs, row_map

    plant(monkeypatch, "te_permute", weighted)
    assert "bf16.top2.dropped.rows" in failed(run("te"))


@pytest.mark.parametrize("off", [1, -1])
def test_counts_off_by_one(monkeypatch: pytest.MonkeyPatch, off: int) -> None:
    original = bridge.Dispatch.permute

    def counted(self: Any, *given: Any, **more: Any) -> Any:
        sent = original(self, *given, **more)
        counts = (sent.rows_per_expert[0] + off, *sent.rows_per_expert[1:])
        return type(sent)(sent.rows, sent.row_probs, counts, sent.tokens_per_expert, sent.row_map)

    monkeypatch.setattr(bridge.Dispatch, "permute", counted)
    assert "bf16.one-token.counts" in failed(run())


def test_a_probability_of_zero_that_is_not_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    original = bridge.Dispatch._native_permute
    monkeypatch.setattr(
        bridge.Dispatch,
        "_native_permute",
        lambda self, payload, probs, kept, count: (
            native.permute(payload, probs, kept) if count else original(self, payload, probs, kept, count)
        ),
    )
    assert failed(run()) == {"bf16.zero-probability.rows"}


@pytest.mark.usefixtures("te_double")
def test_a_fallback_where_te_is_requested_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridge, "why_not_te", lambda *_: Refusal("te", "planted", "planted"))
    found = failed(run("te"))
    assert "bf16.top2.dropped.permute.bf16.top2.dropped.backend" in found
    assert "float8_e4m3fn.jagged.claimed" in found


@pytest.mark.usefixtures("te_double")
@pytest.mark.parametrize("name", ["te_permute", "te_unpermute", "te_sort_chunks"])
def test_a_native_path_that_claims_to_be_te_fails(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    plant(monkeypatch, name, lambda given: first(_unmarked)(given) if isinstance(given, tuple) else _unmarked(given))
    assert any(check.endswith("backend") for check in failed(run("te")))


def _unmarked(tensor: Any) -> Any:
    """The same values and no graph of Transformer Engine behind them."""
    return tensor.detach().clone().requires_grad_() if tensor.is_floating_point() else tensor


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("check_routing", "refuses.map-dtype"),
        ("check_probs", "refuses.weights-shape"),
        ("check_counts", "refuses.counts"),
        ("check_rows", "refuses.rows"),
        ("check_chunks", "refuses.chunk-order"),
        ("check_layout", "refuses.layout"),
    ],
)
def test_a_refusal_that_is_not_made(monkeypatch: pytest.MonkeyPatch, name: str, check: str) -> None:
    monkeypatch.setattr(bridge, name, lambda *given: tuple(given[0]) if name == "check_counts" else None)
    assert check in failed(run())
