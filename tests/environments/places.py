"""Facts and targets made by hand, and a package whose probes do what a test says."""

from __future__ import annotations

import sys
from pathlib import Path

from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.catalog.bridge import Target as TargetRow
from megacpp_validate.environments.interpreter import Facts, Gpu, InterpreterEnvironment

H200 = Gpu(name="NVIDIA H200", capability="9.0", driver="580.159.03", memory_mib="143771")
H200_HOST = Facts(
    python="3.12.3", executable="/usr/bin/python3", machine="x86_64", torch="2.11.0+cu130", te="2.20.2",
    te_folder="/opt/te/transformer_engine", gpu=H200, why_no_gpu="",
)  # fmt: skip
LAPTOP = H200_HOST.model_copy(update={"te": "", "te_folder": "", "gpu": None, "why_no_gpu": "there is no nvidia-smi"})


def target_of(catalog: Catalog, name: str) -> TargetRow:
    return next(target for target in catalog.targets if target.id == name)


def make_probes(folder: Path, main: str) -> InterpreterEnvironment:
    """An environment in which `python -m megacpp_validate.probes` is what a test says; `cell` names the cell."""
    package = folder / "fake" / "megacpp_validate" / "probes"
    package.mkdir(parents=True, exist_ok=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    head = (
        "import hashlib, json, os, signal, subprocess, sys, time, faulthandler\n"
        "faulthandler.enable()\n"
        "order = json.load(sys.stdin)\n"
        "place, cell = sys.argv[1], '{stack}-{id}-{probe}'.format(**order, **order['target'])\n"
        "receipt = dict(cell=cell, stack=order['stack'], target=order['target']['id'], probe=order['probe'],\n"
        "    outcome='pass', reason='', requested=order['requested'], seed=order['seed'],\n"
        "    tool=order['tool'], commit=order['commit'], environment=order['environment'],\n"
        "    checks=[dict(name='one', passed=True)])\n"
        "def write(**more):\n"
        "    text = json.dumps({**receipt, **more, 'seal': ''}, indent=2) + '\\n'\n"
        "    open(place, 'w').write(text[:-4] + hashlib.sha256(text.encode()).hexdigest() + text[-4:])\n"
    )
    (package / "__main__.py").write_text(head + main)
    return InterpreterEnvironment((sys.executable,), {"PYTHONPATH": str(folder / "fake"), "PATH": "/usr/bin:/bin"})


def make_h200_host(folder: Path, main: str, te: str = "2.17.1") -> Path:
    """The folder of `python3` and `nvidia-smi` of a host with an H200, whose probes are as a test says.

    The host's interpreter is its `python3`, with this release of TE, if any; the folder belongs first on the path.
    """
    make_probes(folder, main)
    host = folder / "host"
    host.mkdir(exist_ok=True)
    if te:
        info = host / f"transformer_engine-{te}.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: transformer-engine\nVersion: {te}\n")
    for name, script in {
        "nvidia-smi": 'case "$*" in *memory.free*) echo "143771, 143000";; '
        "*) echo 'NVIDIA H200, 9.0, 580.159.03, 143771';; esac",
        "python3": f'case "$*" in *identify*) export PYTHONPATH="{host}:$PYTHONPATH";; '
        f'*"megacpp_validate.probes "*) export PYTHONPATH="{folder / "fake"}:$PYTHONPATH";; esac\n'
        f'exec {sys.executable} "$@"',
    }.items():
        (host / name).write_text(f"#!/bin/sh\n{script}\n")
        (host / name).chmod(0o755)
    return host
