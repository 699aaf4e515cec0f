"""Text that Markdown takes as text. Code becomes `<code>`: it may hold backticks, pipes and tags."""

from __future__ import annotations

import re


def escape(text: str) -> str:
    """Text that Markdown and HTML take as text, on one line; backticks around code become `<code>`."""
    line = " ".join(re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", " ", text).split())
    pieces = re.split(r"`([^`]*)`", line)
    return "".join(f"<code>{_escape(piece)}</code>" if odd % 2 else _escape(piece) for odd, piece in enumerate(pieces))


def _escape(text: str) -> str:
    # As references, which no Markdown parser reads as syntax; `_` and `.` inside a word are safe as they are.
    text = re.sub(r"""[&<>"'`*|\\\[\]#~$!@]|(?<![A-Za-z0-9_])_|_(?![A-Za-z0-9_])""", lambda m: f"&#{ord(m[0])};", text)
    return text.replace("://", "&#58;//")
