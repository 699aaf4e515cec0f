"""Hosts meet before any rank starts: host 0 listens, the others come to it, and all stay connected for the run.

Host 0 names who does not come, refuses hosts that were started for another run, and has each host show that it sees
the same folder: a token goes over the connection one way and through the folder the other way. The connection is also
how a host learns at once that another one is gone. One JSON object a line, standard library only.
"""

from __future__ import annotations

import json
import secrets
import select
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ...evidence.whole_file import write_whole
from ..errors import TrainingError

SHARED_WITHIN: Final = 15.0  # seconds until a file written on one host is seen on another; NFS keeps names for 3 to 60
LOOK_EVERY: Final = 0.05
HELLO: Final = "megacpp-host"


class MeetingFailed(TrainingError, RuntimeError):
    """Hosts that did not come together; no rank was started."""


@dataclass(frozen=True)
class HostPlace:
    """One host of a run.

    Attributes:
        host: its number, from 0; its ranks are host * ranks_per_host and those after it.
        hosts: how many there are.
        ranks_per_host: on each.
        names: of all hosts, where the scheduler told them; empty otherwise.
    """

    host: int
    hosts: int
    ranks_per_host: int
    names: tuple[str, ...] = ()

    @property
    def world(self) -> int:
        """Ranks of all hosts."""
        return self.hosts * self.ranks_per_host

    def ranks_of(self, host: int) -> range:
        """Ranks of a host."""
        return range(host * self.ranks_per_host, (host + 1) * self.ranks_per_host)

    def words(self, host: int) -> str:
        """For a message: "host 1 (node-b)"."""
        return f"host {host} ({self.names[host]})" if host < len(self.names) else f"host {host}"


class Wire:
    """A connection between two hosts that carries JSON objects.

    Args:
        connection: that is open.

    Attributes:
        is_closed: whether the other side is gone.
        heard_at: when something last came, by the monotonic clock.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._rest = connection, b""
        connection.settimeout(5.0)
        self.is_closed, self.heard_at = False, time.monotonic()

    def send(self, value: Mapping[str, Any]) -> None:
        """Send an object; `take` tells of a side that is gone, once all that it said is taken."""
        with suppress(OSError):
            self._connection.sendall(json.dumps(value).encode() + b"\n")

    def take(self) -> list[dict[str, Any]]:
        """All objects that have come; does not wait."""
        while not self.is_closed and select.select([self._connection], [], [], 0)[0]:
            try:
                came = self._connection.recv(1 << 16)
            except OSError:
                came = b""
            self.is_closed = not came
            self._rest += came
        *lines, self._rest = self._rest.split(b"\n")
        found: list[dict[str, Any]] = []
        for line in lines:
            with suppress(ValueError):
                found += [value] if isinstance(value := json.loads(line), dict) else []
        self.heard_at = time.monotonic() if found else self.heard_at
        return found

    def close(self) -> None:
        """Let go of it, once the other side has had the time to take what was sent: unread words would undo it."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
        until = time.monotonic() + 1.0
        while not self.is_closed and time.monotonic() < until:
            self.take()
            time.sleep(0.01)
        self.is_closed = True
        self._connection.close()


def token_path(folder: Path, host: int) -> Path:
    """Where a host shows that it sees the folder."""
    return folder / f"host-{host}.token"


def gather_hosts(listening: socket.socket, place: HostPlace, folder: Path, seconds: float) -> dict[int, Wire]:
    """At host 0: wait for every other host, and see that each has the same run and folder.

    Args:
        listening: socket at which they come.
        place: of this host.
        folder: of the run.
        seconds: that they have.

    Returns:
        Host number -> its connection.

    Raises:
        MeetingFailed: a host did not come (named), is one of another run, or has another folder. All that came know.
    """
    token, until = secrets.token_hex(16), time.monotonic() + seconds
    write_whole(token_path(folder, 0), token)
    listening.settimeout(LOOK_EVERY)
    came: list[Wire] = []
    greeted: dict[int, Wire] = {}
    ready: set[int] = set()
    try:
        while len(ready) < place.hosts - 1:
            with suppress(TimeoutError):
                came.append(Wire(listening.accept()[0]))
            for wire in [one for one in came if one not in greeted.values()]:
                _greet(wire, place, greeted, token)
            for host, wire in greeted.items():
                if host not in ready and _is_ready(host, wire, place, folder, token, seconds):
                    ready.add(host)
            absent = [place.words(host) for host in range(1, place.hosts) if host not in greeted]
            if time.monotonic() > until:
                raise _too_late(absent or [place.words(host) for host in greeted if host not in ready], seconds)
    except MeetingFailed as fault:
        for wire in came:
            wire.send({"refused": str(fault)})
            wire.close()
        raise
    return greeted


