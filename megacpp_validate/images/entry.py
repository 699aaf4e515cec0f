"""What an image runs: `docker run IMAGE SESSION [ARGUMENTS]`, as `python -m megacpp_validate.images.entry`.

A session of another image is refused before it starts. Process 1 passes signals on, and ends as the session does.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from ..errors import Exit, NoEnvironment, ToolError, WrongArguments, writing_to
from ..evidence.receipt import write_whole
from ..jitcache.layout import ARCH_VARIABLE, MODE_VARIABLE, NVRTC, ROOT_VARIABLE, arch_folder, cache_variables

MOUNT: Final = Path("/receipts")

_PYTHON: Final = (sys.executable, "-P", "-m")
_CLI: Final = "megacpp_validate.cli"
_FORWARDED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True)
class Session:
    """A session: the verb that it calls, for every image or for one target alone.

    Attributes:
        verb: words; "{target}" is the image's.
        gpu: whether an image whose target has no GPU lacks it.
        leaves: "receipts", a file a cell through the verb's option --receipts; "result" as JSON; or empty.
        target: the one image that has it; empty for every image.
    """

    name: str
    verb: tuple[str, ...]
    gpu: bool
    leaves: str
    help: str
    target: str = ""


_OWN: Final = ("--target", "{target}")
SESSIONS: Final = (
    Session("doctor", ("doctor", *_OWN), False, "result", "what the image loads, and what that breaks"),
    Session("te_canary", ("canary",), False, "result", "which bridge module the step OLD NEW breaks; no network"),
    Session("cpu_parity", ("parity", "--target", "cpu"), False, "receipts", "native layers against fp64 references"),
    Session("h200_parity", ("parity", *_OWN), True, "receipts", "every bridge module on an H200", "h200"),
    Session("b200_parity", ("parity", *_OWN), True, "receipts", "every bridge module on a B200", "b200"),
    Session("gb10_compat", ("parity", *_OWN), True, "receipts", "every bridge module on a GB10", "gb10"),
    Session("fp8", ("fp8", *_OWN), True, "receipts", "FP8: recipes, ownership, backends, the loss gate"),
    Session("moe_smoke", ("moe-smoke", *_OWN), False, "receipts", "the hybrid model trained on 1 to 4 devices"),
    Session("fp8_policy", ("fp8-policy",), False, "", "which presets may run in low precision, and why"),
    Session("loss_gate", ("loss-gate",), False, "", "the verdict on a folder of curves"),
    Session("prewarm", ("prewarm", *_OWN), True, "receipts", "the JIT caches filled on this GPU, sealed and verified"),
    Session("jit_verify", ("jit-verify", *_OWN), True, "receipts", "a sealed cache triggers no compilation"),
)


def find_session(name: str) -> Session | None:
    """The session of a name; a dash is as good as an underscore."""
    return next((session for session in SESSIONS if session.name == name.replace("-", "_")), None)


@dataclass(frozen=True)
class ImageFacts:
    """What an image has in its environment variables; `digest` is known to the caller of the container alone."""

    name: str
    target: str
    arch: str
    lock_hash: str
    digest: str

    @property
    def sessions(self) -> list[Session]:
        """Those that this image can run."""
        own = (session for session in SESSIONS if session.target in ("", self.target))
        return [session for session in own if self.arch or not session.gpu]


def read_image(variables: Mapping[str, str]) -> ImageFacts:
    """What the variables of a container hold."""
    names = ("ARCH", "LOCK_HASH", "IMAGE_DIGEST")
    name, target = variables.get("MEGACPP_IMAGE", "this image"), variables.get("MEGACPP_TARGET", "cpu")
    return ImageFacts(name, target, *(variables.get(f"MEGACPP_{one}", "") for one in names))


def choose_place(mount: Path = MOUNT) -> tuple[Path, bool]:
    """The mounted folder of receipts and True, or a folder of the container where nothing is mounted.

    Raises:
        WrongArguments: it cannot be written.
        OSError: its disk is full.
    """
    mounted = os.path.ismount(mount)
    folder = mount if mounted else Path(tempfile.gettempdir()) / "receipts"
    with writing_to(folder, "receipts", f'`docker run --user "$(id -u):$(id -g)" -v FOLDER:{MOUNT}`, without `:ro`,'):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder, mounted


def use_caches() -> None:
    """Set the variables to JIT caches that can be written: the image's own, or a folder of links to its files.

    A cache that is found and cannot be written fails a compiler at its first miss. Links cost no memory, so that a
    folder in `/tmp` holds only what is compiled anew.

    Raises:
        NoEnvironment: there is no room for temporary files, or the caches may not be read.
    """
    root, arch = os.environ.get(ROOT_VARIABLE, ""), os.environ.get(ARCH_VARIABLE, "")
    if not root or not arch:
        return
    kept, new = arch_folder(Path(root), arch), Path(tempfile.gettempdir()) / "megacpp-jit"
    if not kept.is_dir() or os.access(kept, os.W_OK):
        return
    try:
        for place in (Path(root), *kept.rglob("*")):
            if not os.access(place, os.R_OK | os.X_OK if place.is_dir() else os.R_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))
        if not arch_folder(new, arch).exists():
            shutil.copytree(kept, arch_folder(new, arch), copy_function=os.symlink)
            for place in (path for path in new.rglob("*") if path.is_dir()):
                place.chmod(0o755)  # the sealed folders may be read-only
    except OSError as fault:
        raise NoEnvironment(
            f"the JIT caches cannot be read, or there is no room for temporary files: {fault}. Likely cause: the user "
            f"of this container ({os.geteuid()}:{os.getegid()}) may not read the mounted caches; or its root is "
            "read-only and nothing is mounted at /tmp, or /tmp is full. Next step: `chmod -R a+rX` of the caches; "
            "`docker run --read-only --tmpfs /tmp ...`."
        ) from fault
    os.environ.update(cache_variables(new, arch, nvrtc=os.environ.get(MODE_VARIABLE) == NVRTC))


def run_child(words: Sequence[str]) -> int:
    """Run a command to its end, as process 1 must: signals reach it.

    Raises:
        OSError: it cannot be started.
    """
    # What a terminal sends for its keys reaches the child without us: twice would cut short what it does at the first.
    keys = {signal.SIGINT, signal.SIGQUIT} if os.isatty(0) else set()
    received, children = list[int](), list[subprocess.Popen[bytes]]()

    def forward(number: int, _frame: object) -> None:
        received.append(number)
        for child in children if number not in keys else ():
            child.send_signal(number)

    for number in _FORWARDED:
        signal.signal(number, forward)
    children.append(subprocess.Popen(list(words)))
    for early in tuple(received):  # before there was a child
        children[0].send_signal(early)
    code = children[0].wait()
    if code >= 0:
        return code
    if received:
        return Exit.INTERRUPTED
    _say(
        f"signal {-code} ended the session, and no release is judged. Likely cause: for 9, memory ran out, of this "
        "container (--memory) or of the machine; for 11, compiled code crashed. Next step: read the lines above."
    )
    return Exit.INFRASTRUCTURE


def main(arguments: Sequence[str]) -> int:
    """Run a session or another command; the exit code is its own, or that of the class of what stands in the way."""
    image = read_image(os.environ)
    name, *rest = arguments or ["--help"]
    if name in ("--help", "-h", "help"):
        sys.stdout.write(_render_help(image))
        return Exit.OPEN
    if session := find_session(name):
        return _run_session(session, tuple(rest), image)
    if not shutil.which(name):
        raise WrongArguments(
            f"there is no session {name!r}, and no command of that name. Next step: choose one of "
            f"{', '.join(row.name for row in image.sessions)}; or `megacpp --help`."
        )
    use_caches()
    return os.execvp(name, [name, *rest])  # noqa: S606 - a list of words, no shell


def _run_session(session: Session, arguments: tuple[str, ...], image: ImageFacts) -> int:
    if session not in image.sessions:
        raise WrongArguments(
            f"{session.name} is a session of the image for {session.target or 'a GPU'}, and {image.name} is for "
            f"{image.target}. Next step: run it in another image; `megacpp --help` lists the sessions of this one."
        )
    if session.name not in ("prewarm", "jit_verify"):  # they copy sealed caches, and links would lead out of them
        use_caches()
    folder, mounted = choose_place()
    if not mounted and session.leaves == "receipts":
        _say(
            f"nothing is mounted at {MOUNT}: receipts go to {folder} and end with the container. Next step, to keep "
            f'them: `docker run --user "$(id -u):$(id -g)" -v "$PWD/receipts:{MOUNT}" ...`'
        )
    keeps = session.leaves == "result" and mounted and not {"--list", "--help", "-h"} & {*arguments}
    record, result = folder / f"{session.name}.run.json", folder / f"{session.name}.json"
    started, clock = datetime.now(UTC), time.monotonic()
    words = [*_PYTHON, _CLI, *(word.format(target=image.target) for word in session.verb)]
    words += ["--receipts", str(folder / session.name)] if session.leaves == "receipts" else []
    words += ["--json", str(result)] if keeps else []
    for file in (record, *([result] if keeps else [])):  # one that is killed leaves no result of another run
        file.unlink(missing_ok=True)
    code = run_child([*words, *arguments])  # of an option that is given twice, the caller's is the last
    run = {
        "schema_id": "megacpp-validate/image-run/2", "session": session.name, "arguments": arguments,
        "image": asdict(image), "user": f"{os.geteuid()}:{os.getegid()}", "exit_code": int(code),
        "started": started.isoformat(timespec="seconds"), "seconds": round(time.monotonic() - clock, 2),
    }  # fmt: skip
    write_whole(record, json.dumps(run, indent=2, sort_keys=True) + "\n")
    return code


def _render_help(image: ImageFacts) -> str:
    gpus = "--gpus all " if image.arch else ""
    lines = [
        f"{image.name}, for the target {image.target}{f' ({image.arch})' if image.arch else ''}.",
        f'docker run --rm {gpus}--user "$(id -u):$(id -g)" -v "$PWD/receipts:{MOUNT}" IMAGE SESSION [ARGUMENTS]',
        *(f"  {session.name:14} {session.help}" for session in image.sessions),
        "Any other command of the image is run as it is: `python`, `sh`, `megacpp-validate`.",
    ]
    return "\n".join(lines) + "\n"


def _say(text: str) -> None:
    sys.stderr.write(f"megacpp: {text}\n")


def run_main(arguments: Sequence[str]) -> int:
    """The same; an error becomes a message and the exit code of its class."""
    try:
        return int(main(arguments))
    except ToolError as fault:
        _say(str(fault))
        return int(fault.exit)
    except KeyboardInterrupt:
        return int(Exit.INTERRUPTED)
    except OSError as fault:  # a run that nobody can show later is none that went well
        _say(
            f"{fault}. Likely cause: a full disk, or a folder that was removed. Next step: make room, or mount another."
        )
        return int(Exit.INFRASTRUCTURE)
    except Exception as fault:  # Python would end with 1, which says that a release broke
        traceback.print_exc()
        _say(f"unexpected {type(fault).__name__}: {fault}")
        return int(Exit.INFRASTRUCTURE)


if __name__ == "__main__":
    sys.exit(run_main(sys.argv[1:]))
