"""`release-gate`: committed folders, stores with receipts of `data/gate.json`, damaged files, signatures."""

from __future__ import annotations

import json
import lzma
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, Final

from .harness import DATA, FOLDERS, ROOT, Decisions, Ended, NotRun, Scenario, call, listed, terms
from .receipts import AT_WORDS, CODE, PROBES, STACK, TARGET, Receipt, fill, good, place, put, red, sealed

DAY: Final = "2026-11-29"
EVIDENCE: Final = ROOT / "docs/evidence"
OWN: Final = ("--stack", STACK, "--target", TARGET)
FOREIGN: Final = ("stack", "target", "not-required")
Prepare = Callable[[Path], object]


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
        "waivers": listed(
            json.dumps({key: row[key] for key in ("cell", "rule", "state", "in_vain")}, sort_keys=True)
            for row in data["waivers"]
        ),
    }
    for row in data["cells"]:
        key = f"{row['run']}/{row['cell']}"
        if row["warnings"] and row["required"]:
            found[f"warnings {key}"] = len(row["warnings"])
        if not (row["required"] and row["accepted"] and not row["rules"]):
            flags = [name for name in ("required", "accepted", "closes") if row[name]]
            words = [str(row["outcome"]), *flags, *(["waived"] if row["waived_by"] else [])]
            found[f"cell {key}"] = f"{' '.join(words)}: {' '.join(row['rules'])}"
    for row in data["culprits"]:
        key = row["module"]
        found[f"cause {key}"] = f"{row['cause']} {row['component']}".strip()
        found[f"cascades {key}"] = row["cascades"]
        found[f"next {key}"] = terms(row["next_step"])
    return found


def gates() -> Iterator[Scenario]:
    """Every scenario of the gate."""
    yield from _committed()
    for name, row in json.loads((DATA / "gate.json").read_text(encoding="utf-8")).items():
        store, at = row.get("store", "{work}/store"), row.get("at", AT_WORDS)
        yield _scenario(name, *row.get("more", ()), prepare=partial(_lay_out, row), store=store, at=at)
    for name, plant in DAMAGE.items():
        yield _scenario(f"planted {name}", *OWN, prepare=lambda work, plant=plant: plant(fill(work / "store")))
    yield from _signed()


def _scenario(
    name: str, *more: str, prepare: Prepare | None = None, store: str = "{work}/store", at: str = AT_WORDS
) -> Scenario:
    """One call of the gate on a store that `prepare` makes, or on a committed one."""
    codes = accept_codes(ROOT / store) if store.startswith("docs/") else ("--accept-code", CODE)
    signature = () if {"--signers", "release"} & {*more} else ("--unsigned",)
    return Scenario(
        name, ("release-gate", store, *more, *codes, *signature, "--at", at, "--format", "json"), read_gate, prepare
    )


@cache
def accept_codes(store: Path) -> tuple[str, ...]:
    """The option for every code that produced receipts of a folder."""
    files = store.rglob("*-h200-*.json.xz")
    codes = {json.loads(lzma.decompress(file.read_bytes())).get("code", "") or "unknown" for file in files}
    return tuple(word for code in sorted(codes) for word in ("--accept-code", code))


