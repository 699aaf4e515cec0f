"""The verb of the watch for releases of Transformer Engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...catalog.bridge import read_catalog
from ..app import MatrixOption, OutputOption, app
from ..told_options import PageFormat, PageFormatOption


@app.command()
def te_watch(
    state: Annotated[Path, typer.Option(help="Folder of what is known: state.json, results/ and issues/.")] = Path(
        ".megacpp/te_watch"
    ),
    gpu_results: Annotated[
        Path | None,
        typer.Option(help="Folder of RELEASE.json, told by te-canary --tiers gpu: take them in, and ask no index."),
    ] = None,
    fmt: PageFormatOption = PageFormat.TABLE,
    output: OutputOption = None,
    matrix: MatrixOption = None,
) -> None:
    """Is there a release on the index that nobody has judged? Judge it without a GPU, and write its issue text.

    A release is judged once, and told, whatever ends a run half way. Exit code 0: nothing new breaks, 1: a release that
    is new breaks the bridge, 3: the folder of --gpu-results has no answer, 4: one could not be judged, 5: the index
    does not say what there is, 6: the state is damaged, or another run holds it.
    """
    from .te_watch_runs import Asked, run_watch

    run_watch(read_catalog(matrix), Asked(state, gpu_results, matrix), fmt, output)
