"""Doors: each session installs what its verb needs, and calls that one verb."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

import nox

nox.needs_version = ">=2025.5"
nox.options.default_venv_backend = "virtualenv"  # pip, and with it the user's index, mirrors and certificates
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "tests"]

ROOT = Path(__file__).parent
PROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
LOCK = ROOT / "containers" / "locks" / "cpu.txt"
# A GPU host may have no network. Where nox itself runs in the host's interpreter, and that has what the tool needs
# beside torch, a session on the host's own stack makes no environment.
HOST_NEEDS = "torch, jinja2, packaging, platformdirs, pydantic, rich, typer"
ON_THE_HOST = all(map(find_spec, HOST_NEEDS.split(", ")))
HOST = "none" if ON_THE_HOST else None
NO_ENVIRONMENT = 5  # as README has it
LISTENS_S = 20.0  # within which a verb that was interrupted too has ended


def _given(option: str) -> str:
    """The value of an option of the verb, the last one; nothing where it is not there."""
    words = " ".join(sys.argv).replace("=", " ").split()
    return next((words[at + 1] for at in range(len(words) - 2, -1, -1) if words[at] == option), "")


def _wants(tier: str) -> bool:
    """Whether the canary is asked for a tier; every installed release is a matter of the gpu tier."""
    if named := _given("--tiers"):
        return tier in named.split(",")
    return tier == "gpu" and not {"--all-installed", "--environment"}.isdisjoint(" ".join(sys.argv).split())


# Where the CPU is asked for, torch comes from the lock, and not from the host.
TARGET, TARGETS = _given("--target"), _given("--targets")
HERE_IF_CPU = None if TARGET == "cpu" else HOST
NO_GPU = TARGET == "cpu" or (not TARGET and shutil.which("nvidia-smi") is None)


def _install(session: nox.Session, *groups: str) -> None:
    """The package and dependency groups at locked versions; again only when one of those files has changed.

    A session without an environment of its own runs in the host's interpreter, which has what it needs.
    """
    if session.venv_backend == "none":
        return
    wanted = nox.project.dependency_groups(PROJECT, *groups) if groups else ()
    stamp = Path(session.virtualenv.location) / "installed"
    state = "\n".join([sys.version, *wanted, *(p.read_text() for p in (ROOT / "pyproject.toml", LOCK))])
    if stamp.is_file() and stamp.read_text() == state:
        return
    _fetch(session, session.install, "--quiet", "--constraint", str(LOCK), "--editable", str(ROOT), *wanted)
    stamp.write_text(state)


def _fetch(session: nox.Session, install: Callable[..., object], *arguments: str, **options: bool) -> None:
    """What an installer fetches; where it cannot, the exit code says that there is no environment."""
    session.log("installing, once; with torch it is a gigabyte and takes minutes")
    try:
        install(*arguments, **options)
    except nox.command.CommandFailed:
        session.log(
            "could not be installed; the installer's own words stand above. Likely cause: no network, or an index that "
            f"lacks it. Next step: set PIP_INDEX_URL, or run nox in a host's own interpreter that has {HOST_NEEDS}."
        )
        raise SystemExit(NO_ENVIRONMENT) from None


def _python(session: nox.Session) -> str:
    """The session's own interpreter."""
    return sys.executable if session.venv_backend == "none" else f"{session.bin}/python"


