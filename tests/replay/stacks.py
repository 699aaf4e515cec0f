"""Stacks beside each other: `compare-receipts` on every ordered pair, `fits`, `fp8-policy`, blame by error text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import permutations, product
from pathlib import Path
from typing import Final

from .harness import DATA, FOLDERS, ROOT, Decisions, Ended, Scenario, listed, terms
from .receipts import PROBES, good, put, raised

EVIDENCE: Final = "docs/evidence"
_RELEASES: Final = (
    "2.0.0 2.2.0 2.4.0 2.5.0 2.6.0 2.7.0 2.8.0 2.9.0 2.10.0 2.11.0 2.12.0 2.13.0 2.14.0 2.14.1 2.15.0 2.16.0 2.16.1 "
    "2.17.0 2.17.1 2.18.0 2.19.0 2.20.0 2.20.2"
)
STACKS: Final = {
    "nothing-known": (),
    "h200-host": ("cublas=13.1.0.3", "cudnn=9.14.0", "torch=2.11.0", "cuda=13.0", "python=3.12"),
    "cublas-13.2": ("cublas=13.2.0.9", "cudnn=9.22.0", "torch=2.11.0", "cuda=13.0", "python=3.12"),
    "newest": ("cublas=13.6.0.2", "cudnn=9.24.0", "torch=2.13.0", "cuda=13.2", "python=3.13", "nccl=2.30.4"),
    "cuda-12": ("cublas=12.9.1.4", "cudnn=9.11.0", "torch=2.8.0", "cuda=12.9", "python=3.11"),
    "old": ("cublas=12.1.0.0", "cudnn=9.1.0", "torch=2.4.0", "cuda=12.0", "python=3.9", "flash-attn=2.5.8"),
    "flash-attn-4": ("cublas=13.2.0.9", "cudnn=9.19.0", "torch=2.11.0", "cuda=13.0", "flash-attn-4=4.0.0b19"),
}


def read_compare(ended: Ended) -> Decisions:
    """Each step: what became of each module, who is blamed, and which checks are lost."""
    data, found = ended.data, {}
    for stack in data["stacks"]:
        if stack["problem"]:
            found[f"problem {stack['stack']}"] = terms(stack["problem"])
    for stack, held in data["grid"]["stacks"].items():
        found[f"outcomes {stack}"] = [f"{module} {outcome}" for module, outcome in sorted(held.items())]
    for number, step in enumerate(data["steps"]):
        at = f"{number} {step['before']} {step['after']}"
        found[f"modules {at}"] = [
            " ".join(filter(None, (row["module"], row["change"], row["under"] and f"under {row['under']}")))
            for row in step["modules"]
            if row["change"] != "unchanged"
        ]
        found[f"culprits {at}"] = [row["module"] for row in step["culprits"]]
        for row in step["culprits"]:
            key = f"{at} {row['module']}"
            found[f"cause {key}"] = f"{row['cause']} {row['component']}".strip()
            found[f"cascades {key}"] = row["cascades"]
            found[f"entries {key}"] = listed(row["entry_points"])
            found[f"next {key}"] = terms(row["next_step"])
        found[f"lost {at}"] = {module: len(checks) for module, checks in step["lost"].items()}
        found[f"slower {at}"] = listed(f"{row['module']} {row['name']}" for row in step["timings"] if row["slower"])
    return found


def compares() -> Iterator[Scenario]:
    """Every ordered pair of committed folders, and steps over all of them."""
    for before, after in permutations(FOLDERS, 2):
        words = ("compare-receipts", f"{EVIDENCE}/{before}", f"{EVIDENCE}/{after}", "--format", "json")
        yield Scenario(f"{before} to {after}", words, read_compare)
    chain = tuple(f"{EVIDENCE}/h200/{name}" for name in ("te2.12.0", "te2.14.1", "te2.17.1", "te2.20.2"))
    yield Scenario("all", ("compare-receipts", *chain, "--format", "json"), read_compare)
    yield Scenario("all-back", ("compare-receipts", *chain[::-1], "--format", "json"), read_compare)
    yield Scenario("same", ("compare-receipts", chain[0], chain[0], "--format", "json"), read_compare)
    yield Scenario("no-folder", ("compare-receipts", chain[0], "docs/no-such", "--format", "json"), read_compare)


def read_blame(ended: Ended) -> Decisions:
    """The same of one step, without what went in."""
    found = {key.replace("0 te2.17.1 te2.20.2", "").strip(): value for key, value in read_compare(ended).items()}
    return {key: value for key, value in found.items() if not key.startswith("outcomes") and value not in ([], {})}


def blames() -> Iterator[Scenario]:
    """One module raises after a release in which it held: cause, component, next step."""

    def prepare(work: Path, text: str, probe: str) -> None:
        put(work / "before", *(good(one, stack="te2.17.1") for one in PROBES))
        put(work / "after", *(raised(one, text) if one == probe else good(one) for one in PROBES))

    words = ("compare-receipts", "{work}/before/run", "{work}/after/run", "--format", "json")
    for number, text in enumerate(json.loads((DATA / "raised.json").read_text(encoding="utf-8"))):
        for probe in ("attention", "imports") if number % 4 == 0 else ("attention",):
            label = f"{probe} {text[:70]} #{number}"
            yield Scenario(label, words, read_blame, lambda work, t=text, p=probe: prepare(work, t, p))


def read_fits(ended: Ended) -> Decisions:
    """Each need: verdict, component, what breaks, the identity of the next step."""
    found = {}
    for stack in ended.data["stacks"]:
        name = stack["name"].replace("the given stack", "asked")  # its name when this was recorded
        for row in stack["fits"]:
            at = f"{name} {row['need']}"
            found[at] = " ".join(filter(None, (row["verdict"], row["component"], f"wants {row['wanted']}")))
            if row["verdict"] not in ("fits", "unknown"):
                found[f"{at} breaks"] = row["breaks"]
                found[f"{at} next"] = terms(row["next_step"])
    return found


def fits() -> Iterator[Scenario]:
    """Every release of the table beside several stacks, and the stacks of the images."""
    for release, (name, parts) in product(_RELEASES.split(), STACKS.items()):
        yield Scenario(f"{release} {name}", ("fits", release, *parts, "--verbose", "--format", "json"), read_fits)
    for target in ("h200", "b200", "gb10", "cpu"):
        yield Scenario(f"images {target}", ("fits", "--target", target, "--verbose", "--format", "json"), read_fits)
        words = ("fits", "2.20.2", *STACKS["h200-host"], "--target", target, "--verbose", "--format", "json")
        yield Scenario(f"2.20.2 h200-host for {target}", words, read_fits)
    for name, words in {
        "images": "", "no-such-release": "9.9", "no-such-part": "2.20.2 bla=1", "no-version": "2.20.2 torch",
        "no-such-target": "2.20.2 --target none",
    }.items():  # fmt: skip
        yield Scenario(name, ("fits", *words.split(), "--verbose", "--format", "json"), read_fits)


def read_policy(ended: Ended) -> Decisions:
    """Each preset: allowed or refused, by which rules."""
    found = {"rules": ended.data["rules"]}
    for row in ended.data["presets"]:
        name = row["preset"]["id"]
        found[name] = row["outcome"]
        found[f"{name} refused by"] = listed(one["rule"]["id"] for one in row["refusals"])
        found[f"{name} not refused by"] = listed(row["not_refused_by"])
        found[f"{name} targets"] = listed(row["preset"]["targets"])
    return found


def policies() -> Iterator[Scenario]:
    """All presets, each, and what has no answer."""
    yield Scenario("all", ("fp8-policy", "--format", "json"), read_policy)
    yield Scenario("unknown", ("fp8-policy", "--preset", "none", "--format", "json"), read_policy)
    presets = (ROOT / "matrix/fp8_presets.toml").read_text().splitlines()
    names = [line.split('"')[1] for line in presets if line.startswith("id = ")]
    for name in names:
        words = ("fp8-policy", "--preset", name, "--format", "json")
        yield Scenario(f"preset {name}", words, read_policy)
