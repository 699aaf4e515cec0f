"""The damaged installs: how a release of Transformer Engine is laid out and damaged, and what the bridge must answer.

Each case gets a virtual environment made of links: it holds everything that the current interpreter sees except
Transformer Engine, which is laid out anew. So the damage touches no real install, and TE's own search of site-packages
finds the damaged files only. The compiled halves of TE (the core library is 480 MB and needs a GPU driver, the torch
extension exists as source only) have stand-ins: two tiny real libraries, which compute nothing.

The words that a row expects are those of the bridge; what a loader error means to a person is written in `diagnosis`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import sysconfig
import venv
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from ...environments.venv import find_torch_python
from ...errors import WrongArguments
from ...process import run_command

PINNED: Final = "2.20.2"
BASELINES: Final = ("2.8.0", "2.12.0", "2.17.1", PINNED)
WHOLE: Final = ("core", "extension")
FLASH_ATTENTION_4: Final = ("4.0.0b36", "flash-attn-4")
ANOTHER_COPY: Final = ("2.17.1", "transformer-engine")
ANOTHER_RELEASE: Final = "2.19.0"
# Seconds of the trial import of the bridge. One that hangs takes all of them; one that aborts ends early on any host.
_TRIAL: Final = "MEGACPP_TE_TRIAL_SECONDS"
_HANGS_S, _ABORTS_S = "20", "100"
_UNDAMAGED: Final = "undamaged-"
TE_NAMES: Final = ("transformer_engine", "transformer_engine[-_.]*", "__editable__*transformer_engine*")
NEEDED_BY_TE: Final = ("einops", "numpy", "onnxscript", "packaging", "pydantic")
LIMIT_S: Final = 120.0  # of a compile, too: the first use of the packaged compiler builds parts of its own runtime
_SOURCES: Final = Path(__file__).with_name("standin")
_CUDA_LIBRARIES: Final = ("cudnn", "nvrtc", "curand")  # what TE looks for by name before it loads its core
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


# --- the cases ------------------------------------------------------------------------------------------------------

Action = Callable[[Install], object]


@dataclass(frozen=True)
class Damage:
    """One damaged install.

    Attributes:
        id: name of the case.
        says: what is done to the install, in words.
        do: does it.
        reason: patterns that the bridge's reason must match, each of them: the exception, the likely cause, the next
            step. Empty where nothing is wrong, so that there must be no reason.
        release: the release that is laid out; empty for the pinned one.
        parts: the compiled parts that are laid out beside the sources.
        torch: whether the damage shows only once TE has imported torch.
        hides_torch: torch is taken away; modules of the bridge that are made of torch may fail then, nothing else.
        available: what `is_te_available()` must answer.
        missing: accessors that give None although TE is available.
    """

    id: str
    says: str
    do: Action
    reason: tuple[str, ...] = ()
    release: str = ""
    parts: tuple[str, ...] = WHOLE
    torch: bool = True
    hides_torch: bool = False
    available: bool = False
    missing: tuple[str, ...] = ()

    @property
    def is_baseline(self) -> bool:
        """Whether this is an undamaged install."""
        return self.id.startswith(_UNDAMAGED)

    @property
    def baseline(self) -> str:
        """The case that must pass for this one to prove anything: the undamaged install; empty where none must."""
        needs = self.parts == WHOLE and self.torch and not self.is_baseline
        return f"{_UNDAMAGED}{self.release or PINNED}" if needs else ""


def plan_firewall(only: Collection[str] = ()) -> tuple[Damage, ...]:
    """The cases of a run, with the undamaged installs that they need.

    Raises:
        WrongArguments: no case has one of these names.
    """
    if unknown := sorted(set(only) - {row.id for row in DAMAGES}):
        raise WrongArguments(
            f"No firewall case is called {', '.join(unknown)}. Next step: choose from "
            f"{', '.join(row.id for row in DAMAGES)}."
        )
    chosen = {row.id for row in DAMAGES if not only or row.id in only}
    chosen |= {row.baseline for row in DAMAGES if row.id in chosen}
    return tuple(row for row in DAMAGES if row.id in chosen)


# --- the actions ----------------------------------------------------------------------------------------------------


def rename(library: Path, pattern: str, end: str) -> tuple[str, str]:
    """Change the end of a name in the strings of a library: of a symbol, of a library that it needs, of a constant.

    Args:
        library: replaced, never written through a link.
        pattern: of the whole name; the first one that matches is changed.
        end: takes the place of as many characters.

    Returns:
        The old and the new name.

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


