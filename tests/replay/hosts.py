"""`doctor` on recorded facts of hosts: a stand-in for an interpreter answers each look from a file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Final

from .harness import Decisions, Ended, Scenario, terms

FACTS: Final = Path(__file__).parent / "data" / "hosts.json"
# The doctor starts `PYTHON ... -m MODULE WHAT ANSWER.json`, where WHAT is "path" or a package.
STAND_IN: Final = """#!/bin/sh
for word; do what="$last"; last="$word"; done
case "$last" in
  *.json) exec cp "{facts}/$what.json" "$last" ;;
  *) exec python3 "$@" ;;
esac
"""


def read_doctor(ended: Ended) -> Decisions:
    """Each difference: how grave, of what kind, what breaks, the identity of the next step."""
    found: Decisions = {"target": ended.data["target"], "stack": ended.data["stack"].partition(" ")[0]}
    for row in ended.data["differences"]:
        key = f"{row['weight']} {row['aspect']} {row['subject']}"
        while key in found:
            key += " again"
        found[key] = row["breaks"]
        found[f"{key}: next"] = terms(row["next_step"])
    return found


@cache
def _facts() -> dict[str, dict[str, Any]]:
    """Facts of each host; all but the clean one have only what is otherwise."""
    told = json.loads(FACTS.read_text(encoding="utf-8"))
    clean = told["clean"]
    hosts = {}
    for name, row in told.items():
        packages = clean["packages"] | {
            package: clean["packages"].get(package, {}) | facts for package, facts in row["packages"].items()
        }
        hosts[name] = {"path": clean["path"] | row["path"]} | packages
    return hosts


def lay_out(work: Path, host: str) -> None:
    """The stand-in, and the facts that it answers with."""
    facts = work / "facts"
    facts.mkdir()
    for what, row in _facts()[host].items():
        (facts / f"{what}.json").write_text(json.dumps(row))
    script = work / "python"
    script.write_text(STAND_IN.format(facts=facts))
    script.chmod(0o755)


def doctors() -> Iterator[Scenario]:
    """Every host as its GPU says; some for other targets and stacks."""
    words = ("doctor", "--python", "{work}/python", "--jobs", "1", "--format", "json")
    for host in _facts():
        yield Scenario(host, words, read_doctor, lambda work, host=host: lay_out(work, host))
    chosen = ("clean", "release 2.14.1", "no TE", "laptop", "many faults", "two runtimes, TE that throws")
    asked = ("--target cpu", "--target b200", "--target gb10", "--stack te2.17.1", "--stack te2.20.2")
    for host, more in product(chosen, asked):
        name = f"{host} {more.replace('--', '')}"
        yield Scenario(name, (*words, *more.split()), read_doctor, lambda work, host=host: lay_out(work, host))
    for name, more in {"no such target": ("--target", "none"), "no such stack": ("--stack", "none")}.items():
        yield Scenario(name, (*words, *more), read_doctor, lambda work: lay_out(work, "clean"))
    yield Scenario("no such interpreter", ("doctor", "--python", "{work}/none", "--format", "json"), read_doctor)
