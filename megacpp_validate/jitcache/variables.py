"""Variables of the compilers themselves, which are in keys or choose what is compiled: told where they differ.

Nothing is refused by them: which of them is in which key is the libraries' own matter and changes with their releases.
But a cache that is cold for no reason that a version shows has one here as a rule. Values are kept as hashes: the
address of a cache that is far away may hold a password.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Final

from .layout import CPU, cache_variables

_PREFIXES: Final = (
    "TRITON_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_COMPILE", "CUTE_DSL_", "FLASH_ATTENTION_", "FA_", "DG_",
    "NVTE_", "CUDA_CACHE_",
)  # fmt: skip
_OURS: Final = frozenset(cache_variables(Path("/"), CPU, nvrtc=False))  # each root and architecture has its own
_DIGITS: Final = 12


def hash_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Those of compilers that somebody set: name -> hash of the value.

    Args:
        variables: of the environment that compiles.
    """
    names = sorted(name for name in variables if name.startswith(_PREFIXES) and name not in _OURS)
    return {name: sha256(variables[name].encode()).hexdigest()[:_DIGITS] for name in names}


def say_other_variables(recorded: Mapping[str, str] | None, here: Mapping[str, str]) -> tuple[str, ...]:
    """A sentence for each variable that is another one than when the caches were filled.

    Args:
        recorded: of a manifest; one of before has none.
        here: of `hash_variables`.
    """
    if recorded is None:
        return ()
    names = [name for name in sorted({*recorded, *here}) if recorded.get(name) != here.get(name)]
    return tuple(f"{name} {_say(recorded.get(name), here.get(name))}" for name in names)


def _say(recorded: str | None, here: str | None) -> str:
    if recorded is None:
        return "is set here and was not when the cache was filled: what has it in its key is compiled again"
    if here is None:
        return "was set when the cache was filled and is not here: what has it in its key is compiled again"
    return "has another value than when the cache was filled: what has it in its key is compiled again"
