"""What an image runs: `docker run IMAGE SESSION [ARGUMENTS]`, as `python -m megacpp_validate.images.entry`.

Why a session cannot run here is said before it starts. Process 1 passes signals on, waits for orphans, and ends as the
session does. Whoever mounts a folder of receipts owns what is written there.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Final

from ..errors import Exit, InfrastructureFailed, NoEnvironment, ToolError, WrongArguments
from ..evidence.whole_file import write_whole
from ..jitcache.layout import ARCH_VARIABLE, MODE_VARIABLE, NVRTC, ROOT_VARIABLE, arch_folder, cache_variables
from ..process import run_command

MOUNT: Final = Path("/receipts")

_PYTHON: Final = (sys.executable, "-P", "-m")
_MODULE: Final = "megacpp_validate.images.entry"
_CLI: Final = "megacpp_validate.cli"
_VERSION: Final = re.compile(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)")
_IMAGES: Final = {"sm_90": "h200", "sm_100": "b200", "sm_121": "gb10"}
_FORWARDED: Final = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
)  # fmt: skip


class Needs(StrEnum):
    """What a session needs of the machine."""

    NOTHING = "nothing"
    GPU = "gpu"  # the one of the image's target
    ITS_TARGET = "its-target"  # a GPU where the image's target has one


class Leaves(StrEnum):
    """What a session leaves in the folder of receipts, beside the record of the run."""

    RECEIPTS = "receipts"  # a file a cell, through the verb's option --receipts
    RESULT = "result"  # its result, as JSON
    NOTHING = "nothing"


@dataclass(frozen=True)
class Session:
    """A session: the verb that it calls with the image's target, for every image or for one target alone.

    Attributes:
        targets: how the target is given: "own" by the image, another by the verb here, empty for none.
        copies_caches: the verb makes its own copy of the image's JIT caches, which it reads as they were sealed.
    """

    name: str
    verb: tuple[str, ...]
    needs: Needs
    leaves: Leaves
    help: str
    target: str = ""
    names_target: bool = False
    copies_caches: bool = False


def _parity(name: str, target: str, shown: str) -> Session:
    verb = ("parity", "--target", target)
    return Session(name, verb, Needs.GPU, Leaves.RECEIPTS, f"every bridge module on {shown}", target)


_NONE, _GPU, _OWN = Needs.NOTHING, Needs.GPU, Needs.ITS_TARGET
SESSIONS: Final = (
    Session("doctor", ("doctor",), _NONE, Leaves.RESULT, "what the image loads, and what that breaks", "", True),
    Session(
        "te_canary", ("te-canary",), _NONE, Leaves.RESULT, "which bridge module the step OLD NEW breaks; no network"
    ),
    Session(
        "cpu_parity", ("parity", "--target", "cpu"), _NONE, Leaves.RECEIPTS, "native layers against fp64 references"
    ),
    _parity("h200_parity", "h200", "an H200"),
    _parity("b200_parity", "b200", "a B200"),
    _parity("gb10_compat", "gb10", "a GB10"),
    Session("fp8", ("fp8",), _GPU, Leaves.RECEIPTS, "FP8: recipes, ownership, backends, the loss gate", "", True),
    Session("moe_smoke", ("moe-smoke",), _OWN, Leaves.RECEIPTS, "the hybrid model trained on 1 to 4 devices", "", True),
    Session("fp8_policy", ("fp8-policy",), _NONE, Leaves.NOTHING, "which presets may run in low precision, and why"),
    Session("loss_gate", ("loss-gate",), _NONE, Leaves.NOTHING, "the verdict on a folder of curves"),
    Session("prewarm", ("prewarm",), _GPU, Leaves.NOTHING, "the JIT caches filled on this GPU", "", True),
    Session(
        "jit_verify", ("jit-verify",), _GPU, Leaves.RECEIPTS, "a sealed cache triggers no compilation", "", True, True
    ),
)


def find_session(name: str) -> Session | None:
    """The session of a name; a dash is as good as an underscore."""
    return next((session for session in SESSIONS if session.name == name.replace("-", "_")), None)


@dataclass(frozen=True)
class ImageFacts:
    """What an image says of itself in its environment; `digest` is known to the caller of the container alone."""

    name: str
    target: str
    arch: str
    driver_least: str
    lock_hash: str
    digest: str


def read_image(variables: Mapping[str, str]) -> ImageFacts:
    """What the variables of a container say."""
    names = ("IMAGE", "TARGET", "ARCH", "DRIVER_LEAST", "LOCK_HASH", "IMAGE_DIGEST")
    name, target, *rest = (variables.get(f"MEGACPP_{one}", "") for one in names)
    return ImageFacts(name or "this image", target or "cpu", *rest)


@dataclass(frozen=True)
class Machine:
    """What a container can see: the kernel's NVIDIA driver, device files, and its GPUs by name and architecture."""

    driver: str = ""
    devices: bool = False
    gpus: tuple[tuple[str, str], ...] = ()


