"""Doors: each session installs what its verb needs, and calls that one verb."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2025.5"
nox.options.default_venv_backend = "virtualenv"  # pip, and with it the user's index, mirrors and certificates
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "tests"]

ROOT = Path(__file__).parent
PROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
LOCK = ROOT / "containers" / "locks" / "cpu.txt"


def _install(session: nox.Session, *groups: str) -> None:
    """The package and dependency groups at locked versions; again only when one of those files has changed."""
    wanted = nox.project.dependency_groups(PROJECT, *groups) if groups else ()
    stamp = Path(session.virtualenv.location) / "installed"
    state = "\n".join([sys.version, *wanted, *(p.read_text() for p in (ROOT / "pyproject.toml", LOCK))])
    if stamp.is_file() and stamp.read_text() == state:
        return
    session.install("--quiet", "--constraint", str(LOCK), "--editable", str(ROOT), *wanted)
    stamp.write_text(state)


def _call(session: nox.Session, verb: str) -> None:
    """Run one verb; its exit code is the session's, because it says by class what happened."""
    command = [
        shutil.which("megacpp-validate", path=session.bin) or "megacpp-validate",
        verb,
        *session.posargs,
    ]
    code = subprocess.run(command, check=False).returncode
    if code:
        raise SystemExit(code)


@nox.session
def te_canary(session: nox.Session) -> None:
    """Which bridge module a Transformer Engine upgrade breaks: te_canary -- OLD NEW | --all | --first-bad MODULE."""
    _install(session)
    _call(session, "te-canary")


@nox.session
def import_firewall(session: nox.Session) -> None:
    """Whether the bridge stands on damaged Transformer Engine installs."""
    compiler = any(shutil.which(name) for name in ("cc", "gcc", "clang"))
    _install(session, "torch-cpu", *(() if compiler else ("compiler",)))
    _call(session, "import-firewall")


@nox.session
def lint(session: nox.Session) -> None:
    """Style, types, and the architecture."""
    _install(session, "lint")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
    session.run("lint-imports", "--no-cache")
    session.run("python", "ci/house.py")


@nox.session
def tests(session: nox.Session) -> None:
    """Everything that runs without a GPU: tests -- [pytest arguments]."""
    compiler = any(shutil.which(name) for name in ("cc", "gcc", "clang"))
    _install(session, "test", "torch-cpu", *(() if compiler else ("compiler",)))
    session.run("pytest", "-n", "2", "--dist", "loadgroup", *session.posargs)


@nox.session
def benchmark(session: nox.Session) -> None:
    """Time, memory and bytes of the canary beside `pip install` of both releases, in one run."""
    _install(session)
    session.run("python", "benchmarks/canary.py", *session.posargs)
