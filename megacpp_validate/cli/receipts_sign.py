"""`receipts-sign`: sign what a folder of receipts holds."""

from pathlib import Path
from typing import Annotated

from .app import verb
from .options import Store


@verb()
def receipts_sign(
    store: Store, /, key: Annotated[Path, "Private Ed25519 key, or the .pub of one that ssh-agent holds."]
) -> str:
    """Sign the receipts of a folder, so that the gate refuses what is edited, added or lost afterwards.

    Exit code 0: signed. 2: the folder or the key is wrong. 4: a file in it is not a receipt. 6: there is no ssh-keygen.
    """
    from ..gate.release_folder import sign_receipts

    return sign_receipts(store, key)
