"""The login that `docker login` left for a registry, where it lies in its file. Helpers of a keychain are not asked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ..evidence.json_text import read_json

_SCHEME: Final = re.compile(r"https?://")  # docker keeps the name as it was typed, some with the path of the API
_OTHER_NAMES: Final = {"docker.io": ("index.docker.io", "registry-1.docker.io")}


def find_login(host: str, variables: Mapping[str, str]) -> str:
    """What goes behind "Basic" for a registry; empty where nobody has logged in, or the file cannot be read.

    Args:
        host: registry, with its port.
        variables: of the environment: DOCKER_CONFIG names the folder, else it is .docker in HOME.
    """
    folder = variables.get("DOCKER_CONFIG") or (str(Path(variables["HOME"], ".docker")) if "HOME" in variables else "")
    if not folder:
        return ""
    try:
        logins = read_json(Path(folder, "config.json").read_text(encoding="utf-8")).get("auths", {})
        by_host = {_SCHEME.sub("", name).partition("/")[0]: login for name, login in logins.items()}
        found = [by_host[name] for name in (host, *_OTHER_NAMES.get(host, ())) if name in by_host]
        return str(found[0].get("auth") or "") if found else ""
    except (OSError, ValueError, AttributeError):
        return ""
