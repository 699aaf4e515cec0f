"""A run over several hosts: each host starts its ranks and watches them, host 0 decides and judges the whole."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

from .gather import end_path
from .host_meeting import HostPlace, MeetingFailed, Wire, gather_hosts, join_hosts
from .host_ranks import HostRanks, trace_as_json, trace_from_json
from .launch import Ending, Limits, RunEnd, judge, prepare
from .rank_process import RankTrace, read_trace, reserve_port

LOOK_EVERY: Final = 0.05  # seconds
SAY_EVERY: Final = 0.5
LOST_AFTER: Final = 30.0  # without a word from a host that says one every half a second
ENDS_WITHIN: Final = 15.0  # until a host has ended its ranks and told


@contextmanager
def _stoppable() -> Iterator[list[int]]:
    """A list that gets the signal by which the launcher was asked to end."""
    asked: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - as Python calls it
        asked.append(number)

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_hosts(
    words: Sequence[str],
    place: HostPlace,
    *,
    rendezvous: tuple[str, int],
    folder: Path,
    limits: Limits,
    environment: Mapping[str, str] | None = None,
) -> RunEnd:
    """Run a module on all ranks of several hosts; to be called on each of them, with its own place.

    Args:
        words: the module, and its arguments.
        place: of this host.
        rendezvous: address of host 0 and the port where the launchers meet; the ranks meet on a free port.
        folder: of the run, on a file system that all hosts share.
        limits: of time, those of host 0 hold.
        environment: added to this process's.

    Returns:
        What became of the run; host 0 has it of all ranks, the others have its verdict and their own ranks.

    Raises:
        PortInUse: at host 0, another process has the port, or the address is no address of this host.
        MeetingFailed: a host is not there, or has another run or folder; no rank was started.
        WrongLaunch: no rank, or no time.
    """
    with _stoppable() as asked:
        if place.host > 0:
            return _follow(words, place, rendezvous, folder, limits, environment, asked)
        return _lead(words, place, rendezvous, folder, limits, environment, asked)


@dataclass
class _OtherHost:
    """What host 0 knows of another host."""

    wire: Wire
    silent: float | None = None  # as it last said; None until its ranks have joined
    traces: tuple[RankTrace, ...] | None = None
    is_stopped: bool = False

    def hear(self) -> None:
        for said in self.wire.take():
            if "traces" in said:
                self.traces = tuple(map(trace_from_json, said["traces"]))
                self.is_stopped = said["stopped"]
            elif "silent" in said:
                self.silent = said["silent"]

    @property
    def is_lost(self) -> bool:
        return self.traces is None and (self.wire.is_closed or time.monotonic() - self.wire.heard_at > LOST_AFTER)


def _lead(
    words: Sequence[str],
    place: HostPlace,
    rendezvous: tuple[str, int],
    folder: Path,
    limits: Limits,
    environment: Mapping[str, str] | None,
    asked: list[int],
) -> RunEnd:
    started = time.monotonic()
    with reserve_port(rendezvous[1], rendezvous[0]) as listening:
        prepare(place.world, folder, limits)
        for old in folder.glob("host-*"):
            old.unlink()
        end_path(folder).unlink(missing_ok=True)
        wires = gather_hosts(listening, place, folder, limits.joining)
    with reserve_port(0, rendezvous[0]) as free:
        endpoint = f"{rendezvous[0]}:{free.getsockname()[1]}"
    others, joined_at = {host: _OtherHost(wire) for host, wire in wires.items()}, time.monotonic()
    own = HostRanks(words, place, folder, endpoint, limits, environment)
    try:
        for other in others.values():
            other.wire.send({"go": {"endpoint": endpoint}})
        ending = _watch(own, others, limits, joined_at, asked)
        for other in others.values():
            other.wire.send({"end": ending})
        if ending in ("hung", "late"):
            own.ask_where()
            time.sleep(4 * LOOK_EVERY)  # the stacks are written by then
    finally:
        own.end()
    _await_traces(others)
    end = _judge_hosts(ending, own, others, place, folder, limits, time.monotonic() - started)
    for other in others.values():
        other.wire.send({"over": {"ending": end.ending, "culprits": end.culprits, "words": end.words}})
        other.wire.close()
    return end


def _watch(
    own: HostRanks, others: Mapping[int, _OtherHost], limits: Limits, started: float, asked: list[int]
) -> Ending:
    """Until the run is over or is to be: how it ended. `started` is when the ranks did."""
    failed_at = 0.0
    while True:
        for other in others.values():
            other.hear()
        code, now = own.look(), time.monotonic()
        told = [other.traces for other in others.values()]
        if asked or any(other.is_stopped for other in others.values()):
            return "stopped"
        is_over = code is not None and None not in told
        if is_over and code == 0 and all(trace.end.code == 0 for traces in told for trace in traces or ()):
            return "done"
        if code or any(other.is_lost for other in others.values()) or any(
            trace.end.code != 0 for traces in told for trace in traces or ()
        ):  # fmt: skip
            failed_at = failed_at or now
            if is_over or now - failed_at > limits.grace:
                return "died"
        else:
            ages = [own.silent_for()] if code is None else []
            ages += [
                None if other.silent is None else other.silent + now - other.wire.heard_at
                for other in others.values()
                if other.traces is None
            ]
            known = [age for age in ages if age is not None]
            if len(known) < len(ages):
                silent = now - started > limits.joining
            else:
                silent = min(known, default=0.0) > limits.silent
            if silent or now - started > limits.whole:
                return "hung" if silent else "late"
        time.sleep(LOOK_EVERY)


def _await_traces(others: Mapping[int, _OtherHost]) -> None:
    until = time.monotonic() + ENDS_WITHIN
    while time.monotonic() < until and any(
        other.traces is None and not other.wire.is_closed for other in others.values()
    ):
        for other in others.values():
            other.hear()
        time.sleep(LOOK_EVERY)


def _judge_hosts(
    ending: Ending,
    own: HostRanks,
    others: Mapping[int, _OtherHost],
    place: HostPlace,
    folder: Path,
    limits: Limits,
    seconds: float,
) -> RunEnd:
    traces = [*own.traces()]
    lost = [host for host, other in others.items() if other.traces is None]
    for host, other in sorted(others.items()):
        gone = (read_trace(folder, rank, None) for rank in place.ranks_of(host))
        traces += other.traces if other.traces is not None else gone
    if lost and ending != "stopped":
        names = ", ".join(place.words(host) for host in lost)
        happened = (
            f"{names} was lost: its launcher is gone or cannot be reached, and the others were ended. Likely cause: "
            "the host or its launcher was ended (memory, a reboot, the scheduler). Next step: see its system log"
        )
        at_fault = [rank for host in lost for rank in place.ranks_of(host)]
        return judge("died", traces, limits, seconds, at_fault=at_fault, happened=happened)
    if ending == "died" and not any(trace.end.code for trace in traces):  # torchrun itself, before a rank was there
        happened = f"torchrun ended before its ranks did: see {own.log()} and those beside it"
        return judge(ending, traces, limits, seconds, happened=happened)
    return judge(ending, traces, limits, seconds)


def _follow(
    words: Sequence[str],
    place: HostPlace,
    rendezvous: tuple[str, int],
    folder: Path,
    limits: Limits,
    environment: Mapping[str, str] | None,
    asked: list[int],
) -> RunEnd:
    started = time.monotonic()
    wire, go = join_hosts(rendezvous, place, folder, limits.joining)
    own = HostRanks(words, place, folder, go["endpoint"], limits, environment)
    try:
        told = _report(own, wire, asked)
        if told in ("hung", "late"):
            own.ask_where()
            time.sleep(4 * LOOK_EVERY)
    finally:
        own.end()
    traces = own.traces()
    wire.send({"traces": [trace_as_json(trace) for trace in traces], "stopped": bool(asked)})
    over = _await_verdict(wire, limits, asked)
    wire.close()
    ranks, seconds = tuple(trace.end for trace in traces), time.monotonic() - started
    if over is None:
        raise MeetingFailed(
            f"host 0 was lost after {seconds:.0f} s, and the ranks of {place.words(place.host)} were ended. Likely "
            "cause: its launcher was ended. Next step: see what host 0 said."
        )
    return RunEnd(over["ending"], tuple(over["culprits"]), over["words"], ranks, seconds)


def _report(own: HostRanks, wire: Wire, asked: list[int]) -> str:
    """Tell host 0 how long the ranks have been silent, until they or host 0 end it; how, if host 0 does."""
    said_at = 0.0
    while own.look() is None and not asked and not wire.is_closed:
        for said in wire.take():
            if "end" in said:
                return str(said["end"])
        if time.monotonic() - said_at > SAY_EVERY:
            said_at = time.monotonic()
            wire.send({"silent": own.silent_for()})
        time.sleep(LOOK_EVERY)
    return ""


def _await_verdict(wire: Wire, limits: Limits, asked: list[int]) -> dict[str, Any] | None:
    """Host 0's verdict, once all hosts are done; None where it is gone."""
    until = time.monotonic() + limits.whole + ENDS_WITHIN
    while time.monotonic() < until:
        for said in wire.take():
            if "over" in said:
                return dict(said["over"])
        if wire.is_closed or len(asked) > 1:
            return None
        time.sleep(4 * LOOK_EVERY)
    return None
