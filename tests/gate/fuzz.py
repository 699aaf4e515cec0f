"""Mutates receipts that open the release gate, thousands of times, and counts what still opens it.

    ./nox -s gate_fuzz -- [--each 20] [--seed 0] [--output docs/evidence/gate_fuzz.json]

The base is a receipt of this checkout's code for each module, with every check and backend that matrix/checks.json
requires. A class is one way to damage, edit or
swap receipts. An edit is tried twice: as somebody who edits the file leaves it, and sealed again, as a program that
writes receipts would leave it. An edited file must never open the gate. A file that is sealed again is closed by the
content's own rule where there is one; the table names the classes that only a signature can tell (`only-signed`).
Exit code 1 where a mutation opened the gate that must not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import lzma
import math
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from megacpp_validate.catalog.bridge import Catalog, read_catalog
from megacpp_validate.catalog.policies import read_gate_policy
from megacpp_validate.evidence.receipt import hash_code
from tests.replay.harness import ROOT, call
from tests.replay.receipts import AT_WORDS, PROBES, STACK, TARGET, Receipt, backend, check, good, part, sealed

WORDS: Final = "requested te, claimed te, seen te"  # of a check of the backend, as the probes write them


def own(catalog: Catalog, probe: str, **changes: Any) -> Receipt:
    """A receipt of this checkout's code, with every check and backend that the cell leaves."""
    known = read_gate_policy(catalog).choose("te-upgrade", TARGET).evidence[probe]
    checks = [
        check(name, *(part(f"part-{number}") for number in range(parts)), detail="" if parts else WORDS)
        for name, parts in known.checks.items()
    ]
    backends = [backend(path, "te", "te", "te") for path in known.backends]
    return good(probe, **({"checks": checks, "backends": backends, "code": hash_code()} | changes))


def _set(*path: str | int, to: Any) -> Callable[[Receipt, random.Random], None]:
    """Sets what a path of keys leads to; the first key that is a list takes a random row of it."""

    def edit(data: Receipt, rng: random.Random) -> None:
        holder: Any = data
        for key in path[:-1]:
            holder = rng.choice(holder) if key == "*" else holder[key]
        holder[path[-1]] = to(holder[path[-1]]) if callable(to) else to

    return edit


def _part(change: Callable[[dict[str, Any]], object]) -> Callable[[Receipt, random.Random], None]:
    """Changes a random part of a random check that has parts."""

    def edit(data: Receipt, rng: random.Random) -> None:
        measured = [check for check in data["checks"] if any(p["bound"] is not None for p in check["parts"])]
        change(rng.choice([p for p in rng.choice(measured)["parts"] if p["bound"] is not None]))

    return edit


def _drop_checks(data: Receipt, rng: random.Random, *, keep: int | None = None) -> None:
    kept = len(data["checks"]) - 1 if keep is None else keep
    data["checks"] = rng.sample(data["checks"], kept)


def _deny_backend(data: Receipt, rng: random.Random) -> None:
    words = [one for one in data["checks"] if one["detail"] == WORDS and one["name"].endswith(".backend")]
    rng.choice(words or data["checks"])["detail" if words else "passed"] = "requested te, claimed te, seen native"


# --- Edits of one receipt: class -> (edit, whether a rule beside the seal closes the gate). ---

