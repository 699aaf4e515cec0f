"""The damaged installs: what is done to each, and what the bridge has to say about it.

Every row starts from a real release of Transformer Engine. What a row expects is as much a part of it as the
damage: the class of the exception, and words for what is wrong, its likely cause and the next step.
"""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from .firewall_elf import rename_needed, rename_string, rename_undefined
from .firewall_install import Install, write_dist_info
from .firewall_standin import CannotBuild, build_extension, find_compiler

PINNED: Final = "2.20.2"
BASELINES: Final = ("2.8.0", "2.12.0", "2.17.1", PINNED)
WHOLE: Final = ("core", "extension")
FLASH_ATTENTION_4: Final = ("flash-attn-4", "4.0.0b36")

Ending = Literal["exit", "hang", "abort"]


@dataclass(frozen=True)
class Damage:
    """One damaged install.

    Attributes:
        id: name of the case.
        says: what is done to the install, in words.
        do: does it.
        reason: patterns that the reason must match, each of them; none where there must be no reason.
        release: the release that is laid out; empty for the pinned one, or for the installed one.
        parts: the compiled parts that are laid out beside the sources.
        wants_torch: the damage shows only once TE has imported torch.
        available: what `is_te_available()` has to answer.
        missing: accessors that give None although TE is available.
        top_level: whether `import transformer_engine` itself succeeds; None where it does not matter.
        ends: how a process that simply imports it ends.
        extra: a further distribution that is laid out, (name, version).
    """

    id: str
    says: str
    do: Callable[[Install], None]
    reason: tuple[str, ...]
    release: str = ""
    parts: tuple[str, ...] = WHOLE
    wants_torch: bool = True
    available: bool = False
    missing: tuple[str, ...] = ()
    top_level: bool | None = None
    ends: Ending = "exit"
    extra: tuple[str, str] | None = None

    @property
    def proves_nothing_alone(self) -> bool:
        """Whether the undamaged install of the release has to be available for the case to mean anything."""
        return self.parts == WHOLE and self.wants_torch

    @property
    def says_nothing(self) -> bool:
        """Whether nothing is wrong, so that there must be no reason."""
        return not self.reason


def _nothing(_: Install) -> None:
    """Leave the install as it is."""


def _absent(install: Install) -> None:
    shutil.rmtree(install.package)
    for folder in install.site.glob("transformer_engine*.dist-info"):
        shutil.rmtree(folder)


def _leftovers(install: Install) -> None:
    _absent(install)
    for folder in ("common", "pytorch/module", "pytorch/__pycache__"):
        (install.package / folder).mkdir(parents=True)
    (install.package / "pytorch/__pycache__/__init__.cpython-311.pyc").write_bytes(b"")


def _core_without_metadata(install: Install) -> None:
    core = next(install.site.glob("transformer_engine_cu1*.dist-info"), None)
    if core:
        shutil.rmtree(core)


def _core_deleted(install: Install) -> None:
    install.core.unlink()


def _core_cut_short(install: Install) -> None:
    install.write(install.core, b"\x7fELF\x02\x01\x01")


def _core_needs_another_library(install: Install) -> None:
    rename_needed(install.own(install.core), "libcublasLt.so.")


def _core_twice(install: Install) -> None:
    (install.site / "libtransformer_engine.so").symlink_to(install.core.resolve())


def _core_hangs(install: Install) -> None:
    _replace_core(install, "hanging_core")


def _core_aborts(install: Install) -> None:
    _replace_core(install, "aborting_core")


def _replace_core(install: Install, by: str) -> None:
    if install.stand_ins is None:
        raise CannotBuild("this damage is a small library, and there is no compiler to build it with")
    install.write(install.core, getattr(install.stand_ins, by).read_bytes())


def _extension_wants_another_symbol(install: Install) -> None:
    rename_undefined(install.own(install.extension), "_ZN3c10", "nvte_")


