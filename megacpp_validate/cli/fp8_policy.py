"""`fp8-policy`: what may run in low precision."""

from typing import Annotated

from .app import Context, Result, split_names, verb


@verb("gate:describe_policy")
def fp8_policy(
    context: Context,
    preset: Annotated[tuple[str, ...], "Rows of fp8_presets.toml, with commas or repeated.", split_names] = (),
) -> Result:
    """Decide what may run in low precision, what may not, and why.

    Exit code 0: presets that are meant to run are let through, and those that were rolled back are refused by the rules
    that must refuse them. 1: one of them is not so. 2: a file of the matrix, or an argument, is wrong.
    """
    from ..gate.fp8 import decide_policy

    return decide_policy(context.matrix, preset or None)