def _nothing(_: Install) -> None:
    """Leave the install as it is."""


def _uninstall(install: Install) -> None:
    shutil.rmtree(install.package)
    for folder in install.site.glob("transformer_engine*.dist-info"):
        shutil.rmtree(folder)


def _leave_folders(install: Install) -> None:
    _uninstall(install)
    for folder in ("common", "pytorch/module", "pytorch/__pycache__"):
        (install.package / folder).mkdir(parents=True)
    (install.package / "pytorch/__pycache__/__init__.cpython-311.pyc").write_bytes(b"")


def _replace_core(by: str, trial_s: str) -> Action:
    def do(install: Install) -> None:
        install.write(install.core, install.stand_in(by).read_bytes())
        install.variables[_TRIAL] = trial_s

    return do


def _lose_function(install: Install, name: str = "dbias_dgelu") -> None:
    built = build_extension(find_compiler(), install.root / "older", lacks=[name])
    install.write(install.extension, built.read_bytes())


def _set_version(version: str, distribution: str) -> Action:
    def do(install: Install) -> None:
        name = install.dist_info(distribution).name.partition("-")[0]
        shutil.rmtree(install.dist_info(name))
        write_dist_info(install.site, name, version.format(release=install.release))

    return do


def _put_copy_first(install: Install) -> None:
    early = install.root / "checkout"
    early.mkdir()
    shutil.unpack_archive(install.wheels(*ANOTHER_COPY), early, "zip")
    install.early.append(early)


def take_out(name: str) -> Action:
    """Take one name out of what `transformer_engine.pytorch` re-exports, alone or as a line of a longer import."""

    def change(text: str) -> str:
        lines = text.splitlines(keepends=True)
        return "".join(line for line in lines if not line.rstrip().endswith((f" import {name}", f"    {name},")))

    return lambda install: install.edit("pytorch/__init__.py", change)


def _hide(*patterns: str) -> Action:
    return lambda install: install.hidden.update(patterns)


def _hide_nvrtc(install: Install) -> None:
    install.variables["CUDA_HOME"] = install.variables["CUDA_PATH"] = str(install.stand_in("bare_cuda"))
    install.hidden.add("nvidia")
    ldconfig = install.root / "tools" / "ldconfig"
    ldconfig.parent.mkdir()
    ldconfig.write_text("#!/bin/sh\necho '0 libs found in cache'\n", encoding="utf-8")
    ldconfig.chmod(0o755)
    install.variables["PATH"] = f"{ldconfig.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"


def _add_flash_attention_4(install: Install) -> None:
    shutil.unpack_archive(install.wheels(*FLASH_ATTENTION_4), install.site, "zip")
    install.hidden |= {"cutlass*", "nvidia_cutlass*", "quack*", "tvm_ffi*", "flash_attn*"}


# --- the rows -------------------------------------------------------------------------------------------------------

_TORCH_PART: Final = "transformer_engine_torch"
_INSTALL: Final = r"Next step: .*pip install .*transformer-engine\[pytorch\]"
_REINSTALL: Final = "Next step: .*reinstall"
_TURN_OFF: Final = "Next step: .*MEGACPP_DISABLE_TE"
_NEWER: Final = ("autocast", "quantized_model_init")  # entry points that 2.8.0 does not have
_SORT: Final = "moe_sort_chunks_by_index_with_probs"

