"""An install of Transformer Engine laid out in an environment of its own, ready to be damaged.

Each case gets a virtual environment made of links: it holds everything that the current interpreter sees except
Transformer Engine, which is laid out anew. So the damage touches no real install, and TE's own search of site-packages
finds the damaged files only.

Where the compiled halves of TE cannot load (the core library is 480 MB and needs a GPU driver, the torch extension
exists as source only), two tiny real libraries take their places. They compute nothing.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import sysconfig
import venv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, Literal

from ...environments.venv import find_torch_python
from ...process import run_command

InstallMode = Literal["wheels", "current"]
WheelOf = Callable[[str, str], Path]
"""(distribution, version) -> path of its verified pure-Python wheel."""

TE: Final = "transformer-engine"  # the distribution of the Python sources
TE_NAMES: Final = ("transformer_engine", "transformer_engine[-_.]*", "__editable__*transformer_engine*")
NEEDED_BY_TE: Final = ("einops", "numpy", "onnxscript", "packaging", "pydantic")
LIMIT_S: Final = 120.0  # of a compile, too: the first use of the packaged compiler builds parts of its own runtime
_SOURCES: Final = Path(__file__).with_name("standin")
_CUDA_LIBRARIES: Final = ("cudnn", "nvrtc", "curand")  # what TE looks for by name before it loads its core
_PARTS: Final = {
    "core": ("libtransformer_engine*", "transformer_engine_cu*"),
    "extension": ("transformer_engine_torch*",),
}
_BIG_BYTES: Final = 2**20
_LOOK: Final = """
import importlib, importlib.util, json, sys, sysconfig
answer = {"path": [entry for entry in sys.path if entry], "purelib": sysconfig.get_path("purelib")}
answer["torch"] = ""
answer["lacks"] = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
try:
    answer["torch"] = str(importlib.import_module("torch").__version__)
except BaseException as fault:
    answer["fault"] = f"{type(fault).__name__}: {fault}"
print("\\n" + json.dumps(answer))
"""


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
    purelib = Path(sysconfig.get_path("purelib"))
    try:
        ended = run_command([find_torch_python(), "-P", "-c", _LOOK, *NEEDED_BY_TE], limit_s=limit_s)
        answer = json.loads(ended.words.splitlines()[-1])
    except (OSError, IndexError, ValueError) as fault:
        return Interpreter((), purelib, "", f"{find_torch_python()} gave no answer: {fault}")
    problem = ""
    if not answer["torch"]:
        problem = f"torch cannot be imported here ({answer['fault']})"
    elif answer["lacks"]:
        problem = f"TE's Python sources need packages that are not here: {', '.join(answer['lacks'])}"
    if problem:
        problem += ". Next step: install the dependency group `torch-cpu`"
    return Interpreter(tuple(map(Path, answer["path"])), Path(answer["purelib"]), answer["torch"], problem)


# --- stand-ins for the compiled halves ------------------------------------------------------------------------------


def find_compiler() -> tuple[str, ...]:
    """The command of a C compiler; raises `CannotBuild` where there is none."""
    for name in ("cc", "gcc", "clang"):
        if found := shutil.which(name):
            return (found,)
    python = find_torch_python()
    if run_command([python, "-c", "import ziglang"], limit_s=LIMIT_S).code == 0:
        return (python, "-m", "ziglang", "cc")
    raise CannotBuild(
        "no C compiler (cc, gcc or clang) is on the path, and the package `ziglang` is not installed. Next step: "
        "install either; the dependency group `compiler` brings the package"
    )


def build_stand_ins(folder: Path, compiler: Sequence[str] = ()) -> Path:
    """Build small libraries that take the places of the compiled parts; raises `CannotBuild`.

    Returns:
        The folder, with one a part: `core` needs a library named `libcublasLt.so.13`; loading `hanging` never ends, and
        loading `aborting` ends the process; `cuda` has cuDNN, NVRTC and cuRAND, `bare_cuda` cuDNN alone.
    """
    if sys.platform != "linux" or sys.maxsize < 2**32:
        raise CannotBuild("Transformer Engine's libraries, and so their stand-ins, exist for 64-bit Linux only")
    command = tuple(compiler) or find_compiler()
    cublas = _compile(command, folder / "libcublasLt.so.13", "-DPART_CUBLAS", "-Wl,-soname,libcublasLt.so.13")
    linked = ("-Wl,--no-as-needed", str(cublas), f"-Wl,-rpath,{folder}")
    for part, options in (("core", linked), ("hanging", ()), ("aborting", ())):
        _compile(command, folder / part / "libtransformer_engine.so", f"-DPART_{part.upper()}", *options)
    for name in (*(f"cuda/lib/lib{name}.so" for name in _CUDA_LIBRARIES), "bare_cuda/lib/libcudnn.so"):
        _compile(command, folder / name, "-DPART_EMPTY")
    build_extension(command, folder / "extension")
    return folder


def build_extension(compiler: Sequence[str], folder: Path, *, lacks: Sequence[str] = ()) -> Path:
    """Build the stand-in of the torch extension; it has every name but those in `lacks`."""
    folder.mkdir(parents=True, exist_ok=True)
    python = (_SOURCES / "extension.py").read_text(encoding="utf-8") + f"\nLACKS.update({list(lacks)!r})\n"
    lines = "\n".join(json.dumps(line + "\n") for line in python.splitlines())
    (folder / "standin_source.h").write_text(f"static const char STANDIN_SOURCE[] =\n{lines};\n", encoding="utf-8")
    suffix = sysconfig.get_config_var("EXT_SUFFIX") or ".so"
    return _compile(compiler, folder / f"transformer_engine_torch{suffix}", f"-I{folder}", source="extension.c")


def _compile(compiler: Sequence[str], target: Path, *options: str, source: str = "core.c") -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    command = [*compiler, "-shared", "-fPIC", "-o", str(target), str(_SOURCES / source), *options]
    try:
        ended = run_command(command, limit_s=LIMIT_S)
    except OSError as fault:
        raise CannotBuild(f"the compiler `{compiler[0]}` did not run: {fault}") from fault
    if ended.code:
        raise CannotBuild(
            f"the compiler `{compiler[0]}` could not build {target.name} ({ended.how}): {ended.last_words}. Next "
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
        real: the compiled parts are those of a real install, not stand-ins.
        early: folders that come before site-packages on the path.
        variables: environment variables of the processes.
        hidden: patterns of what the current interpreter has and this environment must not see.
    """

    release: str
    root: Path
    site: Path
    wheels: WheelOf
    stand_ins: Path | None
    real: bool = False
    early: list[Path] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    hidden: set[str] = field(default_factory=lambda: set(TE_NAMES))

    @property
    def package(self) -> Path:
        """The folder `transformer_engine`."""
        return self.site / "transformer_engine"

    @property
    def core(self) -> Path:
        """The core library."""
        return self._find("libtransformer_engine*.so*")

    @property
    def extension(self) -> Path:
        """The torch extension."""
        return self._find("transformer_engine_torch*.so")

    def stand_in(self, part: str) -> Path:
        """The library of a part, or its folder where that holds several; raises `CannotBuild`."""
        if self.stand_ins is None:
            raise CannotBuild("this damage needs a small library, and there is no compiler to build it with")
        return next((self.stand_ins / part).glob("*.so"), self.stand_ins / part)

    def dist_info(self, name: str) -> Path:
        """The metadata folder of a distribution: `transformer_engine`, `_cu12`/`_cu13` or `_torch` of it."""
        return self._find(f"{name}-*.dist-info")

    def edit(self, file: str, change: Callable[[str], str]) -> None:
        """Change a Python source of the package; it is an error if that changes nothing."""
        path = self.package / file
        before = path.read_text(encoding="utf-8")
        if (after := change(before)) == before:
            raise LookupError(f"{file} of {self.release} has nothing of what was to be damaged")
        self.write(path, after.encode())

    def write(self, path: Path, data: bytes) -> None:
        """Replace a file; what it was linked to stays as it is."""
        path.unlink(missing_ok=True)
        path.write_bytes(data)

    def _find(self, pattern: str) -> Path:
        for folder in (self.package / "wheel_lib", self.package, self.site):
            for found in folder.glob(pattern):
                return found
        raise LookupError(f"{pattern} is not laid out in {self.site}")