EDITS: Final[dict[str, tuple[Callable[[Receipt, random.Random], object], bool]]] = {
    "outcome fail": (_set("outcome", to="fail"), True),
    "outcome error": (_set("outcome", to="error"), True),
    "outcome not-run": (_set("outcome", to="not-run"), True),
    "outcome timeout": (_set("outcome", to="timeout"), True),
    "outcome blocked": (_set("outcome", to="blocked"), True),
    "outcome unknown word": (_set("outcome", to="passed"), True),
    "reason: CUDA error": (_set("reason", to="CUDA error: an illegal memory access was encountered"), True),
    "reason: out of bounds": (_set("reason", to="out of bounds"), True),
    "failure beside pass": (
        _set("failure", to={"type": "RuntimeError", "message": "x", "frame": "", "traceback": ""}), True,
    ),
    "blocked by a cell": (_set("blocked_by", to="te2.20.2-h200-imports"), True),
    "one check dropped": (_drop_checks, True),
    "one check left": (lambda data, rng: _drop_checks(data, rng, keep=1), True),
    "no checks": (lambda data, rng: _drop_checks(data, rng, keep=0), True),
    "a check renamed": (_set("checks", "*", "name", to=lambda name: name + ".again"), True),
    "a check failed": (_set("checks", "*", "passed", to=False), True),
    "a check twice": (lambda data, rng: data["checks"].append(rng.choice(data["checks"])), True),
    "parts of all checks dropped": (lambda data, _: [one.update(parts=[]) for one in data["checks"]], True),
    "a part failed": (_part(lambda part: part.update(passed=False)), True),
    "observed beyond its bound": (
        _part(lambda part: part.update(observed=part["bound"] * (0.5 if part["at_least"] else 2) or 1.0)), True,
    ),
    "observed unknown": (_part(lambda part: part.update(observed=None)), True),
    "bound unknown": (_part(lambda part: part.update(bound=None)), True),
    "bound infinite": (_part(lambda part: part.update(bound=math.inf)), True),
    "observed and bound widened": (
        _part(lambda part: part.update(observed=(part["observed"] or 1) * 3, bound=part["bound"] * 3)), False,
    ),
    "bound widened": (_part(lambda part: part.update(bound=part["bound"] * (0.1 if part["at_least"] else 10))), False),
    "derivation blanked": (_part(lambda part: part.update(derivation="")), True),
    "detail: native ran": (_deny_backend, True),
    "backend not observed": (_set("backends", "*", "observed", to=[]), True),
    "backend ran native": (_set("backends", "*", "observed", to=["native"]), True),
    "backend claims native": (_set("backends", "*", "claimed", to="native"), True),
    "backend row dropped": (lambda data, rng: data["backends"].remove(rng.choice(data["backends"])), True),
    "no backends": (_set("backends", to=[]), True),
    "GPU blanked": (_set("machine", "gpu", to=""), True),
    "torch blanked": (_set("machine", "torch", to=""), True),
    "driver blanked": (_set("machine", "driver", to=""), True),
    "CUDA blanked": (_set("machine", "cuda", to=""), True),
    "host blanked": (_set("machine", "host", to=""), True),
    "capability of another GPU": (_set("machine", "capability", to="8.0"), True),
    "another GPU than the others": (_set("machine", "gpu", to="NVIDIA A100"), True),
    "another torch than the others": (_set("machine", "torch", to="2.9.0"), True),
    "no packages": (_set("packages", to=[]), True),
    "another version of TE": (
        _set("packages", 0, "version", to="2.12.0"), True,
    ),
    "a second copy of TE": (_set("packages", 0, "other_copies", to=["/other/site-packages"]), True),
    "no libraries": (_set("libraries", to=[]), True),
    "compiles after warm-up": (_set("jit", "after", to={"triton": 3}), True),
    "requested native": (_set("requested", to="native"), True),
    "retried for a number": (_set("retries", to=["out of bounds"]), True),
    "older by a year": (_set("started", to="2025-11-21T12:00:00+00:00"), True),
    "from the future": (_set("started", to="2027-01-01T00:00:00+00:00"), True),
    "time without a zone": (_set("started", to="2026-11-21T12:00:00"), True),
    "code of another tree": (_set("code", to="f" * 64), True),
    "code blanked": (_set("code", to=""), True),
    "another commit": (_set("commit", to="b" * 40), True),
    "another stack": (_set("stack", to="te2.19.0"), True),
    "another target": (_set("target", to="b200"), True),
    "another probe": (_set("probe", to="moe_smoke"), True),
    "older schema": (_set("schema_id", to="megacpp-validate/receipt/1"), True),
    "schema from the future": (_set("schema_id", to="megacpp-validate/receipt/99"), True),
    "a key that nobody knows": (lambda data, _: data.update(approved=True), True),
    "a key that is gone": (lambda data, rng: data.pop(rng.choice(["checks", "backends", "outcome", "started"])), True),
}  # fmt: skip


# --- Damage to the bytes of one file. ---


def _cut(content: bytes, rng: random.Random) -> bytes:
    length = rng.randrange(1, min(5000, len(content)))
    start = rng.randrange(len(content) - length)
    return content[:start] + content[start + length :]


