"""`selftest`: the suite's own faults, planted one at a time."""

from typing import Annotated

import typer

from .app import Context, Limit, Result, Seed, verb


@verb("scores:describe_selftest")
def selftest(
    context: Context,
    mutants: Annotated[tuple[str, ...], "Ids of mutants; all without one."] = (),
    /,
    clean: Annotated[int, typer.Option(min=0, help="Probe runs without a fault, at least.")] = 200,
    seed: Seed = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 2,
    limit_s: Limit = 120.0,
) -> Result:
    """What does the suite catch? Faults are planted, one at a time, and every probe is run; then without any.

    Needs no GPU: Transformer Engine is stood in for by a double of plain torch.
    """
    from ..canary.dynamic.selftest import run_selftest

    return run_selftest(context.catalog, mutants, clean=clean, seed=seed, jobs=jobs, limit_s=limit_s)
