"""What differs in some paths, as a pull request: open_change.py BRANCH TITLE PATH... There is one for a branch."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from pathlib import Path

from github_api import NoAnswer, Repository

ROOT = Path.cwd()
WRONG_ARGUMENTS, INFRASTRUCTURE = 2, 6
BODY = (
    "Made by `nox -s lock`, and opened by `ci/open_change.py`. What changed is in the diff; CI says whether it holds."
)
AUTHOR = ("-c", "user.name=megacpp-validate", "-c", "user.email=megacpp-validate@users.noreply.github.com")


def git(*words: str, token: str = "") -> str:
    """Run git; a token goes by the environment, where no list of processes shows it.

    Raises:
        NoAnswer: git refuses.
    """
    variables = dict(os.environ)
    if token:
        pair = base64.b64encode(f"x-access-token:{token}".encode()).decode()
        variables |= {
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": "http.extraheader",
            "GIT_CONFIG_VALUE_0": f"AUTHORIZATION: basic {pair}",
        }
    done = subprocess.run(["git", *words], cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoAnswer(f"git {words[0]} ended with {done.returncode}: {done.stderr.strip()[-400:]}")
    return done.stdout


def open_change(repository: Repository, branch: str, title: str, paths: list[str], into: str, token: str) -> str:
    """Commit what differs, push it to the branch, and open a pull request unless there is one."""
    if not git("status", "--porcelain", "--", *paths).strip():
        return "nothing differs: no change is opened"
    git("checkout", "--quiet", "-B", branch)
    git("add", "--", *paths)
    git(*AUTHOR, "commit", "--quiet", "-m", title)
    git("push", "--quiet", "--force", "origin", f"{branch}:refs/heads/{branch}", token=token)
    owner = repository.name.partition("/")[0]
    for known in repository.every(f"pulls?state=open&head={owner}:{branch}"):
        return f"#{known['number']} has the new commit"
    wanted = {"title": title, "head": branch, "base": into, "body": BODY}
    return f"opened #{repository.call('POST', 'pulls', wanted)['number']}"


def main() -> int:
    """Open a change for what differs in the paths."""
    if len(sys.argv) < 4:
        print("open_change: open_change.py BRANCH TITLE PATH...", file=sys.stderr)
        return WRONG_ARGUMENTS
    branch, title, *paths = sys.argv[1:]
    into = os.environ.get("GITHUB_REF_NAME", "main")
    try:
        print(open_change(Repository(), branch, title, paths, into, os.environ.get("GITHUB_TOKEN", "")))
    except NoAnswer as fault:
        print(f"open_change: {fault}", file=sys.stderr)
        return INFRASTRUCTURE
    return 0


if __name__ == "__main__":
    sys.exit(main())