def _flip(content: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(content))
    return content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))]) + content[at + 1 :]


def _change_digit(content: bytes, rng: random.Random) -> bytes:
    places = [at for at, byte in enumerate(content) if 48 <= byte <= 57]
    at = rng.choice(places)
    return content[:at] + bytes([48 + (content[at] - 48 + rng.randrange(1, 10)) % 10]) + content[at + 1 :]


DAMAGE: Final[dict[str, Callable[[bytes, random.Random], bytes]]] = {
    "a bit flipped": _flip,
    "up to 5,000 bytes cut out": _cut,
    "cut short": lambda content, rng: content[: rng.randrange(len(content))],
    "empty": lambda _, __: b"",
    "zeros": lambda content, _: bytes(len(content)),
    "a digit changed": _change_digit,
    "indented anew": lambda content, _: json.dumps(json.loads(content)).encode(),
    "twice in one file": lambda content, _: content + content,
    "a list around it": lambda content, _: b"[" + content + b"]",
    "a byte order mark": lambda content, _: b"\xef\xbb\xbf" + content,
    "lines of Windows": lambda content, _: content.replace(b"\n", b"\r\n"),
    "no text": lambda _, rng: rng.randbytes(490),
}


# --- Changes to the folder: class -> (change, whether it may open the gate, and why). ---


def _pick(folder: Path, rng: random.Random) -> Path:
    return rng.choice(sorted(folder.glob("*.json")))


def _swap(folder: Path, rng: random.Random) -> None:
    one, other = rng.sample(sorted(folder.glob("*.json")), 2)
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)


def _of_another_release(folder: Path, rng: random.Random) -> None:
    file = _pick(folder, rng)
    data = json.loads(file.read_text())
    file.write_text(sealed(data | {"stack": "te2.12.0", "cell": data["cell"].replace("2.20.2", "2.12.0")}))


def _by_hand(folder: Path, _: random.Random) -> None:
    for file in folder.glob("*.json"):
        head = {key: json.loads(file.read_text())[key] for key in ("cell", "stack", "target", "probe", "started")}
        file.write_text(json.dumps(head | {"outcome": "pass", "checks": [{"name": "all", "passed": True}]}))


def _red_beside(folder: Path, rng: random.Random) -> None:
    file = _pick(folder, rng)
    data = json.loads(file.read_text()) | {"outcome": "fail", "reason": "out of bounds"}
    data["checks"][0]["passed"] = False
    (folder / "again").mkdir()
    (folder / "again" / file.name).write_text(sealed(data))


def _pack(folder: Path, rng: random.Random, *, cut: int = 0) -> None:
    file = _pick(folder, rng)
    packed = lzma.compress(file.read_bytes())
    file.with_name(f"{file.name}.xz").write_bytes(packed[: len(packed) - cut])
    file.unlink()


FOLDER: Final[dict[str, tuple[Callable[[Path, random.Random], object], str]]] = {
    "a receipt removed": (lambda folder, rng: _pick(folder, rng).unlink(), ""),
    "all receipts removed": (lambda folder, _: [file.unlink() for file in folder.glob("*.json")], ""),
    "two receipts swapped": (_swap, ""),
    "a receipt renamed": (lambda folder, rng: (f := _pick(folder, rng)).rename(f.with_name(f"{STACK}-x.json")), ""),
    "a receipt of another release, renamed": (_of_another_release, ""),
    "seven receipts written by hand": (_by_hand, ""),
    "a red receipt of the same commit beside it": (_red_beside, ""),
    "a link out of the store": (
        lambda folder, rng: (f := _pick(folder, rng)).rename(folder.parent / f.name).is_file()
        and f.symlink_to(folder.parent / f.name), "",
    ),
    "a folder in place of a receipt": (lambda folder, rng: (f := _pick(folder, rng)).unlink() or f.mkdir(), ""),
    "a receipt packed": (_pack, "its content is the same"),
    "a packed receipt cut short": (lambda folder, rng: _pack(folder, rng, cut=rng.randrange(1, 400)), ""),
    "a text file beside": (lambda folder, _: (folder / "notes.txt").write_text("x"), "it is no receipt"),
    "a good copy in a second run": (
        lambda folder, _: shutil.copytree(folder, folder / "again", ignore=shutil.ignore_patterns("again")),
        "the same evidence twice is still evidence",
    ),
}  # fmt: skip


