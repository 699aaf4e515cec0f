"""Starts one command, and outlives whoever asked for it just long enough to end it.

    python -I -S guard.py DESCRIPTOR

A tool that is killed outright (kill -9, the memory killer) ends nothing that it has started. So each process is
started by a guard of its own. Both hold one end of a socket: the guard's end closes when the tool is gone, by whatever
cause, and then the command dies with its whole process group; a container, which outlives its client, dies by the
command that ends it. The same close is how a tool that lives says that time is up.

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
from contextlib import suppress
from typing import BinaryIO

_ENDS_LIMIT_S = 30.0
WHERE = b"where\n"  # asks the command where it hangs: Python's faulthandler answers SIGABRT with its stacks


def main() -> None:
    """One line in says what to start, one line out says how it ended."""
    with socket.socket(fileno=int(sys.argv[1])) as line, line.makefile("rb") as said:
        first = said.readline()
        if not first.endswith(b"\n"):
            return None  # whoever asked was gone before it had said what
        asked = json.loads(first)
        try:
            process = subprocess.Popen(asked["words"], env=asked["variables"], start_new_session=True)
        except OSError as fault:
            return _answer(line, {"error": [fault.errno, fault.strerror, fault.filename]})
        threading.Thread(target=_listen, args=(said, process), daemon=True).start()
        code = process.wait()
        _kill_group(process.pid)  # what it started: TE's import itself starts shells, which would keep running
        if code and asked["ends"]:
            _end(asked["ends"], asked["variables"])
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


def _end(words: list[str], variables: dict[str, str]) -> None:
    with suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(words, env=variables, stdin=subprocess.DEVNULL, timeout=_ENDS_LIMIT_S, check=False)


def _answer(line: socket.socket, value: dict[str, object]) -> None:
    with suppress(OSError):  # nobody is there any more
        line.sendall(json.dumps(value).encode() + b"\n")


if __name__ == "__main__":
    main()
