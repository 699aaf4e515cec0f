"""The damaged installs: how a release of Transformer Engine is laid out and damaged.

Each case gets a virtual environment made of links: it holds everything that the current interpreter sees except
Transformer Engine, which is laid out anew. So the damage touches no real install, and TE's own search of site-packages
finds the damaged files only. The compiled halves of TE (the core library is 480 MB and needs a GPU driver, the torch
extension exists as source only) have stand-ins: two tiny real libraries, which compute nothing.

The rows are in matrix/firewall.toml; `ACTIONS` holds what they name.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import sysconfig
import venv
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from ...environments.venv import find_torch_python
from ...process import run_command

# Seconds of the trial import of the bridge. One that hangs takes all of them; one that aborts ends early on any host.
_TRIAL: Final = "MEGACPP_TE_TRIAL_SECONDS"
_NAMES: Final = ("transformer_engine", "transformer_engine[-_.]*", "__editable__*transformer_engine*")
_NEEDED_BY_TE: Final = ("einops", "numpy", "onnxscript", "packaging", "pydantic")
LIMIT_S: Final = 120.0  # of a compile, too: the first use of the packaged compiler builds parts of its own runtime
_SOURCES: Final = Path(__file__).with_name("standin")
_CUDA_LIBRARIES: Final = ("cudnn", "nvrtc", "curand")  # what TE looks for by name before it loads its core
_CORE: Final = "libtransformer_engine*.so*"
_EXTENSION: Final = "transformer_engine_torch*.so"
_LOOK: Final = """
import importlib.util, json, sys, sysconfig
torch = problem = ""
try:
    import torch as found
    torch = str(found.__version__)
except BaseException as fault:
    problem = f"torch cannot be imported here ({type(fault).__name__}: {fault})"
if torch and (lacks := [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]):
    problem = f"TE's Python sources need packages that are not here: {', '.join(lacks)}"