def read_machine(root: Path = Path("/"), program: str = "nvidia-smi") -> Machine:
    """Look at the machine; what is missing is the answer, and raises nothing.

    `nvidia-smi` is in a container with the capability `utility`; without it the kernel alone names its driver.
    """
    driver, gpus = "", tuple[tuple[str, str], ...]()
    with suppress(OSError):
        found = _VERSION.search((root / "proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace"))
        driver = found[1] if found else ""
    with suppress(OSError):
        words = [program, "--query-gpu=driver_version,compute_cap,name", "--format=csv,noheader"]
        asked = run_command(words, limit_s=60.0, apart=True)
        rows = [line.split(", ", 2) for line in asked.words.splitlines() if line.count(", ") >= 2]
        gpus = tuple((name, f"sm_{version.replace('.', '')}") for _, version, name in rows) if not asked.code else ()
        driver = rows[0][0] if gpus else driver
    return Machine(driver, any((root / "dev").glob("nvidia[0-9]*")), gpus)


def require_session(session: Session, image: ImageFacts, machine: Machine) -> None:
    """Refuse a session that cannot run in this image, or on this machine.

    Raises:
        WrongArguments: it is a session of another image.
        NoEnvironment: the machine, or this container, has not the GPU or the driver.
    """
    if session.target and session.target != image.target:
        raise WrongArguments(
            f"{session.name} is a session of the image for {session.target}, and {image.name} is for {image.target}. "
            f"Next step: run it in the image for {session.target}; `megacpp --help` lists what this one has."
        )
    if session.needs is Needs.NOTHING or (session.needs is Needs.ITS_TARGET and not image.arch):
        return
    if not image.arch:
        raise WrongArguments(
            f"{session.name} needs a GPU, and {image.name} is made for machines without one. Next step: run it in the "
            "image of a GPU target."
        )
    others = [gpu for gpu in machine.gpus if gpu[1] != image.arch]
    if not machine.driver and not machine.devices:
        raise NoEnvironment(
            f"no GPU: {session.name} needs one ({image.arch}), and the kernel of this machine has no NVIDIA driver "
            "loaded. Likely cause: a machine without a GPU, or its driver is not installed. Next step: `nvidia-smi` on "
            f"the host must list the GPU; then `docker run --gpus all ... {session.name}`."
        )
    if machine.driver and _is_older(machine.driver, image.driver_least):
        raise NoEnvironment(
            f"the NVIDIA driver of this machine is {machine.driver}, and the CUDA of {image.name} needs "
            f"{image.driver_least} or newer. Next step: update the driver of the host; an image cannot bring its own."
        )
    if not machine.gpus:
        raise NoEnvironment(
            f"no GPU in this container: the machine has the NVIDIA driver {machine.driver or '(unknown)'}, and "
            "`nvidia-smi` lists no GPU here. Likely cause: --gpus is missing, NVIDIA_DRIVER_CAPABILITIES leaves "
            f"`utility` out, or the GPU has fallen off the bus. Next step: `docker run --gpus all ... {session.name}`, "
            "and `nvidia-smi` on the host; if it says `could not select device driver`, install the NVIDIA Container "
            "Toolkit."
        )
    if others:
        shown, arch = ", ".join(dict.fromkeys(f"{name} ({arch})" for name, arch in others)), others[0][1]
        step = f"take the image for {_IMAGES[arch]} ({arch})" if arch in _IMAGES else f"no image is made for {arch}"
        raise NoEnvironment(
            f"another architecture: {image.name} is for {image.arch}, and here is {shown}. Likely cause: the image of "
            f"another target. Next step: {step}; or hand over the right GPUs alone, with --gpus device=N."
        )


