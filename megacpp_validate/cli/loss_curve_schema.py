"""`loss-curve-schema`: the JSON schema of a loss curve."""

from __future__ import annotations

from .app import verb


@verb()
def loss_curve_schema() -> str:
    """Print the JSON schema of a loss curve; docs/schema/loss_curve.json holds this text."""
    import json

    from ..evidence.loss_curves import loss_curve_schema as build_schema

    return json.dumps(build_schema(), indent=2, ensure_ascii=False)
