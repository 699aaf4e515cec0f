"""MoE dispatch on its native path and on the double of Transformer Engine: the same rows, sums, gradients, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")

from megacpp_validate.bridge import errors, permute  # noqa: E402
from megacpp_validate.bridge.features import PRODUCTION  # noqa: E402
from megacpp_validate.bridge.permute import Dispatch  # noqa: E402
from megacpp_validate.probes.observe import observed_backends  # noqa: E402
from megacpp_validate.probes.references import (  # noqa: E402
    copied,
    count,
    entries,
    picked,
    places,
    put_back,
    reordered,
    spread,
    summed,
)

TOKENS, EXPERTS, WIDTH = 11, 4, 6
LAYOUTS = [{}, {"align": 8}, {"layout": "padded", "capacity": 3}, {"layout": "padded", "capacity": 20}]


@pytest.fixture(params=["native", "te"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "te":
        request.getfixturevalue("te_double")
    return request.param


def routing(kind: str) -> torch.Tensor:
    torch.manual_seed(3)
    if kind == "random":
        return torch.rand(TOKENS, EXPERTS) > 0.5
    table = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool)
    if kind == "one-expert":
        table[:, 2] = True
    elif kind == "every-expert":
        table[:] = True
    elif kind == "one-token":
        return table[:1] | torch.tensor([True, False, True, False])
    return table


def inputs(kind: str, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    table = routing(kind)
    tokens = torch.randn(WIDTH, len(table)).to(dtype).t().requires_grad_()
    return tokens, (torch.rand(len(table), EXPERTS) + 0.1).requires_grad_(), table


def close(seen: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(
        seen.double(), wanted.double(), rtol=2**-7 if seen.dtype == torch.bfloat16 else 1e-6, atol=1e-6
    )


@pytest.mark.parametrize("kind", ["random", "one-expert", "every-expert", "one-token", "nobody"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_there_and_back(backend: str, kind: str, layout: dict[str, object], dtype: torch.dtype) -> None:
    tokens, probs, table = inputs(kind, dtype)
    capacity = layout.get("capacity")
    rows = entries(table, capacity)
    counts = count(rows, EXPERTS)
    align = layout.get("align", 1)
    sizes = [-(-number // align) * align for number in counts] if capacity is None else [capacity] * EXPERTS
    shape = (sum(sizes),) if capacity is None else (EXPERTS, capacity)
    where = places(counts, sizes)

    dispatch = Dispatch(EXPERTS, **layout)
    sent = dispatch.permute(tokens, probs, table)
    taken = backend if sum(counts) else "native"
    assert dispatch.choice.observed == taken
    assert observed_backends(sent.rows) == ((taken,))
    assert (sent.tokens_per_expert, sent.rows_per_expert) == (tuple(counts), tuple(sizes))
    assert torch.equal(sent.rows, spread(copied(tokens, rows), where, sum(sizes)).reshape(*shape, WIDTH))
    assert torch.equal(sent.row_probs, spread(picked(probs, rows), where, sum(sizes)).reshape(shape))

    back = dispatch.unpermute(sent.rows, sent.row_map, probs=probs)
    assert dispatch.choice.observed == taken
    assert back.dtype == dtype
    close(back, summed(copied(tokens, rows), rows, len(tokens), probs))
    gradient = torch.randn(back.shape).to(dtype)
    back.backward(gradient)
    into = copied(gradient, rows).double()
    close(tokens.grad, summed(into * picked(probs, rows).double()[:, None], rows, len(tokens)))
    close(probs.grad, put_back((into * copied(tokens, rows).double()).sum(1).float(), rows, probs.shape))


def test_numbers_of_the_caller_are_taken_and_held_to_the_map(backend: str) -> None:
    tokens, probs, table = inputs("random")
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
    padded = Dispatch(EXPERTS, layout="padded", capacity=2)
    assert padded.permute(tokens, probs, table, rows_per_expert=counts).tokens_per_expert == (2, 2, 2, 2)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp8_moves_bit_by_bit_in_every_layout(backend: str, dtype: torch.dtype, layout: dict[str, object]) -> None:
    torch.manual_seed(0)
    table = routing("random")
    payload = torch.randint(0, 256, (TOKENS, WIDTH), dtype=torch.uint8).view(dtype)  # NaN and both zeros among them
    dispatch = Dispatch(EXPERTS, **layout)
    sent = dispatch.permute(payload, torch.rand(TOKENS, EXPERTS) + 0.1, table)
    assert dispatch.choice.observed == backend
    assert sent.rows.dtype == dtype
    capacity = layout.get("capacity")
    rows = entries(table, capacity)
    where = places(count(rows, EXPERTS), sent.rows_per_expert)
    wanted = spread(copied(payload.view(torch.uint8), rows), where, sum(sent.rows_per_expert))
    assert torch.equal(sent.rows.view(torch.uint8).reshape(-1, WIDTH), wanted)
    jagged = sent.rows.reshape(-1, WIDTH)
    moved, _ = dispatch.sort_chunks(jagged, sent.rows_per_expert, [3, 1, 0, 2])
    assert torch.equal(moved.view(torch.uint8), reordered(wanted, sent.rows_per_expert, [3, 1, 0, 2]))
    with pytest.raises(errors.WrongDtype, match="Next step"):
        dispatch.unpermute(sent.rows, sent.row_map)


class Quantized:
    """Enough of one of Transformer Engine's quantised tensors to be told from a plain one."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self._fp8_dtype, self._tokens = "E4M3", tokens
        self.shape, self.dtype, self.device = tokens.shape, tokens.dtype, tokens.device
        self.requires_grad = False

    def dim(self) -> int:
        return self._tokens.dim()


