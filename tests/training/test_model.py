"""The hybrid model: native builds of every kind, builds by Transformer Engine that equal them, zones, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")

from megacpp_validate.bridge.features import PRESETS, PRODUCTION  # noqa: E402
from megacpp_validate.bridge.fp8_scope import current_scope, low_precision  # noqa: E402
from megacpp_validate.training.language import Language  # noqa: E402
from megacpp_validate.training.layers import Build  # noqa: E402
from megacpp_validate.training.model import HybridModel, Scopes  # noqa: E402
from megacpp_validate.training.sizes import Size, read_size  # noqa: E402

NATIVE = Build(PRESETS["off"])
SPARSE = {"attention": "moba", "moba_block": 8, "moba_top_k": 2, "index_top_k": 6, "index_window": 2, "streams": 3}


def read(size: Size, more: int = 1) -> Any:
    return Language(size.grammar, seed=4).batch(0, 2, size.length + more)


def native(model: HybridModel) -> dict[str, Any]:
    """Every weight under native names, the same for every build."""
    state = {
        "embedding.weight": model.embedding.weight,
        "head.weight": model.head.weight,
        "norm.weight": model.norm.weight,
    }
    layers = {
        f"layers.{place}.{name}": weight
        for place, layer in enumerate(model.layers)
        for name, weight in [*layer.native_state_dict().items(), *experts(layer)]
    }
    return {**{name: weight.detach().clone() for name, weight in state.items()}, **layers}


def experts(layer: Any) -> list[tuple[str, Any]]:
    """The banks of an E-layer, [E, out, in] each."""
    banks = {name: getattr(layer, name) for name in ("up", "down") if hasattr(layer, "router")}
    return [(f"{name}.weight", bank.native_state_dict()["weight"]) for name, bank in banks.items()]


def off(observed: Any, reference: Any) -> float:
    return ((observed.double() - reference).norm() / reference.norm()).item()


@pytest.mark.parametrize("pattern", ["A", "M", "E", "R", "D", "AMER", "DASE"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_kind_is_built_and_every_weight_gets_a_gradient(pattern: str, dtype: Any) -> None:
    sparse = {**SPARSE, "bf16_first": 0, "bf16_last": 0} if "D" in pattern else {"bf16_first": 0, "bf16_last": 0}
    size = read_size("tiny", pattern=pattern, **sparse)
    model = HybridModel(size, Build(PRESETS["off"], dtype), seed=0)
    losses = model.losses(read(size))
    losses.total.backward()
    assert losses.language.item() == pytest.approx(size.grammar.without_context(), abs=0.1)
    assert (losses.total.item() > losses.language.item()) == bool({"E", "D"} & set(pattern))
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()), name
        assert float(parameter.grad.abs().sum()) > 0, name
    assert model(read(size, 0)).shape == (2, size.length, size.grammar.vocabulary)


@pytest.mark.parametrize("changes", [{}, {"pattern": "ADASR", **SPARSE}], ids=["tiny", "sparse"])
def test_no_position_sees_what_comes_after_it(changes: dict[str, Any]) -> None:
    size = read_size("tiny", **changes)
    model = HybridModel(size, NATIVE, seed=0)
    tokens = read(size, 0)
    changed = tokens.clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % size.grammar.vocabulary
    before, after = model(tokens), model(changed)
    # One row's products may be blocked differently; what leaks would change the logits by their own size.
    assert off(after[:, :20], before[:, :20].double()) < 1e-5
    assert off(after[:, 20:], before[:, 20:].double()) > 0.1


def test_weights_depend_on_the_seed_and_nothing_else() -> None:
    size = read_size("tiny")
    first = native(HybridModel(size, NATIVE, seed=0))
    before = torch.random.get_rng_state()
    again = native(HybridModel(size, NATIVE, seed=0))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    other = native(HybridModel(size, NATIVE, seed=1))
    assert any(not torch.equal(first[name], other[name]) for name in first)
    assert not torch.equal(first["layers.0.qkv.weight"], first["layers.3.qkv.weight"])  # two layers of one kind
    rounded = native(HybridModel(size, Build(PRESETS["off"], torch.bfloat16), seed=0))
    assert all(torch.equal(rounded[name], first[name].to(rounded[name].dtype)) for name in first)
    assert [name for name in rounded if rounded[name].dtype != torch.bfloat16] == ["layers.2.router.weight"]
    # A layer more at the end leaves those before it alone.
    longer = native(HybridModel(read_size("tiny", pattern="AMEARM"), NATIVE, seed=0))
    assert all(torch.equal(longer[name], first[name]) for name in first)


@pytest.mark.usefixtures("te_double")
@pytest.mark.parametrize("features", [PRODUCTION, PRESETS["dense"], PRESETS["experts"]])
def test_builds_start_from_the_same_numbers(features: Any) -> None:
    size = read_size("tiny")
    for dtype in (torch.float32, torch.bfloat16):
        wanted = native(HybridModel(size, Build(PRESETS["off"], dtype), seed=0))
        built = HybridModel(size, Build(features, dtype), seed=0)
        assert native(built).keys() == wanted.keys()
        assert all(torch.equal(value, wanted[name]) for name, value in native(built).items())
        built(read(size, 0))
        assert "te" in {choice.observed for choice in built.choices().values()}


@contextmanager
def noted(into: list[str]) -> Iterator[None]:
    """A scope of low precision, its entry and exit noted."""
    with low_precision(target="cpu", amax_reduction_group=None, recipe="delayed"):
        into.append("in")
        yield
        into.append("out")


@pytest.mark.usefixtures("te_double")
@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        (0, 0, ["in", *"AMEAR", "out"]),
        (1, 1, ["a", "in", *"MEA", "out", "r"]),
        (2, 3, [*"amear"]),
        (0, 4, ["in", "A", "out", *"mear"]),
    ],
)
def test_zones_stay_in_bf16_and_the_rest_shares_one_scope(first: int, last: int, expected: list[str]) -> None:
    """Large letters ran in low precision, by Transformer Engine's own state; the MTP head never does."""
    size = read_size("tiny", bf16_first=first, bf16_last=last, mtp=last > 0)
    model = HybridModel(size, Build(PRODUCTION, torch.bfloat16, recipe="delayed"), seed=0)
    ran: list[str] = []
    for letter, layer in zip(size.letters, model.layers, strict=True):

        def note(*_: Any, letter: str = letter) -> None:
            scope = current_scope()
            ran.append(letter if scope is not None and scope.is_low else letter.lower())

        layer.register_forward_pre_hook(note)
    model.norm.register_forward_pre_hook(lambda *_: ran.append("norm" if current_scope() is None else "kept out"))
    model.losses(read(size), scope=Scopes(lambda: noted(ran))).total.backward()
    assert ran == [*expected, "norm", *(["r", "kept out"] if last else [])]
