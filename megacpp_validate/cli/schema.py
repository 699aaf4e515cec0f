"""`schema`: the JSON schema of a receipt, or of a loss curve."""

from typing import Annotated, Literal

from .app import verb


@verb()
def schema(form: Annotated[Literal["receipt", "loss-curve"], "The file that it is of."], /) -> str:
    """Print a JSON schema; docs/schema/receipt.json and docs/schema/loss_curve.json hold these texts."""
    import json

    from ..evidence.loss_curve import loss_curve_schema
    from ..evidence.store import receipt_schema

    return json.dumps(receipt_schema() if form == "receipt" else loss_curve_schema(), indent=2, ensure_ascii=False)
