"""Sessions: each one installs what its verb needs and calls that one verb. Options are the verb's own.

Sessions without torch share one environment. A verb that needs torch on the CPU makes one stack for all of them, in the
folder that `MEGACPP_CPU_STACK` names.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import nox
from filelock import FileLock

nox.needs_version = ">=2025.5"
nox.options.default_venv_backend = "virtualenv"  # pip, and with it the user's index, mirrors and certificates
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "tests"]

ROOT = Path(__file__).parent
PROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
LOCK = ROOT / "containers" / "locks" / "cpu.txt"
SHARED = ROOT / ".nox" / "host-tool"
# A GPU host may have no network. Where nox runs in the host's interpreter and that has what the tool needs beside torch,
# a session that works on the host's own stack makes no environment.
HOST_NEEDS = "torch, filelock, jinja2, packaging, platformdirs, pydantic, rich, typer"
ON_THE_HOST = all(map(find_spec, HOST_NEEDS.split(", ")))
NO_ENVIRONMENT = 5  # as README has it
INTERRUPT_LIMIT_S = 20.0  # within which a verb that was interrupted too has ended


class Verb(NamedTuple):
    """A session that calls one verb.

    Attributes:
        help: what `nox -l` prints.
        command: the verb and the arguments that this session fixes.
        groups: dependency groups that the verb needs beside the tool itself.
    """

    help: str
    command: tuple[str, ...]
    groups: tuple[str, ...] = ()


VERBS = {
    "te_canary": Verb("Which modules a TE upgrade breaks: te_canary -- OLD NEW [--tiers static,firewall,gpu] | --all.", ("canary",)),
    "te_bisect": Verb("The first release or library that breaks a module: te_bisect -- GOOD BAD --module NAME.", ("te-bisect",)),
    "te_requirements": Verb("Which cuBLAS, cuDNN and NCCL the wheels of a TE release need: te_requirements -- RELEASE.", ("te-requirements",)),
    "import_firewall": Verb("Whether the bridge survives damaged TE installs.", ("import-firewall",)),
    "te_watch": Verb("Judge TE releases that are new on the index: te_watch -- [--state DIR].", ("te-watch",)),
    "cpu_parity": Verb("Parity of native layers and wrappers on the CPU: cpu_parity -- [--probes NAME].", ("parity", "--target", "cpu")),
    "h200_parity": Verb("Parity of every bridge module on an H200: h200_parity -- [--probes NAME] [--seed N].", ("parity", "--target", "h200")),
    "b200_parity": Verb("The same on a B200.", ("parity", "--target", "b200")),
    "gb10_compat": Verb("The same on a GB10.", ("parity", "--target", "gb10")),
    "fp8": Verb("FP8 on the host's stack: recipes, ownership, the loss gate: fp8 -- [--probes NAME].", ("fp8",)),
    "moe_smoke": Verb("Train the hybrid model on 1 to 4 devices: moe_smoke -- [--target cpu] [--ranks N].", ("moe-smoke",)),
    "smoke_faults": Verb("Plant faults between ranks of the smoke run: smoke_faults -- [--faults ID].", ("smoke-faults",)),
    "matrix": Verb("Many cells, one job a cell, here or on Slurm: matrix -- --targets cpu,h200 [--launcher slurm].", ("matrix",)),
    "ablate": Verb("What a feature changes in speed, memory and loss: ablate -- feature=NAME [--device cpu].", ("ablate",)),
    "fp8_policy": Verb("Which presets may run in low precision: fp8_policy -- [--preset NAME].", ("fp8-policy",)),
    "fp8_faults": Verb("Plant faults in the FP8 of a real TE: fp8_faults -- [--faults ID].", ("fp8-faults",)),
    "blame_score": Verb("Plant faults in copies of TE and score the blame: blame_score -- [--faults ID].", ("blame-score",)),
    "selftest": Verb("Plant faults in wrappers and in what TE returns: selftest -- [MUTANT].", ("selftest",)),
    "score": Verb("Kill rate, blame accuracy, false alarms: score -- [--format json --output FILE].", ("score",)),
    "loss_gate": Verb("Judge a folder of loss curves: loss_gate -- FOLDER.", ("loss-gate",)),
    "release_gate": Verb("May we release, by these receipts: release_gate -- FOLDER [--release te-upgrade].", ("release-gate",)),
    "receipts_sign": Verb("Sign a folder of receipts: receipts_sign -- FOLDER --key KEY.", ("receipts-sign",)),
    "history": Verb("Outcomes of a cell over runs: history -- [FOLDER] --cell NAME.", ("history",)),
    "report": Verb("Receipts as pages that open from disk: report -- [FOLDER].", ("report",)),
    "doctor": Verb("What an interpreter loads, and what breaks by it: doctor -- [--python PATH] [--target h200].", ("doctor",)),
    "fits": Verb("Whether a TE release fits a stack: fits -- RELEASE cublas=13.1.0.3 torch=2.11.0 ...", ("fits",)),
    "lock": Verb("Write pins and locks of every image: lock -- [TARGET] [--check].", ("lock",), ("images",)),
    "images": Verb("Plan and build the golden images: images -- --plan | cpu.", ("images",), ("images",)),
    "image_sign": Verb("Sign an image with its SBOM: image_sign -- REPOSITORY@sha256:DIGEST --key KEY.", ("image-sign",), ("images",)),
    "image_verify": Verb("Verify an image against pins, locks and signature: image_verify -- REPOSITORY@sha256:DIGEST --key KEY.", ("image-verify",), ("images",)),
    "bundle": Verb("An image, its wheels and caches for hosts without a network: bundle -- TARGET --image ...", ("bundle",), ("images",)),
    "prewarm": Verb("Compile JIT kernels ahead of time and seal the cache: prewarm -- --target h200.", ("prewarm",)),
    "jit_verify": Verb("Whether a sealed cache leaves nothing to compile: jit_verify -- --target h200.", ("jit-verify",)),
    "jit_cache": Verb("Check, export, import or open a JIT cache: jit_cache -- export FILE --root DIR.", ("jit-cache",)),
}  # fmt: skip


def _python(session: nox.Session, *groups: str, own: bool = True) -> str:
    """The interpreter of the shared environment, with dependency groups at locked versions; or the host's own."""
    if ON_THE_HOST and not own:
        return sys.executable
    python = SHARED / "bin" / "python"
    with FileLock(f"{SHARED}.lock"):
        if not python.exists():
            session.run(sys.executable, "-m", "virtualenv", "--quiet", str(SHARED), external=True)
        _install(session, SHARED, groups, str(python), "-m", "pip", "install")
    return str(python)