def lay_out_wheels(install: Install, parts: Iterable[str]) -> None:
    """Lay out a release as pip would: the real wheel of its sources, and stand-ins for its compiled parts."""
    shutil.unpack_archive(install.wheels(TE, install.release), install.site, "zip")
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


def lay_out_current(install: Install, parts: Iterable[str], interpreter: Interpreter) -> None:
    """Lay out the install that the interpreter has: Python files are copied, libraries are linked."""
    left_out = [pattern for part, patterns in _PARTS.items() if part not in parts for pattern in patterns]
    for entry in _find_current(interpreter):
        target = install.site / entry.name
        if _matches(entry.name, left_out):
            continue
        if entry.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", *left_out)
            shutil.copytree(entry, target, copy_function=_link_or_copy, ignore=ignored)
        else:
            _link_or_copy(str(entry), str(target))


def read_current_release(interpreter: Interpreter) -> str:
    """Version of the interpreter's own install; empty where there is none, or where a part of it is missing."""
    found = {path.name: path for path in _find_current(interpreter)}
    package = found.get("transformer_engine", Path("/nowhere"))
    libraries = [*found, *(file.name for place in ("", "wheel_lib") for file in (package / place).glob("*.so"))]
    for pattern in ("libtransformer_engine*.so", "transformer_engine_torch*.so"):
        if not any(fnmatchcase(name, pattern) for name in libraries):
            return ""
    infos = (re.fullmatch(r"transformer_engine-(.+)\.dist-info", name) for name in found)
    return next((info[1] for info in infos if info), "")


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


def write_dist_info(site: Path, name: str, version: str) -> None:
    """The metadata that pip leaves for a distribution of binary wheels."""
    folder = site / f"{name}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    (folder / "RECORD").write_text(f"{folder.name}/METADATA,,\n", encoding="utf-8")


def _find_current(interpreter: Interpreter) -> Iterable[Path]:
    """Folders and files of the Transformer Engine that the interpreter would import; empty for none."""
    found: dict[str, Path] = {}
    for entry in filter(Path.is_dir, interpreter.path):
        for path in entry.iterdir():
            if _matches(path.name, TE_NAMES):
                found.setdefault(path.name, path)
    return found.values()


def _link(source: Path, target: Path, hidden: Iterable[str]) -> Path:
    target.mkdir(exist_ok=True)
    for path in source.iterdir():
        place = target / path.name
        if not _matches(path.name, hidden) and path.suffix != ".pth" and not os.path.lexists(place):
            place.symlink_to(path)
    return target


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _link_or_copy(source: str, target: str) -> str:
    real = Path(source)
    if real.stat().st_size > _BIG_BYTES and ".so" in real.name:
        Path(target).symlink_to(real.resolve())
    else:
        shutil.copy2(source, target)
    return target
