"""The published schema of a loss curve is what the verb prints."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from megacpp_validate.cli.app import app

PUBLISHED = Path(__file__).resolve().parents[2] / "docs" / "schema" / "loss_curve.json"


def test_the_published_schema_is_fresh() -> None:
    done = CliRunner().invoke(app, ["loss-curve-schema"])
    assert done.exit_code == 0
    assert json.loads(done.output)["$id"] == "megacpp-validate/loss-curve/2"
    assert PUBLISHED.read_text(encoding="utf-8") == done.output, (
        "next step: python -m megacpp_validate.cli loss-curve-schema > docs/schema/loss_curve.json"
    )
