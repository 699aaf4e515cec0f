"""Searches for planted culprits: how often the answer is right, and the runs beside what no search can do without.

Writes docs/benchmarks/bisect.md and .json. The same seed gives the same table.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs" / "benchmarks"
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "canary" / "search")]

from culprits import NAMES, Truth, find  # noqa: E402

from megacpp_validate.canary.dynamic.bisect_result import SearchEnd, Verdict  # noqa: E402
from megacpp_validate.canary.dynamic.search.bound import least_runs  # noqa: E402
from megacpp_validate.canary.dynamic.search.repeats import Trust  # noqa: E402
from megacpp_validate.canary.dynamic.search.search import Conclusion, Point  # noqa: E402

ERROR = 0.01
DARK_RUN = 4  # releases that cannot be built come in rows of up to this many


@dataclass(frozen=True)
class Kind:
    """What is planted.

    Attributes:
        axes: that change.
        together: of them, those that are bad only together.
        flaky: probability that a run is wrong; it is stated to the search.
        dark: share of the releases of the first axis that cannot be built.
    """

    axes: int
    together: int = 1
    flaky: float = 0.0
    dark: float = 0.0


@dataclass(frozen=True)
class Row:
    """What came of many searches for one kind.

    Attributes:
        right: answers that name the planted axes and release; where releases are dark, the narrowest range that can be.
        honest: answers that are right, or that do not claim to be closed and hold the truth.
        runs, best: on average; `best` is a lower bound for every search.
        environments: points that were built, on average and at most.
        over: most environments above ceil(log2 n) of the longest axis.
        unbuilt: points that could not be built, on average.
    """

    kind: Kind
    searches: int
    right: int
    honest: int
    runs: float
    best: float
    environments: float
    most_environments: int
    over: int
    unbuilt: float


KINDS = (
    *(Kind(axes) for axes in (1, 2, 3, 4)),
    *(Kind(axes, together=together) for axes in (2, 3, 4) for together in (2, 3, 4) if together <= axes),
    *(Kind(axes, flaky=flaky) for flaky in (0.05, 0.2) for axes in (1, 2, 4)),
    *(Kind(1, dark=dark) for dark in (0.1, 0.3, 0.5)),
    Kind(2, dark=0.3),
    Kind(1, flaky=0.05, dark=0.3),
)


def plant(kind: Kind, chance: random.Random) -> tuple[list[int], dict[int, int], set[int]]:
    """Sizes of 2 to 60, where each guilty axis turns, and which releases of the first axis cannot be built."""
    sizes = [chance.randint(2, 60) for _ in range(kind.axes)]
    guilty = chance.sample(range(kind.axes), kind.together)
    turns = {axis: chance.randint(1, sizes[axis] - 1) for axis in guilty}
    dark: set[int] = set()
    inside = sizes[0] - 2
    while inside > 0 and len(dark) < round(kind.dark * inside):
        start = chance.randint(1, inside)
        dark |= set(range(start, min(start + chance.randint(1, DARK_RUN), inside + 1)))
    return sizes, turns, dark


def is_right(found: Conclusion, turns: dict[int, int], dark: set[int]) -> tuple[bool, bool]:
    """Whether an answer is as narrow as can be, and whether it is at least true."""
    named = {axis for one in found.culprits for axis in one.axes}
    if named != {NAMES[axis] for axis in turns} or len(found.culprits) != 1:
        return False, False
    exact = true = True
    for turn in found.culprits[0].turns:
        at = turns[NAMES.index(turn.axis)]
        first = last = at
        if turn.axis == NAMES[0]:
            while first - 1 in dark:
                first -= 1
            while last in dark:
                last += 1
        exact &= turn.first_bad == tuple(f"v{value}" for value in range(first, last + 1))
        true &= f"v{at}" in turn.first_bad
    return exact, true and (exact or found.end is SearchEnd.NARROWED)


def measure(kind: Kind, searches: int, seed: int) -> Row:
    """Plant, search and count."""
    chance = random.Random(f"{seed} {kind}")
    trust = Trust(kind.flaky, ERROR)
    seen: list[tuple[bool, bool, int, float, int, int, int]] = []
    for number in range(searches):
        sizes, turns, dark = plant(kind, chance)

        def untold(point: Point, dark: set[int] = dark) -> Verdict | None:
            return Verdict.CANNOT_BUILD if point[0] in dark else None

        truth = Truth((turns,), untold, kind.flaky, seed=chance.randrange(2**31) + number)
        found = find(sizes, truth, trust)
        built = [point for point in truth.asked if untold(point) is None]
        best = least_runs([sizes[0] - len(dark), *sizes[1:]], trust, kind.together)
        runs = sum(truth.asked[point] for point in built)
        over = len(built) - math.ceil(math.log2(max(sizes)))
        seen.append((*is_right(found, turns, dark), runs, best, len(built), over, len(truth.asked) - len(built)))
    columns = list(zip(*seen, strict=True))
    return Row(
        kind, searches, sum(columns[0]), sum(columns[1]), sum(columns[2]) / searches, sum(columns[3]) / searches,
        sum(columns[4]) / searches, max(columns[4]), max(columns[5]), sum(columns[6]) / searches,
    )  # fmt: skip


def render_table(rows: list[Row], seed: int) -> str:
    """The rows as Markdown."""
    return "\n".join(_render(rows, seed)) + "\n"


def _render(rows: list[Row], seed: int) -> Iterator[str]:
    yield "<!-- written by benchmarks/first_bad.py -->"
    yield (
        f"Culprits planted at random among 2 to 60 values an axis, {rows[0].searches} searches a row, seed {seed}. "
        f"Stated error where runs are flaky: {ERROR:.0%}. `best possible` is a lower bound for every search: both ends "
        "confirmed, and the bits that tell all answers of the row apart (through a noisy channel where a run may be "
        "wrong)."
    )
    yield ""
    yield (
        "| axes | bad only together | runs wrong | cannot be built | right | true | runs | best possible | ratio | "
        "environments | at most | at most over ceil(log2 n) | not built |"
    )
    yield f"|{'---|' * 13}"
    for row in rows:
        kind = row.kind
        yield (
            f"| {kind.axes} | {kind.together if kind.together > 1 else ''} | {kind.flaky:.0%} | {kind.dark:.0%} | "
            f"{row.right / row.searches:.2%} | {row.honest / row.searches:.2%} | {row.runs:.1f} | {row.best:.1f} | "
            f"{row.runs / row.best:.2f} | {row.environments:.1f} | {row.most_environments} | {row.over} | "
            f"{row.unbuilt:.1f} |"
        )
    yield ""
    yield (
        "`right`: the planted axes and the first bad release, or the narrowest range where the releases around it "
        "cannot be built. `true`: right, or a wider range that says it is open and holds the truth: the search gives "
        "up after 8 releases that cannot be built. A point that may be wrong is repeated in its environment, which is "
        "built once."
    )


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--searches", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    rows = [measure(kind, asked.searches, asked.seed) for kind in KINDS]
    text = render_table(rows, asked.seed)
    print(text)
    DOCS.mkdir(parents=True, exist_ok=True)
    (DOCS / "bisect.md").write_text(text)
    (DOCS / "bisect.json").write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
