"""One run of the loss gate as a process: what to train as JSON on standard input, the curve as a file.

    python -m megacpp_validate.training.gate_process < ORDER

ORDER has the fields of `GateRun` that are text or numbers, and `path`, where the curve goes. On standard output comes
one JSON object: what each part ran on, seconds, and the peak of the device's memory.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ..evidence.loss_curve import LossCurve, write_curve
from ..jit.monitor import start_compiling
from .gate_run import GateRun, GateTrainer


@dataclass(frozen=True)
class Trained:
    """What a run leaves besides its curve.

    Attributes:
        backends: part of the model -> what its last call took.
        seconds: from the first step to the last.
        peak_mib: largest memory on the device.
    """

    backends: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    peak_mib: float = 0.0


def train_to_file(run: GateRun, path: Path) -> tuple[LossCurve, Trained]:
    """Train a run, and write its curve with what trained it.

    Raises:
        OSError: the place cannot be written.
        BridgeError: what the bridge refuses.
    """
    trainer = GateTrainer(run)
    started = time.perf_counter()
    curve = trainer.train()
    seconds = round(time.perf_counter() - started, 2)
    curve.made_with.update(_made_with(run.device))
    write_curve(curve, path)
    backends = {part: choice.observed for part, choice in trainer.model.choices().items()}
    peak = torch.cuda.max_memory_allocated() / 2**20 if run.device == "cuda" else 0.0
    return curve, Trained(backends, seconds, round(peak, 1))


def main() -> None:
    """Read the order, train, and say what came of it."""
    order: dict[str, Any] = json.load(sys.stdin)
    path = Path(order.pop("path")).absolute()
    torch.set_num_threads(1)  # runs stand side by side, and their work is the device's
    start_compiling()
    _, trained = train_to_file(GateRun(**order), path)
    sys.stdout.write(json.dumps(vars(trained)) + "\n")


def _made_with(device: str) -> dict[str, str]:
    made = {"torch": torch.__version__}
    if device == "cuda":
        made["gpu"] = torch.cuda.get_device_name()
    with contextlib.suppress(PackageNotFoundError):
        made["transformer_engine"] = version("transformer_engine")
    return made


if __name__ == "__main__":
    main()
