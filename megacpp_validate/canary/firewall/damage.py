"""The damaged installs: what is done to each, and what the bridge must answer.

Every row starts from a real release of Transformer Engine. The words that a row expects are those of the bridge; what a
loader error means to a person is written once, in `diagnosis`. No action changes a file of a real install: what it
changes is a copy or replaced.
"""

from __future__ import annotations

import os
import shutil
import struct
import zipfile
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from ...errors import WrongArguments
from .install import (
    TE,
    CannotBuild,
    Install,
    InstallMode,
    build_extension,
    core_distribution,
    find_compiler,
    write_dist_info,
)

_DYNAMIC, _DYNSYM = 6, 11  # section types
_NEEDED = 1  # tag of an entry in the dynamic section
_HEADER = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_TAG = struct.Struct("<qQ")


class NotDamageable(RuntimeError):
    """The file has nothing of the kind that was to be damaged; the text says what was looked for."""


@dataclass(frozen=True)
class _Section:
    kind: int
    offset: int
    size: int
    link: int


def rename_needed(library: Path, *prefixes: str) -> tuple[str, str]:
    """Make a library need one that exists nowhere: `libX.so.13` becomes `libX.so.99`. Returns both names."""
    image = bytearray(library.read_bytes())
    found = [(start, _string(image, start)) for start in _needed(image)]
    start, name = _first_of(found, prefixes, f"{library.name} needs no library whose name starts with")
    return _overwrite(library, image, start, name, name[:-2] + "99")


def rename_undefined(library: Path, *prefixes: str) -> tuple[str, str]:
    """Make a library want a symbol that nothing defines. Returns what it wanted and what it wants now."""
    image = bytearray(library.read_bytes())
    found = [(start, _string(image, start)) for start in _undefined(image)]
    start, name = _first_of(found, prefixes, f"{library.name} wants no symbol that starts with")
    return _overwrite(library, image, start, name, name[:-1] + ("Q" if name[-1] != "Q" else "Z"))


def rename_string(library: Path, name: str) -> tuple[str, str]:
    """Change the last letter of a constant string: the function that pybind11 registers under it is gone."""
    image = bytearray(library.read_bytes())
    start = image.find(b"\0" + name.encode() + b"\0")
    if start < 0:
        raise NotDamageable(f"{library.name} holds no string {name!r}")
    return _overwrite(library, image, start + 1, name, name[:-1] + "_")


def _first_of(found: list[tuple[int, str]], prefixes: Sequence[str], nothing: str) -> tuple[int, str]:
    for prefix in prefixes:
        for start, name in found:
            if name.startswith(prefix):
                return start, name
    raise NotDamageable(f"{nothing} {' or '.join(prefixes)}")


def _overwrite(library: Path, image: bytearray, start: int, old: str, new: str) -> tuple[str, str]:
    image[start : start + len(old)] = new.encode()
    mode = library.stat().st_mode
    library.unlink()  # never through a link into the real install
    library.write_bytes(image)
    library.chmod(mode)
    return old, new


def _sections(image: bytearray) -> list[_Section]:
    if image[:6] != b"\x7fELF\x02\x01":
        raise NotDamageable("not a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", image, 0x28)
    entry, count = struct.unpack_from("<HH", image, 0x3A)
    headers = (_HEADER.unpack_from(image, table + index * entry) for index in range(count))
    return [_Section(kind, offset, size, link) for _, kind, _, _, offset, size, link, *_ in headers]


def _needed(image: bytearray) -> Iterator[int]:
    sections = _sections(image)
    for section in sections:
        if section.kind == _DYNAMIC:
            strings = sections[section.link].offset
            for at in range(section.offset, section.offset + section.size, _TAG.size):
                tag, value = _TAG.unpack_from(image, at)
                if tag == _NEEDED:
                    yield strings + value


def _undefined(image: bytearray) -> Iterator[int]:
    sections = _sections(image)
    for section in sections:
        if section.kind == _DYNSYM:
            strings = sections[section.link].offset
            for at in range(section.offset, section.offset + section.size, _SYMBOL.size):
                name, info, _, home, _, _ = _SYMBOL.unpack_from(image, at)
                if name and home == 0 and info >> 4 == 1:  # undefined and global: a weak one may stay undefined
                    yield strings + name


def _string(image: bytearray, start: int) -> str:
    return image[start : image.index(0, start)].decode("ascii", errors="replace")


PINNED: Final = "2.20.2"
BASELINES: Final = ("2.8.0", "2.12.0", "2.17.1", PINNED)
WHOLE: Final = ("core", "extension")
FLASH_ATTENTION_4: Final = ("flash-attn-4", "4.0.0b36")
ANOTHER_COPY: Final = (TE, "2.17.1")
ANOTHER_RELEASE: Final = "2.19.0"
_CUDA_LIBRARIES: Final = ("libcublasLt.so.", "libcublas.so.", "libcudart.so.", "libcudnn.so.")
_UNDAMAGED: Final = "undamaged"