def _is_older(driver: str, least: str) -> bool:
    own, other = ([int(part) for part in text.split(".") if part.isdigit()] for text in (driver, least))
    return bool(least) and own < other


@dataclass(frozen=True)
class Place:
    """Where receipts go; `mounted`: they outlive the container."""

    folder: Path
    mounted: bool


def become_owner(folder: Path) -> str:
    """As root, become whoever owns a mounted folder, so that what is written there is theirs; what was done."""
    try:
        owner = folder.stat()
        if os.geteuid() != 0 or owner.st_uid == 0 or not os.path.ismount(folder):
            return ""
        os.setgroups([])
        os.setgid(owner.st_gid)
        os.setuid(owner.st_uid)
    except OSError:
        return ""  # a container that may not change its user stays what it is
    return f"running as {owner.st_uid}:{owner.st_gid}, who owns {folder}"


def choose_place(mount: Path = MOUNT) -> Place:
    """The mounted folder, or a folder of the container where nothing is mounted.

    Raises:
        WrongArguments: it cannot be written.
        InfrastructureFailed: its disk is full.
    """
    mounted = os.path.ismount(mount)
    folder = mount if mounted else Path(tempfile.gettempdir()) / "receipts"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return Place(folder, mounted)
    except OSError as fault:
        full = fault.errno in (errno.ENOSPC, errno.EDQUOT)
        raise (InfrastructureFailed if full else WrongArguments)(
            f"receipts cannot be written to {folder}: {fault.strerror}. Likely cause: its disk is full, it is mounted "
            f"read-only, or it belongs to somebody else than {os.geteuid()}:{os.getegid()}, as whom this container "
            f'runs. Next step: make room; or `docker run --user "$(id -u):$(id -g)" -v "$PWD/receipts:{MOUNT}" ...` '
            "without `:ro`, with a folder that this user can write."
        ) from fault