def _call(session: nox.Session, verb: str, *arguments: str, **variables: str) -> None:
    """Run one verb; its exit code is the session's, because it says by class what happened."""
    command = [_python(session), "-m", "megacpp_validate.cli", verb, *arguments, *session.posargs]
    with subprocess.Popen(command, env={**os.environ, **variables}) as process:
        code = _wait(process)
    if code:
        raise SystemExit(code)


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Its exit code. An interrupt goes to the verb too, which ends what it has started: it is not killed over that."""
    limit_s = None
    while True:
        try:
            return process.wait(limit_s)
        except KeyboardInterrupt:
            limit_s = LISTENS_S
        except subprocess.TimeoutExpired:  # the interrupt was for nox alone
            process.send_signal(signal.SIGINT)


def _open(session: nox.Session, verb: str, *groups: str) -> None:
    """Install what a verb needs, and call it."""
    _install(session, *groups)
    _call(session, verb)


def _train(session: nox.Session, verb: str, *, on_the_cpu: bool, **variables: str) -> None:
    """A verb that runs torch: on the CPU in the session's own interpreter, else in the host's."""
    _install(session, *(["torch-cpu"] if on_the_cpu else []))
    _call(session, verb, *(["--python", _python(session)] if on_the_cpu else []), **variables)


def _groups_of_damage() -> list[str]:
    """What it takes to import the Python half of Transformer Engine, and to stand in for the compiled half."""
    compiler = any(shutil.which(name) for name in ("cc", "gcc", "clang"))
    return ["torch-cpu", *([] if compiler else ["compiler"])]


def _judge_caches(session: nox.Session, verb: str) -> None:
    """A verb on JIT caches, in the stack that compiles them.

    On the CPU that is one environment for all of these sessions: where its headers lie is part of what is cached.
    """
    _install(session)
    if TARGET != "cpu":
        _call(session, verb)
        return
    folder = ROOT / ".nox" / "jit-stack"
    python, wanted = folder / "bin" / "python", nox.project.dependency_groups(PROJECT, "torch-cpu")
    stamp, state = folder / "installed", "\n".join([sys.version, *wanted, LOCK.read_text()])
    if not stamp.is_file() or stamp.read_text() != state:
        session.run(sys.executable, "-m", "virtualenv", "--quiet", "--clear", str(folder), external=True)
        install = ["-m", "pip", "install", "--quiet", "--constraint", str(LOCK), *wanted]
        _fetch(session, session.run, str(python), *install, external=True)
        stamp.write_text(state)
    _call(session, verb, "--python", str(python))


def _judge_host(session: nox.Session, target: str) -> None:
    """Parity on a GPU host: this tool in an environment of its own, the probes in the host's interpreter and stack."""
    _install(session)
    _call(session, "parity", "--target", target)


@nox.session(venv_backend=HOST if _wants("gpu") else None)
def te_canary(session: nox.Session) -> None:
    """Which bridge module an upgrade breaks: te_canary -- OLD NEW [--tiers static,firewall,gpu] | --all-installed."""
    # Only the firewall imports anything here; what the gpu tier runs has a stack of its own.
    _open(session, "te-canary", *(_groups_of_damage() if _wants("firewall") else ()))


@nox.session(venv_backend=HOST)
def te_bisect(session: nox.Session) -> None:
    """The first release that breaks a module, or which component: te_bisect -- GOOD BAD --module NAME [--axis ...]."""
    _open(session, "te-bisect")


@nox.session
def import_firewall(session: nox.Session) -> None:
    """Whether the bridge stands on damaged Transformer Engine installs."""
    _open(session, "import-firewall", *_groups_of_damage())


@nox.session
def cpu_parity(session: nox.Session) -> None:
    """Native layers against fp64 references, and the wrappers on their native path: cpu_parity -- [--probes NAME]."""
    _install(session, "torch-cpu")
    lock_hash = sha256(LOCK.read_bytes()).hexdigest()
    _call(session, "parity", "--target", "cpu", "--python", _python(session), MEGACPP_LOCK_HASH=lock_hash)


@nox.session(venv_backend=HOST)
def h200_parity(session: nox.Session) -> None:
    """Every bridge module on an H200 with the host's own stack: h200_parity -- [--probes NAME] [--seed N]."""
    _judge_host(session, "h200")


@nox.session(venv_backend=HOST)
def b200_parity(session: nox.Session) -> None:
    """The same on a B200."""
    _judge_host(session, "b200")


@nox.session(venv_backend=HOST)
def gb10_compat(session: nox.Session) -> None:
    """The same on a GB10."""
    _judge_host(session, "gb10")


@nox.session(venv_backend=HOST)
def fp8(session: nox.Session) -> None:
    """FP8 on the host's own stack: recipes, ownership, lanes, the loss gate: fp8 -- [--probes NAME] [--target b200]."""
    _install(session)
    _call(session, "fp8")


