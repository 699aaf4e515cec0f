"""Evidence as `xz -9` packs it: the text of a file, whether it is packed or not."""

from __future__ import annotations

import lzma
from pathlib import Path
from typing import Final

_MOST_BYTES: Final = 64 << 20  # unpacked; the largest receipts have one MiB


def unpack(content: bytes, path: Path) -> bytes:
    """What a file holds; of a name that ends in .xz, unpacked.

    Raises:
        OSError: it is no xz, truncated, or unpacks to more than any evidence has.
    """
    if path.suffix != ".xz":
        return content
    stream = lzma.LZMADecompressor()
    try:
        text = stream.decompress(content, _MOST_BYTES)
    except lzma.LZMAError as fault:
        raise OSError(f"{fault}") from fault
    if not stream.eof:
        what = "it is truncated" if stream.needs_input else f"it has more than {_MOST_BYTES >> 20} MiB"
        raise OSError(f"{what}; give the file as `xz -9` packed it")
    return text
