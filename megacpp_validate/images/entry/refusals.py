"""Why a session cannot run here: a pure function from what the image is for and what the machine has to words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from .machine import Machine
from .sessions import Needs, Session

WRONG_ARGUMENTS: Final = 2
NO_ENVIRONMENT: Final = 5
INFRASTRUCTURE: Final = 6


@dataclass(frozen=True)
class Refusal:
    """The words, and the exit code of their class."""

    words: str
    code: int


@dataclass(frozen=True)
class ImageFacts:
    """What an image says of itself in its environment.

    Attributes:
        name, target: of the image; target is a row of targets.toml.
        arch: of its GPU ("sm_90"); empty for none.
        driver_least: the oldest driver that its CUDA runs on; empty for none.
        lock_hash: of what is installed in it.
        digest: of the image, which only the caller knows.
    """

    name: str
    target: str
    arch: str
    driver_least: str
    lock_hash: str
    digest: str


def read_image(variables: Mapping[str, str]) -> ImageFacts:
    """What the variables of a container say."""

    def read(name: str) -> str:
        return variables.get(f"MEGACPP_{name}", "")

    return ImageFacts(
        name=read("IMAGE") or "this image",
        target=read("TARGET") or "cpu",
        arch=read("ARCH"),
        driver_least=read("DRIVER_LEAST"),
        lock_hash=read("LOCK_HASH"),
        digest=read("IMAGE_DIGEST"),
    )


def refuse_session(session: Session, image: ImageFacts, machine: Machine) -> Refusal | None:
    """Why it cannot run on this machine in this image; None where it can."""
    if session.target and session.target != image.target:
        return Refusal(
            f"{session.name} is a session of the image for {session.target}, and {image.name} is for {image.target}. "
            f"Next step: run it in the image for {session.target}; `megacpp --help` lists what this one has.",
            WRONG_ARGUMENTS,
        )
    if session.needs is Needs.NOTHING or (session.needs is Needs.ITS_TARGET and not image.arch):
        return None
    if not image.arch:
        return Refusal(
            f"{session.name} needs a GPU, and {image.name} is made for machines without one. Next step: run it in the "
            "image of a GPU target.",
            WRONG_ARGUMENTS,
        )
    return _refuse_gpu(session, image, machine)


def _refuse_gpu(session: Session, image: ImageFacts, machine: Machine) -> Refusal | None:
    if not machine.driver and not machine.devices:
        return Refusal(
            f"no GPU: {session.name} needs one ({image.arch}), and the kernel of this machine has no NVIDIA driver "
            "loaded. Likely cause: a machine without a GPU, or its driver is not installed. Next step: `nvidia-smi` on "
            f"the host must list the GPU; then `docker run --gpus all ... {session.name}`.",
            NO_ENVIRONMENT,
        )
    if machine.driver and _is_older(machine.driver, image.driver_least):
        return Refusal(
            f"the NVIDIA driver of this machine is {machine.driver}, and the CUDA of {image.name} needs "
            f"{image.driver_least} or newer. Likely cause: the driver was not updated with the image. Next step: "
            "update the driver of the host; an image cannot bring its own.",
            NO_ENVIRONMENT,
        )
    if not machine.devices and not machine.gpus:
        return Refusal(
            f"no GPU in this container: the machine has the NVIDIA driver {machine.driver}, and no GPU was handed "
            f"over. Likely cause: --gpus is missing. Next step: `docker run --gpus all ... {session.name}`; if it says "
            "`could not select device driver`, install the NVIDIA Container Toolkit.",
            NO_ENVIRONMENT,
        )
    if machine.devices and not machine.gpus:
        what = "lists no GPU" if machine.library else "is not in this container"
        return Refusal(
            f"no GPU in this container can be asked: its device files are there, and the driver's library {what}. "
            "Likely cause: devices were handed over by hand, NVIDIA_DRIVER_CAPABILITIES leaves `utility` out, or the "
            "GPU has fallen off the bus. Next step: `docker run --gpus all`, and `nvidia-smi` on the host.",
            NO_ENVIRONMENT,
        )
    others = [gpu for gpu in machine.gpus if gpu.arch != image.arch]
    if others:
        seen = ", ".join(dict.fromkeys(f"{gpu.name} ({gpu.arch})" for gpu in others))
        return Refusal(
            f"another architecture: {image.name} is for {image.arch}, and here is {seen}. Likely cause: the image of "
            f"another target. Next step: {_say_arch(others[0].arch)}; or hand over the right GPUs alone, with "
            "--gpus device=N.",
            NO_ENVIRONMENT,
        )
    return None


def _say_arch(arch: str) -> str:
    known = {"sm_90": "h200", "sm_100": "b200", "sm_121": "gb10"}
    if arch in known:
        return f"take the image for {known[arch]} ({arch})"
    return (
        f"no image is made for {arch}: take a machine of {', '.join(f'{name} ({key})' for key, name in known.items())}"
    )


def _is_older(driver: str, least: str) -> bool:
    def number(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split(".") if part.isdigit())

    return bool(least) and number(driver) < number(least)