@nox.session(venv_backend=None if NO_GPU else HOST)
def moe_smoke(session: nox.Session) -> None:
    """The hybrid model trained on 1 to 4 devices, and where its time goes: moe_smoke -- [--target cpu] [--ranks N]."""
    _train(session, "moe-smoke", on_the_cpu=NO_GPU)


@nox.session(venv_backend=None if TARGET in ("", "cpu") else HOST)
def smoke_faults(session: nox.Session) -> None:
    """Faults planted between the ranks of the smoke run, each caught and named: smoke_faults -- [--faults ID]."""
    _train(session, "smoke-faults", on_the_cpu=TARGET in ("", "cpu"))


@nox.session(venv_backend=None if TARGETS == "cpu" else HOST)
def matrix(session: nox.Session) -> None:
    """Many cells, one job a cell, here or on Slurm: matrix -- --targets cpu,h200 [--launcher slurm] [--plan]."""
    variables = {"MEGACPP_LOCK_HASH": sha256(LOCK.read_bytes()).hexdigest()} if TARGETS == "cpu" else {}
    _train(session, "matrix", on_the_cpu=TARGETS == "cpu", **variables)


@nox.session(venv_backend=HOST)
def fp8_policy(session: nox.Session) -> None:
    """Which presets may run in low precision, and why the others may not: fp8_policy -- [--preset NAME]."""
    _install(session)
    _call(session, "fp8-policy")


@nox.session(venv_backend=HOST)
def fp8_faults(session: nox.Session) -> None:
    """Faults planted in the FP8 of a real Transformer Engine, each caught by the check that should: fp8_faults."""
    _install(session)
    _call(session, "fp8-faults")


@nox.session(venv_backend=HOST)
def loss_gate(session: nox.Session) -> None:
    """The loss gate's verdict on a folder of curves: loss_gate -- FOLDER."""
    _open(session, "loss-gate")


@nox.session(venv_backend=HOST)
def release_gate(session: nox.Session) -> None:
    """May we release, by these receipts: release_gate -- FOLDER [--release te-upgrade] [--target h200] [--at TIME]."""
    _open(session, "release-gate")


@nox.session(venv_backend=HOST)
def receipts_sign(session: nox.Session) -> None:
    """Sign a folder of receipts, so that what is edited afterwards is refused: receipts_sign -- FOLDER --key KEY."""
    _open(session, "receipts-sign")


@nox.session(venv_backend=HOST)
def history(session: nox.Session) -> None:
    """What became of a cell over runs: history -- [STORE] --cell NAME [--quantity step_seconds] [--format json]."""
    _open(session, "history")


@nox.session(venv_backend=HOST)
def report(session: nox.Session) -> None:
    """Receipts as pages that open from disk: report -- [STORE] [--output DIR] [--gate DECISION.json]."""
    _open(session, "report")


@nox.session(venv_backend=None if _given("--device") == "cpu" else HOST)
def ablate(session: nox.Session) -> None:
    """What features change, in runs that take turns: ablate -- feature=NAME,... | feature=all [--device cpu]."""
    _train(session, "ablate", on_the_cpu=_given("--device") == "cpu")


@nox.session(venv_backend=HOST)
def doctor(session: nox.Session) -> None:
    """What an interpreter loads, and what breaks by it: doctor -- [--python PATH] [--overlays DIR] [--target h200]."""
    _open(session, "doctor")


@nox.session
def lock(session: nox.Session) -> None:
    """Pins and locks of every image, with hashes; the only writer: lock -- [TARGET] [--check] [--accept TAG]."""
    _open(session, "lock", "images")


@nox.session
def fits(session: nox.Session) -> None:
    """Whether a release fits a stack, before anything is built: fits -- RELEASE cublas=13.1.0.3 torch=2.11.0 ..."""
    _open(session, "fits")


@nox.session
def images(session: nox.Session) -> None:
    """The golden images: images -- --plan | cpu [--base REPOSITORY@sha256:...] [--push REGISTRY] [--prove]."""
    _open(session, "images", "images")


