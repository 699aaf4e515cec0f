"""Images as planned, locks as checked, the site's pages and links, and `history`."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from .harness import Decisions, Ended, Scenario, listed, terms
from .receipts import PROBES, fill, good, put, raised, red

EVIDENCE: Final = "docs/evidence"
CACHE: Final = {"XDG_CACHE_HOME": "{work}/cache"}  # no index of another run
PINNED: Final = ("BASE_IMAGE", "TE_VERSION", "ARCH", "CACHE_ARCH", "LOCK_HASH", "TE_ARCHS", "PYTHON_VERSION", "REMOVES")


def read_images(ended: Ended) -> Decisions:
    """Each plan: base, platform, lock, steps, sources; and what is refused."""
    data = ended.data
    found: Decisions = {"warned": len(data["warned"])}
    found["refused"] = listed(
        str(row.get("target", row)) if isinstance(row, dict) else terms(row) for row in data["refused"]
    )
    for row in data["plans"]:
        key = row["target"]
        found[f"{key} base"] = row["reference"]
        found[f"{key} pulled"] = row["pulled"]
        found[f"{key} platform"] = f"{row['platform']} {row['arch']} {row['cache_arch']}"
        found[f"{key} lock"] = f"{row['lock']} {row['lock_hash']}"
        found[f"{key} steps"] = row["steps"]
        found[f"{key} sources"] = listed(row["sources"])
        found[f"{key} verified"] = bool(row["verified"])
        found[f"{key} arguments"] = {name: row["arguments"][name] for name in PINNED if name in row["arguments"]}
    return found


def read_lock(ended: Ended) -> Decisions:
    """What is stale, which pin is another one, how each stack fits."""
    data = ended.data
    found: Decisions = {
        f"pin {row['base']}": f"{row['news']} {row['after']} verified={bool(row['verified'])}" for row in data["pins"]
    }
    found |= {
        f"lock {row['target']} {row['file']}": f"{row['count']} stale={bool(row['stale'])}" for row in data["locks"]
    }
    for stack in data["fits"]:
        name = f"{stack['name']} {stack['te']}"
        found[f"fits {name}"] = dict(sorted(Counter(row["verdict"] for row in stack["fits"]).items()))
        found[f"refused {name}"] = listed(row["need"] for row in stack["fits"] if row["verdict"] == "refused")
    return found | {"refusals": len(data["refusals"])}


def images() -> Iterator[Scenario]:
    """Plans of all targets and of each, other bases, and the locks; nothing is built, and no engine is asked."""
    offline = {"DOCKER_HOST": "unix:///nonexistent/docker.sock"}
    base = "nvcr.io/nvidia/pytorch@sha256:" + "1" * 64
    for name, more in {
        "all": "", "h200": "h200", "b200": "b200", "gb10": "gb10", "cpu": "cpu", "none": "none",
        "h200 on another base": f"h200 --base {base}", "a base by tag": "h200 --base nvcr.io/nvidia/pytorch:26.07-py3",
        "cpu tagged": "cpu --tag mine",
    }.items():  # fmt: skip
        yield Scenario(
            f"plan {name}", ("images", *more.split(), "--plan", "--format", "json"), read_images, env=offline
        )
    words = ("images", "cpu", "--tag", "a b", "--plan", "--format", "json")
    yield Scenario("plan cpu with a tag that is none", words, read_images, env=offline)
    for name in ("all", "h200", "cpu", "none"):
        targets = () if name == "all" else (name,)
        yield Scenario(f"lock {name}", ("lock", *targets, "--check", "--format", "json"), read_lock)


def read_site(ended: Ended) -> Decisions:
    """Cells with their outcome, and steps with their culprits; tests of the site hold its pages and links."""
    data, site = ended.data, ended.work / "site"
    cells = (f"{row['cell']} {row['outcome']}{' in doubt' if row['doubt'] else ''}" for row in data["cells"])
    return {
        "cells": listed(cells), "cells with a page": sum((site / row["page"]).is_file() for row in data["cells"]),
        "steps": listed(map(_step, data["steps"])),
        "receipts": data["receipts"], "runs": data["runs"], "unreadable": len(data["unreadable"]),
    }  # fmt: skip


def _step(row: dict[str, Any]) -> str:
    return f"{row['target']} {row['before']} {row['after']}: {list(map(_name, row['culprits']))}"


def _name(culprit: dict[str, str]) -> str:
    cause = ": ".join(filter(None, (culprit["cause"], culprit["component"])))
    who = "the environment, not a module" if culprit["module"] == "environment" else culprit["module"]
    return f"{who} ({cause})"


def read_history(ended: Ended) -> Decisions:
    """Each cell: its runs in order, with their outcome."""
    data = ended.data
    found: Decisions = {key: data[key] for key in ("receipts", "runs")} | {"unreadable": len(data["unreadable"])}
    for name, rows in data["cells"].items():
        found[name] = [_run(row) for row in rows]
    return found


def _run(row: dict[str, Any]) -> str:
    flags = [name for name in ("same_as", "only_timed") if row[name]]
    return " ".join((row["run"], str(row["outcome"]), row["started"], *flags))


def several_runs(work: Path) -> None:
    """Runs of several days: red and green of one state, a copy, a damaged file, other stacks and targets."""
    store = work / "store"
    fill(store)
    for day in range(1, 9):
        changes: dict[str, Any] = {"hours": 24.0 * day, "peak_memory_mib": 100.0 + 10 * day}
        make = red if day % 4 == 0 else good
        put(store, *(make(probe, **changes) for probe in PROBES[:3]), run=f"day-{day}")
    put(store, raised("permute", "RuntimeError: x", hours=30.0), run="raised")
    others = good("attention", stack="te2.17.1", hours=50.0), red("attention", target="b200", hours=51.0)
    put(store, *others, run="others")
    (store / "copy").mkdir()
    shutil.copy(store / "day-1" / "te2.20.2-h200-attention.json", store / "copy")
    (store / "damaged").mkdir()
    (store / "damaged" / "te2.20.2-h200-attention.json").write_text("{")


def sites() -> Iterator[Scenario]:
    """The site of the committed evidence, and of made-up runs."""
    more = ("--output", "{work}/site", "--format", "json")

    yield Scenario("evidence", ("report", EVIDENCE, *more), read_site, env=CACHE)
    for folder in ("h200", "fp8", "smoke", "jit", "h200/native"):
        yield Scenario(folder, ("report", f"{EVIDENCE}/{folder}", *more), read_site, env=CACHE)
    yield Scenario("several runs", ("report", "{work}/store", *more), read_site, several_runs, CACHE)
    yield Scenario("no folder", ("report", "{work}/none", *more), read_site, env=CACHE)


def histories() -> Iterator[Scenario]:
    """Cells of the committed evidence and of made-up runs."""
    for name, store, more, prepare in (
        ("evidence", EVIDENCE, (), None),
        ("h200", f"{EVIDENCE}/h200", ("--cell", "*"), None),
        ("attention", EVIDENCE, ("--cell", "*-attention"), None),
        ("smoke", EVIDENCE, ("--cell", "*smoke*"), None),
        ("fp8", f"{EVIDENCE}/fp8", ("--cell", "*"), None),
        ("no such cell", EVIDENCE, ("--cell", "none"), None),
        ("no folder", "{work}/none", (), None),
        ("empty", "{work}", (), None),
        ("several runs", "{work}/store", (), several_runs),
        ("the newest two", "{work}/store", ("--cell", "*-attention", "--last", "2"), several_runs),
    ):
        yield Scenario(name, ("history", store, *more, "--format", "json"), read_history, prepare, CACHE)
