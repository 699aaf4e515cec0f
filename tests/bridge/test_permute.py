"""What MoE dispatch refuses, and what it leaves to plain torch; `probes.permute` holds rows, sums and gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")

from megacpp_validate.bridge import errors, permute  # noqa: E402
from megacpp_validate.bridge.features import PRODUCTION  # noqa: E402
from megacpp_validate.bridge.permute import Dispatch  # noqa: E402

TOKENS, EXPERTS, WIDTH = 11, 4, 6
LAYOUTS = [{}, {"align": 8}, {"capacity": 3}, {"capacity": 20}]


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    table = torch.rand(TOKENS, EXPERTS) > 0.5
    return torch.randn(TOKENS, WIDTH).to(dtype).requires_grad_(), torch.rand(TOKENS, EXPERTS).requires_grad_(), table


def test_numbers_of_the_caller_are_taken_and_held_to_the_map(backend: str) -> None:
    tokens, probs, table = inputs()
    dispatch = Dispatch(EXPERTS)
    wanted = dispatch.permute(tokens, probs, table)
    counts = table.sum(0)
    for given in (counts.tolist(), counts):
        sent = dispatch.permute(tokens, probs, table, rows_per_expert=given)
        assert torch.equal(sent.rows, wanted.rows)
    over = counts.clone()
    over[0] = TOKENS + 1
    for given in (counts + 1, counts[:-1], -counts, over):
        with pytest.raises(errors.TokenCountMismatch, match="Next step"):
            dispatch.permute(tokens, probs, table, rows_per_expert=given)
    padded = Dispatch(EXPERTS, capacity=2)
    assert padded.permute(tokens, probs, table, rows_per_expert=counts).tokens_per_expert == (2, 2, 2, 2)


def quantized(tokens: torch.Tensor) -> SimpleNamespace:
    """Enough of one of Transformer Engine's quantised tensors to be told from a plain one."""
    same = {"shape": tokens.shape, "dtype": tokens.dtype, "device": tokens.device, "dim": tokens.dim}
    return SimpleNamespace(_fp8_dtype="E4M3", requires_grad=False, **same)


def test_te_s_own_quantised_tensors_go_through_te_alone(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    tokens, _, table = inputs(torch.bfloat16)
    payload = quantized(tokens)
    with pytest.raises(errors.WrongDtype, match=r"SimpleNamespace.*Next step"):
        Dispatch(EXPERTS).permute(payload, None, table)
    with pytest.raises(errors.WrongDtype, match="Next step"):
        Dispatch(EXPERTS).sort_chunks(payload, [TOKENS], [0])
    request.getfixturevalue("te_double")
    handed: list[object] = []
    monkeypatch.setattr(
        permute, "te_permute", lambda *given, **_: (handed.append(given[0]), (given[0], None, table))[1]
    )
    sent = Dispatch(EXPERTS).permute(payload, None, table)
    assert handed == [payload]
    assert sent.rows is payload
    for layout in LAYOUTS[1:]:
        with pytest.raises(errors.WrongDtype, match="jagged and unaligned"):
            Dispatch(EXPERTS, **layout).permute(payload, None, table)
    none = Dispatch(EXPERTS).permute(payload, None, torch.zeros_like(table))
    assert (none.rows.shape, none.rows.dtype) == ((0, WIDTH), torch.bfloat16)
    with pytest.raises(errors.WrongDtype, match="one scale a tensor"):
        Dispatch(EXPERTS).sort_chunks(payload, [TOKENS], [0])


@pytest.mark.usefixtures("te_double")
def test_what_te_does_wrong_goes_native_with_the_reason() -> None:
    tokens, probs, table = inputs()
    dispatch = Dispatch(EXPERTS)
    cases = {
        "no-rows": (tokens, probs, torch.zeros_like(table)),
        "dtype": (tokens.double(), probs, table),
        "gradient-of-probs-alone": (tokens.detach(), probs, table),
        "flag-off": (tokens, probs, table),
    }
    for code, given in cases.items():
        taken = Dispatch(EXPERTS, features=replace(PRODUCTION, permute=False)) if code == "flag-off" else dispatch
        sent = taken.permute(*given)
        assert [refusal.code for refusal in taken.choice.refusals] == [code]
        taken.unpermute(sent.rows, sent.row_map, probs=probs)
        assert [refusal.code for refusal in taken.choice.refusals] == [code], "the way back says why, too"


TABLE = torch.ones(3, EXPERTS, dtype=torch.bool)
GIVEN = {"tokens": torch.zeros(3, WIDTH), "probs": torch.ones(3, EXPERTS), "routing_map": TABLE}


def test_rows_of_another_map_are_refused(backend: str) -> None:
    dispatch = Dispatch(EXPERTS)
    sent = dispatch.permute(**GIVEN)
    for rows in (sent.rows[:-1], sent.rows[None]):
        with pytest.raises(errors.TokenCountMismatch, match="Next step"):
            dispatch.unpermute(rows, sent.row_map)
    with pytest.raises(errors.WrongShape, match="Next step"):
        dispatch.unpermute(sent.rows, sent.row_map, probs=sent.row_probs)


def dispatched(**change: torch.Tensor) -> Callable[[], object]:
    return lambda: Dispatch(EXPERTS).permute(**{**GIVEN, **change})


def sorted_chunks(sizes: list[int], order: list[int]) -> Callable[[], object]:
    return lambda: Dispatch(EXPERTS).sort_chunks(torch.zeros(8, WIDTH), sizes, order)


def unpermuted(dtype: torch.dtype) -> None:
    dispatch = Dispatch(EXPERTS)
    sent = dispatch.permute(**GIVEN)
    dispatch.unpermute(sent.rows.to(dtype), sent.row_map)


REFUSED: list[tuple[type[Exception], Callable[[], object]]] = [
    (errors.WrongShape, dispatched(tokens=torch.zeros(1, 3, WIDTH))),
    (errors.WrongShape, dispatched(tokens=torch.zeros(4, WIDTH))),
    (errors.WrongShape, dispatched(routing_map=TABLE[:, :2])),
    (errors.WrongDtype, dispatched(routing_map=TABLE.int())),
    (errors.WrongShape, dispatched(probs=torch.ones(3, 2))),
    (errors.WrongDtype, dispatched(probs=torch.ones(3, EXPERTS, dtype=torch.int32))),
    (errors.WrongDtype, lambda: unpermuted(torch.float8_e4m3fn)),
    (errors.TokenCountMismatch, sorted_chunks([3, 4], [0, 1])),
    (errors.TokenCountMismatch, sorted_chunks([9, -1], [0, 1])),
    (errors.WrongShape, sorted_chunks([4, 4], [0, 0])),
    (errors.WrongShape, sorted_chunks([4, 4], [0])),
    (errors.WrongShape, lambda: Dispatch(EXPERTS, capacity=4, align=16)),
]


@pytest.mark.parametrize(("error", "call"), REFUSED)
def test_what_cannot_be_dispatched_is_refused(backend: str, error: type[Exception], call: Callable[[], object]) -> None:
    with pytest.raises(error, match="Next step"):
        call()