Action = Callable[[Install], object]


@dataclass(frozen=True)
class Damage:
    """One damaged install.

    Attributes:
        id: name of the case.
        says: what is done to the install, in words.
        do: does it.
        reason: patterns that the bridge's reason must match, each of them: the exception, the likely cause, the next
            step. None where nothing is wrong, so that there must be no reason.
        release: the release that is laid out; empty for the pinned or the installed one.
        parts: the compiled parts that are laid out beside the sources.
        torch: whether the damage shows only once TE has imported torch.
        hides_torch: torch is taken away; modules of the bridge that are made of torch may fail then, nothing else.
        available: what `is_te_available()` must answer.
        missing: accessors that give None although TE is available.
        top_level: whether `import transformer_engine` itself succeeds; None where that does not matter.
        ends: how a process that simply imports it ends.
        extra: a further distribution that is laid out, (name, version).
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
    top_level: bool | None = None
    ends: Literal["exit", "hang", "abort"] = "exit"
    extra: tuple[str, str] | None = None

    @property
    def is_baseline(self) -> bool:
        """Whether this is an undamaged install."""
        return self.id.startswith(_UNDAMAGED)

    @property
    def needs_baseline(self) -> bool:
        """Whether the undamaged install of the release must be available for the case to prove anything."""
        return self.parts == WHOLE and self.torch


def plan_firewall(only: Collection[str] = (), install: InstallMode = "wheels") -> tuple[Damage, ...]:
    """The cases of a run, with the undamaged installs that they need.

    Raises:
        WrongArguments: no case has one of these names.
    """
    rows = {row.id: row for row in DAMAGES}
    if install == "current":  # a real install is of one release, and has everything that a row could need
        undamaged = replace(rows[f"{_UNDAMAGED}-{PINNED}"], id=_UNDAMAGED, release="")
        rows = {row.id: row for row in (undamaged, *(replace(row, extra=None) for row in DAMAGES if not row.release))}
    if unknown := sorted(set(only) - rows.keys()):
        raise WrongArguments(
            f"No firewall case is called {', '.join(unknown)} with --install {install}. Next step: choose from "
            f"{', '.join(rows)}."
        )
    chosen = [row for row in rows.values() if not only or row.id in only]
    baselines = {baseline_of(row, install) for row in chosen if row.needs_baseline}
    return tuple(row for row in rows.values() if row in chosen or row.id in baselines)


def baseline_of(row: Damage, install: InstallMode) -> str:
    """Id of the case that is the undamaged install of the same release."""
    return f"{_UNDAMAGED}-{row.release or PINNED}" if install == "wheels" else _UNDAMAGED


# --- the actions ----------------------------------------------------------------------------------------------------


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


def _replace_core(by: Literal["hanging_core", "aborting_core"]) -> Action:
    def do(install: Install) -> None:
        if install.stand_ins is None:
            raise CannotBuild("this damage is a small library, and there is no compiler to build it with")
        install.write(install.core, getattr(install.stand_ins, by).read_bytes())

    return do


def _lose_function(install: Install, name: str = "dbias_dgelu") -> None:
    if install.real:
        rename_string(install.own(install.extension), name)
    else:
        built = build_extension(find_compiler(), install.root / "older", lacks=[name])
        install.write(install.extension, built.read_bytes())


def _set_version(version: str, distribution: str = "") -> Action:
    def do(install: Install) -> None:
        install.version(distribution or core_distribution(install), version.format(release=install.release))

    return do


def _put_copy_first(install: Install) -> None:
    early = install.root / "checkout"
    early.mkdir()
    if install.real:
        shutil.copytree(install.package, early / "transformer_engine", ignore=lambda *_: ["wheel_lib"])
        write_dist_info(early, "transformer_engine", ANOTHER_RELEASE)
    else:
        with zipfile.ZipFile(install.wheels[ANOTHER_COPY]) as archive:
            archive.extractall(early)
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
    assert install.stand_ins is not None
    install.variables["CUDA_HOME"] = install.variables["CUDA_PATH"] = str(install.stand_ins.bare_cuda)
    install.hidden.add("nvidia")
    ldconfig = install.root / "tools" / "ldconfig"
    ldconfig.parent.mkdir()
    ldconfig.write_text("#!/bin/sh\necho '0 libs found in cache'\n", encoding="utf-8")
    ldconfig.chmod(0o755)
    install.variables["PATH"] = f"{ldconfig.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"


def _add_flash_attention_4(install: Install) -> None:
    with zipfile.ZipFile(install.wheels[FLASH_ATTENTION_4]) as archive:
        archive.extractall(install.site)
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
    *(Damage(f"{_UNDAMAGED}-{release}", "nothing: the install as it should be", _nothing, release=release,
             available=True, missing=_NEWER if release == "2.8.0" else ()) for release in BASELINES),
    Damage("switched-off", "nothing, and MEGACPP_DISABLE_TE=1 is set",
           lambda install: install.variables.update(MEGACPP_DISABLE_TE="1"), ("MEGACPP_DISABLE_TE=1", "unset")),
    Damage("absent", "Transformer Engine is not installed", _uninstall,
           ("ModuleNotFoundError", "cause: Transformer Engine is not installed", _INSTALL),
           parts=(), torch=False, top_level=False),
    Damage("metapackage-alone", "only the metapackage transformer_engine is installed", _nothing,
           ("RuntimeError", "cause: only the Python half is installed", _INSTALL), parts=(), torch=False),
    Damage("core-without-extension",
           "sources and core library, no transformer_engine_torch; top-level import warns and succeeds", _nothing,
           ("FileNotFoundError", "cause: .*torch extension .* is not", _INSTALL), parts=("core",), top_level=True),
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
           lambda install: rename_needed(install.own(install.core), *_CUDA_LIBRARIES),
           ("OSError", r"cause: the shared library lib\w+\.so\.99 \((cu|the CUDA)",
            "Next step: pip install nvidia-.*LD_LIBRARY_PATH"), torch=False),
    Damage("undefined-symbol", "the torch extension wants a symbol that nothing defines; top-level import succeeds",
           lambda install: rename_undefined(install.own(install.extension), "_ZN3c10", "nvte_"),
           ("ImportError: .*undefined symbol", "cause: .*built against another", "Next step: .*rebuild"),
           top_level=True),
    Damage("extension-of-an-older-build", "the torch extension lacks dbias_dgelu, which the sources use",
           _lose_function, ("AttributeError.*dbias_dgelu", "cause: .*not of one build", _INSTALL)),
    Damage("core-of-another-release", "the core is of 2.19.0", _set_version(ANOTHER_RELEASE),
           ("AssertionError.*mismatch", r"cause: .*different releases .*2\.19\.0", _INSTALL), torch=False),
    Damage("extension-of-another-release", "the torch extension is of 2.19.0",
           _set_version(ANOTHER_RELEASE, _TORCH_PART),
           ("AssertionError.*mismatch", r"cause: .*different releases .*2\.19\.0", _INSTALL)),
    Damage("local-version", "the torch extension was built from a checkout: its version ends with +g1a2b3c4",
           _set_version("{release}+g1a2b3c4", _TORCH_PART),
           ("AssertionError.*mismatch", r"cause: .*\+g1a2b3c4.*\+local suffix", _INSTALL)),
    Damage("second-copy", "a folder with another release's sources comes earlier on the path", _put_copy_first,
           ("AssertionError|RuntimeError|FileNotFoundError", "cause: a second copy", "Next step: remove one"),
           extra=ANOTHER_COPY, torch=False),
    Damage("optional-symbol-gone", f"pytorch/__init__.py no longer re-exports {_SORT}", take_out(_SORT),
           (f"entry point `{_SORT}`", "cause: .*moved, renamed", "Next step: .*canary"),
           available=True, missing=(_SORT,)),
    Damage("required-symbol-gone", "pytorch/__init__.py no longer re-exports Linear", take_out("Linear"),
           ("ImportError: cannot import name 'Linear'", "cause: .*moved, renamed", "Next step: .*canary")),
    Damage("flash-attn-4-without-cutedsl", "flash-attn-4 4.0.0b36 is installed without the CuTe DSL that it needs",
           _add_flash_attention_4,
           ("ModuleNotFoundError", "cause: flash-attn-4 is installed without the CuTe DSL",
            "Next step: .*pip uninstall flash-attn-4"), release="2.17.1", extra=FLASH_ATTENTION_4),
    Damage("dependency-missing", "pydantic, which the recipes are made of, is not installed; top-level import succeeds",
           _hide("pydantic"),
           ("ModuleNotFoundError", "cause: .*needs the Python package `pydantic`", "Next step: pip install pydantic"),
           top_level=True),
    Damage("torch-missing", "torch is not installed; top-level import succeeds", _hide("torch", "torch-*"),
           ("ModuleNotFoundError", "cause: .*needs the Python package `torch`", "Next step: pip install torch"),
           torch=False, hides_torch=True, top_level=True),
    Damage("leftovers-of-an-uninstall",
           "folders without a single source are left: Python takes them for a namespace package", _leave_folders,
           ("ImportError", "cause: .*leftovers of an uninstall", "Next step: remove"),
           parts=(), torch=False, top_level=True),
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
           release="1.13.0", parts=("core",), top_level=True),
    Damage("import-hangs", "loading the core library never ends", _replace_core("hanging_core"),
           (r"did not end within .* hangs in \S+:\d+", "Likely cause: ", _TURN_OFF), torch=False, ends="hang"),
    Damage("import-aborts", "loading the core library aborts the interpreter", _replace_core("aborting_core"),
           ("ends the interpreter", "Likely cause: ", _TURN_OFF), torch=False, ends="abort"),
)
# fmt: on
