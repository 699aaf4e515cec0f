"""Runs of an ablation: the orders of both arms, runs that take turns, each a process, and what each answered."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from .. import TOOL
from ..catalog.postures import Feature, Posture, merge_orders, settings_of
from ..environments.cell import own_folder
from ..environments.environment import Environment
from ..environments.facts import read_facts
from ..environments.interpreter import host_interpreter, read_commit
from ..environments.venv import find_cpu_python
from ..errors import NothingSelected, WrongArguments
from ..evidence.whole_file import write_whole
from ..process import Ended, Processes
from .ablation import (
    ARMS,
    AblationResult,
    AblationRun,
    ArmName,
    FeatureAblation,
    Verdict,
    decide_feature,
    find_run_faults,
)

ALL: Final = "all"
MODULE: Final = "megacpp_validate.training.smoke"
# Low, and reached late: at 3e-3 from the first step on, two arms that differed by roundings left the plateau of their
# first losses ten steps apart (H200, 2026-11-22), and a feature seemed to change the loss by 1 nat.
LEARNING_RATE: Final = 3e-4
_WORDS: Final = {"true": True, "false": False}
_GRACE_S: Final = 60.0  # the run has a limit of its own, and reports which rank was late
_LAST_WORDS: Final = 600  # characters of a log that are kept
_OWN: Final = ("host", "place")  # of one rank, and not part of what is compared


@dataclass(frozen=True)
class AblationOptions:
    """What the user gave.

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
    device: Literal["cuda", "cpu"]
    target: str
    base: Literal["posture", "plain"]
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
        WrongArguments: a feature has no row.
        NothingSelected: no feature is named.
    """
    names: dict[str, None] = {}
    for word in words:
        for name in word.removeprefix("feature=").replace(",", " ").split():
            every = [feature.id for feature in posture.features] if name == ALL else [posture.find(name).id]
            names |= dict.fromkeys(every)
    if not names:
        raise NothingSelected("no feature is selected. Next step: name one, as in feature=recompute, or all.")
    return tuple(names)


def read_plan(text: str, ranks: int) -> dict[str, Any]:
    """A plan from `data=2,expert_parallel=2`; ranks that no word is about read different sequences.

    Raises:
        WrongArguments: words that are no numbers, or do not fill the ranks.
    """
    plan: dict[str, Any] = {}
    for word in text.replace(",", " ").split():
        name, equals, value = word.partition("=")
        if not (name and equals and (value in _WORDS or value.isdecimal())):
            raise WrongArguments(f"--plan has {word!r}. Next step: write it as data=2,expert_parallel=2.")
        plan[name] = _WORDS[value] if value in _WORDS else int(value)
    tensor = int(plan.get("tensor_parallel", 1))
    plan.setdefault("data", max(1, (ranks or 1) // max(tensor, 1)))
    plan.setdefault("world", ranks or int(plan["data"]) * tensor)
    if ranks and plan["world"] != ranks:
        raise WrongArguments(f"--plan has a world of {plan['world']}, and --ranks {ranks}. Next step: drop one.")
    return plan


def plan_arms(posture: Posture, feature: Feature, options: AblationOptions) -> dict[ArmName, dict[str, Any]]:
    """The whole order of each arm, but for its folder; they differ in the feature and in nothing else."""
    plain = options.base == "plain"
    switches = dict.fromkeys(posture.switches if plain else posture.observability, False)  # who looks on costs time
    order: dict[str, Any] = {
        "size": options.size, "changes": {}, "plan": dict(options.plan), "steps": options.steps, "seed": options.seed,
        "precision": "bf16" if options.device == "cuda" else "fp32", "device": options.device,
        "target": options.target, "features": {}, "forms": {}, "learning_rate": LEARNING_RATE,
        "warm_up": options.steps // 2,
    }  # fmt: skip
    order = merge_orders(order, settings_of(posture, switches))
    if options.plan.get("expert_parallel", 1) > 1:
        order = merge_orders(order, {"forms": {"moe": "bridge"}})  # the other paths know no other ranks
    order = merge_orders(order, feature.both.as_order)
    return {"off": merge_orders(order, feature.off.as_order), "on": merge_orders(order, feature.on.as_order)}


def find_absent(options: AblationOptions, *, gpu: bool, te: bool) -> dict[str, str]:
    """What a feature may need and this call does not have, with the next step; "" is what every feature needs.

    Args:
        gpu, te: whether the interpreter sees a GPU and Transformer Engine; neither is looked at on the CPU.
    """
    cuda, shared = options.device == "cuda", options.plan.get("expert_parallel", 1) > 1
    rows = (
        ("", cuda and not gpu, "there is no GPU. Next step: run it where there is one, or with --device cpu"),
        ("gpu", not cuda, "it needs a GPU, and the CPU was requested. Next step: --device cuda"),
        ("te", cuda and not te, "it needs Transformer Engine. Next step: give an interpreter with it to --python"),
        ("one-rank", options.ranks > 1, f"it needs one rank, and {options.ranks} were requested. Next step: --ranks 1"),
        ("own-experts", shared, "it cannot share experts between ranks. Next step: a plan with expert_parallel 1"),
    )
    return {need: text for need, absent, text in rows if absent}


def run_ablation(posture: Posture, options: AblationOptions, report: Callable[[str], None]) -> AblationResult:
    """Run every feature after the other; each receipt is written when its feature is through.

    Args:
        report: called with a line for each run that ended.

    Raises:
        NoEnvironment: there is no interpreter.
        ToolError: another run writes to the folder of the receipts.
        OSError: the receipts cannot be written.
    """
    rows: list[FeatureAblation] = []
    python = find_cpu_python(options.python) if options.device == "cpu" else options.python
    environment, processes = host_interpreter(os.environ, python), Processes()
    facts = read_facts(environment, processes) if options.device == "cuda" else None
    absent = find_absent(options, gpu=bool(facts and facts.gpu), te=bool(facts and facts.te))
    with own_folder(options.receipts):
        for name in options.features:
            feature = posture.find(name)
            orders = plan_arms(posture, feature, options)
            fields: dict[str, Any] = {
                "tool": TOOL, "commit": read_commit(), "feature": feature.id, "title": feature.title,
                "plain": feature.plain, "source": feature.source, "ranks": options.ranks,
                "interpreter": environment.shown, "off": orders["off"], "on": orders["on"],
                **{name: getattr(options, name) for name in ("size", "seed", "steps", "pairs", "device", "base")},
            }  # fmt: skip
            if reasons := tuple(absent[need] for need in ("", *feature.needs) if need in absent):
                row = FeatureAblation(**fields, verdict=Verdict.NOT_JUDGED, reasons=reasons)
            else:
                runs = tuple(_run_in_turn(feature, orders, options, environment, processes, report))
                row = FeatureAblation(**fields, runs=runs, **decide_feature(feature, orders, runs, options.pairs))
            write_whole(options.receipts / f"{name}.json", row.model_dump_json(indent=2) + "\n")
            rows.append(row)
            report(f"{name}: {row.verdict.value}")
    return AblationResult(tool=TOOL, features=tuple(rows))


def _run_in_turn(
    feature: Feature, orders: Mapping[ArmName, Mapping[str, Any]], options: AblationOptions, environment: Environment,
    processes: Processes, report: Callable[[str], None],
) -> Iterator[AblationRun]:  # fmt: skip
    """Off, on, off, on. A run that is no evidence is the last: the same order would end alike."""
    for place in range(2 * options.pairs):
        arm: ArmName = ARMS[place % 2]
        home = options.receipts.absolute() / feature.id / f"{place + 1}-{arm}"
        home.mkdir(parents=True, exist_ok=True)
        given, log = home / "order.json", home / "log"
        write_whole(given, json.dumps({**orders[arm], "folder": str(home / "run"), "limit_s": options.limit_s}) + "\n")
        call = environment.call(MODULE, shares=(home,))
        ended = processes.run(call, folder=home, limit_s=options.limit_s + _GRACE_S, log=log, given=given)
        run = read_run(ended, arm, place, f"{feature.id}/{home.name}")
        report(f"{run.ending:12} {feature.id} {arm} {place + 1}/{2 * options.pairs} ({run.seconds:.1f} s)")
        yield run
        if any(find_run_faults(getattr(feature, arm), orders[arm], run)):
            return


# --- The answer of a smoke run: one JSON object on its standard output; it has more than is read here. ---


def read_run(ended: Ended, arm: ArmName, place: int, file: str = "") -> AblationRun:
    """What a process answered: the last line that is an answer; libraries may write something after it."""
    base: dict[str, Any] = {"arm": arm, "place": place, "file": file}
    lines = [line for line in ended.words.splitlines() if line.startswith("{") and '"ending"' in line]
    run, why = None, "it gave no answer"
    try:
        if lines:
            run = AblationRun(**base, **_merge_ranks(json.loads(lines[-1])))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as fault:
        why = f"its answer has another form: {type(fault).__name__}: {fault}"
    last = f"Its last words: {' '.join(ended.words.split())[-_LAST_WORDS:] or 'none'}"
    if run is None:
        how = ended.how if ended.code else "no-answer"
        return AblationRun(**base, ending=how, words=f"{why}. {last}", seconds=ended.seconds)
    if ended.code == 0 or run.ending != "done":
        return run
    words = f"it answers done, and its process ended with {ended.how} {ended.code}. {last}"
    return run.model_copy(update={"ending": "contradiction", "words": words})


def _merge_ranks(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a run: a step takes as long as on its slowest rank, and the rank that uses most memory counts."""
    ranks = sorted(answer["ranks"], key=lambda rank: int(rank["rank"]))
    fields: dict[str, Any] = {name: answer[name] for name in ("ending", "words", "seconds") if name in answer}
    if not ranks:
        return fields
    first = ranks[0]
    model, steps = first["model"], len(first["steps"])
    times = ([step["seconds"] for step in rank["steps"]] for rank in ranks)
    return fields | {
        "model": model["name"], "pattern": model["pattern"], "parameters": model["parameters"],
        "changes": model["size"], "features": first["features"], "forms": first["forms"], "versions": first["versions"],
        "topology": {name: value for name, value in first["topology"].items() if name not in _OWN},
        "parts": _merge_parts(ranks),
        "step_seconds": [max(row) for row in zip(*times, strict=False)],
        "losses": [_finite(step["loss"]) for step in first["steps"]],
        "tokens": first["goodput"]["tokens"] // steps if steps else 0,
        "peak_bytes": max(max(rank["goodput"]["peak_bytes"].values(), default=0) for rank in ranks),
    }  # fmt: skip


def _merge_parts(ranks: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """What each part took; where another rank took something else, also under the part's name with that rank's."""
    parts: dict[str, dict[str, str]] = {}
    for rank in ranks:
        for name, part in rank["choices"].items():
            seen = {key: part[key] for key in ("requested", "observed")}
            if parts.setdefault(name, seen) != seen:
                parts[f"{name}@{rank['rank']}"] = seen
    return parts


def _finite(loss: object) -> float | None:
    return loss if isinstance(loss, float) and math.isfinite(loss) else None  # what is no number comes as text
