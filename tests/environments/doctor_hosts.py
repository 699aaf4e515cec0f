"""Hosts as the doctor would see them, made by hand after the receipts of a real one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.catalog.images import read_needs
from megacpp_validate.environments.doctor_rules import TE, Difference, Host, judge_host
from megacpp_validate.evidence.doctor_look import Distribution, Extension, PackageLook, PathLook
from megacpp_validate.evidence.receipt import Failure, Library


class Seen(NamedTuple):
    path: PathLook
    packages: tuple[PackageLook, ...]


SITE = "/opt/torch/lib/python3.12/site-packages"
RUNTIME = {"libcudart.so.13": f"{SITE}/nvidia/cu13/lib/libcudart.so.13"}
TWO_RUNTIMES = {**RUNTIME, "libcudart.so.12": "/usr/local/cuda-12/lib64/libcudart.so.12"}
LIBRARIES = (
    Library("libcudart", "13.0", (RUNTIME["libcudart.so.13"],)),
    Library("libcublasLt", "13.1.0", (f"{SITE}/nvidia/cu13/lib/libcublasLt.so.13",)),
    Library("libcudnn", "9.24.0", (f"{SITE}/nvidia/cudnn/lib/libcudnn.so.9",)),
)
PATH = PathLook(
    python="3.12.3", executable="/usr/bin/python3", soabi="cpython-312-x86_64-linux-gnu", machine="x86_64",
    torch="2.11.0+cu130", torch_cuda="13.0", driver="580.159.04", driver_cuda="13.0", gpu="NVIDIA H200",
    capability="9.0",
    distributions=tuple(
        Distribution(name, version, SITE)
        for name, version in (
            ("torch", "2.11.0+cu130"), ("triton", "3.6.0"), ("nvidia-cudnn-cu13", "9.24.0.1"),
            ("nvidia-cudnn-frontend", "1.32.0"), ("sgl-deep-gemm", "0.1.3"),
        )
    ),
)  # fmt: skip


def judge(catalog: Catalog, seen: Seen, target: str = "h200", stack: str = "") -> tuple[Difference, ...]:
    """The differences of a host from the rows of a target."""
    modules = tuple(module.id for module in catalog.modules)
    row = next(one for one in catalog.targets if one.id == target)
    asked = next((one for one in catalog.stacks if one.id == stack), None)
    return judge_host(Host(*seen, modules, row, asked, catalog.pinned, read_needs(list(modules))))


def look(name: str, version: str = "1.0", **more: Any) -> PackageLook:
    values = {"installed": True, "version": version, "libraries": LIBRARIES, "runtimes": RUNTIME, **more}
    return PackageLook(name, file=f"{SITE}/{name.partition('.')[0]}/__init__.py", **values)


def host(te: str = "2.20.2", **looks: PackageLook) -> Seen:
    """A host on which nothing is wrong but the release may be; `looks` replaces some, by their first word."""
    clean = {
        "torch": look("torch", "2.11.0+cu130"),
        "transformer_engine": look(TE, te),
        "flash_attn": look("flash_attn"),
        "flash_attn_interface": look("flash_attn_interface"),
        "deep_gemm": look("deep_gemm", "0.1.3"),
        "triton": look("triton", "3.6.0"),
        "cutlass": look("cutlass"),
    }
    return Seen(PATH, tuple((clean | looks).values()))


def with_path(seen: Seen, **more: Any) -> Seen:
    return Seen(replace(seen.path, **more), seen.packages)


def with_distributions(seen: Seen, *more: tuple[str, str, str] | tuple[str, str, str, tuple[str, ...]]) -> Seen:
    """More metadata; it comes first on the path."""
    return with_path(seen, distributions=tuple(Distribution(*one) for one in more) + seen.path.distributions)


def with_cudnn(version: str, **more: Any) -> PackageLook:
    libraries = (*LIBRARIES[:2], Library("libcudnn", version, LIBRARIES[2].files))
    return look(TE, more.pop("te", "2.20.2"), libraries=libraries, **more)


def extension(file: str = "_C.so", **more: Any) -> Extension:
    return Extension(file=f"{SITE}/deep_gemm/{file}", needed=("libc10.so", "libtorch_cpu.so"), **more)


def failure(message: str, kind: str = "OSError") -> Failure:
    return Failure(kind, message, "transformer_engine/common/__init__.py:360")
