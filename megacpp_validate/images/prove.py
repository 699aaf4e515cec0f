"""An image proved: pulled by the digest that its build printed, and run as strangers run it, with no network.

Each proof can fail: what is expected is written down before it is done.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..errors import Exit, exit_for
from ..evidence.receipt import Outcome
from ..evidence.store import read_receipts
from ..evidence.values import Frozen
from ..process import Ended
from .build import ImageBuild
from .engine import Engine, find_engine
from .tools import BASE_LABEL, LOCK_LABEL, PINS_LABEL, TARGET_LABEL

RELEASES: Final = ("2.17.1", "2.20.2")
_ANY_USER: Final = 54321
_RUN_S: Final = 300.0
# As locked as an engine can make a container: whatever runs so runs anywhere.
_LOCKED: Final = (
    "--network", "none", "--hostname", "localhost", "--read-only", "--tmpfs", "/tmp",  # noqa: S108 - in the container
    "--cap-drop", "ALL", "--security-opt", "no-new-privileges",
)  # fmt: skip


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


class _Unproved(AssertionError):
    """What was expected is not what was seen."""


def _expect(holds: bool, seen: str) -> None:
    if not holds:
        raise _Unproved(seen)


def prove_image(variables: Mapping[str, str], build: ImageBuild, folder: Path, tool: str) -> ImageProof:
    """Pull an image by its digest and run it.

    Args:
        folder: for what containers leave; what an earlier proof left there is removed.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    prover = _Prover(find_engine(variables), build, folder.absolute())
    deeds: Sequence[tuple[str, Callable[[], Iterator[str]]]] = (
        ("pulled by its digest", prover.pull),
        ("labels name what it was made from", prover.read_labels),
        ("static canary with no network", prover.run_canary),
        ("parity on the CPU with no network", prover.run_parity),
        ("doctor, and the health check", prover.run_doctor),
        ("whoever runs it cannot write into it", prover.write_inside),
        ("a GPU session is refused with a reason", lambda: prover.refuse("fp8", "GPU")),
        ("an unknown session is refused with a list", lambda: prover.refuse("cpu_pariti", "cpu_parity")),
        ("a read-only folder of receipts is refused with a reason", prover.mount_read_only),
    )
    proofs = []
    for deed, does in deeds:
        clock = time.monotonic()
        try:
            seen, holds = "; ".join(does()), True
        except (_Unproved, OSError, ValueError, KeyError, TypeError) as fault:
            seen, holds = str(fault) or type(fault).__name__, False
        proofs.append(Proof(deed=deed, holds=holds, seen=seen, seconds=round(time.monotonic() - clock, 1)))
    return ImageProof(tool=tool, build=build, proofs=tuple(proofs))


