"""The loop: the loss falls to the floor, the same seed gives the same bits, and what is not finite ends the run."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

from megacpp_validate.bridge.features import PRESETS, PRODUCTION  # noqa: E402
from megacpp_validate.bridge.fp8_scope import low_precision  # noqa: E402
from megacpp_validate.bridge.recompute import WrongRecomputeOwner  # noqa: E402
from megacpp_validate.evidence.loss_curve import curve_text  # noqa: E402
from megacpp_validate.evidence.loss_curves import parse_curve  # noqa: E402
from megacpp_validate.training.errors import WrongSize  # noqa: E402
from megacpp_validate.training.language import Grammar, Language  # noqa: E402
from megacpp_validate.training.layers import Build  # noqa: E402
from megacpp_validate.training.loop import (  # noqa: E402
    NotFinite,
    StepRecord,
    Trainer,
    train,
)
from megacpp_validate.training.model import HybridModel  # noqa: E402
from megacpp_validate.training.optimizer import MasterAdamW, Schedule  # noqa: E402
from megacpp_validate.training.sizes import read_size  # noqa: E402

NATIVE = Build(PRESETS["off"])


def trainer(steps: int, *, seed: int = 0, build: Build = NATIVE, **named: Any) -> Trainer:
    size = read_size("tiny")
    schedule = Schedule(steps, learning_rate=1e-2, warm_up=min(20, steps - 1))
    return Trainer(HybridModel(size, build, seed=seed), Language(size.grammar, seed=7), schedule, **named)


def losses(records: tuple[StepRecord, ...]) -> list[float]:
    return [record.loss for record in records]


def test_the_loss_falls_towards_the_floor_and_never_below_what_is_possible() -> None:
    """A model without context stays 1.4 nats above the floor, one that knows the classes alone 0.9."""
    records = trainer(120).run()
    assert [record.step for record in records] == list(range(120))
    over = [record.loss - record.perfect for record in records]
    size = read_size("tiny")
    assert sum(over[:5]) / 5 == pytest.approx(size.grammar.without_context() - size.floor, abs=0.1)
    assert 0 < sum(over[-20:]) / 20 < 0.5
    assert size.floor < sum(losses(records)[-20:]) / 20 < size.floor + 0.5
    assert all(record.seconds > 0 and record.grad_norm > 0 and record.aux_loss > 0 for record in records)


def test_the_same_seed_gives_the_same_bits_and_another_does_not() -> None:
    first, again, other = trainer(6).run(), trainer(6).run(), trainer(6, seed=1).run()
    assert [(r.loss, r.grad_norm, r.aux_loss, r.perfect) for r in first] == [
        (r.loss, r.grad_norm, r.aux_loss, r.perfect) for r in again
    ]
    assert losses(first)[0] != losses(other)[0]
    assert [r.perfect for r in first] == [r.perfect for r in other]  # what is read has a seed of its own


@pytest.mark.usefixtures("te_double")
def test_transformer_engine_trains_as_native_does() -> None:
    """In fp32 losses agree to rounding, which AdamW's first updates, signs of gradients however small, magnify."""
    native = trainer(6).run()
    made = trainer(6, build=Build(PRODUCTION))
    assert losses(made.run()) == pytest.approx(losses(native), abs=1e-4)
    assert {choice.observed for choice in made.model.choices().values()} == {"te"}


@pytest.mark.usefixtures("te_double")
@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_it_trains_in_every_recipe_with_a_scope_a_step(recipe: Any) -> None:
    entered = []

    def scope() -> Any:
        entered.append(recipe)
        return low_precision(target="cpu", amax_reduction_group=None, recipe=recipe)

    run = trainer(6, build=Build(PRODUCTION, torch.bfloat16, recipe=recipe), scope=scope)
    records = run.run()
    assert entered == [recipe] * 6
    plain = trainer(6, build=Build(PRESETS["off"], torch.bfloat16)).run()
    assert losses(records) != losses(plain)
    assert losses(records) == pytest.approx(losses(plain), abs=0.02)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_is_no_number_ends_the_run_with_its_name(value: float, dtype: Any) -> None:
    kept: list[StepRecord] = []
    run = trainer(5, build=Build(PRESETS["off"], dtype), keep=kept.append)
    weight = run.model.layers[2].down.bank.weight
    weight.register_hook(lambda gradient: gradient * (value if len(kept) == 2 else 1.0))
    run.step()
    run.step()
    before = run.model.native_state_dict()
    with pytest.raises(NotFinite, match=r"step 2: loss .* not finite: layers\.2\.down\.bank\.weight\.") as refused:
        run.step()
    assert refused.value.tensors == ("layers.2.down.bank.weight",)
    assert [record.step for record in kept] == [0, 1, 2]
    assert refused.value.records == tuple(kept)
    assert [record.is_finite() for record in kept] == [True, True, False]
    assert not math.isfinite(kept[2].grad_norm)
    assert math.isfinite(kept[2].loss)
    after = run.model.native_state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert run.step().is_finite()  # nothing of it is left


def test_a_loss_that_is_no_number_ends_the_run() -> None:
    run = trainer(5)
    with torch.no_grad():
        run.model.norm.weight[3] = math.nan
    with pytest.raises(NotFinite, match="step 0: loss nan") as refused:
        run.run()
    assert refused.value.tensors[0] == "loss"
    assert len(refused.value.records) == 1


