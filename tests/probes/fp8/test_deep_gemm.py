"""The DeepGEMM probe passes on kernels that do what DeepGEMM's do, and every planted fault fails the right check."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")

from megacpp_validate.bridge import deep_gemm, expert_gemm  # noqa: E402
from megacpp_validate.native.grouped_gemm import grouped_gemm_loop  # noqa: E402
from megacpp_validate.probes.bench import Bench, CannotRun  # noqa: E402
from megacpp_validate.probes.fp8 import deep_gemm as probed  # noqa: E402
from megacpp_validate.probes.order import Order, Target  # noqa: E402
from tests.deep_gemm_double import install  # noqa: E402
from tests.probes.planting import Plant, after, failed, putting  # noqa: E402
from tests.probes.planting import changing as patched  # noqa: E402


def run(seed: int = 0, quick: bool = True, **target: Any) -> Bench:
    held = Target("cpu", "sm_90", **{"recipes": (), "deep_gemm": True, **target})
    order = Order("fp8_deep_gemm", "stack", held, "native", seed=seed, quick=quick, stands_on=("expert_gemm",))
    bench = Bench(order)
    probed.probe(bench)
    return bench


def only(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """Leave the other parts of the probe out."""
    monkeypatch.setattr(probed, "PARTS", {part: probed.PARTS[part]})


@pytest.mark.parametrize("seed", range(2))
def test_it_passes_where_everything_is_right(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    install(monkeypatch)
    bench = run(seed=seed, quick=seed > 0)
    assert failed(bench) == set()
    assert {(row.tensor, row.format, row.block) for row in bench.quantizers} == {
        ("input", "float8_e4m3", "1x128"),
        ("weight", "float8_e4m3", "128x128"),
        ("gradient", "float8_e4m3", "1x128"),
        ("input", "float8_e4m3", "128x128"),
    }
    assert [row.library for row in bench.compilers] == ["deep_gemm"]


def test_without_the_library_it_is_not_run() -> None:
    with pytest.raises(CannotRun, match="pip install sgl-deep-gemm"):
        run()


def test_a_target_without_it_refuses_it_as_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = run(deep_gemm=False)
    assert failed(bench) == set()
    assert "has no kernels" in bench.unsupported
    install(monkeypatch)
    assert failed(run(deep_gemm=False)) == {"bridge-refuses"}, "support that the row does not know of is a surprise"


def in_bf16(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        expert_gemm, "deep_gemm_grouped", lambda rows, weight, counts, **_: grouped_gemm_loop(rows, weight, counts)
    )


def scales_of_tensors(whole: Any) -> Any:
    """One scale for all blocks: what the format of gradients is too narrow for."""

    def cast(tokens: Any, tiles: Any, **how: Any) -> Any:
        rows, columns = whole(tokens, tiles, **how)
        if rows is not None:
            scale = rows.scales.max()
            plain = rows.values.double() * rows.scales.double().repeat_interleave(128, 1)
            rows = rows._replace(values=(plain / scale.double()).to(torch.float8_e4m3fn))
            rows = rows._replace(scales=torch.full_like(rows.scales, float(scale)))
        return rows, columns

    return cast


def nan_to_zero(whole: Any) -> Any:
    return lambda tokens, *given, **how: whole(tokens.nan_to_num(0.0), *given, **how)


def a_bit_off(made: Any) -> Any:
    return made and made._replace(scales=made.scales * 1.001)


FAULTS: dict[str, tuple[Plant, str]] = {
    "bf16 in its place": (in_bf16, "contiguous.uneven.forward.rounded"),
    "gradient of the weights in bf16": (
        putting(deep_gemm, "choose_weight_gradient", lambda counts: "bf16"), "contiguous.even.grad.weight.rounded",
    ),
    "one scale for all rows": (
        patched(deep_gemm, "cast_tokens", scales_of_tensors), "contiguous.uneven.forward.of-rounded-operands",
    ),
    "a NaN that is lost": (patched(deep_gemm, "cast_tokens", nan_to_zero), "not-a-number.nan"),
    "a cast that is a bit off": (
        after(deep_gemm, "cast_tokens", lambda made: (a_bit_off(made[0]), made[1])),
        "casts.plain.tokens.none",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    plant, check = FAULTS[name]
    install(monkeypatch)
    plant(monkeypatch)
    only(monkeypatch, check.partition(".")[0])
    assert check in failed(run())


def test_a_fallback_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    monkeypatch.setattr(expert_gemm, "why_not_deep_gemm", lambda *_: expert_gemm.Refusal("deep_gemm", "planted", "no"))
    only(monkeypatch, "contiguous")
    found = failed(run())
    assert "contiguous.uneven.expert_gemm.backend" in found
    assert "contiguous.uneven.operands.e4m3" in found
