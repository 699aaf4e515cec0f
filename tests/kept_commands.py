"""The command line made once for all tests of a process: typer makes every command anew whenever one is called.

That is 60 ms of a call that is refused in 20, and nothing that a test asks about: what is made is the same. A verb that
a test adds, or puts another function in place of, makes it anew.
"""

from __future__ import annotations

from typing import Any

import typer.main

_made: dict[tuple[object, ...], Any] = {}
_plain = typer.main.get_command


def _get_command(app: typer.Typer) -> Any:
    """The command of an app; another one where its verbs are others."""
    groups = (group.typer_instance for group in app.registered_groups)
    entry = app.registered_callback.callback if app.registered_callback else None
    key = app, entry, *(command.callback for command in app.registered_commands), *groups
    if key not in _made:
        _made[key] = _plain(app)
    return _made[key]


def keep_commands() -> None:
    """From here on, in this process."""
    typer.main.get_command = _get_command