def _install(session: nox.Session, folder: Path, groups: tuple[str, ...], *installer: str) -> None:
    """Install the tool and dependency groups; again only when pyproject.toml or the lock has changed."""
    wanted = nox.project.dependency_groups(PROJECT, *groups) if groups else ()
    stamp = folder / "-".join(("installed", *groups))
    state = "\n".join([sys.version, *wanted, *(p.read_text() for p in (ROOT / "pyproject.toml", LOCK))])
    if stamp.is_file() and stamp.read_text() == state:
        return
    session.log(f"installing {', '.join(('the tool', *groups))}, once")
    arguments = ("--quiet", "--disable-pip-version-check", "--constraint", str(LOCK), "--editable", str(ROOT), *wanted)
    try:
        session.run(*installer, *arguments, external=True)
    except nox.command.CommandFailed:
        session.log(
            "The installation failed; the installer's message stands above. Likely cause: no network, or an index that "
            f"lacks a package. Next step: set PIP_INDEX_URL, or run nox in an interpreter that has {HOST_NEEDS}."
        )
        raise SystemExit(NO_ENVIRONMENT) from None
    stamp.write_text(state)


def _call(session: nox.Session, python: str, *command: str) -> None:
    """Run one verb; its exit code is the session's, because the code says by class what happened."""
    variables = {"MEGACPP_CPU_STACK": str(ROOT / ".nox" / "cpu-stack"), **os.environ}
    with subprocess.Popen([python, "-m", "megacpp_validate.cli", *command, *session.posargs], env=variables) as process:
        if code := _wait(process):
            raise SystemExit(code)


def _wait(process: subprocess.Popen[bytes]) -> int:
    """The exit code of a verb. An interrupt reaches the verb too, which ends what it has started before it exits."""
    limit_s = None
    while True:
        try:
            return process.wait(limit_s)
        except KeyboardInterrupt:
            limit_s = INTERRUPT_LIMIT_S
        except subprocess.TimeoutExpired:  # the interrupt was for nox alone
            process.send_signal(signal.SIGINT)


def _make_session(name: str, verb: Verb) -> None:
    def run(session: nox.Session) -> None:
        _call(session, _python(session, *verb.groups, own=bool(verb.groups)), *verb.command)

    run.__doc__ = verb.help
    nox.session(name=name, venv_backend="none")(run)


for _name, _verb in VERBS.items():
    _make_session(_name, _verb)


@nox.session(venv_backend="none")
def image_proof(session: nox.Session) -> None:
    """Build, push, pull and run the cpu image; starts a Docker Engine on Debian: image_proof -- [REGISTRY]."""
    variables = {"MEGACPP_PYTHON": _python(session, "images"), **os.environ}
    if code := subprocess.call(["bash", "containers/image_proof", *session.posargs], env=variables):
        raise SystemExit(code)


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Style, types, the architecture, and the CI workflows."""
    tools = Path(_python(session, "lint")).parent
    for tool in (
        "ruff check .", "ruff format --check .", "mypy", "lint-imports --no-cache", "python ci/house.py",
        "actionlint", "zizmor --offline --quiet .github action.yml",
    ):  # fmt: skip
        name, *arguments = tool.split()
        session.run(str(tools / name), *arguments, external=True)


@nox.session(venv_backend="none")
def gate_fuzz(session: nox.Session) -> None:
    """Mutate receipts that open the release gate; 1 where it opens wrongly: gate_fuzz -- [--each N] [--seed N]."""
    session.run(_python(session), "-m", "tests.gate.fuzz", *session.posargs, external=True)


@nox.session
def tests(session: nox.Session) -> None:
    """Everything that runs without a GPU: tests -- [pytest arguments]."""
    home = Path(session.virtualenv.location)
    compiler = () if any(map(shutil.which, ("cc", "gcc", "clang"))) else ("compiler",)
    groups = ("test", "torch-cpu", "images", *compiler)
    _install(session, home, groups, str(home / "bin" / "python"), "-m", "pip", "install")
    # Many tests start the tool as a process: each would compile the project again where bytecode is not kept.
    bytecode = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(home / "bytecode"), "PIP_NO_COMPILE": "1"}
    workers = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
    session.run("pytest", *workers, *session.posargs, env=bytecode)


@nox.session(venv_backend="none")
def benchmark(session: nox.Session) -> None:
    """Time, memory and bytes of the canary beside `pip install` of both releases, in one run."""
    session.run(_python(session), "benchmarks/canary.py", *session.posargs, external=True)
