"""What features are worth, in a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from ...gate.ablation_result import AblationResult, FeatureAblation, Verdict
from ..ink import draw_sentence, draw_symbol, make_folding_table, plain, print_labelled, print_opening
from ..words.ablation import (
    HEADINGS,
    mark_verdict,
    say_backends,
    say_cells,
    say_model,
    say_numbers,
    say_states,
    say_topology,
    say_verdict,
    summarize_ablation,
)

_LABEL = 14


def render_ablation(result: AblationResult, *, console: Console | None = None) -> None:
    """Print the table of all features, and below it how each was looked at."""
    console = console or Console()
    print_opening(console, "What each feature changes", summarize_ablation(result))
    table = make_folding_table(*HEADINGS)
    for row in result.features:
        name, *cells = map(plain, say_cells(row))
        table.add_row(draw_symbol(mark_verdict(row.verdict), console) + Text(name), *cells)
    console.print(table)
    for row in result.features:
        _print_feature(row, console)


def _print_feature(row: FeatureAblation, console: Console) -> None:
    console.print(Text(plain(row.feature), "bold"))
    print_labelled(console, "compares", draw_sentence(f"{row.title}, with: {row.plain}"), _LABEL)
    print_labelled(console, "model", draw_sentence(say_model(row)), _LABEL)
    print_labelled(console, "topology", draw_sentence(say_topology(row)), _LABEL)
    print_labelled(console, "off -> on", draw_sentence("; ".join(say_states(row))), _LABEL)
    if row.verdict is not Verdict.NOT_JUDGED:
        print_labelled(console, "verdict", draw_sentence(say_verdict(row)), _LABEL)
        print_labelled(console, "numbers", draw_sentence("; ".join(say_numbers(row))), _LABEL)
    for arm in ("off", "on"):
        if row.runs:
            print_labelled(console, f"backends, {arm}", draw_sentence(say_backends(row, arm)), _LABEL)
    if row.verdict is Verdict.NOT_JUDGED:
        for reason in row.reasons:
            print_labelled(console, "not judged", draw_sentence(reason, "red"), _LABEL)