def _extension_of_an_older_build(install: Install) -> None:
    name = "dbias_dgelu"
    if install.real:
        rename_string(install.own(install.extension), name)
    else:
        built = build_extension(find_compiler(), install.root / "older", lacks=[name])
        install.write(install.extension, built.read_bytes())


def _core_of_another_release(install: Install) -> None:
    install.version(install.core_distribution, "2.19.0")


def _extension_of_another_release(install: Install) -> None:
    install.version("transformer_engine_torch", "2.19.0")


def _local_version(install: Install) -> None:
    install.version("transformer_engine_torch", f"{install.release}+g1a2b3c4")


def _second_copy(install: Install) -> None:
    early = install.root / "checkout"
    early.mkdir()
    if install.real:
        shutil.copytree(install.package, early / "transformer_engine", ignore=lambda *_: ["wheel_lib"])
        write_dist_info(early, "transformer_engine", "2.19.0")
    else:
        with zipfile.ZipFile(install.wheel_of("transformer_engine", "2.17.1")) as archive:
            archive.extractall(early)
    install.early.append(early)


def _take_out(name: str) -> Callable[[Install], None]:
    def do(install: Install) -> None:
        install.edit("pytorch/__init__.py", lambda text: _without_name(text, name))

    return do


def _without_name(text: str, name: str) -> str:
    """The source without the re-export of one name, written alone or as a line of a longer import."""
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not line.rstrip().endswith((f" import {name}", f"    {name},")))


