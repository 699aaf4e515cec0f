"""The damaged installs: how each is damaged, and what the bridge must answer.

Every row starts from a real release of Transformer Engine. The words that a row expects are those of the bridge; what a
loader error means to a person is written once, in `diagnosis`. No action changes a file of a real install: it changes
a copy, or replaces a link.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ...errors import WrongArguments
from .install import TE, Install, InstallMode, build_extension, find_compiler, write_dist_info

PINNED: Final = "2.20.2"
BASELINES: Final = ("2.8.0", "2.12.0", "2.17.1", PINNED)
WHOLE: Final = ("core", "extension")
FLASH_ATTENTION_4: Final = ("flash-attn-4", "4.0.0b36")
ANOTHER_COPY: Final = (TE, "2.17.1")
ANOTHER_RELEASE: Final = "2.19.0"
# Seconds of the trial import of the bridge. One that hangs takes all of them; one that aborts ends early on any host.
_TRIAL: Final = "MEGACPP_TE_TRIAL_SECONDS"
_HANGS_S, _ABORTS_S = "20", "100"
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
            step. Empty where nothing is wrong, so that there must be no reason.
        release: the release that is laid out; empty for the pinned or the installed one.
        parts: the compiled parts that are laid out beside the sources.
        torch: whether the damage shows only once TE has imported torch.
        hides_torch: torch is taken away; modules of the bridge that are made of torch may fail then, nothing else.
        available: what `is_te_available()` must answer.
        missing: accessors that give None although TE is available.
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
    extra: tuple[str, str] | None = None

    @property
    def is_baseline(self) -> bool:
        """Whether this is an undamaged install."""
        return self.id.startswith(_UNDAMAGED)

    @property
    def needs_baseline(self) -> bool:
        """Whether the undamaged install of the release must be available for the case to prove anything."""
        return self.parts == WHOLE and self.torch and not self.is_baseline


def plan_firewall(only: Collection[str] = (), install: InstallMode = "wheels") -> tuple[Damage, ...]:
    """The cases of a run: undamaged installs that others need come first.

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
    if install.real:
        rename(install.extension, name, "_")
    else:
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
    if install.real:
        shutil.copytree(install.package, early / "transformer_engine", ignore=lambda *_: ["wheel_lib"])
        write_dist_info(early, "transformer_engine", ANOTHER_RELEASE)
    else:
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
    *(Damage(f"{_UNDAMAGED}-{release}", "nothing: the install as it should be", _nothing, release=release,
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
