"""What the torchao lane refuses, and every step out of its order: by its own methods, and behind its back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from ..bench import Bench
from .torchao_tree import LAYERS, Tree, fill, on_meta, sharding


def check_refusals(bench: Bench) -> None:
    """Recipes, widths, dtypes and devices that the lane does not take."""
    lanes, errors = bench.bridge("torchao_lane"), bench.bridge("errors")

    def lane(recipe: str = "tensorwise", build: Callable[[], Any] = Tree, **options: Any) -> Callable[[], Any]:
        return lambda: lanes.Float8Lane(on_meta(build), recipe, **{"device": "cpu", "emulate": True, **options})

    odd = partial(nn.ModuleDict, {"fc1": nn.Linear(512, 392, device="meta")})
    halves, doubles = (partial(Tree, dtype) for dtype in (torch.float16, torch.float64))
    bench.refuses("recipe", errors.UnknownName, lane("delayed"))
    bench.refuses("width", errors.WrongOption, lane(build=odd))
    bench.refuses("fp16", errors.WrongOption, lane(build=halves))
    bench.refuses("fp64", errors.WrongOption, lane(build=doubles))
    bench.refuses("all-gather-by-row", errors.WrongOption, lane("rowwise", float8_all_gather=True))
    bench.refuses("cpu", errors.WrongTarget, lane(emulate=False))
    with patch.object(torch.cuda, "get_device_capability", return_value=(8, 0)):
        bench.refuses("capability-8.0", errors.WrongTarget, lane(emulate=False, device="cuda"))
    plan = lanes.Float8Lane(on_meta(), "tensorwise", device="cpu", emulate=True).plan
    bench.check("router", plan.names == tuple(LAYERS), f"converts {', '.join(plan.names)}; keeps {dict(plan.kept)}")


def check_order(bench: Bench, mesh: Any) -> None:
    """Every step out of its order, by the lane's own methods and behind its back, raises before training."""
    lanes = bench.bridge("torchao_lane")
    wrong, lost = lanes.WrongOrder, lanes.LaneLost

    def lane(model: Any = None) -> Any:
        return lanes.Float8Lane(on_meta() if model is None else model, "tensorwise", device=bench.device, emulate=True)

    def after(steps: int) -> Any:
        made = lane()
        for step in (made.convert, lambda: made.fully_shard(sharding(mesh)), lambda: made.materialise(fill))[:steps]:
            step()
        return made

    def again(step: str, steps: int) -> Callable[[], Any]:
        made = after(steps)
        arguments = {"fully_shard": (sharding(mesh),), "materialise": (fill,)}.get(step, ())
        return lambda: getattr(made, step)(*arguments)

    taken = {
        "shard-before-convert": ("fully_shard", 0), "compile-before-convert": ("compile", 0),
        "compile-before-shard": ("compile", 1), "compile-on-meta": ("compile", 2), "convert-twice": ("convert", 1),
        "convert-after-shard": ("convert", 2), "shard-twice": ("fully_shard", 2),
        "train-too-early": ("require_ready", 3), "after-step-too-early": ("after_step", 1),
    }  # fmt: skip
    for name, (step, steps) in taken.items():
        bench.refuses(name, wrong, again(step, steps))
    compiled = after(3)
    compiled.compile(backend="eager")
    bench.refuses("shard-after-compile", wrong, lambda: compiled.fully_shard(sharding(mesh)))

    bench.refuses("behind.not-meta", wrong, lambda: lane(Tree()))
    bench.refuses("behind.converted", wrong, lambda: lane(after(1).model))
    bench.refuses("behind.sharded", wrong, lambda: lane(_done(on_meta(), sharding(mesh))))
    bench.refuses(
        "behind.compiled", wrong, lambda: lane(_done(on_meta(), lambda model: model.compile(backend="eager")))
    )
    bench.refuses("behind.wrapped", wrong, lambda: lane(torch.compile(on_meta(), backend="eager")))
    for name, error, steps, deed in (
        ("sharded-between", wrong, 0, sharding(mesh)),
        ("sharded-after", wrong, 1, sharding(mesh)),
        ("compiled-between", wrong, 1, lambda model: model.compile(backend="eager")),
        ("materialised-between", wrong, 1, lambda model: model.to_empty(device=bench.device)),
        ("swapped-back", lost, 1, _swap_back),
        ("swapped-back-late", lost, 3, _swap_back),
    ):
        made = after(steps)
        deed(made.model)
        follow = ("convert", "fully_shard", "materialise", "compile")[steps]
        arguments = {"fully_shard": (sharding(mesh),)}.get(follow, ())
        bench.refuses(f"behind.{name}", error, partial(getattr(made, follow), *arguments))


def _done(model: Any, deed: Callable[[Any], object]) -> Any:
    deed(model)
    return model


def _swap_back(model: Any) -> None:
    old = model.fc2
    model.fc2 = nn.Linear(old.in_features, old.out_features, bias=False, device="meta")
    model.fc2.weight = old.weight
