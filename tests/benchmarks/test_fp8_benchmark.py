"""The FP8 benchmark: its paths run what they are called after, and its ratios are of one round."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import fp8, fp8_paths
from benchmarks.fp8_paths import BF16, FellBack, Path, scaled_linear

HEADING = {"date": "2026-11-21", "gpu": "a card", "torch": "2.11", "te": "2.20.2", "rounds": 15}


@pytest.mark.parametrize(("name", "value"), [("te", "2.12.0"), ("rounds", 3), ("date", "2026-11-22"), ("gpu", "other")])
def test_sections_of_another_stack_or_day_are_not_kept(name: str, value: object) -> None:
    before = {**HEADING, "mlp": {"rows": []}}
    assert fp8.keep_sections(before, HEADING) == before
    assert fp8.keep_sections({**before, name: value}, HEADING) == HEADING


def test_every_path_has_its_round_in_every_round_and_orders_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(fp8, "one_round", lambda run, repeats: (run(), (20.0, 1.0))[1])
    paths = [Path("bridge", str(number), lambda number=number: ran.append(str(number))) for number in range(5)]
    found = fp8.side_by_side(paths, 4)
    assert all(len(pairs) == 4 for pairs in found.values())
    rounds = [ran[start : start + 5] for start in range(5, 25, 5)]
    assert all(sorted(order) == list("01234") for order in rounds)
    assert len({tuple(order) for order in rounds}) > 1


def test_ratios_are_medians_of_ratios_within_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock halves in the second of three rounds: times scatter, ratios do not."""
    paths = [
        Path("bridge", "bf16", lambda: 2.0),
        Path("raw TE", "bf16", lambda: 2.0),
        Path("bridge", "block", lambda: 1.0),
    ]

    def timed(paths: Any, rounds: int) -> dict[str, list[tuple[float, float]]]:
        return {path.name: [(path.step() * slow, 5.0) for slow in (1.0, 2.0, 1.0)] for path in paths}

    monkeypatch.setattr(fp8, "side_by_side", timed)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    rows = {(row["side"], row["recipe"]): row for row in fp8.compare("x", 1e9, paths, 3)["rows"]}
    assert rows["bridge", "block"]["gain"] == 2.0
    assert rows["bridge", "bf16"]["over_raw"] == 1.0
    assert rows["bridge", "block"]["over_raw"] is None  # nothing raw ran in it


def test_a_path_that_raises_is_told_and_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("no kernel\nfor it")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(fp8, "side_by_side", lambda paths, rounds: {path.name: [(1.0, 1.0)] for path in paths})
    paths = [Path("raw TE", "bf16", broken), Path("bridge", "bf16", lambda: None)]
    rows = fp8.compare("x", 1.0, paths, 1)["rows"]
    assert [row["side"] for row in rows] == ["bridge", "raw TE, bf16"]
    assert rows[1]["note"] == "RuntimeError: no kernel for it"


def test_three_scaled_products_give_a_linear_layer_in_fp8() -> None:
    """Both operands of each product are rounded to 3 or 2 bits of mantissa: a relative error of 2^-4 or 2^-3 at most
    each, and in the norm less than the sum of both.
    """
    given = torch.Generator().manual_seed(0)
    rows, weight, gradient = (
        torch.randn(shape, generator=given, dtype=torch.float64).to(BF16) for shape in ((64, 128), (96, 128), (64, 96))
    )
    rows.requires_grad_()
    weight.requires_grad_()
    scaled_linear(rows, weight).backward(gradient)
    with torch.no_grad():
        exact = {
            "out": (scaled_linear(rows, weight), rows.double() @ weight.double().t(), 2.0**-3),
            "rows": (rows.grad, gradient.double() @ weight.double(), 2.0**-3 + 2.0**-4),
            "weight": (weight.grad, gradient.double().t() @ rows.double(), 2.0**-3 + 2.0**-4),
        }
    for name, (found, right, bound) in exact.items():
        error = float((found.double() - right).norm() / right.norm())
        assert 0.0 < error < bound, name


@pytest.fixture
def small(te_double: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Rows for small layers, on Transformer Engine's double."""
    monkeypatch.setattr(fp8_paths, "detect_target", lambda: "cpu")
    monkeypatch.setattr(torch, "compile", lambda way, **options: way)
    return torch.randn(32, 64, dtype=BF16, requires_grad=True)


def test_every_path_takes_a_step_and_drops_the_gradients_of_the_one_before(small: Any) -> None:
    sizes = {"hidden": 64, "ffn_hidden": 128, "num_heads": 4, "head_dim": 16, "num_gqa_groups": 2}
    rows = torch.randn(2, 16, 64, dtype=BF16, requires_grad=True)
    made = {
        "mlp": (small, fp8_paths.mlp_paths(small, 64, 128)),
        "linear": (small, fp8_paths.linear_paths(small, 64, 32, scaled_linear)),
        "block": (rows, fp8_paths.block_paths(rows, sizes, rope=False)),
    }
    for what, (given, paths) in made.items():
        names = {path.name for path in paths}
        assert {f"{side}, {recipe}" for side in ("bridge", "raw TE") for recipe in fp8_paths.RECIPES} <= names
        assert what == "linear" or {"bridge, delayed, weights kept", "raw TE, delayed, weights kept"} <= names
        for path in paths:
            path.step()
            first = given.grad.clone()
            path.step()
            error = (given.grad - first).norm() / first.norm()
            assert error < 0.5, path.name  # gradients that are added up would be off by their own size


def test_a_bridge_that_fell_back_is_not_timed_as_transformer_engine(
    small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGACPP_DISABLE_TE_MLP", "1")
    with pytest.raises(FellBack, match="took native"):
        fp8_paths.mlp_paths(small, 64, 128)
