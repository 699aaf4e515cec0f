"""What an image runs: `docker run IMAGE SESSION [ARGUMENTS]`, as `python -m megacpp_validate.images.entry`.

A session of another image is refused before it starts. The verb of a session then takes the place of this process, so
that the signals of `docker stop` reach the verb, and its exit code is that of the container.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from ..errors import Exit, NoEnvironment, ToolError, WrongArguments, writing_to
from ..jitcache.layout import ARCH_VARIABLE, ROOT_VARIABLE, arch_folder, cache_variables

MOUNT: Final = Path("/receipts")

_CLI: Final = (sys.executable, "-P", "-m", "megacpp_validate.cli")


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


@dataclass(frozen=True)
class ImageFacts:
    """What an image has in its environment variables; `arch` is empty for a target without a GPU."""

    name: str
    target: str
    arch: str

    @property
    def sessions(self) -> list[Session]:
        """Those that this image can run."""
        own = (session for session in SESSIONS if session.target in ("", self.target))
        return [session for session in own if self.arch or not session.gpu]


def read_image(variables: Mapping[str, str]) -> ImageFacts:
    """What the variables of a container hold."""
    get = variables.get
    return ImageFacts(get("MEGACPP_IMAGE", "this image"), get("MEGACPP_TARGET", "cpu"), get("MEGACPP_ARCH", ""))


def find_room() -> Path:
    """The folder for temporary files, without which no session runs.

    Raises:
        NoEnvironment: none can be written.
    """
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as fault:
        raise NoEnvironment(
            f"there is no room for temporary files: {fault}. Likely cause: the root of this container is read-only and "
            "nothing is mounted at /tmp, or /tmp is full. Next step: `docker run --read-only --tmpfs /tmp ...`."
        ) from fault


def choose_place(mount: Path = MOUNT) -> tuple[Path, bool]:
    """The mounted folder of receipts and True, or a folder of the container where nothing is mounted.

    Raises:
        NoEnvironment: as `find_room`.
        WrongArguments: it cannot be written.
        OSError: its disk is full.
    """
    mounted, room = os.path.ismount(mount), find_room()
    folder = mount if mounted else room / "receipts"
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
    kept = arch_folder(Path(root), arch)
    if not kept.is_dir() or os.access(kept, os.W_OK):
        return
    new = find_room() / "megacpp-jit"
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
            f"the JIT caches cannot be read, or /tmp has no room for links to them: {fault}. Likely cause: the user of "
            f"this container ({os.geteuid()}:{os.getegid()}) may not read the mounted caches, or /tmp is full. Next "
            "step: `chmod -R a+rX` of the caches; `docker run --tmpfs /tmp ...`."
        ) from fault
    os.environ.update(cache_variables(new, arch))


def main(arguments: Sequence[str]) -> int:
    """Become a session or another command; returns an exit code only where this process prints the help itself."""
    image = read_image(os.environ)
    name, *rest = arguments or ["--help"]
    if name in ("--help", "-h", "help"):
        sys.stdout.write(_render_help(image))
        return Exit.OPEN
    if session := next((session for session in SESSIONS if session.name == name), None):
        return _start(plan_session(session, rest, image))
    if not shutil.which(name):
        raise WrongArguments(
            f"there is no session {name!r}, and no command of that name. Next step: choose one of "
            f"{', '.join(row.name for row in image.sessions)}; or `megacpp --help`."
        )
    use_caches()
    return _start([name, *rest])


def _start(words: list[str]) -> NoReturn:
    """Replace this process by a command."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvp(words[0], words)  # noqa: S606 - a list of words, no shell


def plan_session(session: Session, arguments: Sequence[str], image: ImageFacts) -> list[str]:
    """The command of a session, whose folder and caches can be used and whose older result is removed.

    Raises:
        WrongArguments: the image does not have the session, or the folder of receipts cannot be written.
        NoEnvironment: as `use_caches`.
        OSError: the disk is full.
    """
    if session not in image.sessions:
        raise WrongArguments(
            f"{session.name} is a session of the image for {session.target or 'a GPU'}, and {image.name} is for "
            f"{image.target}. Next step: run another image; `megacpp --help` lists the sessions of this image."
        )
    if session.name not in ("prewarm", "jit_verify"):  # they copy sealed caches, and links would lead out of them
        use_caches()
    folder, mounted = choose_place()
    words = [*_CLI, *(word.format(target=image.target) for word in session.verb)]
    if session.leaves == "receipts":
        words += ["--receipts", str(folder / session.name)]
        if not mounted:
            _say(
                f"nothing is mounted at {MOUNT}: receipts go to {folder} and end with the container. Next step, to "
                f'keep them: `docker run --user "$(id -u):$(id -g)" -v "$PWD/receipts:{MOUNT}" ...`'
            )
    elif session.leaves == "result" and mounted and not {"--list", "--help", "-h"} & {*arguments}:
        result = folder / f"{session.name}.json"
        result.unlink(missing_ok=True)  # a session that is killed leaves no result of another run
        words += ["--json", str(result)]
    return [*words, *arguments]  # of an option that is given twice, the caller's is the last


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
    except Exception as fault:  # Python would end with 1, which says that a release broke
        traceback.print_exc()
        _say(f"unexpected {type(fault).__name__}: {fault}")
        return int(Exit.INFRASTRUCTURE)


if __name__ == "__main__":
    sys.exit(run_main(sys.argv[1:]))
