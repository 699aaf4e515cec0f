"""What is done to an install of Transformer Engine to damage it; `damage.py` says what comes of it.

Nothing here touches a file of a real install: what is changed is a copy, or replaced.
"""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Callable
from typing import Final

from .elf import rename_needed, rename_string, rename_undefined
from .install import TE, Install, write_dist_info
from .standin_extension import CannotBuild, build_extension, find_compiler

FLASH_ATTENTION_4: Final = ("flash-attn-4", "4.0.0b36")
ANOTHER_COPY: Final = (TE, "2.17.1")
ANOTHER_RELEASE: Final = "2.19.0"


def nothing(_: Install) -> None:
    """Leave the install as it is."""


def absent(install: Install) -> None:
    """Uninstall every part."""
    shutil.rmtree(install.package)
    for folder in install.site.glob("transformer_engine*.dist-info"):
        shutil.rmtree(folder)


def leftovers(install: Install) -> None:
    """Uninstall every part, but leave folders behind as a half-done uninstall does."""
    absent(install)
    for folder in ("common", "pytorch/module", "pytorch/__pycache__"):
        (install.package / folder).mkdir(parents=True)
    (install.package / "pytorch/__pycache__/__init__.cpython-311.pyc").write_bytes(b"")


def core_deleted(install: Install) -> None:
    """Delete the core library, not its metadata."""
    install.core.unlink()


def core_cut_short(install: Install) -> None:
    """Cut the core library short."""
    install.write(install.core, b"\x7fELF\x02\x01\x01")


def core_needs_another_library(install: Install) -> None:
    """Let the core library need a library that exists nowhere."""
    rename_needed(install.own(install.core), "libcublasLt.so.", "libcublas.so.", "libcudart.so.", "libcudnn.so.")


def core_twice(install: Install) -> None:
    """Put a second core library where TE looks as well."""
    (install.site / "libtransformer_engine.so").symlink_to(install.core.resolve())


def core_hangs(install: Install) -> None:
    """Replace the core library by one whose loading never ends."""
    _replace_core(install, "hanging_core")


def core_aborts(install: Install) -> None:
    """Replace the core library by one whose loading ends the process."""
    _replace_core(install, "aborting_core")


def _replace_core(install: Install, by: str) -> None:
    if install.stand_ins is None:
        raise CannotBuild("this damage is a small library, and there is no compiler to build it with")
    install.write(install.core, getattr(install.stand_ins, by).read_bytes())


def extension_wants_another_symbol(install: Install) -> None:
    """Let the torch extension want a symbol that nothing defines."""
    rename_undefined(install.own(install.extension), "_ZN3c10", "nvte_")


def extension_of_an_older_build(install: Install) -> None:
    """Take a function that the sources use out of the torch extension."""
    name = "dbias_dgelu"
    if install.real:
        rename_string(install.own(install.extension), name)
    else:
        built = build_extension(find_compiler(), install.root / "older", lacks=[name])
        install.write(install.extension, built.read_bytes())


def core_of_another_release(install: Install) -> None:
    """Let the core be of another release."""
    install.version(install.core_distribution, ANOTHER_RELEASE)


def extension_of_another_release(install: Install) -> None:
    """Let the torch extension be of another release."""
    install.version("transformer_engine_torch", ANOTHER_RELEASE)


def local_version(install: Install) -> None:
    """Give the torch extension a local version, as a build from a checkout has."""
    install.version("transformer_engine_torch", f"{install.release}+g1a2b3c4")


def second_copy(install: Install) -> None:
    """Put another release's sources earlier on the path."""
    early = install.root / "checkout"
    early.mkdir()
    if install.real:
        shutil.copytree(install.package, early / "transformer_engine", ignore=lambda *_: ["wheel_lib"])
        write_dist_info(early, "transformer_engine", ANOTHER_RELEASE)
    else:
        with zipfile.ZipFile(install.wheels[ANOTHER_COPY]) as archive:
            archive.extractall(early)
    install.early.append(early)


def take_out(name: str) -> Callable[[Install], None]:
    """Take one name out of what `transformer_engine.pytorch` re-exports."""

    def do(install: Install) -> None:
        install.edit("pytorch/__init__.py", lambda text: _without_name(text, name))

    return do


def _without_name(text: str, name: str) -> str:
    """The source without the re-export of one name, written alone or as a line of a longer import."""
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not line.rstrip().endswith((f" import {name}", f"    {name},")))


def cut_short(install: Install) -> None:
    """Cut a source file in half."""
    install.edit("pytorch/module/linear.py", lambda text: text[: len(text) // 2])


def exits(install: Install) -> None:
    """Let a module raise SystemExit."""
    install.edit("common/recipe/__init__.py", lambda text: f'{text}\nraise SystemExit("no licence found")\n')


def metadata_unreadable(install: Install) -> None:
    """Overwrite METADATA of the sources with bytes that are no text."""
    install.write(install.dist_info("transformer_engine") / "METADATA", b"\xff\xfe\x00damaged\x9d\n" * 40)


def record_deleted(install: Install) -> None:
    """Delete RECORD of the sources."""
    (install.dist_info("transformer_engine") / "RECORD").unlink()


def hide(*patterns: str) -> Callable[[Install], None]:
    """Let the environment not have other packages of these names."""
    return lambda install: install.hidden.update(patterns)


def no_nvrtc(install: Install) -> None:
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


def flash_attention_4(install: Install) -> None:
    """Lay out FlashAttention 4 without the CuTe DSL that it needs."""
    with zipfile.ZipFile(install.wheels[FLASH_ATTENTION_4]) as archive:
        archive.extractall(install.site)
    install.hidden |= {"cutlass*", "nvidia_cutlass*", "quack*", "tvm_ffi*", "flash_attn*"}


def switched_off(install: Install) -> None:
    """Set the variable that turns TE off."""
    install.variables["MEGACPP_DISABLE_TE"] = "1"
