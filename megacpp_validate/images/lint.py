"""What linters say of the recipe: the Dockerfile, its scripts, and its stages as each target builds them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

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
    """What one linter says of `subject`; `faults` of a linter that did not run: why."""

    linter: str
    subject: str
    outcome: LintOutcome
    faults: tuple[str, ...] = ()


def lint_recipe(
    root: Path, plans: Sequence[ImagePlan], engine: Engine | None, no_engine: str, variables: Mapping[str, str]
) -> tuple[Lint, ...]:
    """Everything that can be said of the recipe without building it.

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
    for plan in plans:
        for step in plan.steps:
            if not (root / STEPS / f"{step}.sh").is_file():
                faults.append(f"{STEPS}/{step}.sh is a step of {plan.target}, and there is no such file")
            if f"bash /steps/{step}.sh" not in text:
                faults.append(f"{STEPS}/{step}.sh is a step of {plan.target}, and {DOCKERFILE} does not run it")
    return _judge("house rules", DOCKERFILE, dict.fromkeys(faults))


def _lint(name: str, subject: str, words: list[str], root: Path, variables: Mapping[str, str]) -> Lint:
    program = find_program(name, variables)
    if program is None:
        why = f"{name} is missing; install the dependency group `images`, as `nox -s images` does"
        return Lint(linter=name, subject=subject, outcome=LintOutcome.NOT_RUN, faults=(why,))
    done = call([program, *words], variables, folder=root)
    rows = _read_json(done.words)
    if not isinstance(rows, list):
        return Lint(linter=name, subject=subject, outcome=LintOutcome.NOT_RUN, faults=(done.last_words,))
    said = call([program, "--version"], variables).words.replace("version:", " ").split()
    version = next((word for word in said if word[:1].isdigit()), "")
    faults = [
        f"{row['file']}:{row['line']}: {'SC' if name == 'shellcheck' else ''}{row['code']} {row['message']}"
        for row in rows
    ]
    return _judge(f"{name} {version}", subject, faults)


def _check_target(root: Path, plan: ImagePlan, engine: Engine | None, no_engine: str) -> Lint:
    """What `docker buildx build --check` says of the stages of a target.

    The base is an empty image here: a registry that is down says nothing of the recipe.
    """
    subject = f"{DOCKERFILE} as {plan.target} builds it"
    if engine is None:
        return Lint(linter="docker buildx --check", subject=subject, outcome=LintOutcome.NOT_RUN, faults=(no_engine,))
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
    said = _read_json(done.words)
    check = said.get("target", {}).get(plan.target, {}).get("check") if isinstance(said, dict) else None
    linter = f"docker buildx --check {engine.buildx}"
    if not isinstance(check, dict):
        return Lint(linter=linter, subject=subject, outcome=LintOutcome.NOT_RUN, faults=(done.last_words,))
    faults = [f"{row.get('ruleName', '?')}: {row.get('detail', '')}" for row in check.get("warnings") or ()]
    if error := check.get("buildError"):
        faults.append(str(error.get("message", error)))
    return _judge(linter, subject, faults)


def _judge(linter: str, subject: str, faults: Iterable[str]) -> Lint:
    found = tuple(faults)
    outcome = LintOutcome.FAULTS if found else LintOutcome.CLEAN
    return Lint(linter=linter, subject=subject, outcome=outcome, faults=found)


def _read_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
