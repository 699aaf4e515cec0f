"""Ranks of gloo for tests: real processes, forked from a server that has imported torch once."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

SECONDS = 40.0

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "torch._dynamo",  # what functional collectives import when they are first called
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "megacpp_validate.training.parallel.exchange",
    ]
)


def on_ranks(world: int, function: Callable[..., Any], *given: Any) -> list[Any]:
    """What `function(*given)` returns on each of `world` ranks; an AssertionError with every traceback otherwise."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            CONTEXT.Process(target=_rank, args=(rank, world, folder, function, given), daemon=True)
            for rank in range(world)
        ]
        until = time.monotonic() + SECONDS
        for rank in ranks:
            rank.start()
        try:
            for rank in ranks:
                rank.join(max(0.0, until - time.monotonic()))
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
        return _answers(Path(folder), world)


def _answers(folder: Path, world: int) -> list[Any]:
    import torch

    files = [folder / f"{rank}.pt" for rank in range(world)]
    answers = [torch.load(file, weights_only=False) if file.exists() else (False, "no answer") for file in files]
    faults = [f"rank {rank}: {answer}" for rank, (fine, answer) in enumerate(answers) if not fine]
    assert not faults, "\n".join(faults)
    return [answer for _, answer in answers]


def _rank(rank: int, world: int, folder: str, function: Callable[..., Any], given: tuple[Any, ...]) -> None:
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    store = distributed.FileStore(str(Path(folder, "store")), world)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    distributed.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=20))
    try:
        answer = (True, function(*given))
    except BaseException:
        answer = (False, traceback.format_exc())
    aside = Path(folder, f".{rank}.pt")
    torch.save(answer, aside)
    aside.replace(aside.with_name(f"{rank}.pt"))
    os._exit(0)  # one that failed does not wait for the others