# fmt: off
DAMAGES: Final = (
    *(Damage(f"{_UNDAMAGED}{release}", "nothing: the install as it should be", _nothing, release=release,
             available=True, missing=_NEWER if release == "2.8.0" else ()) for release in BASELINES),
    Damage("switched-off", "nothing, and MEGACPP_DISABLE_TE=1 is set",
           lambda install: install.variables.update(MEGACPP_DISABLE_TE="1"), ("MEGACPP_DISABLE_TE=1", "unset")),
    Damage("absent", "Transformer Engine is not installed", _uninstall,
           ("ModuleNotFoundError", "cause: Transformer Engine is not installed", _INSTALL),
           parts=(), torch=False),
    Damage("metapackage-alone", "only the metapackage transformer_engine is installed", _nothing,
           ("RuntimeError", "cause: only the Python half is installed", _INSTALL), parts=(), torch=False),
    Damage("core-without-extension",
           "sources and core library, no transformer_engine_torch; top-level import warns and succeeds", _nothing,
           ("FileNotFoundError", "cause: .*torch extension .* is not", _INSTALL), parts=("core",)),
    Damage("extension-without-core", "sources and torch extension, no transformer_engine_cu12 or _cu13", _nothing,
           ("RuntimeError", "cause: .*core library .* is not", _INSTALL), parts=("extension",), torch=False),
    Damage("core-library-deleted", "libtransformer_engine.so is deleted, its metadata is there",
           lambda install: install.core.unlink(),
           ("FileNotFoundError", "cause: .*transformer-engine-cu1[23].* library file is not there", _REINSTALL),
           torch=False),
    Damage("core-library-cut-short", "libtransformer_engine.so is cut short, as by a full disk",
           lambda install: install.write(install.core, b"\x7fELF\x02\x01\x01"),
           ("OSError", "cause: .*libtransformer_engine.so is damaged", _REINSTALL), torch=False),
    Damage("two-core-libraries", "a libtransformer_engine.so of an earlier build lies beside the package",
           lambda install: (install.site / "libtransformer_engine.so").symlink_to(install.core.resolve()),
           ("RuntimeError: Multiple files", "cause: .*two builds", "Next step: .*remove"), torch=False),
    Damage("missing-library",
           "one of the CUDA libraries that the core library needs exists nowhere: its name ends with .so.99",
           lambda install: rename(install.core, r"lib(?:cublasLt|cublas|cudart|cudnn)\.so\.\d+", "99"),
           ("OSError", r"cause: the shared library lib\w+\.so\.99 \((cu|the CUDA)",
            "Next step: pip install nvidia-.*LD_LIBRARY_PATH"), torch=False),
    Damage("undefined-symbol", "the torch extension wants a symbol that nothing defines; top-level import succeeds",
           lambda install: rename(install.extension, r"nvte_\w+", "Q"),
           ("ImportError: .*undefined symbol", "cause: .*built against another", "Next step: .*rebuild")),
    Damage("extension-of-an-older-build", "the torch extension lacks dbias_dgelu, which the sources use",
           _lose_function, ("AttributeError.*dbias_dgelu", "cause: .*not of one build", _INSTALL)),
    Damage("core-of-another-release", "the core is of 2.19.0", _set_version(ANOTHER_RELEASE, "transformer_engine_cu1*"),
           ("AssertionError.*mismatch", r"cause: .*different releases .*2\.19\.0", _INSTALL), torch=False),
    Damage("extension-of-another-release", "the torch extension is of 2.19.0",
           _set_version(ANOTHER_RELEASE, _TORCH_PART),
           ("AssertionError.*mismatch", r"cause: .*different releases .*2\.19\.0", _INSTALL)),
    Damage("local-version", "the torch extension was built from a checkout: its version ends with +g1a2b3c4",
           _set_version("{release}+g1a2b3c4", _TORCH_PART),
           ("AssertionError.*mismatch", r"cause: .*\+g1a2b3c4.*\+local suffix", _INSTALL)),
    Damage("second-copy", "a folder with another release's sources comes earlier on the path", _put_copy_first,
           ("AssertionError|RuntimeError|FileNotFoundError", "cause: a second copy", "Next step: remove one"),
           torch=False),
    Damage("optional-symbol-gone", f"pytorch/__init__.py no longer re-exports {_SORT}", take_out(_SORT),
           (f"entry point `{_SORT}`", "cause: .*moved, renamed", "Next step: .*canary"),
           available=True, missing=(_SORT,)),
    Damage("required-symbol-gone", "pytorch/__init__.py no longer re-exports Linear", take_out("Linear"),
           ("ImportError: cannot import name 'Linear'", "cause: .*moved, renamed", "Next step: .*canary")),
    Damage("flash-attn-4-without-cutedsl", "flash-attn-4 4.0.0b36 is installed without the CuTe DSL that it needs",
           _add_flash_attention_4,
           ("ModuleNotFoundError", "cause: flash-attn-4 is installed without the CuTe DSL",
            "Next step: .*pip uninstall flash-attn-4"), release="2.17.1"),
    Damage("dependency-missing", "pydantic, which the recipes are made of, is not installed; top-level import succeeds",
           _hide("pydantic"),
           ("ModuleNotFoundError", "cause: .*needs the Python package `pydantic`", "Next step: pip install pydantic")),
    Damage("torch-missing", "torch is not installed; top-level import succeeds", _hide("torch", "torch-*"),
           ("ModuleNotFoundError", "cause: .*needs the Python package `torch`", "Next step: pip install torch"),
           torch=False, hides_torch=True),
    Damage("leftovers-of-an-uninstall",
           "folders without a single source are left: Python takes them for a namespace package", _leave_folders,
           ("ImportError", "cause: .*leftovers of an uninstall", "Next step: remove"),
           parts=(), torch=False),
    Damage("source-cut-short", "pytorch/module/linear.py is cut in half",
           lambda install: install.edit("pytorch/module/linear.py", lambda text: text[: len(text) // 2]),
           ("SyntaxError", r"cause: .*linear\.py is damaged", _REINSTALL)),
    Damage("exits-at-import", "a module raises SystemExit while it is imported",
           lambda install: install.edit("common/recipe/__init__.py",
                                        lambda text: f'{text}\nraise SystemExit("no licence found")\n'),
           ("SystemExit: no licence found", "cause: .*ends the program", "Next step: ")),
    Damage("metadata-unreadable", "METADATA of transformer_engine holds bytes that are no text",
           lambda install: install.write(install.dist_info("transformer_engine") / "METADATA",
                                         b"\xff\xfe\x00damaged\x9d\n" * 40),
           ("UnicodeDecodeError", "cause: .*metadata of transformer-engine cannot be read", _REINSTALL), torch=False),
    Damage("record-deleted", "RECORD of transformer_engine is deleted, as by an install that pip did not make",
           lambda install: (install.dist_info("transformer_engine") / "RECORD").unlink(),
           ("TypeError", "cause: .*list of files", _REINSTALL), torch=False),
    Damage("no-library-in-cache", "no NVRTC anywhere, and `ldconfig -p | grep` finds none", _hide_nvrtc,
           ("CalledProcessError", r"cause: the shared library libnvrtc\S* \(NVRTC\)",
            "Next step: .*nvidia-cuda-nvrtc"), release="2.8.0", torch=False),
    Damage("core-without-extension-1.x", "sources and core library of a 1.x release, no transformer_engine_torch",
           _nothing, ("StopIteration", "cause: .*torch extension .* is not", _INSTALL),
           release="1.13.0", parts=("core",)),
    Damage("import-hangs", "loading the core library never ends", _replace_core("hanging", _HANGS_S),
           (r"did not end within .* hangs in \S+:\d+", "Likely cause: ", _TURN_OFF), torch=False),
    Damage("import-aborts", "loading the core library aborts the interpreter", _replace_core("aborting", _ABORTS_S),
           ("ends the interpreter", "Likely cause: ", _TURN_OFF), torch=False),
)
# fmt: on
