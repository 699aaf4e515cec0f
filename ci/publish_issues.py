"""Issue texts to issues: publish_issues.py FOLDER. One issue a marker: it is opened once, and changed from then on."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from github_api import NoAnswer, Repository

EVIDENCE_MISSING, INFRASTRUCTURE = 4, 6
KEYS = {"title", "labels", "marker"}


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
    if values.keys() != KEYS or not body.startswith(values["marker"]):
        raise ValueError(f"{path.name} has no {', '.join(sorted(KEYS))} before a body that begins with its marker")
    return Text(values["title"], values["labels"], values["marker"], body)


def publish(repository: Repository, texts: list[Text], label: str) -> list[str]:
    """Open what has no issue yet and change what differs; what was done, a line each.

    Closed issues are found too, and stay closed: a person has closed them.
    """
    known: dict[str, dict[str, object]] = {}
    for issue in repository.every(f"issues?state=all&labels={quote(label)}&sort=created&direction=asc"):
        if "pull_request" not in issue:
            known.setdefault(str(issue.get("body") or "").replace("\r\n", "\n").partition("\n")[0], issue)
    done = []
    for text in texts:
        issue = known.get(text.marker)
        wanted = {"title": text.title, "body": text.body, "labels": text.labels}
        if issue is None:
            number = repository.call("POST", "issues", wanted)["number"]
            done.append(f"opened #{number}: {text.title}")
        elif _differs(issue, text):
            repository.call("PATCH", f"issues/{issue['number']}", wanted)
            done.append(f"changed #{issue['number']}: {text.title}")
        else:
            done.append(f"#{issue['number']} stands as it is: {text.title}")
    return done


def _differs(issue: dict[str, object], text: Text) -> bool:
    rows = issue.get("labels")
    labels = {row["name"] if isinstance(row, dict) else row for row in rows} if isinstance(rows, list) else set()
    body = str(issue.get("body") or "").replace("\r\n", "\n").rstrip()
    return (issue.get("title"), body) != (text.title, text.body.rstrip()) or not set(text.labels) <= labels


def main() -> int:
    """Publish every text of a folder; a folder that is not there has none."""
    texts, bad = [], []
    for path in sorted(Path(sys.argv[1]).glob("*.md")):
        try:
            texts.append(read_text(path))
        except (OSError, ValueError) as fault:
            bad.append(f"{path.name} is no issue text: {fault}")
    try:
        lines = publish(Repository(), texts, texts[0].labels[0]) if texts else ["nothing is to be published"]
    except NoAnswer as fault:
        print(f"publish_issues: {fault}", file=sys.stderr)
        return INFRASTRUCTURE
    print("\n".join([*lines, *bad]))
    return EVIDENCE_MISSING if bad else 0


if __name__ == "__main__":
    sys.exit(main())
