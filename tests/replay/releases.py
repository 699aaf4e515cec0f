"""Releases of Transformer Engine by their sources: `canary`, its sweep, `te-bisect`, and `import-firewall`."""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from .harness import Decisions, Ended, NotRun, Scenario, terms

NEWEST: Final = "2.20.2"  # a later one on the index is nobody's change
JUMPS: Final = (
    ("1.11.0", "2.20.2"), ("2.1.0", "2.12.0"), ("2.12.0", "2.20.2"), ("2.17.1", "2.20.2"), ("2.14.1", "2.17.1"),
    ("2.20.2", "2.12.0"), ("2.17.1", "2.14.1"), ("2.3.0", "2.2.0"), ("2.20.2", "2.20.2"), ("2.8.0", "2.9.0"),
    ("2.14.1", "2.15.0"), ("2.18.0", "2.19.0"), ("2.20.2", "9.9.9"), ("2.0.0", "2.1.0"),
)  # fmt: skip
EDITS: Final = Path(__file__).parent / "data" / "edits.json"
CASES: Final = (
    "undamaged-2.8.0", "undamaged-2.12.0", "undamaged-2.17.1", "undamaged-2.20.2", "switched-off", "absent",
    "metapackage-alone", "core-without-extension", "extension-without-core", "core-library-deleted",
    "core-library-cut-short", "two-core-libraries", "missing-library", "undefined-symbol",
    "extension-of-an-older-build", "core-of-another-release", "extension-of-another-release", "local-version",
    "second-copy", "optional-symbol-gone", "required-symbol-gone", "flash-attn-4-without-cutedsl", "dependency-missing",
    "torch-missing", "leftovers-of-an-uninstall", "source-cut-short", "exits-at-import", "metadata-unreadable",
    "record-deleted", "no-library-in-cache", "core-without-extension-1.x", "import-hangs", "import-aborts",
)  # fmt: skip
NO_SOURCES: Final = 5


def decide_pair(data: dict[str, Any]) -> Decisions:
    """One pair: verdict of each module, each finding with its places, cause and next step."""
    found: Decisions = {
        "modules": [" ".join(filter(None, (row["module"], row["verdict"], row["under"]))) for row in data["modules"]],
        "downgrade": data["downgrade"],
        "not consumed": data["not_consumed"],
        "wheels": [data[side]["sha256"][:16] for side in ("old", "new") if data[side]["wheel"].endswith(".whl")],
        "findings": dict(sorted(Counter(f"{one['impact']} {one['kind']}" for one in data["findings"]).items())),
    }
    found["unchanged faults"] = dict(
        sorted(Counter(f"{one['impact']} {one['kind']} {one['module']}" for one in data["unchanged_faults"]).items())
    )
    for row in sorted(data["findings"], key=lambda one: json.dumps(one, sort_keys=True)):
        names = (row["module"], row["kind"], row["symbol"], row["member"], row["parameter"], row["new"][:60])
        key = " ".join(filter(None, names))
        while key in found:
            key += " again"
        found[key] = {
            "impact": row["impact"],
            "cause": row["cause"],
            "follows": row["follows"],
            "modules": row["modules"],
            "seen": [_place(row["before"]), _place(row["after"])],
            "used": sorted(map(_place, row["call_sites"])),
            "next": [one for one in terms(_next_step(row, data)) if "/" not in one],
        }
    return found


def _next_step(row: dict[str, Any], data: dict[str, Any]) -> str:
    """The JSON of a result has no words: they are made from the finding."""
    from megacpp_validate.canary.static.findings import Finding
    from megacpp_validate.report.describe.changes import next_step

    return next_step(Finding.model_validate(row), data["old"]["version"])


def _place(row: dict[str, Any] | None) -> str:
    return f"{row['file']}:{row['line']}" if row else ""


def read_pair(ended: Ended) -> Decisions:
    """Of one pair."""
    return decide_pair(ended.data)


def read_sweep(ended: Ended) -> Decisions:
    """Of every adjacent pair up to the newest release that was there."""
    found: Decisions = {}
    for step in ended.data["steps"]:
        at = f"{step['old']['version']} to {step['new']['version']}"
        found |= {f"{at}: {key}": value for key, value in decide_pair(step).items()}
        if step["new"]["version"] == NEWEST:
            break
    return found