@dataclass(frozen=True)
class _Prover:
    engine: Engine
    build: ImageBuild
    folder: Path

    def pull(self) -> Iterator[str]:
        """What lies in the engine goes first, so that the registry has to answer for it."""
        for name in (self.build.name, self.build.reference):
            self.engine.ask("image", "rm", "--force", name)
        done = self.engine.ask("pull", "--quiet", self.build.reference, limit_s=_RUN_S)
        _expect(done.code == 0, f"docker pull: {done.last_words}")
        digests = json.loads(self._inspect("{{json .RepoDigests}}"))
        _expect(self.build.reference in digests, f"the engine has it as {digests}")
        yield self.build.digest[:19]

    def read_labels(self) -> Iterator[str]:
        labels = json.loads(self._inspect("{{json .Config.Labels}}"))
        wanted = {
            TARGET_LABEL: self.build.target,
            LOCK_LABEL: self.build.lock_hash,
            PINS_LABEL: self.build.pins_hash,
            BASE_LABEL: self.build.base.partition("@")[2],
        }
        for name, value in wanted.items():
            _expect(labels.get(name) == value, f"{name} is {labels.get(name)!r}, and should be {value!r}")
        yield f"lock {self.build.lock_hash[:12]}, base {wanted[BASE_LABEL][:19]}"

    def run_canary(self) -> Iterator[str]:
        place, user = self._place("canary")
        ran = self._run("te_canary", *RELEASES, user=user, place=place)
        _expect(ran.code in (0, 1), f"exit code {ran.code}: {ran.last_words}")
        told = json.loads((place / "te_canary.json").read_text(encoding="utf-8"))
        steps = (told["old"]["version"], told["new"]["version"])
        _expect(steps == RELEASES, f"it compared {steps}")
        _expect(len(told["modules"]) >= 2, "no bridge module was judged")
        yield f"exit code {ran.code}, {len(told['findings'])} findings of {' to '.join(RELEASES)}"
        yield self._require_owner(place, user)

    def run_parity(self) -> Iterator[str]:
        place, user = self._place("parity")
        ran = self._run("cpu_parity", user=user, place=place)
        _expect(ran.code == 0, f"exit code {ran.code}: {ran.last_words}")
        read = read_receipts(place / "cpu_parity")
        _expect(
            bool(read.found) and not read.unreadable, f"{len(read.found)} receipts, {len(read.unreadable)} unreadable"
        )
        bad = [cell for cell, receipt in read.found.items() if receipt.outcome is not Outcome.PASS]
        _expect(not bad, f"not passed: {', '.join(bad)}")
        yield f"{len(read.found)} receipts, all pass"
        yield self._require_owner(place, user)

    def run_doctor(self) -> Iterator[str]:
        for word in ("doctor", "--health"):
            ran = self._run(word)
            _expect(ran.code == 0, f"{word} ends with {ran.code}: {ran.last_words}")
        yield "exit code 0 of both"

    def write_inside(self) -> Iterator[str]:
        places = "/opt/megacpp/megacpp_validate /opt/megacpp/venv/bin /usr/bin /etc"
        script = f"id -u; for place in {places}; do touch $place/x 2>/dev/null && echo $place; done; true"
        words = ("run", "--rm", "--network", "none", self.build.reference, "sh", "-c", script)
        uid, *written = self.engine.ask(*words, limit_s=_RUN_S).words.split()
        _expect(uid != "0", "it runs as root")
        _expect(not written, f"written: {', '.join(written)}")
        yield f"it runs as uid {uid}"

    def refuse(self, session: str, text: str) -> Iterator[str]:
        ran = self._run(session)
        _expect(ran.code == 2 and text in ran.errors, f"exit code {ran.code}: {ran.last_words}")
        yield f"exit code {ran.code}"

    def mount_read_only(self) -> Iterator[str]:
        place, user = self._place("read-only")
        ran = self._run("doctor", user=user, place=place, options=",readonly")
        _expect(ran.code == 2 and "cannot be written" in ran.errors, f"exit code {ran.code}: {ran.last_words}")
        yield f"exit code {ran.code}"

    def _place(self, name: str) -> tuple[Path, str]:
        """A folder for receipts, and a user that owns it and that the image does not know."""
        place = self.folder / name
        place.mkdir()
        if os.geteuid() == 0:
            os.chown(place, _ANY_USER, _ANY_USER)
            return place, f"{_ANY_USER}:{_ANY_USER}"
        return place, f"{os.geteuid()}:{os.getegid()}"

    def _run(self, *words: str, user: str = "", place: Path | None = None, options: str = "") -> Ended:
        how = ("--user", user, "--mount", f"type=bind,source={place},target=/receipts{options}") if place else ()
        return self.engine.ask("run", "--rm", *_LOCKED, *how, self.build.reference, *words, limit_s=_RUN_S)

    def _require_owner(self, place: Path, user: str) -> str:
        uid = int(user.partition(":")[0])
        others = [file.name for file in place.rglob("*") if file.stat().st_uid != uid]
        _expect(not others, f"not written as {user}: {', '.join(others[:3])}")
        _expect(any(place.glob("*.run.json")), "there is no record of the run")
        return f"written as {user}"

    def _inspect(self, form: str) -> str:
        done = self.engine.ask("image", "inspect", "--format", form, self.build.reference)
        _expect(done.code == 0, f"docker image inspect: {done.last_words}")
        return done.words
