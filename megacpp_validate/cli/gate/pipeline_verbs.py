"""The verb of pipelines: what CI runs, planned from the matrix, or run here."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from ...catalog.bridge import read_catalog
from ..app import MatrixOption, OutputOption, app, split_names


class PlanFormat(StrEnum):
    """How a plan is told; github is lines for $GITHUB_OUTPUT, gitlab a child pipeline."""

    TABLE = "table"
    JSON = "json"
    MARKDOWN = "markdown"
    GITHUB = "github"
    GITLAB = "gitlab"


@app.command()
def pipeline(
    name: Annotated[str, typer.Argument(help="A row of matrix/pipelines.toml.")] = "pull_request",
    plan: Annotated[bool, typer.Option("--plan", help="Say what would run, and run nothing.")] = False,
    facts: Annotated[
        str, typer.Option(help="What `nox -s te_watch -- --format json` told: its file, or the text itself.")
    ] = "",
    runners: Annotated[
        list[str] | None,
        typer.Option(
            "--runners", envvar="MEGACPP_RUNNERS", help="Machines that are there beside the hosted ones, with commas."
        ),
    ] = None,
    fmt: Annotated[PlanFormat, typer.Option("--format", help="How to tell the plan.")] = PlanFormat.TABLE,
    output: OutputOption = None,
    matrix: MatrixOption = None,
) -> None:
    """What does CI run? With --plan it is told; without, its jobs are run here, one after the other.

    Exit code, of a run: that of the first job that is not open, 1 before any other; 4 where a job was left out.
    """
    from .pipeline_runs import Asked, run_pipeline

    asked = Asked(name, plan, facts, split_names(runners or ()))
    run_pipeline(read_catalog(matrix), matrix, asked, fmt, output)