def _greet(wire: Wire, place: HostPlace, greeted: dict[int, Wire], token: str) -> None:
    for said in wire.take():
        if said.get("hello") != HELLO:
            continue  # whoever else knocks at a port
        host, theirs = said["host"], (said["hosts"], said["ranks_per_host"])
        if theirs != (place.hosts, place.ranks_per_host) or not 0 < host < place.hosts or host in greeted:
            why = f"{place.words(host)} is there already" if host in greeted else "those numbers are not this run's"
            raise MeetingFailed(
                f"{said['name']} came as host {host} of {theirs[0]} with {theirs[1]} rank(s) each, and host 0 was "
                f"started for {place.hosts} with {place.ranks_per_host}: {why}. Likely cause: another command on that "
                "host, or the same --host-rank twice. Next step: start the same command on each; no rank was started."
            )
        greeted[host] = wire
        wire.send({"token": token})


def _is_ready(host: int, wire: Wire, place: HostPlace, folder: Path, token: str, seconds: float) -> bool:
    for said in wire.take():
        if said.get("sees") is True and _sees(folder, host, token, seconds):
            return True
        if "sees" in said:
            who = (
                f"{place.words(host)} does not see what host 0 writes"
                if not said["sees"]
                else (f"host 0 does not see what {place.words(host)} writes")
            )
            raise MeetingFailed(
                f"{who} in {folder} ({said['folder']} there), after {_shared_within(seconds):g} s. Likely cause: the "
                "folder is on a disk of each host, not shared between them. Next step: pass a --folder on a file "
                "system that they share; no rank was started."
            )
    if wire.is_closed:
        raise MeetingFailed(
            f"{place.words(host)} came and went before the ranks started. Next step: see what it said; no rank was "
            "started."
        )
    return False


def _sees(folder: Path, host: int, token: str, seconds: float) -> bool:
    until = time.monotonic() + _shared_within(seconds)
    while time.monotonic() < until:
        with suppress(OSError):
            list(folder.iterdir())  # a listing has NFS look again
            if token_path(folder, host).read_text(encoding="utf-8") == token:
                return True
        time.sleep(LOOK_EVERY)
    return False


def _shared_within(seconds: float) -> float:
    return min(SHARED_WITHIN, seconds / 2)  # of those that hosts have to join: it is to be said within them


def _too_late(absent: Sequence[str], seconds: float) -> MeetingFailed:
    return MeetingFailed(
        f"{', '.join(absent)} did not join within {seconds:g} s. Likely cause: the launcher was not started there, or "
        "the rendezvous address cannot be reached from there (name, firewall). Next step: start the same command "
        "there; no rank was started."
    )


def join_hosts(address: tuple[str, int], place: HostPlace, folder: Path, seconds: float) -> tuple[Wire, dict[str, Any]]:
    """At every other host: come to host 0, and wait until it starts the run.

    Args:
        address: of host 0, and the port.
        place: of this host.
        folder: of the run.
        seconds: until host 0 must have started it.

    Returns:
        The connection, and what host 0 said to start with.

    Raises:
        MeetingFailed: host 0 is not there, refuses, or goes.
    """
    until = time.monotonic() + seconds
    wire = Wire(_connect(address, until, seconds))
    numbers = {"host": place.host, "hosts": place.hosts, "ranks_per_host": place.ranks_per_host}
    wire.send({"hello": HELLO, "name": socket.gethostname(), **numbers})
    while time.monotonic() < until + SHARED_WITHIN:  # host 0 is the one to say who is late
        for said in wire.take():
            if "token" in said:
                is_seen = _sees(folder, 0, said["token"], seconds)
                if is_seen:
                    write_whole(token_path(folder, place.host), said["token"])
                wire.send({"sees": is_seen, "folder": f"{socket.gethostname()}:{folder}"})
            elif "refused" in said:
                raise MeetingFailed(said["refused"])
            elif "go" in said:
                return wire, said["go"]
        if wire.is_closed:
            break
        time.sleep(LOOK_EVERY)
    raise MeetingFailed(
        f"host 0 at {address[0]}:{address[1]} went before the run started. Next step: see what it said; no rank was "
        "started here."
    )


def _connect(address: tuple[str, int], until: float, seconds: float) -> socket.socket:
    while True:
        try:
            return socket.create_connection(address, timeout=5.0)
        except OSError as fault:
            if time.monotonic() > until:
                raise MeetingFailed(
                    f"host 0 did not answer at {address[0]}:{address[1]} within {seconds:g} s: {fault}. Likely cause: "
                    "the launcher was not started there, or its name or port cannot be reached from here. Next step: "
                    "start the same command on host 0; no rank was started here."
                ) from fault
        time.sleep(2 * LOOK_EVERY)