def statics() -> Iterator[Scenario]:
    """The sweep, long jumps and downgrades, and edits of a release's sources."""
    yield Scenario("sweep", ("canary", "--all", "--format", "json"), read_sweep, lacks=(NO_SOURCES,))
    for old, new in JUMPS:
        words = ("canary", old, new, "--verbose", "--format", "json")
        yield Scenario(f"{old} to {new}", words, read_pair, lacks=() if new == "9.9.9" else (NO_SOURCES,))
    edits = json.loads(EDITS.read_text(encoding="utf-8"))
    for name, rows in edits.items():
        yield _edited(f"edited: {name}", rows)
    for name in ("other-kinds", "removed"):
        for number, row in enumerate(edits[name]):
            yield _edited(f"edited: {name} {number} {row[0]}", [row])
    yield _edited("edited: nothing", [])


def _edited(name: str, rows: list[list[str]]) -> Scenario:
    """The newest release beside a copy of its sources with edits: module, file or "*", pattern, replacement."""

    def prepare(work: Path) -> None:
        cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
        wheel = next(cache.rglob(f"transformer_engine-{NEWEST}-py3-none-any.whl"), None)
        if wheel is None:
            raise NotRun(f"the wheel of {NEWEST} is not in {cache}")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(
                work / "after", [one for one in archive.namelist() if one.startswith("transformer_engine/")]
            )
        for _, file, pattern, replacement in rows:
            files = (work / "after").rglob("*.py") if file == "*" else [work / "after" / file]
            for path in files:
                text = path.read_text()
                path.write_text(re.sub(pattern, replacement, text, count=0 if file == "*" else 1, flags=re.DOTALL))

    words = ("canary", NEWEST, "{work}/after", "--format", "json")
    return Scenario(name, words, read_pair, prepare, lacks=(NO_SOURCES,))


def read_firewall(ended: Ended) -> Decisions:
    """Each case: whether the bridge stands, what it takes instead, what it names."""
    found: Decisions = {}
    for row in ended.data["cases"]:
        name = row["case"]
        found[name] = f"{row['outcome']} {'available' if row['available'] else 'off'} {row['ended']} {row['compiled']}"
        found[f"{name} problems"] = len(row["problems"])
        found[f"{name} native"] = sorted(row["native_paths"])
        found[f"{name} names"] = [one for one in terms(row["reason"]) if "/" not in one and "…" not in one]
    return found


def firewalls() -> Iterator[Scenario]:
    """Every case of laid-out wheels."""
    for case in CASES:
        words = ("import-firewall", case, "--jobs", "1", "--format", "json")
        yield Scenario(case, words, read_firewall, lacks=(NO_SOURCES,))
    yield Scenario("no such case", ("import-firewall", "none", "--format", "json"), read_firewall)


def read_bisect(ended: Ended) -> Decisions:
    """How the search ended, who is the culprit, and what each point was found to be."""
    data = ended.data
    return {
        "end": data["end"],
        "culprits": int(bool(data["first_bad"])),  # a search by sources has one axis
        "points": [f"{' '.join(row['point'].values())} {row['verdict']}" for row in data["points"]],
    }


def bisects() -> Iterator[Scenario]:
    """By sources alone; a search over a GPU needs one."""
    for module, good, bad in (
        ("imports", "2.12.0", "2.20.2"), ("attention", "2.1.0", "2.20.2"), ("permute", "2.1.0", "2.12.0"),
        ("native_block", "2.12.0", "2.20.2"), ("layer_spec", "1.11.0", "2.20.2"), ("none", "2.12.0", "2.20.2"),
        ("attention", "2.20.2", "2.12.0"),
    ):  # fmt: skip
        more = ("--tier", "static", "--receipts", "{work}/answers", "--format", "json")
        words = ("te-bisect", good, bad, "--module", module, *more)
        yield Scenario(f"{module} {good} {bad}", words, read_bisect, lacks=(NO_SOURCES,))
