"""`python -m tests.replay record | compare | list [--only GROUP[/SCENARIO]] [--fast]`."""

from __future__ import annotations

import argparse
import sys
import time
from fnmatch import fnmatchcase

from .groups import GROUPS
from .harness import NOT_RUN, OTHER_FORM, differences, read_recording, record, write_recording


def main() -> int:
    """Record, or compare: 0 where nothing changed, 1 where a decision is another one, 4 where some could not be run."""
    parser = argparse.ArgumentParser(prog="python -m tests.replay", description=__doc__)
    parser.add_argument("verb", choices=["record", "compare", "list"])
    parser.add_argument("--only", default="*", help="GROUP, or GROUP/SCENARIO with * and ?")
    parser.add_argument("--fast", action="store_true", help="leave the slow groups out")
    given = parser.parse_args()
    name, _, only = given.only.partition("/")
    groups = [group for group in GROUPS if fnmatchcase(group.name, name) and not (given.fast and group.slow)]
    found = lacking = 0
    for group in groups:
        chosen = {one.id for one in group.scenarios() if fnmatchcase(one.id, only or "*") or one.id == only}
        if given.verb == "list":
            print(*(f"{group.name}/{one}" for one in sorted(chosen)), sep="\n")  # noqa: T201
            continue
        started, before = time.monotonic(), read_recording(group.name)
        recording = record(group, chosen)
        missing = [key for key, row in recording.items() if NOT_RUN in row]
        lacking += len(missing)
        if given.verb == "record":
            if wrong := [f"{key}: {row[OTHER_FORM]}" for key, row in recording.items() if OTHER_FORM in row]:
                parser.error("\n".join(("not recorded; adapt the function that reads the JSON", *wrong)))
            write_recording(group.name, {**(before if only else {}), **recording})
        else:
            new = differences({key: row for key, row in before.items() if not only or key in chosen}, recording)
            found += len(new)
            print(*(f"{group.name}/{one}\n" for one in new), sep="", end="")  # noqa: T201
        print(  # noqa: T201
            f"{group.name}: {len(recording)} scenarios, {sum(map(len, recording.values()))} decisions, "
            f"{len(missing)} not run, {time.monotonic() - started:.1f} s",
            flush=True,
        )
    return 1 if found else 4 if lacking and given.verb == "compare" else 0


if __name__ == "__main__":
    sys.exit(main())
