"""`receipt-schema`: the JSON schema of a receipt."""

from __future__ import annotations

from .app import verb


@verb()
def receipt_schema() -> str:
    """Print the JSON schema of a receipt; docs/schema/receipt.json holds this text."""
    import json

    from ..evidence.store import receipt_schema as build_schema

    return json.dumps(build_schema(), indent=2, ensure_ascii=False)
