"""Stand-ins for the compiled halves of Transformer Engine, built where this runs.

The core library is 480 MB and wants a GPU driver, the torch extension exists as source only, and neither
loads beside a CPU build of torch. So on such a host two tiny libraries take their places: real ones, that the
loader resolves and that can be really damaged. They compute nothing.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).with_name("standin")
CUDA_LIBRARIES = ("cudnn", "nvrtc", "curand")  # what TE looks for by name before it loads its core
_LIMIT_S = 120.0  # the first use of the packaged compiler builds parts of its own runtime


class CannotBuild(RuntimeError):
    """The stand-ins cannot be built here; the text says why and what to do."""


@dataclass(frozen=True)
class StandIns:
    """The built libraries.

    Attributes:
        core: takes the place of `libtransformer_engine.so`; needs a library named `libcublasLt.so.13`.
        extension: takes the place of `transformer_engine_torch.*.so`.
        hanging_core, aborting_core: a core whose loading never ends, or ends the process.
        cuda: a folder with stand-ins for cuDNN, NVRTC and cuRAND.
        bare_cuda: the same without NVRTC and cuRAND.
        compiler: the command that built them.
    """

    core: Path
    extension: Path
    hanging_core: Path
    aborting_core: Path
    cuda: Path
    bare_cuda: Path
    compiler: str


def find_compiler() -> tuple[str, ...]:
    """The command of a C compiler; raises `CannotBuild` where there is none."""
    for name in ("cc", "gcc", "clang"):
        if found := shutil.which(name):
            return (found,)
    if importlib.util.find_spec("ziglang"):
        return (sys.executable, "-m", "ziglang", "cc")
    raise CannotBuild(
        "no C compiler (cc, gcc or clang) is on the path, and the package `ziglang` is not installed. Next "
        "step: install either; the dependency group `compiler` brings the package"
    )


def build_stand_ins(folder: Path, compiler: Sequence[str] = ()) -> StandIns:
    """Build every stand-in into `folder`; raises `CannotBuild`."""
    if sys.platform != "linux" or sys.maxsize < 2**32:
        raise CannotBuild("Transformer Engine's libraries, and so their stand-ins, exist for 64-bit Linux only")
    command = tuple(compiler) or find_compiler()
    folder.mkdir(parents=True, exist_ok=True)
    build = _Build(command, folder)
    cublas = build.library("libcublasLt.so.13", "core.c", "-DPART_CUBLAS", "-Wl,-soname,libcublasLt.so.13")
    linked = ("-Wl,--no-as-needed", str(cublas), f"-Wl,-rpath,{folder}")
    for name in CUDA_LIBRARIES:
        build.library(f"cuda/lib/lib{name}.so", "core.c", "-DPART_EMPTY")
    build.library("bare_cuda/lib/libcudnn.so", "core.c", "-DPART_EMPTY")
    return StandIns(
        core=build.library("core/libtransformer_engine.so", "core.c", "-DPART_CORE", *linked),
        extension=build_extension(build.command, folder / "extension"),
        hanging_core=build.library("hanging/libtransformer_engine.so", "core.c", "-DPART_HANGS"),
        aborting_core=build.library("aborting/libtransformer_engine.so", "core.c", "-DPART_ABORTS"),
        cuda=folder / "cuda",
        bare_cuda=folder / "bare_cuda",
        compiler=" ".join(command),
    )


def build_extension(compiler: Sequence[str], folder: Path, *, lacks: Sequence[str] = ()) -> Path:
    """Build the stand-in of the torch extension; it has every name but those in `lacks`."""
    folder.mkdir(parents=True, exist_ok=True)
    python = (SOURCES / "extension.py").read_text(encoding="utf-8") + f"\nLACKS.update({list(lacks)!r})\n"
    lines = "\n".join(json.dumps(line + "\n") for line in python.splitlines())
    (folder / "standin_source.h").write_text(f"static const char STANDIN_SOURCE[] =\n{lines};\n", encoding="utf-8")
    suffix = sysconfig.get_config_var("EXT_SUFFIX") or ".so"
    build = _Build(tuple(compiler), folder)
    return build.library(f"transformer_engine_torch{suffix}", "extension.c", f"-I{folder}")


@dataclass(frozen=True)
class _Build:
    command: tuple[str, ...]
    folder: Path

    def library(self, name: str, source: str, *options: str) -> Path:
        target = self.folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        run = [*self.command, "-shared", "-fPIC", "-o", str(target), str(SOURCES / source), *options]
        try:
            done = subprocess.run(run, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as fault:
            raise CannotBuild(f"the compiler `{' '.join(self.command)}` did not run: {fault}") from fault
        if done.returncode:
            said = done.stderr.strip()[-800:]
            raise CannotBuild(
                f"the compiler `{' '.join(self.command)}` could not build {name}: {said}. "
                "Next step: try it by hand, or put another compiler first on the path"
            )
        return target


def stand_in_environment(cuda: Path) -> Mapping[str, str]:
    """Variables by which every release of TE finds the stand-ins of the CUDA libraries."""
    libraries = ("cuda", *CUDA_LIBRARIES)
    return {f"{name}_{word}".upper(): str(cuda) for name in libraries for word in ("home", "path")}
