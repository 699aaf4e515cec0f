"""Starts one command, and outlives the tool that wants it just long enough to end it.

    python -I -S guard.py DESCRIPTOR

A tool that is killed outright (kill -9, the memory killer) ends nothing that it has started. So each process is
started by a guard of its own. Both hold one end of a socket: the guard's end closes when the tool is gone, by whatever
cause, and then the command dies with its whole process group, and its container by a cleanup command. The same close
is how a tool that lives says that time is up. The guard ends as its command did: by the same exit status or signal.

What left that group (a daemon, a worker with a session of its own) falls to the guard when its parent ends, and is
killed when the command ends. Should the guard itself be killed, the kernel kills the command. Both are of Linux alone.

A script of the standard library: it is started by path, with nothing of this project on its own path.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

_GONE_LIMIT_S = 2.0  # what is killed and not gone by then sleeps in the kernel
PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def main() -> None:
    """Start what the first line says; a start that fails is answered with a line."""
    line = socket.socket(fileno=int(sys.argv[1]))
    received = line.makefile("rb")
    first = received.readline()
    if not first.endswith(b"\n"):
        return  # the tool was gone before its order was whole
    order = json.loads(first)
    control_process(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        process = subprocess.Popen(
            order["words"],
            env=order["variables"],
            start_new_session=True,
            preexec_fn=lambda: control_process(PR_SET_PDEATHSIG, signal.SIGKILL),  # noqa: PLW1509 - no thread runs yet
        )
    except OSError as fault:
        line.sendall(json.dumps([fault.errno, fault.strerror, fault.filename]).encode())
        return
    threading.Thread(target=_listen, args=(received, process), daemon=True).start()
    code = process.wait()
    _kill(os.killpg, process.pid)  # what it started: TE's import itself starts shells, which would keep running
    _kill_children()
    if code and order["cleanup"]:  # docker, which is slow under load
        with suppress(OSError, subprocess.SubprocessError):
            subprocess.run(order["cleanup"], env=order["variables"], capture_output=True, timeout=30, check=False)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)  # the listener sleeps in a read


def _listen(received: BinaryIO, process: subprocess.Popen[bytes]) -> None:
    """Each line asks the command where it hangs: Python's faulthandler answers SIGABRT with its stacks."""
    for _ in received:
        if process.returncode is None:
            process.send_signal(signal.SIGABRT)
    if process.returncode is None:
        _kill(os.killpg, process.pid)


def _kill(kill: object, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        kill(number, signal.SIGKILL)  # type: ignore[operator]


def control_process(option: int, value: int) -> None:
    """prctl(2), where there is one."""
    with suppress(ImportError, AttributeError, OSError):
        import ctypes  # a Python can be built without

        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def _kill_children() -> None:
    """Kill what has become a child of the guard, and what becomes one by that."""
    until = time.monotonic() + _GONE_LIMIT_S
    while (children := _find_children()) and time.monotonic() < until:
        for child in children:
            _kill(os.kill, child)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def _find_children() -> list[int]:
    """Children of this process; none where there is no /proc."""
    lists = Path("/proc/self/task").glob("*/children")
    return [int(child) for children in lists for child in children.read_text().split()]


if __name__ == "__main__":
    main()
