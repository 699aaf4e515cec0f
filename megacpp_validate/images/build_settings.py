"""What a host lends to a build: mirrors, certificates, wheels, a network. None of it becomes part of an image."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from .refusals import ImageRefused

WHEELS: Final = "MEGACPP_BUILD_WHEELS"
APT_SOURCES: Final = "MEGACPP_BUILD_APT_SOURCES"
NETWORK: Final = "MEGACPP_BUILD_NETWORK"
JOBS: Final = "MEGACPP_BUILD_JOBS"

_CERTIFICATES: Final = ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
# Where packages come from and how one gets there. What names a folder of the host means nothing in a build.
_PIP_KEYS: Final = ("index-url", "extra-index-url", "trusted-host", "proxy", "timeout", "retries")
_PIP_LINE: Final = re.compile(r"^(?P<where>[\w:.]+)\.(?P<key>[\w-]+)='(?P<value>.*)'$")


@dataclass(frozen=True)
class BuildSettings:
    """What a host lends.

    Attributes:
        wheels: folder of wheels that need not be fetched.
        apt_sources: file in the form of sources.list, used in place of the base's.
        ca_bundle: certificates that are trusted while packages are fetched.
        pip_conf: text of a configuration file of pip; it may hold passwords.
        network: "host", or empty for the engine's own network.
        jobs: compilers at a time; empty for what each build takes by itself.
        sources: row of images.toml -> a clone that stands in for its repository.
    """

    wheels: Path | None = None
    apt_sources: Path | None = None
    ca_bundle: Path | None = None
    pip_conf: str = field(default="", repr=False)
    network: str = ""
    jobs: str = ""
    sources: Mapping[str, Path] = field(default_factory=dict)


def read_build_settings(variables: Mapping[str, str], *, has_bridge: bool) -> BuildSettings:
    """The settings of this host.

    Args:
        variables: of the environment.
        has_bridge: whether the engine has a network of its own for builds.

    Raises:
        ImageRefused: a setting names what is not there.
    """
    links = variables.get("PIP_FIND_LINKS", "")
    wheels = _existing(variables, WHEELS) or (Path(links) if links and Path(links).is_dir() else None)
    certificates = next((Path(variables[name]) for name in _CERTIFICATES if variables.get(name)), None)
    return BuildSettings(
        wheels=wheels,
        apt_sources=_existing(variables, APT_SOURCES),
        ca_bundle=certificates if certificates and certificates.is_file() else None,
        pip_conf=render_pip_conf(_ask_pip(variables)),
        network=variables.get(NETWORK, "" if has_bridge else "host"),
        jobs=variables.get(JOBS, ""),
    )


def render_pip_conf(said: str) -> str:
    """A configuration file from what `pip config list` says; what a later source says wins, as it does for pip."""
    found: dict[str, str] = {}
    order = {"global": 0, ":env:": 2}
    lines = [match for line in said.splitlines() if (match := _PIP_LINE.match(line.strip()))]
    for match in sorted(lines, key=lambda match: order.get(match["where"], 1)):
        value = " ".join(word for word in match["value"].replace("\\n", " ").split() if not word.startswith("file:"))
        if match["key"] in _PIP_KEYS and value:
            found[match["key"]] = value
    return "\n".join(["[global]", *(f"{key} = {value}" for key, value in sorted(found.items()))]) + "\n"


def _existing(variables: Mapping[str, str], name: str) -> Path | None:
    given = variables.get(name, "")
    if given and not Path(given).exists():
        raise ImageRefused(f"{name} names {given}, which there is not. Next step: name what is there, or unset {name}.")
    return Path(given).absolute() if given else None


def _ask_pip(variables: Mapping[str, str]) -> str:
    command = [sys.executable, "-m", "pip", "config", "list"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=60, env={**os.environ, **variables}
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout
