"""Ranks of gloo are started by `tests/training/parallel/gloo_ranks.py`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "parallel"))
