"""`python -m tests.replay record | compare [--only GROUP[/SCENARIO]] [--fast]`."""

from __future__ import annotations

import argparse
import sys
import time

from .groups import GROUPS
from .harness import (
    NOT_RUN,
    OTHER_FORM,
    Recording,
    differences,
    read_changed,
    read_recording,
    record,
    unexplained,
    write_recording,
)


def main() -> int:
    """Record, or compare: 0 where nothing changed, 1 where a decision is another one, 4 where some could not be run."""
    parser = argparse.ArgumentParser(prog="python -m tests.replay", description=__doc__)
    parser.add_argument("verb", choices=["record", "compare", "list"])
    parser.add_argument("--only", action="append", default=[], help="GROUP, or GROUP/SCENARIO with * and ?; repeated")
    parser.add_argument("--fast", action="store_true", help="leave the slow groups out")
    parser.add_argument("--verbose", action="store_true", help="print each scenario as it starts")
    asked = parser.parse_args()
    wanted = {one.partition("/")[0]: one.partition("/")[2] or "*" for one in asked.only}
    if unknown := wanted.keys() - {group.name for group in GROUPS}:
        parser.error(f"no such group: {', '.join(sorted(unknown))}")
    found, lacking = 0, 0
    for group in GROUPS:
        if (wanted and group.name not in wanted) or (asked.fast and group.slow):
            continue
        only = wanted.get(group.name, "*")
        if asked.verb == "list":
            print(*(f"{group.name}/{one.id}" for one in group.scenarios()), sep="\n")  # noqa: T201
            continue
        started = time.monotonic()
        say = (lambda name: print(f"  {name}", file=sys.stderr, flush=True)) if asked.verbose else (lambda _: None)  # noqa: T201
        recording = record(group, only, say)
        missing = [name for name, row in recording.items() if NOT_RUN in row]
        lacking += len(missing)
        if asked.verb == "record":
            if wrong := [f"{name}: {row[OTHER_FORM]}" for name, row in recording.items() if OTHER_FORM in row]:
                parser.error("\n".join(("not recorded; adapt the function that reads the JSON", *wrong)))
            kept = {} if only == "*" else read_recording(group.name)
            write_recording(group.name, kept | recording)
        else:
            found += _compare(group.name, recording, only)
        count = sum(len(row) for row in recording.values())
        print(  # noqa: T201
            f"{group.name}: {len(recording)} scenarios, {count} decisions, {len(missing)} not run, "
            f"{time.monotonic() - started:.1f} s",
            flush=True,
        )
    return 1 if found else 4 if lacking and asked.verb == "compare" else 0


def _compare(name: str, recording: Recording, only: str) -> int:
    before = read_recording(name)
    if only != "*":
        before = {key: value for key, value in before.items() if key in recording}
    new = differences(before, recording)
    left = unexplained(new, read_changed())
    for one in left:
        print(f"{name}/{one}")  # noqa: T201
    if len(new) > len(left):
        print(f"{name}: {len(new) - len(left)} differences are explained by changed.json")  # noqa: T201
    return len(left)


if __name__ == "__main__":
    sys.exit(main())
