"""The libraries whose releases are compared, a row each; Transformer Engine is the default."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Library:
    """One library, as its distribution is built.

    Attributes:
        title: what people call it.
        distributions: its names on an index; releases are fetched by the first.
        roots: modules whose names code can use; importing the first one is judged.
        opaque: modules whose names are not known: compiled, of another distribution, or for GPUs of another vendor.
        layer: class whose `set_extra_state` loads the state of a layer; empty where layers have none.
    """

    title: str
    distributions: tuple[str, ...]
    roots: tuple[str, ...]
    opaque: tuple[str, ...] = ()
    layer: str = ""

    @property
    def package(self) -> str:
        """The top-level package, or the module that is all of it."""
        return self.roots[0].partition(".")[0]

    def owns(self, dotted: str) -> bool:
        """Whether a name belongs to the library. A single root is all of it: others may share the package."""
        owned = self.package if len(self.roots) > 1 else self.roots[0]
        return f"{dotted}.".startswith(f"{owned}.")

    def is_named_in(self, text: str) -> bool:
        """Whether a name of code that is not in the tree, with the texts that it is given, speaks of the library."""
        words = re.split("[^a-z]+", text.lower())
        return "".join(word[0] for word in self.package.split("_")) in words or self.package in "_".join(words)

    def names_version(self, text: str) -> bool:
        """Whether it speaks of the version of the library: `is_te_min_version`, `TE_GE_2_9`."""
        return bool(re.search("(?<![a-z])version|(?<![a-z0-9])[0-9]", text.lower())) and self.is_named_in(text)

    def is_opaque(self, module: str) -> bool:
        """Whether the names of a module are not known."""
        return any(f"{module}.".startswith(f"{one}.") for one in self.opaque)


TE: Final = Library(
    "Transformer Engine",
    ("transformer-engine", "transformer-engine-torch", "transformer-engine-cu12", "transformer-engine-cu13"),
    ("transformer_engine.pytorch", "transformer_engine.common"),
    ("transformer_engine_torch",),
    "transformer_engine.pytorch.module.base.TransformerEngineBaseModule",
)
_FLASH_2: Final = ("flash_attn.cute", "flash_attn.flash_attn_triton_amd")
LIBRARIES: Final = {
    "transformer-engine": TE,
    "deep-gemm": Library("DeepGEMM", ("sgl-deep-gemm", "deep-gemm"), ("deep_gemm",), ("deep_gemm._C",)),
    "flash-attn": Library("FlashAttention 2", ("flash-attn",), ("flash_attn",), _FLASH_2),
    "flash-attn-3": Library("FlashAttention 3", ("flash-attn-3",), ("flash_attn_interface",)),
    "flash-attn-4": Library("FlashAttention 4", ("flash-attn-4",), ("flash_attn.cute",)),
    "liger-kernel": Library("Liger Kernel", ("liger-kernel",), ("liger_kernel.transformers", "liger_kernel")),
    "torchao": Library("torchao", ("torchao",), ("torchao.float8", "torchao"), ("torchao._C",)),
    "triton": Library("Triton", ("triton",), ("triton",), ("triton._C",)),
}