@nox.session
def image_proof(session: nox.Session) -> None:
    """The cpu image built, pushed, pulled by its digest and run with no network; brings up its engine on Debian."""
    _install(session, "images")
    _call(session, "images", "cpu", "--prove", "--own-engine")


@nox.session
def image_keys(session: nox.Session) -> None:
    """A pair of keys to sign images with: image_keys -- PREFIX."""
    _open(session, "image-keys", "images")


@nox.session
def image_sign(session: nox.Session) -> None:
    """Sign an image, and bind its SBOM to it: image_sign -- REPOSITORY@sha256:DIGEST --key KEY."""
    _open(session, "image-sign", "images")


@nox.session
def image_verify(session: nox.Session) -> None:
    """Whether an image is what was pinned, locked and signed: image_verify -- REPOSITORY@sha256:DIGEST --key KEY."""
    _open(session, "image-verify", "images")


@nox.session
def bundle(session: nox.Session) -> None:
    """An image, its wheels and its caches in one folder, for hosts without a network: bundle -- TARGET --image ..."""
    _open(session, "bundle", "images")


@nox.session(venv_backend=HERE_IF_CPU)
def prewarm(session: nox.Session) -> None:
    """Compile what would be compiled just in time, and seal it: prewarm -- --target h200 [--root DIR] [--at-build]."""
    _judge_caches(session, "prewarm")


@nox.session(venv_backend=HERE_IF_CPU)
def jit_verify(session: nox.Session) -> None:
    """Whether a sealed cache leaves nothing to compile: jit_verify -- --target h200 [--root DIR]."""
    _judge_caches(session, "jit-verify")


@nox.session(venv_backend=HOST)
def jit_cache(session: nox.Session) -> None:
    """Check, seal, export or import a cache: jit_cache -- export FILE --root DIR."""
    _open(session, "jit-cache")


@nox.session
def selftest(session: nox.Session) -> None:
    """The suite's own score: faults planted in wrappers and in what Transformer Engine returns."""
    _open(session, "selftest", "torch-cpu")


@nox.session(venv_backend=HOST)
def blame_score(session: nox.Session) -> None:
    """Who is blamed for faults planted in copies of Transformer Engine: blame_score -- [--faults ID] [--shard I/N]."""
    _open(session, "blame-score")


@nox.session
def te_watch(session: nox.Session) -> None:
    """Releases of Transformer Engine that are new on the index, each judged once: te_watch -- [--state DIR]."""
    _open(session, "te-watch", *_groups_of_damage())  # the firewall tier imports the Python half of real releases


@nox.session
def pipeline(session: nox.Session) -> None:
    """What CI runs, told or run here: pipeline -- pull_request [--plan] [--format json]."""
    _open(session, "pipeline")


@nox.session
def score(session: nox.Session) -> None:
    """Kill rate, blame accuracy and false alarms of the last full selftest: score -- [--write]."""
    _open(session, "score")


@nox.session
def lint(session: nox.Session) -> None:
    """Style, types, and the architecture."""
    _install(session, "lint")
    tools = ("ruff check .", "ruff format --check .", "mypy", "lint-imports --no-cache")
    for tool in (*tools, "python ci/house.py", "python ci/workflows.py"):
        session.run(*tool.split())


@nox.session
def tests(session: nox.Session) -> None:
    """Everything that runs without a GPU: tests -- [pytest arguments]."""
    session.env["PIP_NO_COMPILE"] = "1"  # nothing here would read that bytecode
    _install(session, "test", *_groups_of_damage())
    # Many tests start the tool as a process: each would compile the project again where bytecode is not kept.
    bytecode = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": f"{session.virtualenv.location}/bytecode"}
    workers = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
    session.run("pytest", *workers, *session.posargs, env=bytecode)


@nox.session
def benchmark(session: nox.Session) -> None:
    """Time, memory and bytes of the canary beside `pip install` of both releases, in one run."""
    _install(session)
    session.run("python", "benchmarks/canary.py", *session.posargs)
