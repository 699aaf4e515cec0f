"""Issue texts to issues: publish_issues.py FOLDER. One issue a marker: it is opened once, and changed from then on."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from github_api import NoAnswer, Repository

WRONG_ARGUMENTS, EVIDENCE_MISSING, INFRASTRUCTURE = 2, 4, 6
KEYS = {"title", "labels", "marker"}
# Of all labels of an issue these alone are taken off again: they say how a release stands. Any other is a person's.
STATES = frozenset({"breaks", "at-risk", "clean", "no-evidence", "withdrawn"})
# Whose token a workflow has: its issues are found again without their label, too. A stranger can write a marker.
ACCOUNT = "github-actions[bot]"
ORDER = "sort=created&direction=asc"


@dataclass(frozen=True)
class Text:
    """One issue text, as `nox -s te_watch` writes it."""

    title: str
    labels: list[str]
    marker: str
    body: str


def read_text(path: Path) -> Text:
    """An issue text: front matter of `key: JSON`, then the body, which begins with the marker.

    Raises:
        ValueError: it is none.
    """
    _, head, body = path.read_text(encoding="utf-8").split("---\n", 2)
    values = {key: json.loads(value) for key, _, value in (line.partition(": ") for line in head.splitlines())}
    words = [values.get(key) for key in ("title", "marker")]
    if values.keys() != KEYS or not all(isinstance(word, str) and word for word in words):
        raise ValueError(f"{path.name} has no {', '.join(sorted(KEYS))} of which title and marker are words")
    if not body.startswith(values["marker"]):
        raise ValueError(f"{path.name} has a body that does not begin with its marker")
    labels = values["labels"]
    if not (isinstance(labels, list) and labels and all(isinstance(name, str) and name for name in labels)):
        raise ValueError(f"{path.name} has no label, by which its issue would be found again")
    if labels[0] in STATES:
        raise ValueError(f"{path.name} has {labels[0]!r} first, which changes, and its issue would be lost with it")
    return Text(values["title"], values["labels"], values["marker"], body)


def publish(repository: Repository, texts: list[Text]) -> list[str]:
    """Open what has no issue yet and change what differs; what was done, a line each.

    Closed issues are found too, and stay closed: a person has closed them. One that lost its label gets it again.
    """
    known = _find_known(repository, texts)
    done = []
    for text in texts:
        issue = known.get(text.marker)
        labels = _labels(issue) if issue else set()
        # A PATCH sets them all.
        wanted = {"title": text.title, "body": text.body, "labels": sorted((labels - STATES) | set(text.labels))}
        if issue is None:
            known[text.marker] = repository.call("POST", "issues", wanted)
            done.append(f"opened #{known[text.marker]['number']}: {text.title}")
        elif _differs(issue, text):
            known[text.marker] = repository.call("PATCH", f"issues/{issue['number']}", wanted)
            done.append(f"changed #{issue['number']}: {text.title}")
        else:
            done.append(f"#{issue['number']} stands as it is: {text.title}")
    return done


def _find_known(repository: Repository, texts: list[Text]) -> dict[str, dict[str, Any]]:
    """Issues by marker, the oldest of each: those with the label, then those of the workflow's own account."""
    known: dict[str, dict[str, Any]] = {}
    for label in dict.fromkeys(text.labels[0] for text in texts):
        _put_marked(known, repository.every(f"issues?state=all&labels={quote(label)}&{ORDER}"))
    if any(text.marker not in known for text in texts):  # it is new, or a person has taken the label off
        own = repository.every(f"issues?state=all&creator={quote(ACCOUNT)}&{ORDER}")
        _put_marked(known, (issue for issue in own if (issue.get("user") or {}).get("login") == ACCOUNT))
    return known


def _put_marked(known: dict[str, dict[str, Any]], issues: Iterable[dict[str, Any]]) -> None:
    for issue in issues:
        if "pull_request" not in issue:
            known.setdefault(str(issue.get("body") or "").replace("\r\n", "\n").partition("\n")[0], issue)


def _labels(issue: dict[str, Any]) -> set[str]:
    return {str(row["name"] if isinstance(row, dict) else row) for row in issue.get("labels") or ()}


def _differs(issue: dict[str, Any], text: Text) -> bool:
    labels = _labels(issue)
    body = str(issue.get("body") or "").replace("\r\n", "\n").rstrip()
    return (issue.get("title"), body) != (text.title, text.body.rstrip()) or labels & (
        STATES | set(text.labels)
    ) != set(text.labels)


def main() -> int:
    """Publish every text of a folder; a folder that is not there has none."""
    if len(sys.argv) != 2:
        print("publish_issues: publish_issues.py FOLDER, of what `nox -s te_watch` wrote to issues/", file=sys.stderr)
        return WRONG_ARGUMENTS
    texts, bad = [], []
    for path in sorted(Path(sys.argv[1]).glob("*.md")):
        try:
            texts.append(read_text(path))
        except (OSError, ValueError) as fault:
            bad.append(f"{path.name} is no issue text: {fault}")
    try:
        lines = publish(Repository(), texts) if texts else ["nothing is to be published"]
    except NoAnswer as fault:
        print(f"publish_issues: {fault}", file=sys.stderr)
        return INFRASTRUCTURE
    print("\n".join([*lines, *bad]))
    return EVIDENCE_MISSING if bad else 0


if __name__ == "__main__":
    sys.exit(main())
