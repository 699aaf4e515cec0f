"""What an ablation runs: the orders of both arms, put together from the posture, the row and what was asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from ...catalog.postures import Feature, Posture, merge_orders, settings_of
from ...gate.ablation_result import ArmName

ALL: Final = "all"
Base = Literal["posture", "plain"]
Device = Literal["cuda", "cpu"]
# Low, and reached late: at 3e-3 from the first step on, two arms that differed by roundings left the plateau of their
# first losses ten steps apart (H200, 2026-11-22), and a feature seemed to change the loss by 1 nat.
LEARNING_RATE: Final = 3e-4
_WORDS: Final = {"true": True, "false": False}


class WrongAblation(ValueError):
    """Arguments that go together with nothing; the text says what to give instead."""


@dataclass(frozen=True)
class Asked:
    """The arguments of the verb.

    Attributes:
        features: ids, in the order in which they are run.
        base: what both arms begin with: the posture with nobody looking on, or everything in its plain form.
        plan: fields of `training.parallel.plan.ParallelPlan`.
        limit_s: seconds that one run may take.
        receipts: folder for receipts, logs and the page.
        python: interpreter of the stack; empty for the host's.
    """

    features: tuple[str, ...]
    size: str
    steps: int
    pairs: int
    seed: int
    plan: dict[str, Any]
    device: Device
    target: str
    base: Base
    limit_s: float
    receipts: Path
    python: str

    @property
    def ranks(self) -> int:
        """Processes of a run."""
        return int(self.plan.get("world", 1))


def read_features(words: Sequence[str], posture: Posture) -> tuple[str, ...]:
    """Ids from what was typed: `feature=recompute,mtp`, the same without `feature=`, or all.

    Raises:
        UnknownFeature: one that has no row.
    """
    names: dict[str, None] = {}
    for word in words:
        for name in word.removeprefix("feature=").replace(",", " ").split():
            every = [feature.id for feature in posture.features] if name == ALL else [posture.find(name).id]
            names |= dict.fromkeys(every)
    return tuple(names)


def read_plan(text: str, ranks: int) -> dict[str, Any]:
    """A plan from `data=2,expert_parallel=2`; ranks that no word is said of read different sequences.

    Raises:
        WrongAblation: words that are no numbers, or do not fill the ranks.
    """
    plan: dict[str, Any] = {}
    for word in text.replace(",", " ").split():
        name, equals, value = word.partition("=")
        if not (name and equals and (value in _WORDS or value.isdecimal())):
            raise WrongAblation(f"--plan has {word!r}. Next step: write it as data=2,expert_parallel=2.")
        plan[name] = _WORDS[value] if value in _WORDS else int(value)
    tensor = int(plan.get("tensor_parallel", 1))
    plan.setdefault("data", max(1, (ranks or 1) // max(tensor, 1)))
    plan.setdefault("world", ranks or int(plan["data"]) * tensor)
    if ranks and plan["world"] != ranks:
        raise WrongAblation(f"--plan has a world of {plan['world']}, and --ranks says {ranks}. Next step: drop one.")
    return plan


def plan_arms(posture: Posture, feature: Feature, asked: Asked) -> dict[ArmName, dict[str, Any]]:
    """The whole order of each arm, but for its folder; they differ in the feature and in nothing else."""
    quiet = dict.fromkeys(posture.observability, False)  # who looks on weighs in the times
    plain = dict.fromkeys(posture.switches, False)
    order: dict[str, Any] = {
        "size": asked.size, "changes": {}, "plan": dict(asked.plan), "steps": asked.steps, "seed": asked.seed,
        "precision": "bf16" if asked.device == "cuda" else "fp32", "device": asked.device, "target": asked.target,
        "features": {}, "forms": {}, "learning_rate": LEARNING_RATE, "warm_up": asked.steps // 2,
    }  # fmt: skip
    order = merge_orders(order, settings_of(posture, plain if asked.base == "plain" else quiet))
    if asked.plan.get("expert_parallel", 1) > 1:
        order = merge_orders(order, {"forms": {"moe": "bridge"}})  # the other paths know no other ranks
    order = merge_orders(order, feature.both.as_order)
    return {"off": merge_orders(order, feature.off.as_order), "on": merge_orders(order, feature.on.as_order)}


def why_not_run(feature: Feature, asked: Asked, *, gpu: bool, te: bool) -> Iterator[str]:
    """What a feature needs and is not here; nothing is started then.

    Args:
        feature: its row.
        asked: on which device, with which plan.
        gpu, te: whether the interpreter has a GPU, and Transformer Engine.
    """
    if "gpu" in feature.needs and asked.device != "cuda":
        yield "it needs a GPU, and the CPU was asked for. Next step: --device cuda"
    elif asked.device == "cuda" and not gpu:
        yield "there is no GPU. Next step: run it where there is one, or with --device cpu"
    elif "te" in feature.needs and not te:
        yield "it needs Transformer Engine, and the interpreter has none. Next step: give another with --python"
    if "one-rank" in feature.needs and asked.ranks > 1:
        yield f"it needs one rank, and {asked.ranks} were asked for. Next step: --ranks 1"
    if "own-experts" in feature.needs and asked.plan.get("expert_parallel", 1) > 1:
        yield "it knows no other ranks, and experts were to be shared out. Next step: a plan with expert_parallel 1"
