"""An image proved: pulled by the digest that its build printed, and run as strangers run it, with no network.

Each proof can fail: what is expected is written down before the container runs.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ..errors import Exit, exit_for
from ..evidence.receipt import Outcome
from ..evidence.store import read_receipts
from ..evidence.values import Frozen
from .build import ImageBuild
from .engine import Engine, find_engine
from .tools import BASE_LABEL, LOCK_LABEL, PINS_LABEL, TARGET_LABEL

RELEASES: Final = ("2.17.1", "2.20.2")
_ANY_USER: Final = 54321
_RUN_S: Final = 300.0
_ALONE: Final = ("--network", "none", "--hostname", "localhost")
# As locked as an engine can make a container: whatever runs so runs anywhere.
_LOCKED: Final = (
    *_ALONE, "--read-only", "--tmpfs", "/tmp",  # noqa: S108 - in the container
    "--cap-drop", "ALL", "--security-opt", "no-new-privileges",
)  # fmt: skip
_WRITES: Final = (
    "for place in /opt/megacpp/megacpp_validate /opt/megacpp/venv/bin /usr/bin /etc; do "
    "touch $place/x 2>/dev/null && exit 9; done; test $(id -u) != 0"
)
# Proof -> options of the container, words, exit codes, text in its output, and options of a folder that is mounted as
# another user's ("" for a folder that can be written); None for no folder.
_RUNS: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[int, ...], str, str | None]]] = {
    "static canary with no network": (_LOCKED, ("te_canary", *RELEASES), (0, 1), "", ""),
    "parity on the CPU with no network": (_LOCKED, ("cpu_parity",), (0,), "", ""),
    "doctor": (_LOCKED, ("doctor",), (0,), "", None),
    "the health check": (_LOCKED, ("--health",), (0,), "", None),
    "whoever runs it cannot write into it": (_ALONE, ("sh", "-c", _WRITES), (0,), "", None),
    "a GPU session is refused with a reason": (_LOCKED, ("fp8",), (2,), "GPU", None),
    "an unknown session is refused with a list": (_LOCKED, ("cpu_pariti",), (2,), "cpu_parity", None),
    "a read-only folder of receipts is refused": (_LOCKED, ("doctor",), (2,), "cannot be written", ",readonly"),
}


class Proof(Frozen):
    """One thing that was done with an image, whether it holds, and what was seen."""

    deed: str
    holds: bool
    seen: str
    seconds: float


class ImageProof(Frozen):
    """An image that was pushed, pulled by its digest, and run without a network."""

    schema_id: str = "megacpp-validate/image-proof/1"
    tool: str
    build: ImageBuild
    proofs: tuple[Proof, ...]

    @property
    def exit(self) -> Exit:
        """Closed where there is no proof, or one does not hold."""
        return exit_for(breaks=not self.proofs or not all(proof.holds for proof in self.proofs))


def prove_image(variables: Mapping[str, str], build: ImageBuild, folder: Path, tool: str) -> ImageProof:
    """Pull an image by its digest and run it.

    Args:
        folder: for what containers leave; what an earlier proof left there is removed.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    engine, proofs = find_engine(variables), list[Proof]()
    for deed in ("pulled by its digest", "labels name what it was made from", *_RUNS):
        clock = time.monotonic()
        try:
            if deed in _RUNS:
                holds, seen = _run(engine, build.reference, deed, folder.absolute() / str(len(proofs)))
            else:
                holds, seen = _inspect(engine, build) if proofs else _pull(engine, build)
        except (OSError, ValueError, KeyError, TypeError) as fault:
            holds, seen = False, repr(fault)
        proofs.append(Proof(deed=deed, holds=holds, seen=seen, seconds=round(time.monotonic() - clock, 1)))
    return ImageProof(tool=tool, build=build, proofs=tuple(proofs))


def _pull(engine: Engine, build: ImageBuild) -> tuple[bool, str]:
    """What lies in the engine goes first, so that the registry has to answer for it."""
    for name in (build.name, build.reference):
        engine.ask("image", "rm", "--force", name)
    done = engine.ask("pull", "--quiet", build.reference, limit_s=_RUN_S)
    found = engine.ask("image", "inspect", "--format", "{{json .RepoDigests}}", build.reference).words.strip()
    return not done.code and build.reference in found, found or done.last_words


def _inspect(engine: Engine, build: ImageBuild) -> tuple[bool, str]:
    done = engine.ask("image", "inspect", "--format", "{{json .Config.Labels}}", build.reference)
    labels, base = json.loads(done.words), build.base.partition("@")[2]
    wanted = {TARGET_LABEL: build.target, LOCK_LABEL: build.lock_hash, PINS_LABEL: build.pins_hash, BASE_LABEL: base}
    wrong = [
        f"{name} is {labels.get(name)}, expected {value}" for name, value in wanted.items() if labels.get(name) != value
    ]
    return not wrong, "; ".join(wrong) or f"lock {build.lock_hash[:12]}, base {base[:19]}"


def _run(engine: Engine, image: str, deed: str, place: Path) -> tuple[bool, str]:
    """Run a container; whether the proof holds, and what was seen."""
    locked, words, codes, text, mount = _RUNS[deed]
    options, root = [*locked], os.geteuid() == 0
    user = (_ANY_USER, _ANY_USER) if root else (os.geteuid(), os.getegid())
    if mount is not None:
        place.mkdir()
        if root:
            os.chown(place, *user)
        options += ["--user", f"{user[0]}:{user[1]}", "--mount", f"type=bind,source={place},target=/receipts{mount}"]
    ran = engine.ask("run", "--rm", *options, image, *words, limit_s=_RUN_S)
    seen = f"exit code {ran.code}"
    if ran.code not in codes or text not in ran.words + ran.errors:
        return False, f"{seen}: {ran.last_words}"
    if mount != "":
        return True, seen
    if not any(place.glob("*.run.json")) or any(file.stat().st_uid != user[0] for file in place.rglob("*")):
        return False, f"there is no record of the run, or it is not written as {user[0]}"
    if words[0] == "te_canary":
        told = json.loads((place / "te_canary.json").read_text(encoding="utf-8"))
        steps = (told["old"]["version"], told["new"]["version"])
        holds, seen = steps == RELEASES and len(told["modules"]) > 1, f"{seen}, {' to '.join(steps)}"
    else:
        read = read_receipts(place / words[0])
        bad = [cell for cell, receipt in read.found.items() if receipt.outcome is not Outcome.PASS]
        holds, seen = (
            bool(read.found) and not bad and not read.unreadable,
            f"{len(read.found)} receipts, {len(bad)} not passed",
        )
    return holds, f"{seen}; written as {user[0]}:{user[1]}"
