"""Licences of what images build from source or take from a vendor, which no package's metadata says for us.

Those of CUTLASS and fmt were read in their licence files on 2026-11-22; the others are as the metadata of their
packages and their README files have them, and `says` is where to look. What a source brings along in submodules is
listed under it. A source that is not here is told as unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class SourceLicence:
    """The licence of a source.

    Attributes:
        source: row of images.toml, or name of a distribution.
        licence: SPDX expression.
        brings: what lies in its submodules -> SPDX expression.
        says: the file that decides.
    """

    source: str
    licence: str
    brings: tuple[tuple[str, str], ...]
    says: str


SOURCES: Final = (
    SourceLicence(
        "flash-attention-3",
        "BSD-3-Clause",
        (("cutlass", "BSD-3-Clause"),),
        "https://github.com/Dao-AILab/flash-attention/blob/main/LICENSE",
    ),
    SourceLicence(
        "deep-gemm",
        "MIT",
        (("cutlass", "BSD-3-Clause"), ("fmt", "MIT")),
        "https://github.com/deepseek-ai/DeepGEMM/blob/main/LICENSE",
    ),
    SourceLicence(
        "transformer-engine",
        "Apache-2.0",
        (("cudnn-frontend", "MIT"), ("cutlass", "BSD-3-Clause"), ("googletest", "BSD-3-Clause")),
        "https://github.com/NVIDIA/TransformerEngine/blob/main/LICENSE",
    ),
)
