"""Reading back the state of delayed scaling that a layer of Transformer Engine saved."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Final

# Since 2.17 that state, which is a pickle, is read back only with this; a probe wrote it itself.
UNPICKLING: Final = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"


@contextmanager
def unpickling_allowed(variables: MutableMapping[str, str]) -> Iterator[None]:
    """Transformer Engine reads its pickled state back; what was set before is put back.

    Args:
        variables: of the environment of this process, which it asks at each load.
    """
    before = variables.get(UNPICKLING)
    variables[UNPICKLING] = "1"
    try:
        yield
    finally:
        if before is None:
            del variables[UNPICKLING]
        else:
            variables[UNPICKLING] = before
