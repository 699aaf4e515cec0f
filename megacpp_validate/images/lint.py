"""What linters report of the recipe: the Dockerfile, its scripts, and its stages as each target builds them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Final

from ..evidence.values import Frozen
from .engine import Engine
from .plan import DOCKERFILE, ImagePlan, plan_bake
from .tools import call, find_program

STEPS: Final = "containers/steps"
ENGINE_SCRIPT: Final = "containers/docker_engine"


class LintOutcome(StrEnum):
    """How a linter ended. `NOT_RUN` is never clean."""

    CLEAN = "clean"
    FAULTS = "faults"
    NOT_RUN = "not-run"


class Lint(Frozen):
    """What one linter reports of `subject`; `faults` of a linter that did not run: why."""

    linter: str
    subject: str
    outcome: LintOutcome
    faults: tuple[str, ...] = ()


def lint_recipe(
    root: Path, plans: Sequence[ImagePlan], engine: Engine | None, no_engine: str, variables: Mapping[str, str]
) -> tuple[Lint, ...]:
    """Everything that can be found in the recipe without building it.

    Args:
        engine: that checks the stages; None where there is none, because of `no_engine`.
    """
    files = [*sorted(str(file.relative_to(root)) for file in (root / STEPS).glob("*.sh")), ENGINE_SCRIPT]
    checks = ["-x", "-P", "SCRIPTDIR", "-s", "bash", "-f", "json", *files]
    return (
        lint_house(root, plans),
        _lint("hadolint", DOCKERFILE, ["--no-color", "--format", "json", DOCKERFILE], root, variables),
        _lint("shellcheck", f"{len(files) - 1} scripts of {STEPS}, {ENGINE_SCRIPT}", checks, root, variables),
        *(_check_target(root, plan, engine, no_engine) for plan in plans),
    )


def lint_house(root: Path, plans: Sequence[ImagePlan]) -> Lint:
    """The rules of this project that no linter knows."""
    try:
        text = (root / DOCKERFILE).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        return _judge("house rules", DOCKERFILE, [f"it cannot be read: {fault}"])
    faults = []
    if any(line.replace(" ", "").lower().startswith("#syntax=") for line in text.splitlines()):
        faults.append(f"{DOCKERFILE}: a syntax line fetches a frontend from a registry; leave it out")
    for step, target in {step: plan.target for plan in reversed(plans) for step in plan.steps}.items():
        if not (root / STEPS / f"{step}.sh").is_file():
            faults.append(f"{STEPS}/{step}.sh is a step of {target}, and there is no such file")
        if f"bash /steps/{step}.sh" not in text:
            faults.append(f"{STEPS}/{step}.sh is a step of {target}, and {DOCKERFILE} does not run it")
    return _judge("house rules", DOCKERFILE, faults)


def _lint(name: str, subject: str, words: list[str], root: Path, variables: Mapping[str, str]) -> Lint:
    program = find_program(name, variables)
    if program is None:
        return _judge(name, subject, None, f"{name} is missing; `nox -s images` installs it")
    done = call([program, *words], variables, folder=root)
    code = "SC" if name == "shellcheck" else ""
    try:
        rows = json.loads(done.words)
        faults = [f"{row['file']}:{row['line']}: {code}{row['code']} {row['message']}" for row in rows]
    except (ValueError, KeyError, TypeError):
        return _judge(name, subject, None, done.last_words)
    return _judge(name, subject, faults)


def _check_target(root: Path, plan: ImagePlan, engine: Engine | None, no_engine: str) -> Lint:
    """What `docker buildx build --check` reports of the stages of a target.

    The base is an empty image here: a registry that is down is no fault of the recipe.
    """
    linter, subject = "docker buildx --check", f"{DOCKERFILE} as {plan.target} builds it"
    if engine is None:
        return _judge(linter, subject, None, no_engine)
    with tempfile.TemporaryDirectory(prefix="megacpp-bake-") as folder:
        document = plan_bake([plan])
        target = document["target"][plan.target]
        target["args"]["BASE_IMAGE"] = "scratch"
        target.pop("contexts", None)
        target.pop("platforms", None)
        file = Path(folder) / "bake.json"
        file.write_text(json.dumps(document), encoding="utf-8")
        words = ["buildx", "bake", "--progress", "quiet", "--allow", f"fs.read={folder}", "--file", str(file)]
        done = engine.ask(*words, "--call", "check,format=json", plan.target, folder=root)
    try:
        check = json.loads(done.words)["target"][plan.target]["check"]
        faults = [f"{row.get('ruleName', '?')}: {row.get('detail', '')}" for row in check.get("warnings") or ()]
        faults += [str(check["buildError"])] if check.get("buildError") else []
    except (ValueError, KeyError, TypeError):
        return _judge(linter, subject, None, done.last_words)
    return _judge(linter, subject, faults)


def _judge(linter: str, subject: str, faults: Iterable[str] | None, why: str = "") -> Lint:
    """A linter that ran; or, with None, one that did not, and why."""
    if faults is None:
        return Lint(linter=linter, subject=subject, outcome=LintOutcome.NOT_RUN, faults=(why,))
    found = tuple(faults)
    outcome = LintOutcome.FAULTS if found else LintOutcome.CLEAN
    return Lint(linter=linter, subject=subject, outcome=outcome, faults=found)
