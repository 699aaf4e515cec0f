"""What a registry's refusal means: whether to ask again, and when; its likely cause; and the login that it wants.

RFC 9110: 429 and 503 may say when to come back (10.2.3); a challenge's names are told apart by no case (11.2).
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import Final

TRANSIENT: Final = frozenset({429, 502, 503, 504})
LONGEST_WAIT_S: Final = 30.0  # of one that a registry asks for; a longer one is for people
_FIRST_WAIT_S: Final = 0.5
_PARAMETER: Final = re.compile(r'(\w+)=(?:"([^"]*)"|([^\s",]+))')


def wait_before(attempt: int, asked: str, now: float) -> float:
    """Seconds until the next attempt: those that the registry asks for, else twice as many each time.

    Args:
        attempt: that failed, from 0.
        asked: its Retry-After: seconds, or a date; empty for none.
        now: seconds since the epoch.
    """
    if asked.strip().isdecimal():
        return float(asked)
    try:
        return max(0.0, parsedate_to_datetime(asked).timestamp() - now)
    except (ValueError, TypeError, IndexError):
        return _FIRST_WAIT_S * 2.0**attempt


def explain_status(host: str, status: int) -> tuple[str, str]:
    """Likely cause and next step of a refusal."""
    known = {
        401: ("it wants a login", f"`docker login {host}`"),
        403: ("the login has no right to it", f"`docker login {host}` as somebody who has"),
        404: ("it has no such repository, or shows it to nobody who is not logged in", "check the name"),
        429: ("too many were asked for from here", f"wait, or `docker login {host}`"),
    }
    if status in known:
        return known[status]
    if status >= 500:
        return "it is ill, or what stands before it does not reach it", "try again later, or ask who runs it"
    return "it speaks another API, or a proxy answers in its place", "open its /v2/ by hand"


def read_challenge(texts: Sequence[str]) -> tuple[str, dict[str, str]]:
    """The scheme that a registry wants a login in, in lower case, and its parameters.

    Of several the one that hands out tokens: it lets in who has no login, too.
    """
    text = next((one for one in texts if one.lower().startswith("bearer ")), texts[0] if texts else "")
    return text.partition(" ")[0].lower(), {
        name.lower(): quoted or bare for name, quoted, bare in _PARAMETER.findall(text)
    }


def name_token(realm: str, query: Mapping[str, str]) -> str:
    """The address of a token; that of the service may have a query of its own."""
    return f"{realm}{'&' if '?' in realm else '?'}{urllib.parse.urlencode(query)}"