def _cut_short(install: Install) -> None:
    install.edit("pytorch/module/linear.py", lambda text: text[: len(text) // 2])


def _exits(install: Install) -> None:
    install.edit("common/recipe/__init__.py", lambda text: f'{text}\nraise SystemExit("no licence found")\n')


def _metadata_unreadable(install: Install) -> None:
    install.write(install.dist_info("transformer_engine") / "METADATA", b"\xff\xfe\x00damaged\x9d\n" * 40)


def _record_deleted(install: Install) -> None:
    (install.dist_info("transformer_engine") / "RECORD").unlink()


def _hide(*patterns: str) -> Callable[[Install], None]:
    return lambda install: install.hidden.update(patterns)


def _no_nvrtc(install: Install) -> None:
    """No CUDA toolkit has NVRTC, and the loader's cache, as `ldconfig` lists it, has none either."""
    assert install.stand_ins is not None
    install.variables["CUDA_HOME"] = install.variables["CUDA_PATH"] = str(install.stand_ins.bare_cuda)
    install.hidden.add("nvidia")
    tools = install.root / "tools"
    tools.mkdir()
    ldconfig = tools / "ldconfig"
    ldconfig.write_text("#!/bin/sh\necho '0 libs found in cache'\n", encoding="utf-8")
    ldconfig.chmod(0o755)
    install.variables["PATH"] = f"{tools}{os.pathsep}{os.environ.get('PATH', os.defpath)}"


def _flash_attention_4(install: Install) -> None:
    with zipfile.ZipFile(install.wheel_of(*FLASH_ATTENTION_4)) as archive:
        archive.extractall(install.site)
    install.hidden |= {"cutlass*", "nvidia_cutlass*", "quack*", "tvm_ffi*", "flash_attn*"}


def _switched_off(install: Install) -> None:
    install.variables["MEGACPP_DISABLE_TE"] = "1"


_INSTALL = r"Next step: .*pip install .*transformer-engine\[pytorch\]"

DAMAGES: Final = (
    *(
        Damage(
            f"undamaged-{release}",
            "nothing: the install as it should be",
            _nothing,
            (),
            release=release,
            available=True,
            missing=() if release != "2.8.0" else ("autocast", "quantized_model_init"),
        )
        for release in BASELINES
    ),
    Damage("switched-off", "nothing, and MEGACPP_DISABLE_TE=1 is set", _switched_off, (r"MEGACPP_DISABLE_TE=1", r"unset")),
    Damage(
        "absent",
        "Transformer Engine is not installed",
        _absent,
        ("ModuleNotFoundError", "cause: Transformer Engine is not installed", _INSTALL),
        parts=(),
        wants_torch=False,
        top_level=False,
    ),
    Damage(
        "metapackage-alone",
        "only the metapackage transformer_engine is installed",
        _nothing,
        ("RuntimeError", "cause: only the Python half is installed", _INSTALL),
        parts=(),
        wants_torch=False,
    ),
    Damage(
        "core-without-extension",
        "sources and core library, no transformer_engine_torch; `import transformer_engine` warns and succeeds",
        _nothing,
        ("FileNotFoundError", "cause: .*torch extension .* is not", _INSTALL),
        parts=("core",),
        top_level=True,
    ),
    Damage(
        "extension-without-core",
        "sources and torch extension, no transformer_engine_cu12 or _cu13",
        _nothing,
        ("RuntimeError", "cause: .*core library .* is not", _INSTALL),
        parts=("extension",),
        wants_torch=False,
    ),
    Damage(
        "core-library-deleted",
        "libtransformer_engine.so is deleted, its metadata is there",
        _core_deleted,
        ("FileNotFoundError", "cause: .*transformer-engine-cu1[23].* library file is not there", "Next step: .*reinstall"),
        wants_torch=False,
    ),
    Damage(
        "core-library-cut-short",
        "libtransformer_engine.so is cut short, as by a full disk",
        _core_cut_short,
        ("OSError", "cause: .*libtransformer_engine.so is damaged", "Next step: .*reinstall"),
        wants_torch=False,
    ),
    Damage(
        "two-core-libraries",
        "a libtransformer_engine.so of an earlier build lies beside the package",
        _core_twice,
        ("RuntimeError: Multiple files", "cause: .*two builds", "Next step: .*remove"),
        wants_torch=False,
    ),
    Damage(
        "missing-library",
        "the core library needs libcublasLt.so.99, which exists nowhere",
        _core_needs_another_library,
        ("OSError", r"cause: .*libcublasLt.so.99 \(cuBLAS\)", "Next step: .*nvidia-cublas"),
        wants_torch=False,
    ),
    Damage(
        "undefined-symbol",
        "the torch extension wants a symbol that nothing defines; `import transformer_engine` succeeds in silence",
        _extension_wants_another_symbol,
        ("ImportError: .*undefined symbol", "cause: .*built against another", "Next step: .*rebuild"),
        top_level=True,
    ),
    Damage(
        "extension-of-an-older-build",
        "the torch extension lacks dbias_dgelu, which the sources use",
        _extension_of_an_older_build,
        ("AttributeError.*dbias_dgelu", "cause: .*not of one build", _INSTALL),
    ),
    Damage(
        "core-of-another-release",
        "the core is of 2.19.0",
        _core_of_another_release,
        ("AssertionError.*mismatch", r"cause: .*different releases .*2\.19\.0", _INSTALL),
        wants_torch=False,
    ),
    Damage(
        "extension-of-another-release",
        "the torch extension is of 2.19.0",
        _extension_of_another_release,
        ("AssertionError.*mismatch", r"cause: .*different releases .*2\.19\.0", _INSTALL),
    ),
    Damage(
        "local-version",
        "the torch extension was built from a checkout: its version ends with +g1a2b3c4",
        _local_version,
        ("AssertionError.*mismatch", r"cause: .*\+g1a2b3c4.*\+local suffix", _INSTALL),
    ),
    Damage(
        "second-copy",
        "a folder with another release's sources comes earlier on the path",
        _second_copy,
        ("AssertionError|RuntimeError|FileNotFoundError", "cause: a second copy", "Next step: remove one"),
        wants_torch=False,
    ),
    Damage(
        "optional-symbol-gone",
        "pytorch/__init__.py no longer re-exports moe_sort_chunks_by_index_with_probs",
        _take_out("moe_sort_chunks_by_index_with_probs"),
        ("entry point `moe_sort_chunks_by_index_with_probs`", "cause: .*moved, renamed", "Next step: .*canary"),
        available=True,
        missing=("moe_sort_chunks_by_index_with_probs",),
    ),
    Damage(
        "required-symbol-gone",
        "pytorch/__init__.py no longer re-exports Linear",
        _take_out("Linear"),
        ("ImportError: cannot import name 'Linear'", "cause: .*moved, renamed", "Next step: .*canary"),
    ),
    Damage(
        "flash-attn-4-without-cutedsl",
        "flash-attn-4 4.0.0b36 is installed without the CuTe DSL that it needs",
        _flash_attention_4,
        ("ModuleNotFoundError", "cause: flash-attn-4 is installed without the CuTe DSL", "Next step: .*pip uninstall flash-attn-4"),
        release="2.17.1",
        extra=FLASH_ATTENTION_4,
    ),
    Damage(
        "dependency-missing",
        "pydantic, which the recipes are made of, is not installed; `import transformer_engine` succeeds in silence",
        _hide("pydantic"),
        ("ModuleNotFoundError", "cause: .*needs the Python package `pydantic`", "Next step: pip install pydantic"),
        top_level=True,
    ),
    Damage(
        "torch-missing",
        "torch is not installed; `import transformer_engine` succeeds in silence",
        _hide("torch", "torch-*"),
        ("ModuleNotFoundError", "cause: .*needs the Python package `torch`", "Next step: pip install torch"),
        wants_torch=False,
        top_level=True,
    ),
    Damage(
        "leftovers-of-an-uninstall",
        "folders without a single source are left: Python takes them for a namespace package",
        _leftovers,
        ("ImportError", "cause: .*leftovers of an uninstall", "Next step: remove"),
        parts=(),
        wants_torch=False,
        top_level=True,
    ),
    Damage(
        "source-cut-short",
        "pytorch/module/linear.py is cut in half",
        _cut_short,
        ("SyntaxError", r"cause: .*linear\.py is damaged", "Next step: .*reinstall"),
    ),
    Damage(
        "exits-at-import",
        "a module raises SystemExit while it is imported",
        _exits,
        ("SystemExit: no licence found", "cause: .*ends the program", "Next step: "),
    ),
    Damage(
        "metadata-unreadable",
        "METADATA of transformer_engine holds bytes that are no text",
        _metadata_unreadable,
        ("UnicodeDecodeError", "cause: .*metadata of transformer-engine cannot be read", "Next step: .*reinstall"),
        wants_torch=False,
    ),
    Damage(
        "record-deleted",
        "RECORD of transformer_engine is deleted, as by an install that pip did not make",
        _record_deleted,
        ("TypeError", "cause: .*list of files", "Next step: .*reinstall"),
        wants_torch=False,
    ),
    Damage(
        "no-library-in-cache",
        "no NVRTC anywhere, and `ldconfig -p | grep` finds none",
        _no_nvrtc,
        ("CalledProcessError", r"cause: the shared library libnvrtc\S* \(NVRTC\)", "Next step: .*nvidia-cuda-nvrtc"),
        release="2.8.0",
        wants_torch=False,
    ),
    Damage(
        "core-without-extension-1.x",
        "sources and core library of a 1.x release, no transformer_engine_torch",
        _nothing,
        ("StopIteration", "cause: .*torch extension .* is not", _INSTALL),
        release="1.13.0",
        parts=("core",),
        top_level=True,
    ),
    Damage(
        "import-hangs",
        "loading the core library never ends",
        _core_hangs,
        (r"did not end within .* hangs in \S+:\d+", "Likely cause: ", "Next step: .*MEGACPP_DISABLE_TE"),
        wants_torch=False,
        ends="hang",
    ),
    Damage(
        "import-aborts",
        "loading the core library aborts the interpreter",
        _core_aborts,
        ("ends the interpreter", "Likely cause: ", "Next step: .*MEGACPP_DISABLE_TE"),
        wants_torch=False,
        ends="abort",
    ),
)

