"""Releases of Transformer Engine by their sources: `te-canary`, its sweep, `te-bisect`, and `import-firewall`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final

from .harness import Decisions, Ended, Scenario, terms

RELEASES: Final = (
    "1.11.0", "1.12.0", "1.13.0", "2.0.0", "2.1.0", "2.2.0", "2.3.0", "2.4.0", "2.5.0", "2.6.0", "2.7.0", "2.8.0",
    "2.9.0", "2.10.0", "2.11.0", "2.12.0", "2.13.0", "2.14.0", "2.14.1", "2.15.0", "2.16.0", "2.16.1", "2.17.0",
    "2.17.1", "2.18.0", "2.19.0", "2.20.0", "2.20.2",
)  # fmt: skip
JUMPS: Final = (
    ("1.11.0", "2.20.2"), ("2.0.0", "2.12.0"), ("2.12.0", "2.20.2"), ("2.17.1", "2.20.2"), ("2.14.1", "2.17.1"),
    ("2.20.2", "2.12.0"), ("2.17.1", "2.14.1"), ("2.3.0", "2.2.0"), ("2.20.2", "2.20.2"),
)  # fmt: skip
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
        "wheels": [data[side]["sha256"][:16] for side in ("old", "new")],
        "findings": dict(sorted(Counter(f"{one['impact']} {one['kind']}" for one in data["findings"]).items())),
    }
    for row in data["findings"]:
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
            "next": [one for one in terms(row["next_step"]) if "/" not in one],
        }
    return found


def _place(row: dict[str, Any] | None) -> str:
    return f"{row['file']}:{row['line']}" if row else ""


def read_pair(ended: Ended) -> Decisions:
    """Of one pair, or of several steps."""
    return decide_pair(ended.data)


def statics() -> Iterator[Scenario]:
    """Adjacent pairs, long jumps and downgrades."""
    for old, new in (*pairwise(RELEASES), *JUMPS):
        words = ("te-canary", old, new, "--verbose", "--format", "json")
        yield Scenario(f"{old} to {new}", words, read_pair, lacks=(NO_SOURCES,))
    for old, new in (("2.17.1", "2.18.0"), ("2.12.0", "2.13.0")):
        words = ("te-canary", old, new, "--fail-on", "risk", "--format", "json")
        yield Scenario(f"{old} to {new}, failing on risk", words, read_pair, lacks=(NO_SOURCES,))


def read_firewall(ended: Ended) -> Decisions:
    """Each case: whether the bridge stands, what it takes instead, what it names."""
    found: Decisions = {}
    for row in ended.data["cases"]:
        name = row["case"]
        found[name] = f"{row['outcome']} {'available' if row['available'] else 'off'} {row['ended']} {row['compiled']}"
        found[f"{name} problems"] = len(row["problems"])
        found[f"{name} native"] = sorted(row["native_paths"])
        found[f"{name} names"] = [one for one in terms(row["reason"]) if not one.startswith(("/", "…"))]
    return found


def firewalls() -> Iterator[Scenario]:
    """Every case of laid-out wheels."""
    for case in CASES:
        words = ("import-firewall", case, "--jobs", "1", "--format", "json")
        yield Scenario(case, words, read_firewall, lacks=(NO_SOURCES,))
    yield Scenario("no such case", ("import-firewall", "none", "--format", "json"), read_firewall)


def read_bisect(ended: Ended) -> Decisions:
    """The first bad release, or the range, and why."""
    return {key: value for key, value in ended.data.items() if key in BISECTED}


BISECTED: Final = ("outcome", "module", "good", "bad", "first_bad", "last_good", "skipped")


def bisects() -> Iterator[Scenario]:
    """By sources alone; a search over a GPU needs one."""
    for module, good, bad in (
        ("imports", "2.12.0", "2.20.2"), ("attention", "2.0.0", "2.20.2"), ("permute", "2.0.0", "2.12.0"),
        ("native_block", "2.12.0", "2.20.2"), ("layer_spec", "1.11.0", "2.20.2"), ("none", "2.12.0", "2.20.2"),
        ("attention", "2.20.2", "2.12.0"),
    ):  # fmt: skip
        more = ("--tier", "static", "--answers", "{work}/answers", "--format", "json")
        words = ("te-bisect", good, bad, "--module", module, *more)
        yield Scenario(f"{module} {good} {bad}", words, read_bisect, lacks=(NO_SOURCES,))
