"""An image proved: pulled by the digest that its build said, and run as strangers run it, with no network.

Each proof can fail: what is expected is said before it is done, and an image that does less is found out here.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..evidence.receipt import Outcome
from ..evidence.store import read_receipts
from .build_result import ImageBuild, ImageProof, Proof
from .engine import Engine
from .labels import LOCK_LABEL, PINS_LABEL, TARGET_LABEL

RELEASES: Final = ("2.17.1", "2.20.2")
_ANY_USER: Final = 54321
_RUN_S: Final = 300.0
# As locked as an engine can make a container: whatever runs so runs anywhere.
LOCKED: Final = (
    "--network", "none", "--hostname", "localhost", "--read-only", "--tmpfs", "/tmp",  # noqa: S108 - in the container
    "--cap-drop", "ALL", "--security-opt", "no-new-privileges",
)  # fmt: skip


@dataclass(frozen=True)
class _Ran:
    """How a container ended: code, what it said on standard output and error."""

    code: int
    out: str
    err: str

    @property
    def last(self) -> str:
        """The last words, for people."""
        lines = [line.strip() for line in (self.err + "\n" + self.out).splitlines() if line.strip()]
        return lines[-1][:160] if lines else "it said nothing"


def prove_image(engine: Engine, build: ImageBuild, folder: Path, tool: str) -> ImageProof:
    """Pull an image by its digest and run it; what was seen of each deed.

    Args:
        engine: that runs it.
        build: that was pushed.
        folder: for what containers leave; what an earlier proof left there goes.
        tool: that proves.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    prover = _Prover(engine, build, folder.absolute())
    deeds: Sequence[tuple[str, Callable[[], Iterator[str]]]] = (
        ("pulled by its digest", prover.pull),
        ("labels say what it was made from", prover.read_labels),
        ("static canary with no network", prover.run_canary),
        ("parity on the CPU with no network", prover.run_parity),
        ("doctor", prover.run_doctor),
        ("nothing of it can be written by whoever runs it", prover.write_inside),
        ("a GPU session is refused in words", prover.ask_for_gpu),
        ("an unknown session is refused in words", prover.ask_for_nonsense),
        ("a folder of receipts that is read-only is refused in words", prover.mount_read_only),
    )
    return ImageProof(tool=tool, build=build, proofs=tuple(_do(deed, does) for deed, does in deeds))


class _Unproved(AssertionError):
    """What was expected is not what was seen."""