def _committed() -> Iterator[Scenario]:
    """Every committed folder, under every kind of release; days, baselines and targets."""

    def of(name: str, folder: str, *more: str) -> Scenario:
        return _scenario(name, *more, store=f"docs/evidence/{folder}", at=DAY)

    for folder, release in product((*FOLDERS, "restart"), ("te-upgrade", "nightly", "release")):
        files = sorted((EVIDENCE / folder).glob("*-h200-*.json.xz"))
        stack = next((file.name.partition("-")[0] for file in files), "te2.20.2")
        yield of(f"{folder} {release}", folder, "--release", release, "--stack", stack, "--target", "h200")
    yield of("shipped", "shipped")
    yield of("shipped nightly", "shipped", "--release", "nightly")
    signed = ("--signers", "docs/evidence/signers", "--release", "release", "--baseline")
    yield of("shipped release", "shipped", *signed, "docs/evidence/baseline")
    yield of("shipped release beside an unsigned baseline", "shipped", *signed, "docs/evidence/h200/te2.19.0")
    more = ("--release", "release", "--baseline", "docs/evidence/baseline")
    yield _scenario("shipped with another extension", *OWN, *more, "--unsigned", prepare=_other_extension, at=DAY)
    stacks = ("te2.12.0", "te2.17.1", "te2.20.2")
    for stack in (*stacks, "te2.14.1", "native"):
        yield of(f"h200 {stack}", "h200", "--stack", stack)
        yield of(f"evidence {stack}", "", "--stack", stack, "--target", "h200")
    for after, before in product((*stacks, "native"), stacks):
        yield of(f"h200/{after} beside {before}", f"h200/{after}", "--baseline", f"docs/evidence/h200/{before}")
    for after, before in (("te2.20.2", "te2.12.0"), ("te2.12.0", "te2.20.2")):
        more = ("--release", "nightly", "--target", "h200", "--baseline", f"docs/evidence/fp8/{before}")
        yield of(f"fp8/{after} beside {before}", f"fp8/{after}", *more)


def _other_extension(work: Path) -> None:
    """What was shipped, with a torch extension of Transformer Engine that the lock of the image does not have."""
    (work / "store").mkdir()
    for file in (EVIDENCE / "shipped").glob("te*.json.xz"):
        receipt = json.loads(lzma.decompress(file.read_bytes()))
        for row in receipt["packages"]:
            row["version"] = "2.12.0" if row["name"] == "transformer_engine_torch" else row["version"]
        (work / "store" / file.stem).write_text(sealed(receipt), encoding="utf-8")


def _lay_out(row: dict[str, Any], work: Path) -> None:
    """A store that is good throughout, with what a row puts into runs: [folder, probe or "*", changes or null]."""
    if not row.get("empty"):
        fill(work / "store")
    for folder, probe, changes in row.get("put", ()):
        for each in PROBES if probe == "*" else (probe,):
            if changes is None:
                (work / folder / f"{STACK}-{TARGET}-{each}.json").unlink()
            else:
                put(work / Path(folder).parent, _change(good(each), changes), run=Path(folder).name)
    if "matrix" in row:
        copy_matrix(work, *((text.replace("required", "any").replace("close", "list"), text) for text in row["edits"]))
    if "waiver" in row:
        write_waiver(work / "matrix", *row["waiver"])


def _change(receipt: Receipt, changes: dict[str, Any]) -> Receipt:
    """A receipt with other values; of an object only the keys that are named change."""
    for key, value in changes.items():
        held = receipt.get(key)
        new = value.replace("{probe}", receipt["probe"]) if key == "cell" else value
        receipt[key] = {**held, **new} if isinstance(held, dict) and isinstance(new, dict) else new
    return receipt


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


def write_waiver(matrix: Path, rule: str, expires: str, cell: str) -> None:
    """One row of waivers in a copy of the matrix."""
    (matrix / "gate_waivers.toml").write_text(
        f'[[waiver]]\nrelease = "te-upgrade"\ncell = "{cell}"\nrule = "{rule}"\nowner = "somebody"\n'
        f'reason = "known"\nlink = "https://example.org/1"\nexpires = {expires}\n'
    )


def _replace(old: str, new: str) -> Prepare:
    """The file of attention, one text in it replaced after it was sealed."""

    def deed(store: Path) -> None:
        path = place(store, "attention")
        path.write_text(path.read_text().replace(old, new, 1))

    return deed


def _write(text: str) -> Prepare:
    return lambda store: place(store, "attention").write_text(text)


def _link(store: Path) -> None:
    path = place(store, "attention")
    path.rename(store.parent / path.name)
    path.symlink_to(store.parent / path.name)


def _link_out(store: Path) -> None:
    put(store.parent / "elsewhere", red("attention", hours=0.5))
    (store / "nightly").symlink_to(store.parent / "elsewhere")