path = [entry for entry in sys.path if entry]
print("\\n" + json.dumps([path, sysconfig.get_path("purelib"), torch, problem]))
"""
WheelOf = Callable[[str, str], Path]
"""(version, distribution) -> path of its verified pure-Python wheel."""


class CannotBuild(RuntimeError):
    """The stand-ins cannot be built here; the text says why and what to do."""


@dataclass(frozen=True)
class Interpreter:
    """What the current interpreter offers to an environment made from it.

    Attributes:
        path: its `sys.path`, standard library included.
        purelib: its site-packages.
        torch: version of the torch that it imports; empty where it imports none.
        problem: why TE's Python sources cannot be imported in full with it; empty where they can.
    """

    path: tuple[Path, ...]
    purelib: Path
    torch: str
    problem: str


def read_interpreter(limit_s: float = LIMIT_S) -> Interpreter:
    """Ask a process of the interpreter that has torch; this one imports neither torch nor a vendor library."""
    python = find_torch_python()
    try:
        ended = run_command([python, "-P", "-c", _LOOK, *_NEEDED_BY_TE], limit_s=limit_s)
        path, purelib, torch, problem = json.loads(ended.words.splitlines()[-1])
    except (OSError, IndexError, ValueError) as fault:
        return Interpreter((), Path(sysconfig.get_path("purelib")), "", f"{python} gave no answer: {fault}")
    if problem:
        problem += ". Next step: run `nox -s import_firewall`, which installs torch, or name a torch in MEGACPP_PYTHON"
    return Interpreter(tuple(map(Path, path)), Path(purelib), torch, problem)


# --- stand-ins for the compiled halves ------------------------------------------------------------------------------


def find_compiler() -> tuple[str, ...]:
    """The command of a C compiler; raises `CannotBuild` where there is none."""
    for name in ("cc", "gcc", "clang"):
        if found := shutil.which(name):
            return (found,)
    python = find_torch_python()
    if run_command([python, "-c", "import ziglang"], limit_s=LIMIT_S).code == 0:  # as in the cpu image
        return (python, "-m", "ziglang", "cc")
    raise CannotBuild(
        "no C compiler (cc, gcc or clang) is on the path, and the package `ziglang` is not installed. Next step: "
        "install either; the dependency group `compiler` brings the package"
    )


def build_stand_ins(folder: Path) -> Path:
    """Build small libraries that take the places of the compiled parts; raises `CannotBuild`.

    Returns:
        The folder, with one a part: `core` needs a library named `libcublasLt.so.13`; loading `hanging` never ends, and
        loading `aborting` ends the process; `cuda` has cuDNN, NVRTC and cuRAND, `bare_cuda` cuDNN alone.
    """
    if sys.platform != "linux" or sys.maxsize < 2**32:
        raise CannotBuild("Transformer Engine's libraries, and so their stand-ins, exist for 64-bit Linux only")
    cublas = _compile(folder / "libcublasLt.so.13", "-DPART_CUBLAS", "-Wl,-soname,libcublasLt.so.13")
    linked = ("-Wl,--no-as-needed", str(cublas), f"-Wl,-rpath,{folder}")
    for part, options in (("core", linked), ("hanging", ()), ("aborting", ())):
        _compile(folder / part / "libtransformer_engine.so", f"-DPART_{part.upper()}", *options)
    for name in (*(f"cuda/lib/lib{name}.so" for name in _CUDA_LIBRARIES), "bare_cuda/lib/libcudnn.so"):
        _compile(folder / name, "-DPART_EMPTY")
    build_extension(folder / "extension")
    return folder


def build_extension(folder: Path, *lacks: str) -> Path:
    """Build the stand-in of the torch extension; it has every name but those in `lacks`."""
    folder.mkdir(parents=True, exist_ok=True)
    python = (_SOURCES / "extension.py").read_text(encoding="utf-8") + f"\nLACKS.update({list(lacks)!r})\n"
    lines = "\n".join(json.dumps(line + "\n") for line in python.splitlines())
    (folder / "standin_source.h").write_text(f"static const char STANDIN_SOURCE[] =\n{lines};\n", encoding="utf-8")
    suffix = sysconfig.get_config_var("EXT_SUFFIX") or ".so"
    return _compile(folder / f"transformer_engine_torch{suffix}", f"-I{folder}", source="extension.c")


def _compile(target: Path, *options: str, source: str = "core.c") -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    command = [*find_compiler(), "-shared", "-fPIC", "-o", str(target), str(_SOURCES / source), *options]
    ended = run_command(command, limit_s=LIMIT_S)
    if ended.code:
        raise CannotBuild(
            f"the compiler `{command[0]}` could not build {target.name} ({ended.how}): {ended.last_words}. Next "
            "step: try it by hand, or put another compiler first on the path"
        )
    return target


# --- one install ----------------------------------------------------------------------------------------------------


@dataclass
class Install:
    """One install of Transformer Engine, in the making.

    Attributes:
        release: version of the Python sources.
        root: folder of the whole environment.
        site: its site-packages.
        wheels: gives the wheel of a distribution.
        stand_ins: folder of the built stand-ins; None where they could not be built.
        early: folders that come before site-packages on the path.
        variables: environment variables of the processes.
        hidden: patterns of what the current interpreter has and this environment must not see.
    """

    release: str
    root: Path
    site: Path
    wheels: WheelOf
    stand_ins: Path | None
    early: list[Path] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    hidden: set[str] = field(default_factory=lambda: set(_NAMES))

    @property
    def package(self) -> Path:
        """The folder `transformer_engine`."""
        return self.site / "transformer_engine"

    def stand_in(self, part: str) -> Path:
        """The library of a part, or its folder where that holds several."""
        assert self.stand_ins is not None, "a case with compiled parts is not run without stand-ins"
        return next((self.stand_ins / part).glob("*.so"), self.stand_ins / part)

    def write(self, pattern: str, data: bytes) -> None:
        """Replace a file; what it was linked to stays as it is."""
        path = self.find(pattern)
        path.unlink()
        path.write_bytes(data)

    def find(self, pattern: str) -> Path:
        """A file or folder of the package, of its libraries, or of its metadata."""
        for folder in (self.package / "wheel_lib", self.package, self.site):
            for found in folder.glob(pattern):
                return found
        raise LookupError(f"{pattern} is not laid out in {self.site}")


def lay_out(install: Install, parts: Collection[str]) -> None:
    """Lay out a release as pip would: the real wheel of its sources, and stand-ins for its compiled parts."""
    shutil.unpack_archive(install.wheels(install.release, "transformer-engine"), install.site, "zip")
    install.hidden |= {"flash_attn*"}  # a real FlashAttention needs the real extension
    if install.stand_ins is None:
        return
    # Where the real wheels have them; releases before 2.0 look for them in the package itself.
    folder = install.package if install.release.startswith("1.") else install.package / "wheel_lib"
    folder.mkdir(exist_ok=True)
    for part, distribution in (("core", "transformer_engine_cu12"), ("extension", "transformer_engine_torch")):
        if part in parts:
            shutil.copy2(install.stand_in(part), folder)
            write_dist_info(install.site, distribution, install.release)
    # By these every release of TE finds the stand-ins of the CUDA libraries.
    names = (f"{name}_{word}".upper() for name in ("cuda", *_CUDA_LIBRARIES) for word in ("home", "path"))
    install.variables |= dict.fromkeys(names, str(install.stand_ins / "cuda"))
    # Before 2.4, TE compiles functions while it is imported: a Triton that cannot launch is not enough.
    install.variables["NVTE_TORCH_COMPILE"] = "0"


def make_environment(root: Path) -> tuple[Path, Path]:
    """An empty virtual environment; returns its interpreter and its site-packages."""
    venv.EnvBuilder(symlinks=True, with_pip=False).create(root)
    return root / "bin" / "python", next(root.glob("lib/python*/site-packages"))


def link_the_rest(install: Install, interpreter: Interpreter) -> list[Path]:
    """Show the environment what else the interpreter has; returns the entries that come before its site."""
    standard = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")}
    entries: list[Path] = []
    for index, entry in enumerate(interpreter.path):
        if not entry.is_dir() or entry.resolve() in standard or entry.name == "lib-dynload":
            continue
        if entry.resolve() == interpreter.purelib.resolve():
            _link(entry, install.site, install.hidden)
        elif any(_matches(path.name, install.hidden) for path in entry.iterdir()):
            entries.append(_link(entry, install.root / f"path-{index}", install.hidden))
        else:
            entries.append(entry)
    return [*install.early, *entries]


def _link(source: Path, target: Path, hidden: Iterable[str]) -> Path:
    target.mkdir(exist_ok=True)
    for path in source.iterdir():
        place = target / path.name
        if not _matches(path.name, hidden) and path.suffix != ".pth" and not os.path.lexists(place):
            place.symlink_to(path)
    return target


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def write_dist_info(site: Path, name: str, version: str) -> None:
    """The metadata that pip leaves for a distribution of binary wheels."""
    folder = site / f"{name}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    (folder / "RECORD").write_text(f"{folder.name}/METADATA,,\n", encoding="utf-8")


# --- the actions ----------------------------------------------------------------------------------------------------


def rename(library: Path, pattern: str, end: str) -> tuple[str, str]:
    """Change the end of the first string of a library that matches: of a symbol, of a library that it needs.

    Args:
        library: replaced, never written through a link.
        pattern: of the whole string.
        end: takes the place of as many characters.

    Returns:
        The old and the new string.

    Raises:
        LookupError: no string of the library matches.
    """
    image = library.read_bytes()
    found = re.search(rb"(?<=\0)(?:" + pattern.encode() + rb")(?=\0)", image)
    if found is None:
        raise LookupError(f"{library.name} has no string {pattern}")
    old = found[0].decode()
    new = old[: -len(end)] + end
    library.unlink()
    library.write_bytes(image[: found.start()] + new.encode() + image[found.end() :])
    return old, new


def rename_string(install: Install, file: str, pattern: str, end: str) -> None:
    """Change the end of the first string that matches, as `rename` does."""
    rename(install.find(file), pattern, end)


def uninstall(install: Install) -> None:
    """Remove the package and all its metadata."""
    shutil.rmtree(install.package)
    for folder in install.site.glob("transformer_engine*.dist-info"):
        shutil.rmtree(folder)


def leave_folders(install: Install) -> None:
    """Leave folders without a single source."""
    uninstall(install)
    for folder in ("common", "pytorch/module", "pytorch/__pycache__"):
        (install.package / folder).mkdir(parents=True)
    (install.package / "pytorch/__pycache__/__init__.cpython-311.pyc").write_bytes(b"")


def set_variable(install: Install, name: str, value: str) -> None:
    """Set an environment variable of the process."""
    install.variables[name] = value


def delete(install: Install, file: str) -> None:
    """Delete a file."""
    install.find(file).unlink()


def overwrite(install: Install, file: str, content: str) -> None:
    """Replace the content of a file by these characters as bytes."""
    install.write(file, content.encode("latin-1"))


def edit(install: Install, file: str, pattern: str, replacement: str) -> None:
    """Change a source of the package where a pattern matches first; it is an error if that changes nothing."""
    before = install.find(file).read_text(encoding="utf-8")
    if (after := re.sub(pattern, replacement, before, count=1)) == before:
        raise LookupError(f"{file} of {install.release} has nothing of what was to be damaged")
    install.write(file, after.encode())


def link_second_core(install: Install) -> None:
    """Put a second core library beside the package."""
    (install.site / "libtransformer_engine.so").symlink_to(install.find(_CORE).resolve())


def replace_core(install: Install, part: str, trial_s: str) -> None:
    """Replace the core library by a part of the stand-ins; the bridge tries the import for so many seconds."""
    install.write(_CORE, install.stand_in(part).read_bytes())
    install.variables[_TRIAL] = trial_s


def lose_function(install: Install, name: str) -> None:
    """Replace the torch extension by one that lacks a function."""
    install.write(_EXTENSION, build_extension(install.root / "older", name).read_bytes())


def set_version(install: Install, distribution: str, version: str) -> None:
    """Change the version in the metadata of a distribution; RELEASE stands for the release."""
    folder = install.find(f"{distribution}-*.dist-info")
    shutil.rmtree(folder)
    write_dist_info(install.site, folder.name.partition("-")[0], version.replace("RELEASE", install.release))


def put_copy_first(install: Install, release: str) -> None:
    """Put the sources of another release first on the path."""
    early = install.root / "checkout"
    early.mkdir()
    shutil.unpack_archive(install.wheels(release, "transformer-engine"), early, "zip")
    install.early.append(early)


def hide(install: Install, *patterns: str) -> None:
    """Hide what the interpreter has of these names."""
    install.hidden.update(patterns)


def hide_nvrtc(install: Install) -> None:
    """Let nothing find NVRTC."""
    install.variables["CUDA_HOME"] = install.variables["CUDA_PATH"] = str(install.stand_in("bare_cuda"))
    install.hidden.add("nvidia")
    ldconfig = install.root / "tools" / "ldconfig"
    ldconfig.parent.mkdir()
    ldconfig.write_text("#!/bin/sh\necho '0 libs found in cache'\n", encoding="utf-8")
    ldconfig.chmod(0o755)
    install.variables["PATH"] = f"{ldconfig.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"


def add_flash_attention_4(install: Install, version: str) -> None:
    """Install flash-attn-4 without what it needs."""
    shutil.unpack_archive(install.wheels(version, "flash-attn-4"), install.site, "zip")
    install.hidden |= {"cutlass*", "nvidia_cutlass*", "quack*", "tvm_ffi*", "flash_attn*"}


ACTIONS: Final[dict[str, Callable[..., object]]] = {
    action.__name__: action
    for action in (
        add_flash_attention_4, delete, edit, hide, hide_nvrtc, leave_folders, link_second_core, lose_function,
        overwrite, put_copy_first, rename_string, replace_core, set_variable, set_version, uninstall,
    )
}  # fmt: skip
"""Name in a row's `do` -> what it does to an install, with the row's other words as arguments."""
