"""A plan trained for real: the run ends and learns, tokens are conserved, replicas are equal, and its time adds up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from ...evidence.receipt import Check
from ...training.language import Grammar, step_probabilities
from ..bench import Bench
from ..bounds import check_of, part
from ..fp8.quantizers import KINDS, TENSORS, wanted_format
from .runs import Run, check_parts, have_ended, note_casts, open_runs, read_number, record_of

LAST: Final = 0.2  # of the steps: over so many the end of training is looked at
SIGMAS: Final = 5.0  # a mean of so many tokens lies beyond with probability 3e-7
CASTING: Final = ("block", "mlp", "in_projection", "up", "down")  # parts whose products low precision takes
RAN: Final = ("start-up", "data", "step")  # phases that every run has


def probe(bench: Bench) -> None:
    """Train the row's plan and check the receipt of every rank."""
    with open_runs(bench) as runs:
        run = runs.run("plan", profile=bench.device == "cuda")  # how long ranks wait for one another
        check_run(bench, run)


def check_run(bench: Bench, run: Run) -> None:
    """Every check of one run."""
    have_ended(bench, run)
    if not run.receipts:
        return
    check_ranks(bench, run, look_at_steps, look_at_audit, look_at_account)
    size = run.size
    learned = judge_learning(run.name, run.first["steps"], size.grammar, size.length, size.batch)
    if run.done:
        record = record_of(run)
        to_goal = f"{record.tokens_to_goal or f'more than {record.tokens}'} tokens to {record.goal:.3f} nats"
        detail = f"{learned.detail}; {to_goal}, {record.tokens_per_gpu_hour:.0f} tokens a GPU-hour"
        learned = replace(learned, detail=detail)
    bench.checks.append(learned)
    check_parts(bench, run)
    if run.order.recipe is not None and bench.wants_te:
        check_low_precision(bench, run, run.order.recipe)


Look = Callable[[Run, Mapping[str, Any]], Iterator[tuple[str, bool, str]]]
"""A run, and what one of its ranks left -> checks: name, whether it passed, what was seen."""


def check_ranks(bench: Bench, run: Run, *looks: Look) -> None:
    """Look at what each rank left; the checks are `RUN.NAME.rankN`."""
    for receipt in run.receipts:
        for look in looks:
            for name, passed, said in look(run, receipt):
                bench.check(f"{run.name}.{name}.rank{receipt['rank']}", passed, said)


def look_at_steps(run: Run, receipt: Mapping[str, Any]) -> Iterator[tuple[str, bool, str]]:
    """Every step is there, and finite."""
    steps = receipt["steps"]
    bad = [step["step"] for step in steps if not _is_finite(step)]
    whole = [step["step"] for step in steps] == list(range(run.order.steps))
    said = f"{len(steps)} of {run.order.steps} steps; not finite: {receipt['where'] or bad[:3] or 'none'}"
    yield "steps", whole and not bad and not receipt["check"], said


def look_at_audit(run: Run, receipt: Mapping[str, Any]) -> Iterator[tuple[str, bool, str]]:
    """The rank's own checks in each step, and that they ran."""
    plan = run.order.read_plan()
    for name, key, words in (
        ("experts", "experts_without_gradient", "experts without gradient"),
        ("moved", "unmoved", "parameters as before the first step"),
    ):
        found = receipt[key]
        said = "not checked" if found is None else ", ".join(found) or "none"
        yield name, found == [], f"{words}: {said}"
    conserved, replicas, alike = receipt["dispatches"] or 0, receipt["replicas"], receipt["alike"]
    # Without an exchange only the path "bridge" has numbers of rows that the audit can compare with the router's.
    counts = plan.expert_parallel > 1 or run.order.read_forms().moe == "bridge"
    wanted = run.size.letters.count("E") * run.order.steps if counts else 0
    yield "tokens", conserved >= wanted, f"{conserved} dispatches conserved their tokens, of {wanted} or more"
    # FSDP2 keeps one copy; alike are experts of several ranks, routers in fp32, and tensor groups.
    shares = alike or plan.tensor_parallel > 1 or (plan.data > plan.expert_parallel and "E" in run.size.letters)
    looked = None not in (replicas, alike) and (not shares or replicas > 0)
    yield "replicas", looked, f"{replicas} replicated tensors have the same bits; {alike} groups hold some alike"


def look_at_account(run: Run, receipt: Mapping[str, Any]) -> Iterator[tuple[str, bool, str]]:
    """The phases of a rank sum to its whole, and every token is counted."""
    account = receipt["goodput"]
    phases, whole = account["phases_ns"], round(account["whole_s"] * 1e9)
    # The whole is given in seconds, in fp64: rounding at 2**-53 of 10**3 s is far below a nanosecond.
    adds_up = abs(sum(phases.values()) - whole) <= 1 and min(phases.values()) >= 0
    ran = min(phases[phase] for phase in RAN) > 0
    said = ", ".join(f"{phase} {spent / 1e9:.2f} s" for phase, spent in phases.items() if spent)
    yield "account", adds_up and ran, f"{whole / 1e9:.2f} s: {said}"
    wanted = run.order.steps * run.size.batch * run.size.length
    said = f"{account['tokens']} of {wanted} tokens of {run.order.steps} steps"
    yield "counted", account["tokens"] == wanted, said


