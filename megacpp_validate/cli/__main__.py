"""`python -m megacpp_validate.cli`."""

from __future__ import annotations

from . import main

main()
