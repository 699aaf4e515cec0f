"""`receipt-schema`: the JSON schema of a receipt."""

from __future__ import annotations

from .app import OutputOption, app


@app.command()
def receipt_schema(output: OutputOption = None) -> None:
    """Print the JSON schema of a receipt; docs/schema/receipt.json holds this text."""
    import json

    from ..evidence.store import receipt_schema as build_schema
    from .output import write_text

    write_text(json.dumps(build_schema(), indent=2, ensure_ascii=False), output)
