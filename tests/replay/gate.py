"""`release-gate`: committed folders, orders, baselines, waivers, signatures; planted faults are in `gate_plants`."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Final

from .gate_plants import PLANTS, golden
from .harness import ROOT, Decisions, Ended, NotRun, Scenario, listed, terms
from .receipts import (
    AT_WORDS,
    CODE,
    COMMIT,
    FAILED,
    IMAGE,
    LOCK,
    OTHER_COMMIT,
    PROBES,
    STACK,
    TARGET,
    check,
    fill,
    good,
    jit,
    machine,
    part,
    place,
    put,
    raised,
    red,
    sealed,
    timing,
)

DAY: Final = "2026-11-22"
Prepare = Callable[[Path], object]
FOREIGN: Final = ("stack", "target", "not-required")
FOLDERS: Final = (
    "h200/te2.12.0", "h200/te2.12.0/again", "h200/te2.14.1", "h200/te2.17.1", "h200/te2.20.2", "h200/native",
    "h200-fa4", "fp8/te2.12.0", "fp8/te2.20.2", "fp8/two-gpus", "smoke/small", "smoke/scaled", "smoke/canary/te2.17.1",
    "smoke/canary/te2.20.2", "smoke/autotuned", "smoke/ablation", "jit/h200", "restart",
)  # fmt: skip


def read_gate(ended: Ended) -> Decisions:
    """Who is accepted, which rule closes each other cell, who is blamed, which waivers hold."""
    data = ended.data
    found: Decisions = {
        "open": data["open"],
        "of": f"{data['release']} {data['stack']} {data['target']}",
        "missing": listed(data["missing"]),
        "unreadable": sum(not {"unreadable", "name"}.isdisjoint(row["rules"]) for row in data["cells"]),
        "foreign": sum(not row["required"] and row["rules"][0] in FOREIGN for row in data["cells"]),
        "signed": bool(data["signed_by"]),
        "baseline": data["baseline"],
        "culprits": [row["module"] for row in data["culprits"]],
        "accepted": listed(
            row["probe"] for row in data["cells"] if row["required"] and row["accepted"] and not row["rules"]
        ),
        "waivers": listed(json.dumps(_waiver(row), sort_keys=True) for row in data["waivers"]),
    }
    for row in data["cells"]:
        key = f"{row['run']}/{row['cell']}"
        if row["warnings"] and row["required"]:
            found[f"warnings {key}"] = len(row["warnings"])
        if row["required"] and row["accepted"] and not row["rules"]:
            continue
        flags = ("required", "accepted", "closes")
        words = [str(row["outcome"]), *(name for name in flags if row[name]), *(["waived"] if row["waived_by"] else [])]
        found[f"cell {key}"] = f"{' '.join(words)}: {' '.join(row['rules'])}"
    for row in data["culprits"]:
        key = row["module"]
        found[f"cause {key}"] = f"{row['cause']} {row['component']}".strip()
        found[f"cascades {key}"] = row["cascades"]
        found[f"next {key}"] = terms(row["next_step"])
    return found


def _waiver(row: dict[str, Any]) -> dict[str, Any]:
    kept = {key: row[key] for key in ("cell", "rule", "state", "in_vain") if key in row}
    return kept or {"waiver": sorted(row)}


def _scenario(
    name: str,
    *more: str,
    prepare: Callable[[Path], object] | None = None,
    store: str = "{work}/store",
    at: str = AT_WORDS,
) -> Scenario:
    """One call of the gate on a store that `prepare` makes."""
    codes = accept_codes(ROOT / store) if store.startswith("docs/") else ("--accept-code", CODE)
    return Scenario(name, ("release-gate", store, *more, *codes, "--at", at, "--format", "json"), read_gate, prepare)


@cache
def accept_codes(store: Path) -> tuple[str, ...]:
    """The option for every code that produced receipts of a folder."""
    codes = {json.loads(file.read_text()).get("code", "") or "unknown" for file in store.rglob("*-h200-*.json")}
    return tuple(word for code in sorted(codes) for word in ("--accept-code", code))


def _committed_scenario(name: str, folder: str, *more: str, at: str = DAY) -> Scenario:
    return _scenario(name, *more, store=f"docs/evidence/{folder}", at=at)


def gates() -> Iterator[Scenario]:
    """Every scenario of the gate."""
    for make in (_committed, _planted, _asked, _golden, _compared, _waived, _signed):
        yield from make()


def _committed() -> Iterator[Scenario]:
    """Every committed folder, under every kind of release."""
    releases = ("te-upgrade", "nightly", "release")
    for folder, release in product(FOLDERS, releases):
        files = sorted((ROOT / "docs/evidence" / folder).glob("*-h200-*.json"))
        stack = next((file.name.partition("-")[0] for file in files), "te2.20.2")
        more = ("--release", release, "--stack", stack, "--target", "h200")
        yield _committed_scenario(f"{folder} {release}", folder, *more)
    for stack in ("te2.12.0", "te2.14.1", "te2.17.1", "te2.20.2", "native"):
        yield _committed_scenario(f"h200 {stack}", "h200", "--stack", stack)
        yield _committed_scenario(f"evidence {stack}", "", "--stack", stack, "--target", "h200")
    new = "h200/te2.20.2"
    for target, release in product(("b200", "gb10", "cpu"), releases):
        yield _committed_scenario(f"{new} {target} {release}", new, "--target", target, "--release", release)
    for at in ("2026-11-21T12:00", "2026-11-21", "2026-12-20", "2026-12-22", "2027-01-01"):
        yield _committed_scenario(f"{new} at {at}", new, at=at)
    stacks = ("te2.12.0", "te2.17.1", "te2.20.2")
    for after, before in product((*stacks, "native"), stacks):
        more = ("--baseline", f"docs/evidence/h200/{before}")
        yield _committed_scenario(f"h200/{after} beside {before}", f"h200/{after}", *more)
    for after, before in (("te2.20.2", "te2.12.0"), ("te2.12.0", "te2.20.2")):
        more = ("--release", "nightly", "--target", "h200", "--baseline", f"docs/evidence/fp8/{before}")
        yield _committed_scenario(f"fp8/{after} beside {before}", f"fp8/{after}", *more)


def _planted() -> Iterator[Scenario]:
    """Faults in a store that is good throughout, and in a real receipt."""
    own = ("--stack", STACK)
    for name, plant in PLANTS.items():
        prepare = lambda work, plant=plant: plant(fill(work / "store"))  # noqa: E731
        yield _scenario(f"planted {name}", *own, "--target", TARGET, prepare=prepare)
    for name, change in EDITS.items():

        def edit(work: Path, change: Callable[[dict[str, Any]], object] = change) -> None:
            shutil.copytree(ROOT / "docs/evidence/h200/te2.20.2", work / "store")
            path = work / "store" / "te2.20.2-h200-permute.json"
            data = json.loads(path.read_text())
            change(data)
            path.write_text(sealed(data))

        codes = accept_codes(ROOT / "docs/evidence/h200/te2.20.2")
        yield _scenario(f"edited {name}", *own, *codes, prepare=edit, at=DAY)


def _first_check(data: dict[str, Any], **changes: Any) -> None:
    one = next(row for row in data["checks"] if row["parts"])
    one["parts"][0].update(changes)


EDITS: Final[dict[str, Callable[[dict[str, Any]], object]]] = {  # of a real receipt, permute of te2.20.2
    "nothing": lambda data: None,
    "outcome fail": lambda data: data.update(outcome="fail", reason="out of bounds"),
    "outcome error": lambda data: data.update(outcome="error", reason="it raised"),
    "outcome not-run": lambda data: data.update(outcome="not-run", reason="no GPU"),
    "outcome nobody knows": lambda data: data.update(outcome="fine"),
    "over its bound": lambda data: _first_check(data, observed=1e9),
    "over its bound and says so": lambda data: _first_check(data, observed=1e9, passed=False),
    "no checks": lambda data: data.update(checks=[]),
    "half of the checks": lambda data: data.update(checks=data["checks"][::2]),
    "no backends": lambda data: data.update(backends=[]),
    "native requested": lambda data: data.update(requested="native"),
    "another day": lambda data: data.update(started="2026-10-01T00:00:00+00:00"),
    "another commit": lambda data: data.update(commit="b" * 40),
    "another environment": lambda data: data.update(environment="f" * 64),
    "another GPU": lambda data: data["machine"].update(gpu="NVIDIA H100 80GB HBM3"),
    "another capability": lambda data: data["machine"].update(capability="10.0"),
    "another driver": lambda data: data["machine"].update(driver="1.0"),
    "no packages": lambda data: data.update(packages=[]),
    "a later schema": lambda data: data.update(schema_id="megacpp-validate/receipt/99"),
    "an unknown key": lambda data: data.update(surplus=1),
    "a key less": lambda data: data.pop("checks"),
    "another cell": lambda data: data.update(cell="te2.20.2-h200-attention"),
    "compiled afterwards": lambda data: data["jit"]["after"].update(triton=3),
    "a retry of a failure": lambda data: data.update(retries=["fail: permute out of bounds"]),
    "a retry of a node": lambda data: data.update(retries=["node-fail: the node was lost (node n3)"]),
    "negative memory": lambda data: data.update(peak_memory_mib=-1.0),
    "a median that is none": lambda data: data["timings"][0].update(median_ms=data["timings"][0]["median_ms"] / 2),
}  # fmt: skip


def _asked() -> Iterator[Scenario]:
    """What the gate is asked for: commits, images, locks, kinds of release, stores that are none."""
    for name, more in {
        "good": (), "commit": ("--commit", COMMIT), "another commit": ("--commit", OTHER_COMMIT),
        "short commit": ("--commit", "abcdef"), "image": ("--image", IMAGE), "lock": ("--lock", LOCK),
        "release": ("--release", "release"), "nightly": ("--release", "nightly"), "weekly": ("--release", "weekly"),
        "another stack": ("--stack", "te2.17.1"), "no such target": ("--target", "none"),
        "no such baseline": ("--baseline", "{work}/none"), "own baseline": ("--baseline", "{work}/store"),
    }.items():  # fmt: skip
        yield _scenario(f"asked {name}", *more, prepare=lambda work: fill(work / "store"))
    yield _scenario("asked no store", store="{work}/none", at=DAY)
    yield _scenario("asked an empty store", store="{work}", at=DAY)
    yield _committed_scenario("asked several stacks", "h200")
    yield _committed_scenario("asked a time that is none", "h200/te2.20.2", at="yesterday")


def _golden() -> Iterator[Scenario]:
    """Receipts of a golden image of the targets that no machine has run."""
    for target, capability in (("gb10", "12.1"), ("b200", "10.0")):
        for name, fault, more in (
            ("good", {}, ()),
            ("another image", {"image_digest": f"sha256:{'2' * 64}"}, ()),
            ("no lock", {"lock_hash": ""}, ()),
            ("dirty", {"commit": f"{COMMIT}-dirty"}, ()),
            ("old schema", {"schema_id": "megacpp-validate/receipt/4"}, ()),
            ("asked for image", {}, ("--image", IMAGE, "--lock", LOCK)),
            ("asked for another image", {}, ("--image", f"r.io/te@sha256:{'3' * 64}")),
        ):
            of = {"target": target, "machine": machine(gpu=target.upper(), capability=capability)}
            receipts = [*(golden(probe, **of) for probe in PROBES), golden("attention", **(of | fault))]
            yield _scenario(
                f"golden {target} {name}", "--release", "release", "--target", target, "--stack", STACK, *more,
                prepare=lambda work, receipts=receipts: put(work / "store", *receipts),
            )  # fmt: skip


def _compared() -> Iterator[Scenario]:
    """Speed, memory and checks beside a baseline, which the rules require or do not."""
    slow = timing(median=1.11)
    two = [check("bf16.forward", part()), check("bf16.backward", part())]
    strict = ('baseline = "any"', 'baseline = "required"'), ('others = "list"', 'others = "close"')
    for (name, before, after), edits in product((
        ("alike", {}, {}),
        ("slower", {}, {"timings": [slow]}),
        ("slower and larger", {}, {"timings": [slow], "peak_memory_mib": 229.0}),
        ("just not slower", {}, {"timings": [timing(median=1.1)], "peak_memory_mib": 228.0}),
        ("host time alone", {}, {"timings": [timing(), timing("host", 9.0, "perf_counter")]}),
        ("memory 94 to 139", {"peak_memory_mib": 94.1}, {"peak_memory_mib": 139.2}),
        ("memory 100 to 228.1", {"peak_memory_mib": 100.0}, {"peak_memory_mib": 228.1}),
        ("memory 2000 to 2200", {"peak_memory_mib": 2000.0}, {"peak_memory_mib": 2200.0}),
        ("memory 2000 to 2201", {"peak_memory_mib": 2000.0}, {"peak_memory_mib": 2201.0}),
        ("no timings", {}, {"timings": []}),
        ("no memory", {}, {"peak_memory_mib": 0.0}),
        ("baseline without timings", {"timings": []}, {}),
        ("baseline without anything", {"timings": [], "peak_memory_mib": 0.0}, {}),
        ("another card", {}, {"machine": machine(gpu="NVIDIA H100")}),
        ("a check is lost", {"checks": two}, {"checks": two[:1]}),
        ("a check is lost, of another commit", {"checks": two, "commit": OTHER_COMMIT}, {"checks": two[:1]}),
        ("a wider bound", {}, {"checks": [check("bf16.forward", part(bound=0.1))]}),
    ), ((), strict)):  # fmt: skip

        def prepare(work: Path, before: Any = before, after: Any = after, edits: Any = edits) -> None:
            fill(work / "before", stack="te2.12.0", hours=48.0, **before)
            put(fill(work / "store"), good("attention", **after))
            copy_matrix(work, *edits)

        more = ("--baseline", "{work}/before", "--matrix", "{work}/matrix")
        yield _scenario(f"baseline {name}{' strictly' if edits else ''}", *more, prepare=prepare)


def copy_matrix(work: Path, *edits: tuple[str, str]) -> Path:
    """A copy of the matrix, with edits of the rules."""
    shutil.copytree(ROOT / "matrix", work / "matrix")
    path = work / "matrix" / "gate.toml"
    text = path.read_text()
    for old, new in edits:
        if old not in text:
            raise NotRun(f"matrix/gate.toml has no {old}")
        text = text.replace(old, new)
    path.write_text(text)
    return work / "matrix"


NANS: Final = (
    "NaNs in gradient", "Infs were found", "infinite loss", "grad_nan", "has_nan=True", "hasNaN", "got -inf", "1.#QNAN",
    "non-finite", "nonfinite values", "not a number", "assert torch.isfinite(loss)", "loss is nan at step 3", "info",
    "infer the shape", "nano", "tenant", "inference", "InfiniBand", "finite difference", "finance",
)  # fmt: skip


def _waived() -> Iterator[Scenario]:
    """A waiver of one cell and one rule, over what it may hold off and what it may not."""
    cell, later = f"{STACK}-{TARGET}-attention", "2026-12-31"
    nan = check("bf16.forward", part("finite", 3.0, 0.0))
    imports = {**FAILED, "detail": "ImportError: cannot import name 'f'"}
    blocked = red("attention", outcome="blocked", blocked_by=f"{STACK}-{TARGET}-imports", checks=[])
    late = good("attention", jit=jit(after={"triton": 1}))
    cases: list[tuple[str, list[dict[str, Any]], str, str]] = [
        ("holds", [red("attention")], "outcome", "2026-11-22"),
        ("expired", [red("attention")], "outcome", "2026-11-21"),
        ("of another rule", [red("attention")], "slower", later),
        ("not needed", [], "outcome", later),
        ("a second breakage", [red("attention", jit=late["jit"])], "outcome", later),
        ("NaN", [red("attention", checks=[nan])], "outcome", later),
        ("import error", [red("attention", outcome="import-error", checks=[])], "outcome", later),
        ("import in the probe", [raised("attention", "ModuleNotFoundError: no module 'x'")], "outcome", later),
        ("symbol in the probe", [raised("attention", "OSError: te.so: undefined symbol: f")], "outcome", later),
        ("import in a check", [red("attention", checks=[imports])], "outcome", later),
        ("blocked by an import", [raised("imports", "OSError: x"), blocked], "outcome", later),
        ("blocked by nobody", [blocked | {"blocked_by": f"{STACK}-{TARGET}-nothing"}], "outcome", later),
        ("of another commit", [red("attention", commit=OTHER_COMMIT)], "outcome", later),
        ("not run", [good("attention", outcome="not-run", checks=[])], "outcome", later),
        ("jit", [late], "jit", later),
        ("a rule that cannot be waived", [red("attention")], "missing", later),
        ("no such rule", [red("attention")], "never", later),
        *((f"words {word}", [raised("attention", f"RuntimeError: {word}")], "outcome", later) for word in NANS),
    ]
    own = ("--stack", STACK, "--matrix", "{work}/matrix")
    for name, receipts, rule, expires in cases:
        prepare = lambda work, of=(receipts, rule, expires): _waive(work, cell, of[1], of[2], of[0])  # noqa: E731
        yield _scenario(f"waiver {name}", *own, prepare=prepare)
    for name, older in (
        ("a contradiction", red("attention", hours=3.0)),
        ("an old NaN", red("attention", hours=3.0, checks=[nan])),
    ):
        prepare = lambda work, older=older: _waive(work, cell, "contradicted", later, [older], "older")  # noqa: E731
        yield _scenario(f"waiver {name}", *own[2:], prepare=prepare)
    yield Scenario(
        "waiver h200/te2.17.1",
        (
            "release-gate",
            "docs/evidence/h200/te2.17.1",
            *own[2:],
            *accept_codes(ROOT / "docs/evidence/h200/te2.17.1"),
            "--at",
            DAY,
            "--format",
            "json",
        ),
        read_gate,
        lambda work: _waive(work, "te2.17.1-h200-attention", "outcome", later, []),
    )


def _waive(
    work: Path, cell: str, rule: str, expires: str, receipts: Iterable[dict[str, Any]], run: str = "run"
) -> None:
    """A good store with these receipts on top, and one waiver."""
    put(fill(work / "store"), *receipts, run=run)
    write_waiver(copy_matrix(work), rule, expires, cell)


def write_waiver(matrix: Path, rule: str, expires: str, cell: str) -> None:
    """One row of waivers in a copy of the matrix."""
    (matrix / "gate_waivers.toml").write_text(
        f'[[waiver]]\nrelease = "te-upgrade"\ncell = "{cell}"\nrule = "{rule}"\nowner = "somebody"\n'
        f'reason = "known"\nlink = "https://example.org/1"\nexpires = {expires}\n'
    )


def sign(work: Path) -> None:
    """A signed store, by a key that is made for it."""
    if shutil.which("ssh-keygen") is None:
        raise NotRun("there is no ssh-keygen")
    from .harness import call

    fill(work / "store")
    for name in ("key", "other"):
        words = ("ssh-keygen", "-q", "-t", "ed25519", "-f", str(work / name), "-N", "")
        subprocess.run(words, check=True, stdin=subprocess.DEVNULL, capture_output=True)
    public = {name: (work / f"{name}.pub").read_text().strip() for name in ("key", "other")}
    grant = 'ci@team namespaces="receipts@megacpp-validate"'
    (work / "signers").write_text(f"{grant} {public['key']}\n")
    (work / "others").write_text(f"{grant} {public['other']}\n")
    (work / "expired").write_text(
        f'ci@team namespaces="receipts@megacpp-validate",valid-before="20260101" {public["key"]}\n'
    )
    (work / "another-use").write_text(f'ci@team namespaces="git" {public["key"]}\n')
    ended = call(("receipts-sign", str(work / "store"), "--key", str(work / "key")), work)
    if ended.code:
        raise NotRun(f"receipts-sign ended with {ended.code}")


def _signed() -> Iterator[Scenario]:
    """A signed store, and what was done to it since; `release` wants a signature."""
    cell = lambda work: place(work / "store", "attention")  # noqa: E731
    edit = lambda work: cell(work).write_text(cell(work).read_text().replace("0.001", "0.002", 1))  # noqa: E731
    after: dict[str, tuple[Callable[[Path], object], str]] = {
        "whole": (lambda work: None, "signers"), "edited": (edit, "signers"),
        "lost": (lambda work: cell(work).unlink(), "signers"),
        "added": (lambda work: put(work / "store", good("fp8_delayed"), run="late"), "signers"),
        "a red one added": (lambda work: put(work / "store", red("attention", hours=0.5), run="late"), "signers"),
        "no signature": (lambda work: [one.unlink() for one in (work / "store").rglob("*.sig")], "signers"),
        "another key": (lambda work: None, "others"), "expired": (lambda work: None, "expired"),
        "another use": (lambda work: None, "another-use"), "no such signers": (lambda work: None, "none"),
    }  # fmt: skip
    for name, (change, signers) in after.items():
        prepare = lambda work, change=change: (sign(work), change(work))  # noqa: E731
        yield _scenario(f"signed {name}", "--stack", STACK, "--signers", f"{{work}}/{signers}", prepare=prepare)
    more = ("--stack", STACK, "--signers", "{work}/signers", "--release", "release")
    yield _scenario("signed under release", *more, prepare=sign)
