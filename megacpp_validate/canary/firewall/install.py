"""An install of Transformer Engine laid out in an environment of its own, ready to be damaged.

Each case gets a virtual environment made of links: everything that the current interpreter sees is there, but
for Transformer Engine, which is laid out anew. So the damage touches no real install, and TE's own search of
site-packages finds the damaged files only.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from .standin_extension import StandIns, stand_in_environment

WheelOf = Callable[[str, str], Path]
"""(distribution, version) -> path of its verified pure-Python wheel."""

TE: Final = "transformer-engine"  # the distribution of the Python sources
TE_NAMES: Final = ("transformer_engine", "transformer_engine[-_.]*", "__editable__*transformer_engine*")
NEEDED_BY_TE: Final = ("einops", "numpy", "onnxscript", "packaging", "pydantic")
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


def look_at_interpreter(limit_s: float = 120.0) -> Interpreter:
    """Ask a fresh process of this interpreter; this one imports neither torch nor a vendor library."""
    command = [sys.executable, "-P", "-c", _LOOK, *NEEDED_BY_TE]
    purelib = Path(sysconfig.get_path("purelib"))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as fault:
        return Interpreter((), purelib, "", f"{sys.executable} gave no answer: {fault}")
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        said = done.stderr.strip()[-400:] or f"exit status {done.returncode}"
        return Interpreter((), purelib, "", f"{sys.executable} gave no answer: {said}")
    problem = ""
    if not answer["torch"]:
        problem = f"torch cannot be imported here ({answer['fault']})"
    elif answer["lacks"]:
        problem = f"TE's Python sources need packages that are not here: {', '.join(answer['lacks'])}"
    if problem:
        problem += ". Next step: install the dependency group `torch-cpu`"
    path = tuple(Path(entry) for entry in answer["path"])
    return Interpreter(path, Path(answer["purelib"]), answer["torch"], problem)


@dataclass
class Install:
    """One install of Transformer Engine, in the making.

    Attributes:
        release: version of the Python sources.
        root: folder of the whole environment.
        site: its site-packages.
        wheels: (distribution, version) -> its wheel.
        stand_ins: the built stand-ins; None where they could not be built.
        real: the compiled parts are those of a real install, not stand-ins.
        early: folders that come before site-packages on the path.
        variables: environment variables of the processes.
        hidden: patterns of what the current interpreter has and this environment must not see.
    """

    release: str
    root: Path
    site: Path
    wheels: Mapping[tuple[str, str], Path]
    stand_ins: StandIns | None
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
        return self._one("core library", "libtransformer_engine*.so*")

    @property
    def extension(self) -> Path:
        """The torch extension."""
        return self._one("torch extension", "transformer_engine_torch*.so")

    def dist_info(self, name: str) -> Path:
        """The metadata folder of a distribution: `transformer_engine`, `_cu12`/`_cu13` or `_torch` of it."""
        found = [folder for folder in self.site.glob(f"{name}-*.dist-info") if folder.is_dir()]
        if not found:
            raise LookupError(f"{name} is not laid out in {self.site}")
        return found[0]

    @property
    def core_distribution(self) -> str:
        """Name of the core's distribution: transformer_engine_cu12 or transformer_engine_cu13."""
        return next(self.site.glob("transformer_engine_cu1*.dist-info")).name.partition("-")[0]

    def edit(self, file: str, change: Callable[[str], str]) -> None:
        """Change a Python source of the package; it is an error if that changes nothing."""
        path = self.package / file
        before = path.read_text(encoding="utf-8")
        after = change(before)
        if after == before:
            raise LookupError(f"{file} of {self.release} has nothing of what was to be damaged")
        self.write(path, after.encode())

    def write(self, path: Path, data: bytes) -> None:
        """Replace a file; what it was linked to stays as it is."""
        path.unlink(missing_ok=True)
        path.write_bytes(data)

    def version(self, name: str, version: str) -> None:
        """Let a distribution's metadata say another version."""
        folder = self.dist_info(name)
        shutil.rmtree(folder)
        write_dist_info(self.site, name, version)

    def own(self, library: Path) -> Path:
        """Make a library a file of this environment, where it was a link into the real install."""
        if library.is_symlink():
            real = library.resolve()
            library.unlink()
            shutil.copy2(real, library)
        return library

    def _one(self, what: str, pattern: str) -> Path:
        found = [
            file for folder in (self.package / "wheel_lib", self.package, self.site) for file in folder.glob(pattern)
        ]
        if not found:
            raise LookupError(f"no {what} ({pattern}) is laid out in {self.site}")
        return found[0]


