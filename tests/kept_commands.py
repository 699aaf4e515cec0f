"""The command line made once for all tests of a process: typer makes every command anew whenever one is called.

That is 60 ms of a call that is refused in 20, and nothing that a test asks about: what is made is the same.
"""

from __future__ import annotations

from typing import Any

import typer.main
import typer.testing

_made: dict[tuple[typer.Typer, int], Any] = {}
_plain = typer.main.get_command


def _get_command(app: typer.Typer) -> Any:
    """The command of an app; another one once a verb has been added."""
    key = app, len(app.registered_commands)
    if key not in _made:
        _made[key] = _plain(app)
    return _made[key]


def keep_commands() -> None:
    """From here on, in this process."""
    typer.main.get_command = _get_command
    typer.testing._get_command = _get_command
