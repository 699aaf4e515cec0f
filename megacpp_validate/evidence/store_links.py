"""Links in a store: told, and not followed. Standard library only."""

from __future__ import annotations

import os
from typing import Any


def is_odd_link(entry: os.DirEntry[Any]) -> bool:
    """Whether an entry of a folder is a link to anything but a file: receipts may lie behind it that nobody reads.

    That is a link to a folder, but also to one that is not mounted today, that may not be entered, or whose name no
    file system takes: what it will be tomorrow is not known.
    """
    if not entry.is_symlink():
        return False
    try:
        return not entry.is_file()
    except OSError:  # no permission, a circle, a name that is too long
        return True