def make_room(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables with JIT caches that can be written: the image's own, or a copy of links to its files.

    A cache that is found and cannot be written fails a compiler at its first miss. Links cost no memory, so that a
    folder in `/tmp` holds only what is compiled anew.

    Raises:
        NoEnvironment: there is no room for temporary files, or the caches may not be read, and everything would be
            compiled anew as if they were not there.
    """
    try:
        new = Path(tempfile.gettempdir()) / "megacpp-jit"
        root, arch = variables.get(ROOT_VARIABLE, ""), variables.get(ARCH_VARIABLE, "")
        if not root or not arch:
            return dict(variables)
        kept = arch_folder(Path(root), arch)
        if Path(root).is_dir() and not os.access(root, os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), root)
        if not kept.is_dir() or os.access(kept, os.W_OK):
            return dict(variables)
        for folder, _, files in os.walk(kept, onerror=_raise):
            here = arch_folder(new, arch) / Path(folder).relative_to(kept)
            here.mkdir(parents=True, exist_ok=True)
            for name in files:
                file = Path(folder) / name
                if not os.access(file, os.R_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
                if not (here / name).exists():
                    (here / name).symlink_to(file)
        return {**variables, **cache_variables(new, arch, nvrtc=variables.get(MODE_VARIABLE) == NVRTC)}
    except OSError as fault:
        raise NoEnvironment(
            f"the JIT caches cannot be read, or there is no room for temporary files: {fault}. Likely cause: the "
            f"mounted caches are closed to {os.geteuid()}:{os.getegid()}, as whom this container runs; or its root is "
            "read-only and nothing is mounted at /tmp, or /tmp is full. Next step: `chmod -R a+rX` of the caches; "
            "`docker run --read-only --tmpfs /tmp ...`."
        ) from fault


def _raise(fault: OSError) -> None:
    raise fault


def run_child(words: Sequence[str], variables: Mapping[str, str], *, verb: bool = True) -> int:
    """Run a command to its end, as process 1 must: signals reach it, and orphans are waited for.

    Args:
        verb: an exit code of the design is wanted; else the command's own, or 128 and the signal that ended it.

    Raises:
        OSError: it cannot be started.
    """
    # What a terminal sends for its keys reaches the child without us: twice would cut short what it does at the first.
    keys = {signal.SIGINT, signal.SIGQUIT} if os.isatty(0) else set()
    received: list[int] = []
    pid = 0

    def forward(number: int, _frame: object) -> None:
        received.append(number)
        if pid and number not in keys:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        pid = os.posix_spawnp(words[0], list(words), dict(variables), setsigdef=_FORWARDED)
        for number in tuple(received):  # that came before there was a child
            os.kill(pid, number)
        ended, status = os.wait()
        while ended != pid:
            ended, status = os.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code
    if any(number not in (signal.SIGUSR1, signal.SIGUSR2) for number in received):
        return Exit.INTERRUPTED
    return _explain_killed(-code) if verb else 128 - code


def _explain_killed(number: int) -> int:
    """A process that is killed says nothing itself."""
    name = signal.Signals(number).name if number in {*signal.Signals} else f"signal {number}"
    _say(
        f"{name} ended the session, and no release is judged. Likely cause: for SIGKILL, memory ran out, of this "
        "container (--memory) or of the machine; for SIGSEGV and its like, compiled code crashed; else another process "
        "sent it. Next step: read the lines above, `megacpp doctor`, and start it again."
    )
    return Exit.INFRASTRUCTURE


def main(arguments: Sequence[str]) -> int:
    """Run what was asked for; the exit code is the verb's own, or that of the class of what stands in the way."""
    image = read_image(os.environ)
    name, *rest = arguments or ["--help"]
    session = find_session(name)
    if name in ("--help", "-h", "help"):
        sys.stdout.write(_render_help(image))
        return Exit.OPEN
    if name == "--health":
        return _check_health(image)
    if session is not None:
        return _run_session(session, tuple(rest), image)
    if not shutil.which(name):
        raise WrongArguments(
            f"there is no session {name!r}, and no command of that name. Next step: choose of "
            f"{', '.join(row.name for row in _list_sessions(image))}; or `megacpp --help`."
        )
    variables = make_room(os.environ)  # an image must run what it is given: other tools start their processes in it
    try:
        if os.getpid() == 1:
            return run_child([name, *rest], variables, verb=False)
        os.execvpe(name, [name, *rest], variables)  # noqa: S606 - a list of words, no shell
    except OSError as fault:
        raise WrongArguments(
            f"{name} cannot be started: {fault.strerror}. Likely cause: it is a script without an interpreter's name, "
            "or made for another machine. Next step: name the program that runs it."
        ) from fault


def _run_session(session: Session, arguments: tuple[str, ...], image: ImageFacts) -> int:
    machine = Machine() if session.needs is Needs.NOTHING else read_machine()
    require_session(session, image, machine)
    if said := become_owner(MOUNT):
        _say(said)
    variables = make_room(os.environ)
    if session.copies_caches:
        variables = dict(os.environ)
    place = choose_place()
    if not place.mounted and session.leaves is Leaves.RECEIPTS:
        _say(
            f"nothing is mounted at {MOUNT}: receipts go to {place.folder} and end with the container. Next step, to "
            f'keep them: `docker run --user "$(id -u):$(id -g)" -v "$PWD/receipts:{MOUNT}" ...`'
        )
    if {"--help", "-h"} & {*arguments}:  # a question, and no run: an earlier result stays
        return run_child([*_PYTHON, _CLI, session.verb[0], "--help"], variables)
    options = {word.partition("=")[0] for word in arguments}
    keeps = session.leaves is Leaves.RESULT and place.mounted and options.isdisjoint({"--format", "--output", "--list"})
    record, result = place.folder / f"{session.name}.run.json", place.folder / f"{session.name}.json"
    for file in (record, *([result] if keeps else [])):  # one that is killed leaves no result of another run
        _remove(file)
    started, clock = datetime.now(UTC), time.monotonic()
    words = [*_PYTHON, _CLI, *session.verb]
    if session.names_target and "--target" not in options:
        words += ["--target", image.target]
    if session.leaves is Leaves.RECEIPTS and "--receipts" not in options:
        words += ["--receipts", str(place.folder / session.name)]
    code = run_child([*words, *(["--format", "json", "--output", str(result)] if keeps else []), *arguments], variables)
    if keeps and result.is_file():
        run_child([*_PYTHON, f"{_CLI}.result_again", str(result)], variables)
    run = {
        "schema_id": "megacpp-validate/image-run/1", "session": session.name, "arguments": arguments,
        "image": asdict(image), "user": f"{os.geteuid()}:{os.getegid()}", "driver": machine.driver,
        "gpus": [f"{name} ({arch})" for name, arch in machine.gpus], "started": started.isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - clock, 2), "exit_code": int(code),
    }  # fmt: skip
    try:
        write_whole(record, json.dumps(run, indent=2, sort_keys=True) + "\n")
    except OSError as fault:
        _say(
            f"the record of this run cannot be written to {place.folder}: {fault.strerror}. Likely cause: its disk is "
            "full, or somebody removed it meanwhile. Next step: make room, or mount another folder."
        )
        return code or Exit.INFRASTRUCTURE  # a run that nobody can show later is none that went well
    return code