def judge_learning(name: str, steps: Sequence[Mapping[str, Any]], grammar: Grammar, length: int, batch: int) -> Check:
    """Whether the end of a run is better than the best model that sees only the token before could be.

    Attention, scans and recurrences that pass nothing on leave such a model. The gap to a perfect model on the same
    tokens is measured as a part of the gap that a model without context has. sigma is the spread of a token's surprise
    over the square root of the tokens looked at; the run must end SIGMAS of it below the gap of one token back. Nothing
    scores better than a perfect model: a gap below 0 by more is that of a model which was shown what it is to predict,
    or the same batch again and again.
    """
    last = steps[-max(1, round(LAST * len(steps))) :]
    gaps = [float(step["loss"]) - float(step["perfect"]) for step in last if _is_finite(step)]
    whole = grammar.without_context() - grammar.floor(length + 1)
    sigma = _spread_of_surprise(grammar) / math.sqrt(max(1, len(gaps)) * batch * length)
    bound = (grammar.one_token_back() - grammar.floor(length + 1) - SIGMAS * sigma) / whole
    observed = sum(gaps) / len(gaps) / whole if gaps and len(gaps) == len(last) else math.inf
    why = f"gap of one token back - {SIGMAS:g} x {sigma:.3g}, the spread over {len(gaps)} steps; over ln V - floor"
    parts = (
        part("gap-of-one-token-back", observed, bound, why),
        part("gap-of-knowing-all", observed, -SIGMAS * sigma / whole, "of a perfect model: 0", at_least=True),
    )
    return check_of(f"{name}.learns", *parts, detail=f"of a floor of {grammar.floor(length + 1):.4f} nats")


def check_low_precision(bench: Bench, run: Run, recipe: str) -> None:
    """Transformer Engine's quantizers sat on all that should cast in a recipe, and on nothing else."""

    def look(_: Run, receipt: Mapping[str, Any]) -> Iterator[tuple[str, bool, str]]:
        faults = find_wrong_casts(run, receipt, recipe)
        said = "; ".join(faults[:5]) or f"{len(receipt['quantizers'])} casts of {recipe}"
        yield "casts", not faults, said
        dense = any(run.size.letters[_place_of(part)] in "AM" for part in _low_parts(run, receipt))
        if recipe == "delayed" and run.order.read_plan().world > 1 and dense:
            scales = receipt.get("scales") or 0
            yield "scales", scales > 0, f"{scales} scales have the same bits"

    check_ranks(bench, run, look)
    note_casts(bench, run, run.name)


def find_wrong_casts(run: Run, receipt: Mapping[str, Any], recipe: str) -> list[str]:
    """Quantizers that a rank lacks, has too many, or has of another recipe; empty where all is right."""
    seen: dict[str, set[str]] = {}
    parts, faults = _low_parts(run, receipt), []
    for row in receipt["quantizers"] or ():
        of_part = next((name for name, start in parts.items() if f"{row['layer']}.".startswith(start)), "")
        seen.setdefault(of_part, set()).add(row["tensor"])
        direction: Any = "dgrad" if row["tensor"] == "gradient" else "forward"
        said = (row["kind"], f"float8_{row['format']}")
        wanted = (KINDS[recipe], wanted_format(recipe, direction, row["tensor"]))
        if not _may_cast(run, row["layer"]):
            faults.append(f"{row['layer']} stays in BF16, and has a {row['kind']}")
        elif said != wanted:
            faults.append(f"{row['layer']} {row['tensor']}: {' '.join(said)}; wanted {' '.join(wanted)}")
    if not parts:
        faults.append("no part of a layer outside of the BF16 zones took Transformer Engine")
    lacking = ((part, sorted(set(TENSORS) - seen.get(part, set()))) for part in parts)
    return faults + [f"{part} has no quantizer of {', '.join(tensors)}" for part, tensors in lacking if tensors]


def _low_parts(run: Run, receipt: Mapping[str, Any]) -> dict[str, str]:
    """Parts with a product that took Transformer Engine where low precision may run -> start of its layers' names."""
    found = {}
    for path, choice in receipt["choices"].items():
        layer, _, name = path.rpartition(".")
        if name in CASTING and choice["observed"] == "te" and _may_cast(run, path):
            found[path] = f"{layer}." if name == "in_projection" else f"{path}."  # which its mixer has
    return found


def _may_cast(run: Run, name: str) -> bool:
    """Whether a layer may run in low precision: not the embedding, heads, zones, and experts that are kept out."""
    if not name.startswith("layers.") or run.size.zones.is_bf16(place := _place_of(name)):
        return False
    return run.size.letters[place] != "E" or run.order.read_forms().low_precision_experts


def _place_of(name: str) -> int:
    return int(name.split(".")[1])


def _is_finite(step: Mapping[str, Any]) -> bool:
    return all(read_number(step[name]) is not None for name in ("loss", "perfect", "grad_norm"))


def _spread_of_surprise(grammar: Grammar) -> float:
    """Standard deviation of -ln p of a token: its class and its word move by distances of their own."""
    variance = 0.0
    for states in (grammar.classes, grammar.words):
        probabilities = step_probabilities(states)
        mean = -sum(p * math.log(p) for p in probabilities)
        variance += sum(p * (-math.log(p) - mean) ** 2 for p in probabilities)
    return math.sqrt(variance)