def lay_out_wheels(install: Install, parts: Iterable[str]) -> None:
    """Lay out a release as pip would: the real wheel of its sources, and stand-ins for its compiled parts."""
    wheel = install.wheels[TE, install.release]
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(install.site)
    install.hidden |= {"flash_attn*"}  # a real FlashAttention wants the real extension
    stand_ins = install.stand_ins
    if stand_ins is None:
        return
    # Where the real wheels have them; releases before 2.0 look for them in the package itself.
    folder = install.package if install.release.startswith("1.") else install.package / "wheel_lib"
    folder.mkdir(exist_ok=True)
    if "core" in parts:
        shutil.copy2(stand_ins.core, folder)
        write_dist_info(install.site, "transformer_engine_cu12", install.release)
    if "extension" in parts:
        shutil.copy2(stand_ins.extension, folder)
        write_dist_info(install.site, "transformer_engine_torch", install.release)
    install.variables |= stand_in_environment(stand_ins.cuda)
    # Before 2.4, TE compiles functions while it is imported: a Triton that cannot launch is not enough.
    install.variables["NVTE_TORCH_COMPILE"] = "0"


def lay_out_current(install: Install, parts: Iterable[str], interpreter: Interpreter) -> None:
    """Lay out the install that the interpreter has: Python files are copied, libraries are linked."""
    wanted = {"sources", *parts}
    for entry in find_current(interpreter):
        part = _part_of(entry.name)
        if entry.is_dir() and entry.name == "transformer_engine":
            shutil.copytree(entry, install.package, copy_function=_link_or_copy, ignore=_without(wanted))
        elif part not in wanted:
            continue
        elif entry.is_dir():
            shutil.copytree(entry, install.site / entry.name)
        else:
            _link_or_copy(str(entry), str(install.site / entry.name))


def find_current(interpreter: Interpreter) -> tuple[Path, ...]:
    """Folders and files of the Transformer Engine that the interpreter would import; empty for none."""
    found: dict[str, Path] = {}
    for entry in interpreter.path:
        if entry.is_dir():
            for path in entry.iterdir():
                if _matches(path.name, TE_NAMES):
                    found.setdefault(path.name, path)
    return tuple(found.values())


def current_release(interpreter: Interpreter) -> str:
    """Version of that install; empty where there is none, or where a part of it is missing."""
    found = find_current(interpreter)
    folders = [path for path in found if path.name == "transformer_engine"]
    libraries = {path.name for path in found}
    libraries |= {
        file.name for folder in folders for place in ("", "wheel_lib") for file in (folder / place).glob("*.so")
    }
    infos = [path.name for path in found if re.fullmatch(r"transformer_engine-.+\.dist-info", path.name)]
    for part in ("libtransformer_engine", "transformer_engine_torch"):
        if not any(name.startswith(part) and name.endswith(".so") for name in libraries):
            return ""
    return infos[0].removesuffix(".dist-info").partition("-")[2] if infos and folders else ""


def make_environment(root: Path) -> tuple[Path, Path]:
    """An empty virtual environment; returns its interpreter and its site-packages."""
    builder = venv.EnvBuilder(symlinks=True, with_pip=False)
    builder.create(root)
    site = next(root.glob("lib/python*/site-packages"))
    return root / "bin" / "python", site


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


def environment_of(install: Install, path: Iterable[Path]) -> dict[str, str]:
    """Variables of a process in the environment; nothing is inherited that steers TE or the bridge."""
    steering = ("PYTHON", "MEGACPP_", "NVTE_", "VIRTUAL_ENV")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(steering)}
    return {**inherited, "PYTHONPATH": os.pathsep.join(map(str, path)), **install.variables}


def write_dist_info(site: Path, name: str, version: str) -> None:
    """The metadata that pip leaves for a distribution of binary wheels."""
    folder = site / f"{name}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    (folder / "WHEEL").write_text("Wheel-Version: 1.0\nRoot-Is-Purelib: false\n", encoding="utf-8")
    (folder / "RECORD").write_text(f"{folder.name}/METADATA,,\n{folder.name}/WHEEL,,\n", encoding="utf-8")
    (folder / "INSTALLER").write_text("pip\n", encoding="utf-8")


def _link(source: Path, target: Path, hidden: Iterable[str]) -> Path:
    target.mkdir(exist_ok=True)
    for path in source.iterdir():
        place = target / path.name
        if not _matches(path.name, hidden) and path.suffix != ".pth" and not os.path.lexists(place):
            place.symlink_to(path)
    return target


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _part_of(name: str) -> str:
    if name.startswith("transformer_engine_torch"):
        return "extension"
    return "core" if name.startswith("transformer_engine_cu") else "sources"


def _without(wanted: set[str]) -> Callable[[str, list[str]], list[str]]:
    patterns = {"core": "libtransformer_engine*", "extension": "transformer_engine_torch*.so"}
    left_out = [pattern for part, pattern in patterns.items() if part not in wanted]
    return lambda _, names: [name for name in names if name == "__pycache__" or _matches(name, left_out)]


def _link_or_copy(source: str, target: str) -> str:
    real = Path(source)
    if real.stat().st_size > _BIG_BYTES and ".so" in real.name:
        Path(target).symlink_to(real.resolve())
    else:
        shutil.copy2(source, target)
    return target
