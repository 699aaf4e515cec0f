"""The FP8 benchmark: its page says what its figures say, and its paths run what they are called after."""

from __future__ import annotations

import copy
import json
from pathlib import Path as File
from typing import Any

import pytest
import torch

from benchmarks import fp8, fp8_paths
from benchmarks.fp8_page import AIMS, write_page
from benchmarks.fp8_paths import BF16, FellBack, Path, scaled_linear

ROOT = File(__file__).parents[2]
FIGURES = ROOT / "docs" / "benchmarks" / "fp8.json"


def line(side: str, recipe: str, ms: float, gain: float | None = None, over_raw: float | None = None) -> dict[str, Any]:
    return {
        "side": side, "recipe": recipe, "ms": ms, "low": ms, "high": ms, "tflops": 1000 / ms, "host_us": 900.0,
        "gain": gain, "over_raw": over_raw,
    }  # fmt: skip


def layer(what: str, gain: float, over_raw: float) -> dict[str, Any]:
    rows = [
        line("bridge", "bf16", 10.0, 1.0, 1.001),
        line("bridge", "delayed", 10.0 / gain, gain, over_raw),
        line("raw TE", "bf16", 10.0, 1.0),
    ]
    return {"what": what, "flop": 1e12, "rows": rows}


GOOD: dict[str, Any] = {
    "date": "2026-11-21",
    "gpu": "a card",
    "torch": "2.11",
    "te": "2.20.2",
    "rounds": 15,
    "rates": {"what": "one product", "flop": 1.0, "rows": [line("torch", "bf16", 1.0)]},
    "mlp": layer("LayerNormMLP 1 x 2 x 3, RMSNorm", 1.70, 1.004),
    "block": layer("TransformerLayer 1 x 2 x 3, 4 heads", 1.50, 1.004),
    "linears": [
        {"what": "Linear 8 x 16 x 16", "flop": 1.0, "rows": [line("torch", "bf16", 1.0),
                                                            line("bridge", "delayed", 1.25, 0.8, 1.0)]}
    ],
}  # fmt: skip


def changed(*way: Any, to: Any) -> dict[str, Any]:
    """The good figures with one of them changed."""
    result = copy.deepcopy(GOOD)
    place: Any = result
    for step in way[:-1]:
        place = place[step]
    place[way[-1]] = to
    return result


def verdicts(page: str) -> list[str]:
    """The rows of the table of aims."""
    return [line for line in page.splitlines() if line.endswith(("| kept |", "| **not kept** |"))]


def test_aims_that_are_kept_are_said_to_be() -> None:
    said = verdicts(write_page(GOOD))
    assert len(said) == 4
    assert all(line.endswith("| kept |") for line in said)


@pytest.mark.parametrize(
    "worse",
    [
        changed("mlp", "rows", 1, "gain", to=AIMS["mlp"] - 0.01),
        changed("block", "rows", 1, "gain", to=AIMS["block"] - 0.01),
        changed("mlp", "rows", 1, "over_raw", to=1.021),
        changed("block", "rows", 0, "over_raw", to=1.021),
        changed("mlp", "rows", 1, to={"side": "bridge, delayed", "recipe": "", "note": "FellBack: native"}),
    ],
    ids=["mlp gain", "block gain", "mlp over", "block over", "mlp not run"],
)
def test_an_aim_that_is_not_kept_is_said_not_to_be(worse: dict[str, Any]) -> None:
    assert sum("**not kept**" in line for line in verdicts(write_page(worse))) == 1


def test_what_loses_and_what_did_not_run_is_told() -> None:
    page = write_page(GOOD)
    assert "1.250 (0.80 x **loses**)" in page
    assert "not run" in page
    worse = changed("mlp", "rows", 2, to={"side": "raw TE, bf16", "recipe": "", "note": "RuntimeError: no"})
    assert "| raw TE, bf16 | not run: RuntimeError: no |" in write_page(worse)


def test_a_section_that_was_not_measured_is_left_out() -> None:
    page = write_page({name: value for name, value in GOOD.items() if name not in ("mlp", "linears")})
    assert "LayerNormMLP" not in page
    assert "TransformerLayer" in page


def test_the_page_in_the_docs_is_made_of_the_figures_beside_it() -> None:
    if not FIGURES.is_file():
        pytest.skip(f"not-run: there is no {FIGURES.name}: it is measured on a GPU")
    assert FIGURES.with_suffix(".md").read_text() == write_page(json.loads(FIGURES.read_text()))


@pytest.mark.parametrize(("name", "value"), [("te", "2.12.0"), ("rounds", 3), ("date", "2026-11-22"), ("gpu", "other")])
def test_sections_of_another_stack_or_day_are_not_kept(name: str, value: object) -> None:
    heading = {key: GOOD[key] for key in ("date", "gpu", "torch", "te", "rounds")}
    assert fp8.keep_sections(GOOD, heading) == GOOD
    assert fp8.keep_sections({**GOOD, name: value}, heading) == heading


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
