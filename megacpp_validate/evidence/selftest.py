"""The faults of the selftest, its order, and what the probes said.

Standard library only: the mutants and the runs go to and from the environment in which the faults are planted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal

from .receipt import Receipt, Strict

Where = Literal["wrapper", "vendor"]
Requested = Literal["te", "native"]
Value = str | int | float | bool

Z_95: Final = 1.959964  # two-sided 95% of a normal variable


class Fault(StrEnum):
    """What is done to a callable of a wrapper, or to an entry point of Transformer Engine. A closed enumeration."""

    # A tensor that comes out of it, or a gradient that it passes on.
    ZEROS = "zeros"
    HALF_ZEROS = "half-zeros"
    SCALED = "scaled"
    NEGATED = "negated"
    SHUFFLED = "shuffled"  # by one place along the first axis that has several
    NAN = "nan"  # in one element
    # What goes into it.
    ARGUMENT = "argument"  # another value
    ARGUMENT_SCALED = "argument-scaled"
    ARGUMENT_LOST = "argument-lost"  # its default, or None
    ARGUMENT_ROLLED = "argument-rolled"  # groups, experts or tokens change places along an axis
    # What it has.
    BIAS_DROPPED = "bias-dropped"
    HALVES_SWAPPED = "halves-swapped"
    SCOPE_IGNORED = "scope-ignored"  # computes in the dtype of its weights, whatever the low-precision scope says
    # What it gives.
    PARAMETERS_CLONED = "parameters-cloned"  # a layer with copies of the parameters that it should share
    PARAMETERS_FRESH = "parameters-fresh"  # a layer that keeps what it was made with
    ANSWERS = "answers"  # always the same
    SKIPPED = "skipped"  # nothing, or one of its arguments as it came
    OUTPUT_KEPT = "output-kept"  # the tensors of every call, for good
    OVERWRITTEN = "overwritten"  # an argument or parameter; without a name, the first output of the shape
    # What it is.
    NATIVE_INSTEAD = "native-instead"  # plain torch under the vendor's name
    MISSING = "missing"
    ENTRY_LOST = "entry-lost"  # a row of a table


@dataclass(frozen=True)
class Mutant(Strict):
    """One fault, planted in one place: a row of `matrix/mutants.toml`.

    Attributes:
        id: short and stable.
        module: id of the bridge module that must be blamed.
        where: "wrapper" (an attribute below `bridge`) or "vendor" (what an accessor of `bridge.imports` gives).
        requested: on which path the probes run: "te" (on the double, where there is no GPU) or "native".
        at: the patch point: "attention.native_attention" below `bridge`; or an accessor's name, with the attribute of
            its value after a dot.
        fault, parameters: what is done there. `tensor`: "output" (the default), "output.1" or "output.rows" of
            several, "gradient.NAME" of an argument or parameter. `call`: "init" where a class is made; the call itself
            by default. `when`: "eval" where only calls without gradients have it. `only`: the value that is changed.
            `index`: the item of an answer that is always the same.
        says: what it stands for, in a sentence.
    """

    id: str
    module: str
    where: Where
    requested: Requested
    at: str
    fault: Fault
    says: str
    parameters: dict[str, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class SelftestOrder:
    """What the environment is to run.

    Attributes:
        probes: ids of the probes, in the order in which they run.
        mutants: those to plant, one run each.
        clean: how many probe runs without a fault there are to be at least, half of them on each path.
        seed: of the first run; every run has a seed of its own, counted on from it.
        recipes: FP8 recipes of the path "te".
    """

    probes: tuple[str, ...]
    mutants: tuple[Mutant, ...]
    clean: int = 0
    seed: int = 0
    recipes: tuple[str, ...] = ("delayed", "current", "block")


@dataclass(frozen=True)
class SelftestRun(Strict):
    """Every probe once, in one process, with one fault planted or none.

    Attributes:
        mutant: id of the mutant; empty for a clean run.
        planted: whether the patch point was there; True in a clean run.
        reached: how often the planted code changed something.
        trouble: why it could not be planted, or how the process ended; empty where neither is the case.
        receipts: one a probe; of good checks only those that failed are kept, which is none.
    """

    mutant: str
    requested: Requested
    seed: int
    receipts: tuple[Receipt, ...]
    planted: bool = True
    reached: int = 0
    trouble: str = ""
    seconds: float = 0.0


def wilson_interval(hits: int, trials: int) -> tuple[float, float]:
    """95% score interval of a proportion; (0, 1) where nothing was tried.

    Wilson 1927, "Probable inference, the law of succession, and statistical inference", JASA 22(158), 209-212. Unlike
    p +- z sqrt(p (1 - p) / n) it says something where there were no hits.
    """
    if trials == 0:
        return 0.0, 1.0
    share, square = hits / trials, Z_95**2
    centre = (share + square / (2 * trials)) / (1 + square / trials)
    half = Z_95 * math.sqrt(share * (1 - share) / trials + square / (4 * trials**2)) / (1 + square / trials)
    # At either end the formula gives exactly 0 or 1, and floating point nearly that.
    return 0.0 if hits == 0 else centre - half, 1.0 if hits == trials else centre + half


def read_runs(text: str) -> tuple[SelftestRun, ...]:
    """What the environment wrote, a run a line."""
    from pydantic import TypeAdapter

    reader = TypeAdapter(SelftestRun)
    return tuple(reader.validate_json(line, strict=True) for line in text.splitlines())
