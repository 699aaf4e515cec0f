"""The torchao lane takes its steps in one order, sees what others did to the model, and what fell back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")
from torch import nn  # noqa: E402

from megacpp_validate.bridge import torchao  # noqa: E402
from megacpp_validate.bridge.errors import UnknownName, WrongOption, WrongTarget  # noqa: E402
from megacpp_validate.bridge.torchao import Float8Plan, WrongOrder, convert_linears  # noqa: E402
from tests.bridge.torchao_ready import on_meta, one_rank, shard  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
WIDTHS = {"0.fc1", "0.fc2", "1.fc1", "1.fc2"}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with one_rank(tmp_path_factory.mktemp("rank")) as made:
        yield made


def make(model: Any = None, recipe: str = "tensorwise", **options: Any) -> Float8Plan:
    given = {"device": "cpu", "emulate": True, **options}
    return convert_linears(on_meta() if model is None else model, recipe, **given)


# --- selection and refusals -------------------------------------------------------------------------------------------


def test_the_walkers_whitelist_and_its_exclusions_choose_the_layers() -> None:
    plan = make()
    assert set(plan.names) == WIDTHS
    assert {name for name, _ in plan.kept} == {"0.router", "1.router"}
    assert all("router" in why for _, why in plan.kept)


def test_layers_that_cannot_run_in_fp8_are_kept_with_the_reason() -> None:
    model = nn.Sequential(on_meta()[0], nn.ModuleDict({"fc1": nn.Linear(64, 40, device="meta")}))
    model.append(nn.ModuleDict({"fc1": nn.Linear(64, 32, device="meta", dtype=torch.float16)}))
    kept = dict(make(model).kept)
    assert "64 -> 40 features: torch._scaled_mm wants multiples of 16" in kept["1.fc1"]
    assert "torch.float16" in kept["2.fc1"]


def test_a_weight_that_two_layers_share_is_kept() -> None:
    model = on_meta()
    model[1].fc1.weight = model[0].fc1.weight
    plan = make(model)
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


# Capability of the GPU, or None where torchao is not installed -> code of the refusal.
CODES = {(8, 0): "arch", (8, 9): None, (9, 0): None, None: "torchao-unavailable"}


@pytest.mark.parametrize(("capability", "code"), CODES.items())
def test_torchao_and_the_least_capability(capability: Any, code: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchao.TORCHAO, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    found = torchao.why_not_float8("cuda")
    assert (found and found.code) == code


# --- order ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("deed", "words"),
    [
        (shard, "sharded by FSDP already"),
        (lambda model, mesh: model[0].compile(backend="eager"), "`0` is compiled already"),
        (lambda model, mesh: model.to_empty(device="cpu"), "is on cpu, not on meta"),
        (lambda model, mesh: make(model), "`0.fc1` is a Float8Linear already"),
    ],
)
def test_a_model_that_was_touched_before_is_refused(deed: Any, words: str, mesh: Any) -> None:
    model = on_meta()
    deed(model, mesh)
    with pytest.raises(WrongOrder, match="Next step: build the model anew") as caught:
        make(model)
    assert words in str(caught.value)
