"""Which seeds there are."""

from __future__ import annotations

from typing import Final

# torch and JSON hold 64 bits, and a verb that needs further seeds counts on from the one that it is given.
LARGEST_SEED: Final = 2**63 - 1