def _do(deed: str, does: Callable[[], Iterator[str]]) -> Proof:
    clock = time.monotonic()
    try:
        seen, holds = "; ".join(does()), True
    except (_Unproved, OSError, ValueError, KeyError, TypeError) as fault:
        seen, holds = str(fault) or type(fault).__name__, False
    return Proof(deed, holds, seen, round(time.monotonic() - clock, 1))


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
        _expect(done.returncode == 0, f"docker pull: {done.stderr.strip()[-200:]}")
        digests = json.loads(self._inspect("{{json .RepoDigests}}"))
        _expect(self.build.reference in digests, f"the engine has it as {digests}")
        yield self.build.digest[:19]

    def read_labels(self) -> Iterator[str]:
        labels = json.loads(self._inspect("{{json .Config.Labels}}"))
        wanted = {
            TARGET_LABEL: self.build.target,
            LOCK_LABEL: self.build.lock_hash,
            PINS_LABEL: self.build.pins_hash,
            "org.opencontainers.image.base.digest": self.build.base.partition("@")[2],
        }
        for name, value in wanted.items():
            _expect(labels.get(name) == value, f"{name} is {labels.get(name)!r}, and should be {value!r}")
        yield f"lock {self.build.lock_hash[:12]}, base {wanted['org.opencontainers.image.base.digest'][:19]}"

    def run_canary(self) -> Iterator[str]:
        place, user = self._place("canary")
        ran = self._run("te_canary", *RELEASES, user=user, place=place)
        _expect(ran.code in (0, 1), f"exit code {ran.code}: {ran.last}")
        told = json.loads((place / "te_canary.json").read_text(encoding="utf-8"))
        steps = (told["old"]["version"], told["new"]["version"])
        _expect(steps == RELEASES, f"it compared {steps}")
        _expect(len(told["modules"]) >= len(("imports", "attention")), "no bridge module was judged")
        yield f"exit code {ran.code}, {len(told['findings'])} findings of {' to '.join(RELEASES)}"
        yield self._whose(place, user)

    def run_parity(self) -> Iterator[str]:
        place, user = self._place("parity")
        ran = self._run("cpu_parity", user=user, place=place)
        _expect(ran.code == 0, f"exit code {ran.code}: {ran.last}")
        read = read_receipts(place / "cpu_parity")
        outcomes = {cell: receipt.outcome for cell, receipt in read.found.items()}
        _expect(bool(outcomes) and not read.unreadable, f"{len(outcomes)} receipts, {len(read.unreadable)} unreadable")
        bad = [cell for cell, outcome in outcomes.items() if outcome is not Outcome.PASS]
        _expect(not bad, f"not passed: {', '.join(bad)}")
        yield f"{len(outcomes)} receipts, all pass"
        yield self._whose(place, user)

    def run_doctor(self) -> Iterator[str]:
        ran = self._run("doctor")
        _expect(ran.code == 0, f"exit code {ran.code}: {ran.last}")
        ran = self._run("--health")
        _expect(ran.code == 0, f"the health check ends with {ran.code}: {ran.last}")
        yield "exit code 0, and so does the health check"

    def write_inside(self) -> Iterator[str]:
        places = "/opt/megacpp/megacpp_validate /opt/megacpp/venv/bin /usr/bin /etc"
        script = f"id -u; for place in {places}; do touch $place/x 2>/dev/null && echo $place; done; true"
        done = self.engine.ask(
            "run", "--rm", "--network", "none", self.build.reference, "sh", "-c", script, limit_s=_RUN_S
        )
        uid, *written = done.stdout.split()
        _expect(uid != "0", "it runs as root")
        _expect(not written, f"written: {', '.join(written)}")
        yield f"it runs as uid {uid}"

    def ask_for_gpu(self) -> Iterator[str]:
        ran = self._run("fp8")
        _expect(ran.code == 2 and "GPU" in ran.err, f"exit code {ran.code}: {ran.last}")
        yield f"exit code {ran.code}"

    def ask_for_nonsense(self) -> Iterator[str]:
        ran = self._run("cpu_pariti")
        _expect(ran.code == 2 and "cpu_parity" in ran.err, f"exit code {ran.code}: {ran.last}")
        yield f"exit code {ran.code}, and the sessions are listed"

    def mount_read_only(self) -> Iterator[str]:
        place, user = self._place("read-only")
        ran = self._run("doctor", user=user, place=place, read_only=True)
        _expect(ran.code == 2 and "cannot be written" in ran.err, f"exit code {ran.code}: {ran.last}")
        yield f"exit code {ran.code}"

    def _place(self, name: str) -> tuple[Path, str]:
        """A folder for receipts, and a user that owns it and that the image has never heard of."""
        place = self.folder / name
        place.mkdir()
        if os.geteuid() == 0:
            os.chown(place, _ANY_USER, _ANY_USER)
            return place, f"{_ANY_USER}:{_ANY_USER}"
        return place, f"{os.geteuid()}:{os.getegid()}"

    def _run(self, *words: str, user: str = "", place: Path | None = None, read_only: bool = False) -> _Ran:
        mount = f"type=bind,source={place},target=/receipts{',readonly' if read_only else ''}"
        done = self.engine.ask(
            "run", "--rm", *LOCKED, *(("--user", user) if user else ()), *(("--mount", mount) if place else ()),
            self.build.reference, *words,
            limit_s=_RUN_S,
        )  # fmt: skip
        return _Ran(done.returncode, done.stdout, done.stderr)

    def _whose(self, place: Path, user: str) -> str:
        uid = int(user.partition(":")[0])
        others = [file.name for file in place.rglob("*") if file.stat().st_uid != uid]
        _expect(not others, f"not written as {user}: {', '.join(others[:3])}")
        _expect(any(place.glob("*.run.json")), "there is no record of the run")
        return f"written as {user}"

    def _inspect(self, form: str) -> str:
        done = self.engine.ask("image", "inspect", "--format", form, self.build.reference)
        _expect(done.returncode == 0, f"docker image inspect: {done.stderr.strip()[-200:]}")
        return done.stdout


def _expect(holds: bool, seen: str) -> None:
    if not holds:
        raise _Unproved(seen)
