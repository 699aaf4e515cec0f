"""The damaged installs: what is done to each, and what the bridge has to say about it.

Every row starts from a real release of Transformer Engine. What a row expects is as much a part of it as the
damage: the class of the exception, and words for what is wrong, its likely cause and the next step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from . import damage_actions as deeds
from .install import Install

PINNED: Final = "2.20.2"
BASELINES: Final = ("2.8.0", "2.12.0", "2.17.1", PINNED)
WHOLE: Final = ("core", "extension")

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
        hides_torch: torch is taken away; what is made of torch cannot be imported then, and nothing else may fail.
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
    hides_torch: bool = False
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


_INSTALL = r"Next step: .*pip install .*transformer-engine\[pytorch\]"

DAMAGES: Final = (
    *(
        Damage(
            f"undamaged-{release}",
            "nothing: the install as it should be",
            deeds.nothing,
            (),
            release=release,
            available=True,
            missing=() if release != "2.8.0" else ("autocast", "quantized_model_init"),
        )
        for release in BASELINES
    ),
    Damage(
        "switched-off",
        "nothing, and MEGACPP_DISABLE_TE=1 is set",
        deeds.switched_off,
        (r"MEGACPP_DISABLE_TE=1", r"unset"),
    ),
    Damage(
        "absent",
        "Transformer Engine is not installed",
        deeds.absent,
        ("ModuleNotFoundError", "cause: Transformer Engine is not installed", _INSTALL),
        parts=(),
        wants_torch=False,
        top_level=False,
    ),
    Damage(
        "metapackage-alone",
        "only the metapackage transformer_engine is installed",
        deeds.nothing,
        ("RuntimeError", "cause: only the Python half is installed", _INSTALL),
        parts=(),
        wants_torch=False,
    ),
    Damage(
        "core-without-extension",
        "sources and core library, no transformer_engine_torch; top-level import warns and succeeds",
        deeds.nothing,
        ("FileNotFoundError", "cause: .*torch extension .* is not", _INSTALL),
        parts=("core",),
        top_level=True,
    ),
    Damage(
        "extension-without-core",
        "sources and torch extension, no transformer_engine_cu12 or _cu13",
        deeds.nothing,
        ("RuntimeError", "cause: .*core library .* is not", _INSTALL),
        parts=("extension",),
        wants_torch=False,
    ),
    Damage(
        "core-library-deleted",
        "libtransformer_engine.so is deleted, its metadata is there",
        deeds.core_deleted,
        (
            "FileNotFoundError",
            "cause: .*transformer-engine-cu1[23].* library file is not there",
            "Next step: .*reinstall",
        ),
        wants_torch=False,
    ),
    Damage(
        "core-library-cut-short",
        "libtransformer_engine.so is cut short, as by a full disk",
        deeds.core_cut_short,
        ("OSError", "cause: .*libtransformer_engine.so is damaged", "Next step: .*reinstall"),
        wants_torch=False,
    ),
    Damage(
        "two-core-libraries",
        "a libtransformer_engine.so of an earlier build lies beside the package",
        deeds.core_twice,
        ("RuntimeError: Multiple files", "cause: .*two builds", "Next step: .*remove"),
        wants_torch=False,
    ),
    Damage(
        "missing-library",
        "one of the CUDA libraries that the core library needs exists nowhere: its name ends with .so.99",
        deeds.core_needs_another_library,
        (
            "OSError",
            r"cause: the shared library lib\w+\.so\.99 \((cu|the CUDA)",
            "Next step: pip install nvidia-.*LD_LIBRARY_PATH",
        ),
        wants_torch=False,
    ),
    Damage(
        "undefined-symbol",
        "the torch extension wants a symbol that nothing defines; top-level import succeeds",
        deeds.extension_wants_another_symbol,
        ("ImportError: .*undefined symbol", "cause: .*built against another", "Next step: .*rebuild"),
        top_level=True,
    ),
    Damage(
        "extension-of-an-older-build",
        "the torch extension lacks dbias_dgelu, which the sources use",
        deeds.extension_of_an_older_build,
        ("AttributeError.*dbias_dgelu", "cause: .*not of one build", _INSTALL),
    ),
    Damage(
        "core-of-another-release",
        "the core is of 2.19.0",
        deeds.core_of_another_release,
        ("AssertionError.*mismatch", r"cause: .*different releases .*2\.19\.0", _INSTALL),
        wants_torch=False,
    ),
    Damage(
        "extension-of-another-release",
        "the torch extension is of 2.19.0",
        deeds.extension_of_another_release,
        ("AssertionError.*mismatch", r"cause: .*different releases .*2\.19\.0", _INSTALL),
    ),
    Damage(
        "local-version",
        "the torch extension was built from a checkout: its version ends with +g1a2b3c4",
        deeds.local_version,
        ("AssertionError.*mismatch", r"cause: .*\+g1a2b3c4.*\+local suffix", _INSTALL),
    ),
    Damage(
        "second-copy",
        "a folder with another release's sources comes earlier on the path",
        deeds.second_copy,
        ("AssertionError|RuntimeError|FileNotFoundError", "cause: a second copy", "Next step: remove one"),
        extra=deeds.ANOTHER_COPY,
        wants_torch=False,
    ),
    Damage(
        "optional-symbol-gone",
        "pytorch/__init__.py no longer re-exports moe_sort_chunks_by_index_with_probs",
        deeds.take_out("moe_sort_chunks_by_index_with_probs"),
        (
            "entry point `moe_sort_chunks_by_index_with_probs`",
            "cause: .*moved, renamed",
            "Next step: .*canary",
        ),
        available=True,
        missing=("moe_sort_chunks_by_index_with_probs",),
    ),
    Damage(
        "required-symbol-gone",
        "pytorch/__init__.py no longer re-exports Linear",
        deeds.take_out("Linear"),
        ("ImportError: cannot import name 'Linear'", "cause: .*moved, renamed", "Next step: .*canary"),
    ),
    Damage(
        "flash-attn-4-without-cutedsl",
        "flash-attn-4 4.0.0b36 is installed without the CuTe DSL that it needs",
        deeds.flash_attention_4,
        (
            "ModuleNotFoundError",
            "cause: flash-attn-4 is installed without the CuTe DSL",
            "Next step: .*pip uninstall flash-attn-4",
        ),
        release="2.17.1",
        extra=deeds.FLASH_ATTENTION_4,
    ),
    Damage(
        "dependency-missing",
        "pydantic, which the recipes are made of, is not installed; top-level import succeeds",
        deeds.hide("pydantic"),
        (
            "ModuleNotFoundError",
            "cause: .*needs the Python package `pydantic`",
            "Next step: pip install pydantic",
        ),
        top_level=True,
    ),
    Damage(
        "torch-missing",
        "torch is not installed; top-level import succeeds",
        deeds.hide("torch", "torch-*"),
        ("ModuleNotFoundError", "cause: .*needs the Python package `torch`", "Next step: pip install torch"),
        wants_torch=False,
        hides_torch=True,
        top_level=True,
    ),
    Damage(
        "leftovers-of-an-uninstall",
        "folders without a single source are left: Python takes them for a namespace package",
        deeds.leftovers,
        ("ImportError", "cause: .*leftovers of an uninstall", "Next step: remove"),
        parts=(),
        wants_torch=False,
        top_level=True,
    ),
    Damage(
        "source-cut-short",
        "pytorch/module/linear.py is cut in half",
        deeds.cut_short,
        ("SyntaxError", r"cause: .*linear\.py is damaged", "Next step: .*reinstall"),
    ),
    Damage(
        "exits-at-import",
        "a module raises SystemExit while it is imported",
        deeds.exits,
        ("SystemExit: no licence found", "cause: .*ends the program", "Next step: "),
    ),
    Damage(
        "metadata-unreadable",
        "METADATA of transformer_engine holds bytes that are no text",
        deeds.metadata_unreadable,
        (
            "UnicodeDecodeError",
            "cause: .*metadata of transformer-engine cannot be read",
            "Next step: .*reinstall",
        ),
        wants_torch=False,
    ),
    Damage(
        "record-deleted",
        "RECORD of transformer_engine is deleted, as by an install that pip did not make",
        deeds.record_deleted,
        ("TypeError", "cause: .*list of files", "Next step: .*reinstall"),
        wants_torch=False,
    ),
    Damage(
        "no-library-in-cache",
        "no NVRTC anywhere, and `ldconfig -p | grep` finds none",
        deeds.no_nvrtc,
        (
            "CalledProcessError",
            r"cause: the shared library libnvrtc\S* \(NVRTC\)",
            "Next step: .*nvidia-cuda-nvrtc",
        ),
        release="2.8.0",
        wants_torch=False,
    ),
    Damage(
        "core-without-extension-1.x",
        "sources and core library of a 1.x release, no transformer_engine_torch",
        deeds.nothing,
        ("StopIteration", "cause: .*torch extension .* is not", _INSTALL),
        release="1.13.0",
        parts=("core",),
        top_level=True,
    ),
    Damage(
        "import-hangs",
        "loading the core library never ends",
        deeds.core_hangs,
        (r"did not end within .* hangs in \S+:\d+", "Likely cause: ", "Next step: .*MEGACPP_DISABLE_TE"),
        wants_torch=False,
        ends="hang",
    ),
    Damage(
        "import-aborts",
        "loading the core library aborts the interpreter",
        deeds.core_aborts,
        ("ends the interpreter", "Likely cause: ", "Next step: .*MEGACPP_DISABLE_TE"),
        wants_torch=False,
        ends="abort",
    ),
)