def _remove(file: Path) -> None:
    try:
        file.unlink(missing_ok=True)
    except OSError as fault:
        raise WrongArguments(
            f"{fault}. Next step: move what an earlier run left away, or mount another folder."
        ) from fault


def _check_health(image: ImageFacts) -> int:
    """Healthy while a session runs, which reports itself and times itself on these cores; else what doctor says."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = file.read_bytes().decode(errors="replace").split("\0")
            after = words[words.index(_MODULE) + 1 :] if _MODULE in words else []
            if after and find_session(after[0]):
                sys.stdout.write(f"the session {after[0]} runs\n")
                return Exit.OPEN
    return min(1, run_child([*_PYTHON, _CLI, "doctor", "--target", image.target], os.environ))


def _list_sessions(image: ImageFacts) -> Iterator[Session]:
    for session in SESSIONS:
        if session.target in ("", image.target) and (session.needs is not Needs.GPU or image.arch):
            yield session


def _render_help(image: ImageFacts) -> str:
    lines = [
        f"{image.name}, for the target {image.target}{f' ({image.arch})' if image.arch else ''}.",
        "",
        f'docker run --rm {"--gpus all " if image.arch else ""}--user "$(id -u):$(id -g)" '
        f'-v "$PWD/receipts:{MOUNT}" IMAGE SESSION [ARGUMENTS]',
        "",
        *(f"  {session.name:14} {session.help}" for session in _list_sessions(image)),
        "",
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
    except Exception as fault:  # Python would end with 1, which says that a release broke
        traceback.print_exc()
        _say(f"unexpected {type(fault).__name__}: {fault}")
        return int(Exit.INFRASTRUCTURE)


if __name__ == "__main__":
    sys.exit(run_main(sys.argv[1:]))
