"""The torchao lane takes its steps in one order, sees what others did to the model, and what fell back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")
from torch import nn  # noqa: E402

from megacpp_validate.bridge import torchao  # noqa: E402
from megacpp_validate.bridge.errors import UnknownName, WrongOption, WrongTarget  # noqa: E402
from megacpp_validate.bridge.torchao import Float8Lane, LaneLost, WrongOrder  # noqa: E402
from tests.bridge.torchao_ready import ROWS, fill, on_meta, one_rank, shard_with  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
STEPS = ("convert", "fully_shard", "materialise", "compile")
WIDTHS = {"0.fc1", "0.fc2", "1.fc1", "1.fc2"}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with one_rank(tmp_path_factory.mktemp("rank")) as made:
        yield made


@pytest.fixture
def fp8_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch multiplies FP8 on a CPU too, for tests alone."""
    monkeypatch.setattr(torchao, "why_not_float8", lambda *_, **__: None)


def make(model: Any = None, recipe: str = "tensorwise", **options: Any) -> Float8Lane:
    return Float8Lane(on_meta() if model is None else model, recipe, device="cpu", **{"emulate": True, **options})


def take(lane: Float8Lane, step: str, mesh: Any) -> Any:
    arguments = {"fully_shard": (shard_with(mesh),), "materialise": (fill,)}.get(step, ())
    options = {"backend": "aot_eager"} if step == "compile" else {}
    return getattr(lane, step)(*arguments, **options)


def lane_after(steps: int, mesh: Any, **options: Any) -> Float8Lane:
    lane = make(**options)
    for step in STEPS[:steps]:
        take(lane, step, mesh)
    return lane


def train(model: Any) -> Callable[[], None]:
    rows = torch.randn(ROWS, 64, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    return lambda: model(rows).float().square().mean().backward()


# --- selection and refusals -------------------------------------------------------------------------------------------


def test_the_walkers_whitelist_and_its_exclusions_choose_the_layers() -> None:
    plan = make().plan
    assert set(plan.names) == WIDTHS
    assert {name for name, _ in plan.kept} == {"0.router", "1.router"}
    assert all("router" in why for _, why in plan.kept)


def test_layers_that_cannot_run_in_fp8_are_kept_with_the_reason() -> None:
    model = nn.Sequential(on_meta()[0], nn.ModuleDict({"fc1": nn.Linear(64, 40, device="meta")}))
    model.append(nn.ModuleDict({"fc1": nn.Linear(64, 32, device="meta", dtype=torch.float16)}))
    kept = dict(make(model).plan.kept)
    assert "64 -> 40 features: torch._scaled_mm wants multiples of 16" in kept["1.fc1"]
    assert "torch.float16" in kept["2.fc1"]


def test_a_weight_that_two_layers_share_is_kept() -> None:
    model = on_meta()
    model[1].fc1.weight = model[0].fc1.weight
    plan = make(model).plan
    assert set(plan.names) == {"0.fc2", "1.fc2"}
    assert "shares its weight" in dict(plan.kept)["0.fc1"]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"recipe": "delayed"}, UnknownName, "choose one of tensorwise, rowwise, rowwise_with_gw_hp"),
        ({"recipe": "rowwise", "float8_all_gather": True}, WrongOption, "take tensorwise"),
        ({"emulate": False}, WrongTarget, "cpu, which has no FP8 tensor cores"),
        ({"include": ("nothing",)}, WrongOption, "no layer is left"),
    ],
)
def test_what_the_lane_does_not_take(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match="Next step") as caught:
        make(**options)
    assert words in str(caught.value)


@pytest.mark.parametrize(("capability", "refused"), [((8, 0), True), ((8, 9), False), ((9, 0), False)])
def test_the_least_capability(capability: tuple[int, int], refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    found = torchao.why_not_float8("cuda")
    assert (found is not None and found.code == "arch") is refused


def test_without_torchao_the_lane_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchao.TORCHAO, "is_available", lambda: False)
    monkeypatch.setattr(torchao.TORCHAO, "why_unavailable", lambda: "it is not here. Next step: install it")
    with pytest.raises(WrongTarget, match=r"it is not here\. Next step: install it"):
        make()


# --- order ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("taken", range(5))
def test_only_the_next_step_is_taken_and_training_wants_every_step(taken: int, mesh: Any) -> None:
    lane = lane_after(taken, mesh)
    wanted = (*STEPS, "train")[taken]
    for step in (one for one in STEPS if one != wanted):
        with pytest.raises(WrongOrder, match=f"the step {step} cannot be taken: the next step is {wanted}"):
            take(lane, step, mesh)
    if wanted == "train":
        lane.require_ready()
        return
    for question in (lane.require_ready, lane.after_step):
        with pytest.raises(WrongOrder, match=wanted):
            question()
    take(lane, wanted, mesh)


def _wrap(model: Any) -> None:
    model[0].compile(backend="eager")


def _replace(model: Any) -> None:
    model[1].fc2 = nn.Linear(96, 64, device="meta")