def test_te_s_own_quantised_tensors_go_through_te_alone(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    tokens, _, table = inputs("random", torch.bfloat16)
    payload = Quantized(tokens.detach())
    with pytest.raises(errors.WrongDtype, match=r"Quantized.*Next step"):
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
    tokens, probs, table = inputs("random")
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
    for rows, error in (
        (sent.rows[:-1], errors.TokenCountMismatch),
        (sent.rows[None], errors.WrongShape),
    ):
        with pytest.raises(error, match="Next step"):
            dispatch.unpermute(rows, sent.row_map)
    with pytest.raises(errors.WrongShape, match="Next step"):
        dispatch.unpermute(sent.rows, sent.row_map, probs=sent.row_probs)
    with pytest.raises(errors.TokenCountMismatch, match="Next step"):
        Dispatch(2 * EXPERTS).unpermute(sent.rows, sent.row_map)
    large = Dispatch(EXPERTS, layout="padded", capacity=4).permute(*inputs("every-expert"))
    with pytest.raises(errors.TokenCountMismatch, match="Next step"):
        Dispatch(EXPERTS, layout="padded", capacity=2).unpermute(large.rows[:, :2], large.row_map)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"tokens": torch.zeros(1, 3, WIDTH)}, errors.WrongShape),
        ({"tokens": torch.zeros(4, WIDTH)}, errors.WrongShape),
        ({"routing_map": TABLE[:, :2]}, errors.WrongShape),
        ({"routing_map": TABLE.int()}, errors.WrongDtype),
        ({"routing_map": TABLE.to("meta")}, errors.WrongTarget),
        ({"probs": torch.ones(3, 2)}, errors.WrongShape),
        ({"probs": torch.ones(3, EXPERTS, dtype=torch.int32)}, errors.WrongDtype),
        ({"probs": torch.ones(3, EXPERTS, device="meta")}, errors.WrongTarget),
    ],
)
def test_tensors_that_do_not_belong_together_are_refused(
    backend: str, change: dict[str, torch.Tensor], error: type[Exception]
) -> None:
    with pytest.raises(error, match="Next step"):
        Dispatch(EXPERTS).permute(**{**GIVEN, **change})


@pytest.mark.parametrize(
    ("sizes", "order", "error"),
    [
        ([3, 4], [0, 1], errors.TokenCountMismatch),
        ([9, -1], [0, 1], errors.TokenCountMismatch),
        ([4, 4], [0, 0], errors.WrongShape),
        ([4, 4], [0], errors.WrongShape),
    ],
)
def test_chunks_that_cannot_be_are_refused(backend: str, sizes: object, order: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="Next step"):
        Dispatch(EXPERTS).sort_chunks(torch.zeros(8, WIDTH), sizes, order)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"layout": "ragged"}, errors.UnknownName),
        ({"layout": "padded"}, errors.WrongShape),
        ({"capacity": 4}, errors.WrongShape),
        ({"align": 0}, errors.WrongShape),
        ({"layout": "padded", "capacity": 0}, errors.WrongShape),
        ({"layout": "padded", "capacity": 4, "align": 16}, errors.WrongShape),
        ({"num_experts": 0}, errors.WrongShape),
    ],
)
def test_layouts_that_cannot_be_are_refused(change: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error, match="Next step"):
        Dispatch(**{"num_experts": EXPERTS, **change})