class Fuzz:
    """Runs mutations in one folder, which is laid out anew after each."""

    def __init__(self, work: Path, seed: int) -> None:
        self.store, self.work, self.rng = work / "store", work, random.Random(seed)
        catalog = read_catalog()
        self.base = {f"{STACK}-{TARGET}-{probe}.json": sealed(own(catalog, probe)) for probe in PROBES}

    def opens(self, change: Callable[[Path], object]) -> bool:
        """Whether the gate opens after a change of the folder."""
        shutil.rmtree(self.store, ignore_errors=True)
        self.store.mkdir()
        for name, text in self.base.items():
            (self.store / name).write_text(text, encoding="utf-8")
        change(self.store)
        words = "release-gate", str(self.store), "--stack", STACK, "--target", TARGET, "--at", AT_WORDS, "--unsigned"
        return call([*words, "--format", "json"], self.work).code == 0

    def edit(self, change: Callable[[Receipt, random.Random], object], *, again: bool) -> bool:
        """Whether an edited receipt opens the gate; `again`: sealed again."""

        def applied(folder: Path) -> None:
            file = _pick(folder, self.rng)
            data = json.loads(file.read_text(encoding="utf-8"))
            change(data, self.rng)
            old = data.get("seal", "")
            file.write_text(sealed(data) if again else json.dumps({**data, "seal": old}, indent=2) + "\n")

        return self.opens(applied)

    def damage(self, change: Callable[[bytes, random.Random], bytes]) -> bool:
        """Whether a damaged file opens the gate."""

        def applied(folder: Path) -> None:
            file = _pick(folder, self.rng)
            content = file.read_bytes()
            damaged = change(content, self.rng)
            file.write_bytes(damaged if damaged != content else b"")

        return self.opens(applied)


def run(each: int, seed: int) -> dict[str, Any]:
    """Every class `each` times; a row a class and way: mutations, opened, and why an opening is right."""
    rows: list[dict[str, Any]] = []

    def add(name: str, way: str, opens: Callable[[], bool], right: str = "") -> None:
        found = [opens() for _ in range(each)]
        rows.append({"class": name, "way": way, "mutations": each, "opened": sum(found), "right": right})
        sys.stderr.write(f"{name}, {way}: {sum(found)} of {each}\n")

    with tempfile.TemporaryDirectory(prefix="gate-fuzz-") as folder, contextlib.chdir(ROOT):
        fuzz = Fuzz(Path(folder), seed)
        if not fuzz.opens(lambda _: None):
            raise SystemExit("the receipts without a change do not open the gate: nothing can be learnt from them")
        for name, (edit, has_rule) in EDITS.items():
            add(name, "edited", lambda edit=edit: fuzz.edit(edit, again=False))  # type: ignore[misc]
            right = "" if has_rule else "only-signed"
            add(name, "sealed again", lambda edit=edit: fuzz.edit(edit, again=True), right)  # type: ignore[misc]
        for name, damage in DAMAGE.items():
            add(name, "damaged", lambda damage=damage: fuzz.damage(damage))  # type: ignore[misc]
        for name, (change, right) in FOLDER.items():
            add(name, "folder", lambda change=change: fuzz.opens(lambda one: change(one, fuzz.rng)), right)  # type: ignore[misc]
    wrong = sum(row["opened"] for row in rows if not row["right"])
    classes = len(EDITS) + len(DAMAGE) + len(FOLDER)
    return {"classes": classes, "mutations": sum(row["mutations"] for row in rows), "wrong": wrong, "rows": rows}


def main() -> int:
    """Run, print what opened, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--each", type=int, default=20, help="mutations of each class")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    found = run(options.each, options.seed)
    lines = [
        f"{row['class']}, {row['way']}: {row['opened']} of {row['mutations']} {row['right'] or 'WRONG'}"
        for row in found["rows"] if row["opened"]
    ]  # fmt: skip
    lines += [f"{found['classes']} classes, {found['mutations']} mutations, {found['wrong']} wrong openings"]
    sys.stdout.write("\n".join(lines) + "\n")
    if options.output:
        options.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(found["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
