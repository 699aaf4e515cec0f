"""Pages of `docs/examples` that need no GPU, from committed evidence: `python ci/pages.py [PAGE ...]`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from megacpp_validate.canary.dynamic.scores import FaultScore
from megacpp_validate.catalog.bridge import ProbeCell, read_catalog
from megacpp_validate.environments.host_session import SessionResult, SmokeSession
from megacpp_validate.evidence.store import read_receipts
from megacpp_validate.gate.ablation import AblationResult, FeatureAblation
from megacpp_validate.gate.fp8 import Fp8Result
from megacpp_validate.gate.loss import judge_folder
from megacpp_validate.jitcache.prewarm import PrewarmResult
from megacpp_validate.report.describe.scores import describe_ablation, describe_planted
from megacpp_validate.report.describe.session import describe_session
from megacpp_validate.report.render.markdown import render_markdown
from megacpp_validate.report.render.terminal import render_terminal

ROOT: Final = Path(__file__).resolve().parents[1]
EVIDENCE: Final = ROOT / "docs" / "evidence"
RELEASES: Final = ("2.12.0", "2.14.1", "2.16.1", "2.17.1", "2.19.0", "2.20.2")
SIX: Final = "compare-receipts " + " ".join(f"docs/evidence/h200/te{release}" for release in RELEASES)
VERBS: Final = {  # page -> what prints it
    "te_canary.txt": "canary 2.14.1 2.15.0",
    "canary_torchao.txt": "canary 0.13.0 0.18.0 --library torchao",
    "te_canary_h200.txt": SIX,
    "../evidence/support.md": f"{SIX} --format markdown",
    "fp8_policy.txt": "fp8-policy",
    "images_plan.txt": "images --plan",
    "loss_gate_h200.html": "loss-gate docs/evidence/fp8/te2.20.2 --format html",
}
SCORES: Final = (
    "selftest", "blame_score", "blame_score_held_out", "fp8_faults", "fp8_faults_rest", "fp8_faults_held_out",
    "smoke_faults",
)  # fmt: skip


def render_score(name: str) -> str:
    """Markdown of a score that a run on a GPU, or of many processes, left in `docs/evidence`."""
    score = FaultScore.model_validate_json((EVIDENCE / f"{name}.json").read_bytes())
    return render_markdown(describe_planted(score))


def render_ablation() -> str:
    """Markdown of the features that were measured on an H200."""
    files = sorted((EVIDENCE / "smoke" / "ablation").glob("*.json"))
    features = tuple(FeatureAblation.model_validate_json(file.read_bytes()) for file in files)
    return render_markdown(describe_ablation(AblationResult(tool="", features=features)))


def render_kernels() -> str:
    """Kernels that compile for each target, from the results of `prewarm --compile-only` in `docs/evidence/kernels`."""
    files = [EVIDENCE / "kernels" / f"{target}.json" for target in ("h200", "b200", "gb10")]
    results = [PrewarmResult.model_validate_json(file.read_bytes()) for file in files]
    counts = [Counter((one.library, one.kernel) for row in result.rows for one in row.compiled) for result in results]
    head = ["library", "kernel", *(f"{result.target} ({result.architecture})" for result in results)]
    rows = [[library, f"`{kernel}`", *(str(count[library, kernel] or "-") for count in counts)]
            for library, kernel in sorted(set().union(*counts), reverse=True)]  # fmt: skip
    rows.append(["all", "", *(str(count.total()) for count in counts)])
    rows.append(["failed", "", *(str(sum(row.verdict != "done" for row in result.rows)) for result in results)])
    versions = ", ".join(
        f"{name} {results[0].versions[name]}" for name in ("triton", "transformer-engine", "flash-attn-4")
    )
    lines = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
    return f"Compiled to cubins and run on no device ({versions}):\n\n" + "\n".join(lines) + "\n"


def read_session(cells: Sequence[ProbeCell], interpreter: str, *folders: str) -> SessionResult:
    """The cells that have a receipt of an H200, as one session."""
    found = {one.probe: one for folder in folders for one in read_receipts(EVIDENCE / folder).found.values()}
    receipts = tuple(found[cell.id] for cell in cells if cell.id in found)
    return SessionResult(
        tool="", target=receipts[0].target, stack=receipts[0].stack, requested=receipts[0].requested,
        requested_because=receipts[0].requested_because, interpreter=interpreter, seed=0, receipts=receipts,
        folder=" and ".join(f"docs/evidence/{folder}" for folder in folders),
        seconds=sum(one.seconds["total"] for one in receipts),
    )  # fmt: skip


def render_smoke() -> str:
    """The smoke run as text."""
    cells = read_catalog().smoke
    session = read_session(cells, "One or two H200s for each cell", "smoke/one_gpu", "smoke/two_gpus")
    return render_terminal(describe_session(SmokeSession(**dict(session))))


def render_fp8() -> str:
    """FP8 on two releases as text."""
    pages = []
    for folder in ("fp8/te2.20.2", "fp8/te2.12.0"):
        session = read_session(read_catalog().fp8_cells, "One H200", folder)
        result = Fp8Result(**dict(session), loss=judge_folder(EVIDENCE / folder).verdicts)
        pages.append(render_terminal(describe_session(result)))
    return "\n".join(pages)


def run_verb(words: str) -> str:
    """What a verb prints, whatever its exit code: a page may show a red result."""
    command = [sys.executable, "-m", "megacpp_validate.cli", *words.split()]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False).stdout


PAGES: Final[dict[str, Callable[[], str]]] = {
    **{page: partial(run_verb, words) for page, words in VERBS.items()},
    **{f"{name}.md": partial(render_score, name) for name in SCORES},
    "ablation_h200.md": render_ablation, "moe_smoke_h200.txt": render_smoke, "fp8_h200.txt": render_fp8,
    "kernels.md": render_kernels,
}  # fmt: skip


def main() -> int:
    """Write the pages that are named, or all, in 100 columns and without spaces at the ends of lines."""
    os.environ["COLUMNS"] = "100"
    for page in sys.argv[1:] or PAGES:
        lines = "".join(f"{line.rstrip()}\n" for line in PAGES[page]().splitlines())
        (ROOT / "docs" / "examples" / page).write_text(lines, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