@pytest.mark.parametrize(
    ("deed", "words"),
    [
        (lambda model, mesh: shard_with(mesh)(model), "sharded by FSDP already"),
        (lambda model, mesh: _wrap(model), "`0` is compiled already"),
        (lambda model, mesh: model.to_empty(device="cpu"), "is on cpu, not on meta"),
        (lambda model, mesh: make(model).convert(), "`0.fc1` is a Float8Linear already"),
    ],
)
def test_a_model_that_was_touched_before_is_refused(deed: Any, words: str, mesh: Any) -> None:
    model = on_meta()
    deed(model, mesh)
    with pytest.raises(WrongOrder, match="Next step: build the model anew") as caught:
        make(model)
    assert words in str(caught.value)


def test_a_compiled_wrapper_is_refused() -> None:
    with pytest.raises(WrongOrder, match="compiled already"):
        make(torch.compile(on_meta(), backend="eager"))


@pytest.mark.parametrize(
    ("taken", "deed", "error", "words"),
    [
        (0, lambda model, mesh: shard_with(mesh)(model), WrongOrder, "sharded by FSDP already"),
        (1, lambda model, mesh: shard_with(mesh)(model), WrongOrder, "sharded by FSDP already"),
        (1, lambda model, mesh: _wrap(model), WrongOrder, "compiled already"),
        (1, lambda model, mesh: model.to_empty(device="cpu"), WrongOrder, "not on meta"),
        (1, lambda model, mesh: _replace(model), LaneLost, "`1.fc2` is not what the plan says"),
        (2, lambda model, mesh: _replace(model), LaneLost, "`1.fc2` is not what the plan says"),
        (3, lambda model, mesh: _wrap(model), WrongOrder, "compiled already"),
        (3, lambda model, mesh: _replace(model), LaneLost, "`1.fc2` is not what the plan says"),
    ],
)
def test_what_is_done_behind_the_lanes_back_is_seen_at_the_next_step(
    taken: int, deed: Any, error: type[Exception], words: str, mesh: Any
) -> None:
    lane = lane_after(taken, mesh)
    deed(lane.model, mesh)
    with pytest.raises(error, match="Next step") as caught:
        take(lane, STEPS[taken], mesh)
    assert words in str(caught.value)


def test_and_before_training(mesh: Any) -> None:
    lane = lane_after(4, mesh)
    lane.require_ready()
    _replace(lane.model)
    with pytest.raises(LaneLost, match=r"1\.fc2"):
        lane.require_ready()
    compiled = lane_after(4, mesh)
    _wrap(compiled.model)
    with pytest.raises(WrongOrder, match="compiled already"):
        compiled.require_ready()


def test_a_rule_that_shards_a_part_is_seen(mesh: Any) -> None:
    lane = lane_after(1, mesh)
    with pytest.raises(WrongOrder, match=r"the weight of `1\.fc1` unsharded"):
        lane.fully_shard(lambda model: shard_with(mesh)(nn.Sequential(model[0])))


def test_another_recipe_in_a_converted_layer_is_seen(mesh: Any) -> None:
    lane = lane_after(1, mesh)
    other = lane_after(1, mesh, recipe="rowwise")
    lane.model[0].fc1.config = other.model[0].fc1.config
    with pytest.raises(LaneLost, match=r"`0\.fc1` is not what the plan says"):
        take(lane, "fully_shard", mesh)


def test_a_float8_linear_that_no_plan_names_is_seen(mesh: Any) -> None:
    lane, other = lane_after(1, mesh), lane_after(1, mesh)
    lane.model[0].router = other.model[0].fc1
    with pytest.raises(LaneLost, match=r"`0\.router` is not what the plan says"):
        take(lane, "fully_shard", mesh)


# --- after the optimizer's step ---------------------------------------------------------------------------------------


@pytest.fixture
def gathering(
    fp8_on_cpu: None, mesh: Any, monkeypatch: pytest.MonkeyPatch
) -> tuple[Float8Lane, Callable[[], None], Any]:
    """Scales are the weights': tracing their graph would take most of the time, and change nothing."""
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)
    lane = make(float8_all_gather=True, emulate=False)
    for step in STEPS[:3]:
        take(lane, step, mesh)
    run = train(take(lane, "compile", mesh))
    optimizer = torch.optim.SGD(lane.model.parameters(), lr=0.5)
    return lane, run, optimizer


def test_scales_are_there_before_the_first_step(gathering: Any) -> None:
    assert gathering[0].stale_scales() == ()


def test_a_step_without_after_step_is_reported_by_layer(gathering: Any) -> None:
    lane, run, optimizer = gathering
    run()
    optimizer.step()
    assert set(lane.stale_scales()) == WIDTHS
    lane.after_step()
    assert lane.stale_scales() == ()


def test_the_hook_computes_them_after_every_step(gathering: Any) -> None:
    lane, run, optimizer = gathering
    handle = lane.attach(optimizer)
    for _ in range(2):
        run()
        optimizer.step()
        assert lane.stale_scales() == ()
    handle.remove()
    run()
    optimizer.step()
    assert len(lane.stale_scales()) == len(WIDTHS)


def test_a_scale_that_is_lost_or_wrong_is_reported(gathering: Any) -> None:
    lane = gathering[0]
    lane.model[0].fc1.weight._local_tensor._precomputed_scale = None
    lane.model[1].fc2.weight._local_tensor._precomputed_scale *= 2
    assert set(lane.stale_scales()) == {"0.fc1", "1.fc2"}


def test_without_an_fp8_all_gather_there_is_nothing_to_compute(mesh: Any) -> None:
    lane = lane_after(4, mesh)
    lane.after_step()
    assert lane.stale_scales() == ()
