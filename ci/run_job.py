"""One planned job: the nox sessions that $MEGACPP_JOB names, one after the other, up to the first that is not open.

The plan is made by `nox -s pipeline -- PIPELINE --plan --format github`; no shell reads it. Standard library only, for
it runs before anything is installed.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WRONG_ARGUMENTS, EVIDENCE_MISSING = 2, 4


def read_commands(text: str) -> tuple[list[list[str]], list[list[str]]]:
    """The commands of a job, each a call of nox; and those that follow whatever came of them.

    Raises:
        ValueError: it is no job, or calls something else.
    """
    job = json.loads(text)
    commands, after = (job.get("commands"), job.get("after", [])) if isinstance(job, dict) else (None, [])
    if not isinstance(commands, list) or not commands or not isinstance(after, list):
        raise ValueError("there are no commands in it")
    for command in commands + after:
        whole = isinstance(command, list) and all(isinstance(word, str) for word in command)
        if not whole or command[:2] != ["./nox", "-s"] or len(command) < 3:
            raise ValueError(f"{command!r} is no call of a nox session")
    return commands, after


def read_not_run(text: str) -> str:
    """Why a job that was left out is not run; empty where it is one to run."""
    try:
        job = json.loads(text)
    except ValueError:
        return ""
    return str(job.get("not_run", "")) if isinstance(job, dict) else ""


def main() -> int:
    """Run them; the exit code of the first that is not open."""
    if reason := read_not_run(os.environ.get("MEGACPP_JOB", "")):
        print(f"run_job: not-run: {reason}", file=sys.stderr)
        return EVIDENCE_MISSING
    try:
        commands, after = read_commands(os.environ.get("MEGACPP_JOB", ""))
    except ValueError as fault:
        print(
            f"run_job: $MEGACPP_JOB is no job: {fault}. Likely cause: the workflow did not hand it on. Next step: see "
            "that its plan step wrote it.",
            file=sys.stderr,
        )
        return WRONG_ARGUMENTS
    code = 0
    for command in commands:
        code = code or _run(command)
    for command in after:
        ended = _run(command)
        code = code or ended
    _summarise()
    return code


def _run(command: list[str]) -> int:
    print(shlex.join(command), flush=True)
    return subprocess.run([str(ROOT / "nox"), *command[1:]], cwd=ROOT, check=False).returncode


def _summarise() -> None:
    """Put what the sessions told in Markdown on the page of the run, where there is one."""
    page = os.environ.get("GITHUB_STEP_SUMMARY")
    if page:
        with Path(page).open("a", encoding="utf-8") as stream:
            for told in sorted((ROOT / "reports").glob("*.md")):
                stream.write(told.read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(main())
