"""Starts one command, and outlives whoever asked for it just long enough to end it.

    python -I -S guard.py DESCRIPTOR

A tool that is killed outright (kill -9, the memory killer) ends nothing that it has started. So each process is
started by a guard of its own. Both hold one end of a socket: the guard's end closes when the tool is gone, by whatever
cause, and then the command dies with its whole process group; a container, which outlives its client, dies by the
command that ends it. The same close is how a tool that lives says that time is up.

What left that group (a daemon, a worker with a session of its own) falls to the guard when its parent ends, and is
killed when the command ends. Should the guard itself be killed, the kernel kills the command. Both are of Linux alone.

A script of the standard library: it is started by path, with nothing of this project on its own path.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

_CLEANUP_LIMIT_S = 30.0
_GONE_LIMIT_S = 2.0  # what is killed and not gone by then sleeps in the kernel
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
WHERE = b"where\n"  # asks the command where it hangs: Python's faulthandler answers SIGABRT with its stacks


def main() -> None:
    """One line in says what to start, one line out says how it ended."""
    with socket.socket(fileno=int(sys.argv[1])) as line, line.makefile("rb") as said:
        first = said.readline()
        if not first.endswith(b"\n"):
            return None  # whoever asked was gone before it had said what
        asked = json.loads(first)
        _control(_PR_SET_CHILD_SUBREAPER, 1)
        try:
            process = subprocess.Popen(
                asked["words"],
                env=asked["variables"],
                start_new_session=True,
                preexec_fn=_die_with_guard,  # noqa: PLW1509 - no thread runs yet
            )
        except OSError as fault:
            return _answer(line, {"error": [fault.errno, fault.strerror, fault.filename]})
        threading.Thread(target=_listen, args=(said, process), daemon=True).start()
        code = process.wait()
        _kill_group(process.pid)  # what it started: TE's import itself starts shells, which would keep running
        _kill_children()
        if code and asked["cleanup"]:
            _clean_up(asked["cleanup"], asked["variables"])
        _answer(line, {"code": code})
        os._exit(0)  # the listener sleeps in a read


def _listen(said: BinaryIO, process: subprocess.Popen[bytes]) -> None:
    for request in said:
        if request == WHERE and process.returncode is None:
            process.send_signal(signal.SIGABRT)
    if process.returncode is None:
        _kill_group(process.pid)


def _kill_group(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _die_with_guard() -> None:
    """In the command, before it is that: the kernel kills it when the guard dies."""
    _control(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _control(option: int, value: int) -> None:
    """prctl(2), where there is one."""
    with suppress(ImportError, AttributeError, OSError):
        import ctypes  # a Python can be built without

        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def _kill_children() -> None:
    """Kill what has become a child of the guard, and what becomes one by that."""
    until = time.monotonic() + _GONE_LIMIT_S
    while (children := list(_find_children())) and time.monotonic() < until:
        for child in children:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def _find_children() -> Iterator[int]:
    """Processes whose parent this is."""
    for stat in Path("/proc").glob("[0-9]*/stat"):  # none where there is no /proc
        with suppress(OSError):
            if int(stat.read_bytes().rpartition(b")")[2].split()[1]) == os.getpid():
                yield int(stat.parent.name)


def _clean_up(words: list[str], variables: dict[str, str]) -> None:
    with suppress(OSError, subprocess.TimeoutExpired):
        # What it has to say, that nothing is left for instance, is none of the command's last words.
        quiet = subprocess.DEVNULL
        subprocess.run(
            words, env=variables, stdin=quiet, stdout=quiet, stderr=quiet, timeout=_CLEANUP_LIMIT_S, check=False
        )


def _answer(line: socket.socket, value: dict[str, object]) -> None:
    with suppress(OSError):  # nobody is there any more
        line.sendall(json.dumps(value).encode() + b"\n")


if __name__ == "__main__":
    main()