@pytest.mark.usefixtures("te_double")
@pytest.mark.filterwarnings("default")
def test_an_infinity_in_front_of_a_cast_ends_the_run_with_layer_and_step_though_no_loss_shows_it() -> None:
    def scope() -> Any:
        return low_precision(target="cpu", amax_reduction_group=None, recipe="delayed")

    run = trainer(6, build=Build(PRODUCTION, torch.bfloat16, recipe="delayed"), scope=scope)
    run.step()
    before = run.model.native_state_dict()

    def flood(_module: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
        rows = given[0].clone()
        rows.view(-1)[5] = math.inf
        return (rows, *given[1:])

    name, layer = next(
        (name, layer) for name, layer in run.model.named_modules() if type(layer).__name__ == "GroupedLinear"
    )
    layer.register_forward_pre_hook(flood, prepend=True)
    with pytest.raises(NotFinite, match=rf"step 1: .*{name.replace('.', '[.]')}.*step 1") as refused:
        run.step()
    assert [record.step for record in refused.value.records] == [0, 1]
    after = run.model.native_state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.usefixtures("te_double")
@pytest.mark.filterwarnings("default")
def test_torchs_checkpoint_around_a_layer_in_low_precision_is_refused() -> None:
    def scope() -> Any:
        return low_precision(target="cpu", amax_reduction_group=None, recipe="delayed")

    run = trainer(3, build=Build(PRODUCTION, torch.bfloat16, recipe="delayed"), scope=scope)
    layer = run.model.layers[2]
    plain = layer.forward
    layer.forward = lambda *given: checkpoint(plain, *given, use_reentrant=False)
    with pytest.raises(WrongRecomputeOwner, match="Next step"):
        run.step()


def test_a_run_goes_on_where_it_stands_and_no_further() -> None:
    run = trainer(4)
    first = run.step()
    assert run.run()[0] is first
    assert run.run() == tuple(run.records)
    assert len(run.records) == 4
    with pytest.raises(WrongSize, match="step 4 of a run of 4"):
        run.step()


def test_the_curve_is_what_the_loss_gate_takes() -> None:
    run = trainer(3)
    run.step()
    early = run.curve("bf16")
    assert (early.planned, early.steps, len(early.losses)) == (3, (0,), 1)
    records, curve = run.run(), run.curve("bf16")
    assert (curve.steps, curve.losses) == ((0, 1, 2), tuple(losses(records)))
    assert curve.gradient_norms == tuple(record.grad_norm for record in records)
    other = trainer(3, seed=1)
    other.run()
    assert (curve.seed, other.curve("bf16").seed) == (0, 1)
    assert other.curve("bf16").data == curve.data != early.data
    grammar = run.model.size.grammar
    elsewhere = Trainer(run.model, Language(grammar, seed=8), Schedule(3, warm_up=0))
    elsewhere.run()
    assert elsewhere.curve("bf16").data != curve.data
    assert parse_curve(curve_text(curve)) == curve


def test_a_language_of_another_size_is_refused() -> None:
    model = HybridModel(read_size("tiny", pattern="A", bf16_last=0), NATIVE, seed=0)
    with pytest.raises(WrongSize, match="made from two sizes"):
        train(model, Language(Grammar(3, 4, 1), seed=0), Schedule(2, warm_up=0))


def test_rates_rise_then_fall() -> None:
    schedule = Schedule(100, learning_rate=1.0, warm_up=10, last=0.2)
    rates = [schedule.rate(step) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10] == 1.0
    assert all(later < earlier for earlier, later in pairwise(rates[10:]))
    assert rates[55] == pytest.approx(0.6)
    assert schedule.rate(100) == pytest.approx(0.2)


@pytest.mark.parametrize(
    "wrong",
    [{"steps": 0}, {"warm_up": 10}, {"warm_up": -1}, {"learning_rate": 0.0}, {"clip": math.inf}, {"beta2": 1.5}],
)
def test_a_schedule_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(WrongSize, match=f"{next(iter(wrong))} is"):
        Schedule(**{"steps": 10, "warm_up": 2, **wrong})


def test_updates_too_small_for_bf16_are_not_lost() -> None:
    """1.0 in bf16 moves by 2^-9 at the least; a hundred steps of 1e-4 that are each lost would leave it there."""
    held = torch.nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
    optimizer = MasterAdamW([("held", held)], Schedule(100, learning_rate=1e-4, warm_up=0, weight_decay=0.0, last=1.0))
    for step in range(100):
        held.grad = torch.ones_like(held)
        optimizer.update(step, optimizer.take_gradients())
    assert held[0, 0].item() == pytest.approx(0.99, abs=2**-8)


def test_an_update_is_that_of_adamw_with_clipped_gradients() -> None:
    schedule = Schedule(10, learning_rate=0.1, warm_up=0, clip=0.5, last=1.0)
    matrix, vector = (partial(torch.full, size, 2.0) for size in ((3, 3), (3,)))
    ours = {"matrix": torch.nn.Parameter(matrix()), "vector": torch.nn.Parameter(vector())}
    plain = {name: torch.nn.Parameter(value.detach().clone()) for name, value in ours.items()}
    reference = torch.optim.AdamW(
        [{"params": [plain["matrix"]], "weight_decay": 0.1}, {"params": [plain["vector"]], "weight_decay": 0.0}],
        lr=0.1, betas=(0.9, 0.95), foreach=False,
    )  # fmt: skip
    optimizer = MasterAdamW([*ours.items(), ("again", ours["vector"])], schedule)
    for step in range(3):
        for both in (ours, plain):
            both["matrix"].grad, both["vector"].grad = torch.full((3, 3), float(step)), None
        norm = optimizer.take_gradients()
        assert float(norm) == pytest.approx(3.0 * step)
        plain["vector"].grad = torch.zeros(3)
        torch.nn.utils.clip_grad_norm_(plain.values(), 0.5)
        reference.step()
        assert optimizer.update(step, norm) == pytest.approx(0.1)
        for name, value in ours.items():
            torch.testing.assert_close(value, plain[name], rtol=1e-6, atol=0.0)