def _another_cell(store: Path) -> None:
    text = place(store, "attention").read_text().replace("h200-attention", "h200-permute")
    place(store, "permute").write_text(text.replace('"probe": "attention"', '"probe": "permute"'))


def _truncate_beside(store: Path) -> None:
    put(store, good("attention"), run="other")
    path = place(store, "attention", "other")
    path.write_text(path.read_text()[:-40])


DAMAGE: Final[dict[str, Prepare]] = {
    "truncated": lambda store: place(store, "attention").write_text(place(store, "attention").read_text()[:900]),
    "truncated beside": _truncate_beside,
    "empty file": _write(""),
    "unpacks to 65 MiB": lambda store: (
        place(store, "attention").with_suffix(".json.xz").write_bytes(lzma.compress(bytes(65 << 20), preset=0))
    ),
    "no JSON": _write("{"),
    "a list": _write("[]"),
    "nested too deep": _write("[" * 100_000),
    "NaN": _replace("0.001", "NaN"),
    "infinity": _replace("0.001", "Infinity"),
    "a number edited": _replace("0.001", "0.5"),
    "a key twice": _replace('"stack"', '"outcome": "pass",\n  "stack"'),
    "a link": _link,
    "a folder that leads out": _link_out,
    "another name": lambda store: shutil.copy(place(store, "attention"), place(store, "permute")),
    "a red one as (1)": lambda store: (store / "run" / f"{STACK}-{TARGET}-attention (1).json").write_text(
        sealed(red("attention", hours=0.5))
    ),
    "another cell": _another_cell,
    "only timed": lambda store: put(store, good("attention", seconds={"speed": 1.0, "total": 9.0})),
    "a foreign file": lambda store: (store / "notes.json").write_text('{"schema_id": "megacpp-validate/upgrade/1"}'),
}


def sign(work: Path) -> None:
    """A signed store, by a key that is made for it."""
    if shutil.which("ssh-keygen") is None:
        raise NotRun("there is no ssh-keygen")
    fill(work / "store")
    for name in ("key", "other"):
        words = ("ssh-keygen", "-q", "-t", "ed25519", "-f", str(work / name), "-N", "")
        subprocess.run(words, check=True, stdin=subprocess.DEVNULL, capture_output=True)
    key, other = ((work / f"{name}.pub").read_text() for name in ("key", "other"))
    grant = 'ci@team namespaces="receipts@megacpp-validate"'
    for name, row in {
        "signers": f"{grant} {key}", "others": f"{grant} {other}", "another-use": f'ci@team namespaces="git" {key}',
        "expired": f'{grant},valid-before="20260101" {key}',
    }.items():  # fmt: skip
        (work / name).write_text(row)
    if code := call(("receipts-sign", str(work / "store"), "--key", str(work / "key")), work).code:
        raise NotRun(f"receipts-sign ended with {code}")


def _signed() -> Iterator[Scenario]:
    """A signed store, and what was done to it since; `release` wants a signature."""
    after: dict[str, tuple[Prepare, str]] = {
        "whole": (lambda store: None, "signers"),
        "edited": (_replace("0.001", "0.002"), "signers"),
        "lost": (lambda store: place(store, "attention").unlink(), "signers"),
        "added": (lambda store: put(store, good("fp8_delayed"), run="late"), "signers"),
        "a red one added": (lambda store: put(store, red("attention", hours=0.5), run="late"), "signers"),
        "no signature": (lambda store: [one.unlink() for one in store.rglob("*.sig")], "signers"),
        "another key": (lambda store: None, "others"),
        "expired": (lambda store: None, "expired"),
        "another use": (lambda store: None, "another-use"),
        "no such signers": (lambda store: None, "none"),
    }
    for name, (change, signers) in after.items():
        prepare = lambda work, change=change: (sign(work), change(work / "store"))  # noqa: E731
        yield _scenario(f"signed {name}", *OWN[:2], "--signers", f"{{work}}/{signers}", prepare=prepare)
    more = (*OWN[:2], "--signers", "{work}/signers", "--release", "release")
    yield _scenario("signed under release", *more, prepare=sign)
