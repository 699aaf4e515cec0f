"""Runs the command line in this process, records what it decides, and compares two recordings.

Nothing here imports the product but `megacpp_validate.cli.main`. A scenario is a command line, the files that it needs,
and a function that reads decisions from the JSON that the command writes. A recording is `{scenario: {field: value}}`;
its field names are ours, so that it outlives a renamed JSON key: then the function that reads the JSON changes, and
the recording does not.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
DATA: Final = Path(__file__).parent / "data"
RECORDED: Final = Path(__file__).parent / "recorded"
NOT_RUN: Final = "not-run"
OTHER_FORM: Final = "the JSON has another form"

FOLDERS: Final = (  # of committed receipts
    "h200/te2.12.0", "h200/te2.12.0/again", "h200/te2.14.1", "h200/te2.16.1", "h200/te2.17.1", "h200/te2.19.0",
    "h200/te2.20.2", "h200/native", "fp8/te2.12.0", "fp8/te2.20.2", "smoke/one_gpu", "smoke/two_gpus", "jit/h200",
)  # fmt: skip

Decisions = dict[str, Any]
Recording = dict[str, Decisions]


class NotRun(Exception):
    """A scenario that cannot run on this machine; the text is the reason."""


@dataclass(frozen=True)
class Ended:
    """What one call of the command line ended with.

    Attributes:
        code: exit code.
        data: the JSON that it printed; None where it printed none.
        work: the folder of the scenario, which is removed afterwards.
        err: what it wrote to stderr.
    """

    code: int
    data: Any
    work: Path
    err: str


@dataclass(frozen=True)
class Scenario:
    """One command line.

    Attributes:
        argv: its words; `{work}` is the folder of the scenario.
        read: decisions of the JSON that the command prints; called only where there is JSON.
        prepare: makes what the command needs in the folder of the scenario.
        env: variables of the call; `{work}` as above.
        lacks: exit codes that mean that the scenario could not run here.
    """

    id: str
    argv: tuple[str, ...]
    read: Callable[[Ended], Decisions]
    prepare: Callable[[Path], object] | None = None
    env: dict[str, str] = field(default_factory=dict)
    lacks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Group:
    """Scenarios that are recorded in one file.

    Attributes:
        slow: run only when it is asked for.
        every: pytest takes one scenario of so many, unless it is thorough.
    """

    name: str
    scenarios: Callable[[], Iterable[Scenario]]
    slow: bool = False
    every: int = 1


@dataclass(frozen=True)
class Difference:
    """One decision that is another now."""

    scenario: str
    name: str
    before: Any
    after: Any

    def __str__(self) -> str:
        values = f"    before {json.dumps(self.before)}\n    after  {json.dumps(self.after)}"
        return f"{self.scenario}: {self.name}\n{values}"


def call(argv: Iterable[str], work: Path) -> Ended:
    """The command line with these words; its standard output is read as JSON."""
    from megacpp_validate.cli import main

    out, err, before, code = io.StringIO(), io.StringIO(), sys.argv, 0
    sys.argv = ["megacpp-validate", *argv]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        sys.argv = before
    try:
        data = json.loads(out.getvalue())
    except ValueError:
        data = None
    return Ended(code, data, work, err.getvalue())


def decide(scenario: Scenario) -> Decisions:
    """What the command line decides of one scenario."""
    with tempfile.TemporaryDirectory(prefix="replay-") as name, contextlib.chdir(ROOT), _variables(scenario, name):
        work = Path(name)
        try:
            if scenario.prepare:
                scenario.prepare(work)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ended = call((word.replace("{work}", name) for word in scenario.argv), work)
            if ended.code in scenario.lacks:
                raise NotRun(f"exit code {ended.code}")
            found = scenario.read(ended) if ended.data is not None else {}
        except NotRun as reason:
            return {NOT_RUN: str(reason)}
        except (KeyError, TypeError, AttributeError, IndexError) as fault:
            # The JSON has another form: the function that reads it must be adapted. Never a decision, always seen.
            return {OTHER_FORM: f"{type(fault).__name__}: {fault}"}
    return {"exit": ended.code} | {key: plain(value) for key, value in found.items()}


@contextlib.contextmanager
def _variables(scenario: Scenario, work: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update({"NO_COLOR": "1", "COLUMNS": "160"})
    os.environ.update({name: value.replace("{work}", work) for name, value in scenario.env.items()})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def plain(value: Any) -> Any:
    """A value as JSON gives it back; sets and tuples as lists."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    return json.loads(json.dumps(value))


def record(group: Group, chosen: Container[str] | None = None) -> Recording:
    """Decisions of every scenario of a group that is one of those that were chosen; of all without."""
    found: Recording = {}
    for scenario in group.scenarios():
        if scenario.id in found:
            raise ValueError(f"two scenarios are called {scenario.id}")
        if chosen is None or scenario.id in chosen:
            found[scenario.id] = decide(scenario)
    return found


def differences(before: Recording, after: Recording) -> list[Difference]:
    """Every field that one recording has otherwise than the other; a scenario that is gone is one too."""
    found = []
    for scenario in sorted(before.keys() | after.keys()):
        old, new = before.get(scenario, {}), after.get(scenario, {})
        if NOT_RUN in old and NOT_RUN in new:
            continue
        if not old or not new or NOT_RUN in old or NOT_RUN in new or OTHER_FORM in new:
            found.append(Difference(scenario, "*", _short(old), _short(new)))
            continue
        found += [
            Difference(scenario, name, old.get(name), new.get(name))
            for name in sorted(old.keys() | new.keys())
            if old.get(name) != new.get(name)
        ]
    return found


def _short(decisions: Decisions) -> Any:
    if not decisions:
        return None
    return {key: decisions[key] for key in (NOT_RUN, OTHER_FORM, "exit") if key in decisions}


def read_recording(name: str) -> Recording:
    """The committed recording of a group."""
    return json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))


def write_recording(name: str, recording: Recording) -> None:
    """Write it: a line a field, so that a change is a line of a diff."""
    RECORDED.mkdir(exist_ok=True)
    rows = []
    for scenario, decisions in sorted(recording.items()):
        fields = ",\n".join(f"  {json.dumps(key)}: {json.dumps(decisions[key])}" for key in sorted(decisions))
        rows.append(f"{json.dumps(scenario)}: {{\n{fields}\n}}")
    (RECORDED / f"{name}.json").write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")


_TOKEN: Final = re.compile(r"`[^`]+`|[^\s`'\"(),;]+")
_KEPT: Final = re.compile(r"\d\.\d|_|^[A-Z][A-Z0-9]{3,}$|[<>=]=|\.(?:py|so|toml|json)\b|^/\w")


def terms(text: str) -> list[str]:
    """What a sentence names: versions, files, requirements, identifiers and backticked words, without its wording."""
    found = set()
    for token in _TOKEN.findall(text):
        bare = token.strip("`").strip() if token.startswith("`") else token.strip(".:,")
        if token.startswith("`") or _KEPT.search(bare):
            found.add(bare)
    return sorted(found)


def listed(values: Iterable[Any]) -> list[Any]:
    """A sorted list: the order is no decision."""
    return sorted(values, key=str)
