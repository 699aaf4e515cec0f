"""The scripts that workflows call, against a server that speaks as GitHub does, and a repository of git's own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

CI = Path(__file__).parents[2] / "ci"
MARKER = "<!-- megacpp-validate/te-watch release={} -->"


class Tracker:
    """Issues and pull requests, as the REST API gives them."""

    def __init__(self) -> None:
        self.issues: list[dict[str, Any]] = []
        self.pulls: list[dict[str, Any]] = []
        self.calls: list[tuple[str, str]] = []
        self.tokens: set[str] = set()

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        parts = urlsplit(path)
        self.calls.append((method, parts.path))
        kind, *rest = parts.path.removeprefix("/repos/team/bridge/").split("/")
        rows = {"issues": self.issues, "pulls": self.pulls}.get(kind)
        if rows is None or not parts.path.startswith("/repos/team/bridge/"):
            return 404, {"message": "Not Found"}
        if method == "POST":
            labels = [{"name": name} for name in body.get("labels", [])]
            user = {"login": "github-actions[bot]"}
            rows.append(body | {"number": len(rows) + 1, "labels": labels, "state": "open", "user": user})
            return 201, rows[-1]
        if method == "PATCH":
            row = rows[int(rest[0]) - 1]
            row |= body | {"labels": [{"name": name} for name in body.get("labels", [])]}
            return 200, row
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        label, size, page = query.get("labels"), int(query["per_page"]), int(query["page"])
        found = [row for row in rows if label is None or any(one["name"] == label for one in row["labels"])]
        if "creator" in query:
            found = [row for row in found if row.get("user", {}).get("login") == query["creator"]]
        if "head" in query:
            found = [row for row in found if f"team:{row['head']}" == query["head"]]
        return 200, found[size * (page - 1) : size * page]


@contextlib.contextmanager
def serving(tracker: Tracker) -> Iterator[dict[str, str]]:
    class Handler(BaseHTTPRequestHandler):
        def _speak(self) -> None:
            tracker.tokens.add(self.headers["Authorization"])
            raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, data = tracker.answer(self.command, self.path, json.loads(raw) if raw else None)
            text = json.dumps(data).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_PATCH = _speak  # noqa: N815 - the names of the base class

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    quiet = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    try:
        yield quiet | {
            "GITHUB_API_URL": f"http://127.0.0.1:{server.server_port}",
            "GITHUB_REPOSITORY": "team/bridge",
            "GITHUB_TOKEN": "a-token",
            "GITHUB_REF_NAME": "main",
        }
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def run(
    script: str, *arguments: object, env: dict[str, str], cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(CI / f"{script}.py"), *map(str, arguments)]
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


def write_text(
    folder: Path,
    release: str,
    body: str = "It breaks.",
    title: str = "",
    labels: tuple[str, ...] = ("te-watch", "breaks"),
) -> None:
    folder.mkdir(exist_ok=True)
    marker = MARKER.format(release)
    head = {"title": title or f"TE {release}: \u2028 breaks", "labels": labels, "marker": marker}
    lines = "\n".join(f"{key}: {json.dumps(value)}" for key, value in head.items())
    (folder / f"{release}.md").write_text(f"---\n{lines}\n---\n{marker}\n\n{body}\n---\nmore\n")


def test_an_issue_is_opened_once_and_changed_from_then_on(tmp_path: Path) -> None:
    tracker, folder = Tracker(), tmp_path / "issues"
    tracker.issues = [
        {"number": n, "title": "t", "body": "of a person", "labels": [{"name": "te-watch"}]} for n in range(1, 151)
    ]
    write_text(folder, "2.21.0")
    write_text(folder, "2.22.0")
    with serving(tracker) as env:
        first = run("publish_issues", folder, env=env)
        assert first.returncode == 0, first.stderr
        assert first.stdout.count("opened #") == 2
        tracker.issues[150]["body"] = tracker.issues[150]["body"].replace("\n", "\r\n").rstrip()  # as GitHub keeps it
        tracker.issues[150]["state"] = "closed"
        tracker.issues[150]["labels"].append({"name": "seen"})
        tracker.calls.clear()
        assert run("publish_issues", folder, env=env).stdout.count("stands as it is") == 2
        assert {method for method, _ in tracker.calls} == {"GET"}
        write_text(folder, "2.22.0", body="It was withdrawn.", title="withdrawn")
        assert "changed #152: withdrawn" in run("publish_issues", folder, env=env).stdout
    assert len(tracker.issues) == 152
    assert tracker.issues[150]["state"] == "closed"  # a person has closed it
    assert "withdrawn" in tracker.issues[151]["body"]
    assert tracker.tokens == {"Bearer a-token"}


def test_labels_of_people_stay_and_the_state_before_goes(tmp_path: Path) -> None:
    tracker, folder = Tracker(), tmp_path / "issues"
    write_text(folder, "2.21.0", labels=("te-watch", "clean"))
    with serving(tracker) as env:
        assert run("publish_issues", folder, env=env).returncode == 0
        tracker.issues[0]["labels"].append({"name": "team-alice"})
        write_text(folder, "2.21.0", labels=("te-watch", "breaks"))
        assert "changed #1" in run("publish_issues", folder, env=env).stdout
        assert {row["name"] for row in tracker.issues[0]["labels"]} == {"te-watch", "breaks", "team-alice"}
        assert "stands as it is" in run("publish_issues", folder, env=env).stdout


def test_an_issue_whose_label_was_taken_off_is_found_again_and_one_of_a_stranger_is_not(tmp_path: Path) -> None:
    tracker, folder = Tracker(), tmp_path / "issues"
    write_text(folder, "2.21.0")
    write_text(folder, "2.22.0")
    with serving(tracker) as env:
        stranger = {"body": MARKER.format("2.22.0"), "title": "t", "labels": [], "user": {"login": "mallory"}}
        tracker.issues.append({"number": 1, "state": "closed", **stranger})  # to hide the next break
        assert run("publish_issues", folder, env=env).stdout.count("opened #") == 2
        tracker.issues[1] |= {"labels": [{"name": "seen"}], "state": "closed"}
        assert "changed #2" in run("publish_issues", folder, env=env).stdout
    assert (len(tracker.issues), tracker.issues[1]["state"]) == (3, "closed")
    assert {row["name"] for row in tracker.issues[1]["labels"]} == {"te-watch", "breaks", "seen"}
    assert tracker.issues[0]["title"] == "t"


def test_two_texts_of_one_release_have_one_issue_and_one_without_a_label_none(tmp_path: Path) -> None:
    tracker, folder = Tracker(), tmp_path / "issues"
    write_text(folder, "2.21.0")
    (folder / "again.md").write_text((folder / "2.21.0.md").read_text().replace("It breaks.", "It broke."))
    write_text(folder, "2.22.0", labels=())
    write_text(folder, "2.23.0", labels=("breaks",))
    with serving(tracker) as env:
        done = run("publish_issues", folder, env=env)
    assert (done.returncode, len(tracker.issues)) == (4, 1)
    assert "has no label" in done.stdout
    assert "has 'breaks' first" in done.stdout


@pytest.mark.parametrize(("script", "words"), [("publish_issues", ()), ("open_change", ("branch", "title"))])
def test_without_its_arguments_a_script_says_how_it_is_called(script: str, words: tuple[str, ...]) -> None:
    done = run(script, *words, env=dict(os.environ))
    assert done.returncode == 2
    assert f"{script}.py " in done.stderr
    assert "Traceback" not in done.stderr


def test_what_is_no_issue_text_is_told_and_the_others_are_published(tmp_path: Path) -> None:
    tracker, folder = Tracker(), tmp_path / "issues"
    write_text(folder, "2.21.0")
    (folder / "cut.md").write_text("---\ntitle: ")
    (folder / "number.md").write_text('---\ntitle: "x"\nlabels: ["te-watch"]\nmarker: 7\n---\n7')
    (folder / "foreign.md").write_text('---\ntitle: "x"\nlabels: []\nmarker: "y"\n---\nno marker')
    with serving(tracker) as env:
        done = run("publish_issues", folder, env=env)
        assert done.returncode == 4
        assert len(tracker.issues) == 1
        assert done.stdout.count("is no issue text") == 3
        assert run("publish_issues", tmp_path / "nothing", env=env).returncode == 0
        refused = run("publish_issues", folder, env=env | {"GITHUB_REPOSITORY": "team/other"})
        assert refused.returncode == 6
        assert "lacks a permission" in refused.stderr
    assert run("publish_issues", folder, env=env | {"GITHUB_TOKEN": ""}).returncode == 6
    down = run("publish_issues", folder, env=env)  # the server is gone
    assert down.returncode == 6
    assert "got no answer" in down.stderr


def git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True).stdout


def test_a_change_is_opened_once_a_branch_and_gets_each_new_commit(tmp_path: Path) -> None:
    far, here, tracker = tmp_path / "far.git", tmp_path / "here", Tracker()
    subprocess.run(["git", "init", "--quiet", "--bare", "--initial-branch=main", str(far)], check=True)
    subprocess.run(["git", "clone", "--quiet", str(far), str(here)], check=True, capture_output=True)
    (here / "containers").mkdir()
    (here / "containers" / "pins.json").write_text("1")
    git(here, "checkout", "--quiet", "-B", "main")
    git(here, "add", ".")
    git(here, "-c", "user.name=n", "-c", "user.email=e", "commit", "--quiet", "-m", "first")
    git(here, "push", "--quiet", "origin", "main")
    with serving(tracker) as env:

        def change() -> str:
            done = run("open_change", "update-pins", "Pins of this week", "containers", env=env, cwd=here)
            assert done.returncode == 0, done.stderr
            git(here, "checkout", "--quiet", "main")
            return done.stdout.strip()

        assert change() == "nothing differs: no change is opened"
        (here / "containers" / "pins.json").write_text("2")
        (here / "other").write_text("not of the change")
        assert change() == "opened #1"
        (here / "containers" / "pins.json").write_text("3")
        assert change() == "#1 has the new commit"
    assert [(pull["head"], pull["base"]) for pull in tracker.pulls] == [("update-pins", "main")]
    assert git(far, "show", "update-pins:containers/pins.json") == "3"
    assert "other" not in git(far, "ls-tree", "--name-only", "update-pins")
    assert git(far, "show", "main:containers/pins.json") == "1"


JOB = {"id": "lint", "commands": [["./nox", "-s", "lint"], ["./nox", "-s", "te_canary", "--", "a b", "$(touch x)"]]}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "ci").mkdir()
    (tmp_path / "ci" / "run_job.py").write_text((CI / "run_job.py").read_text())
    nox = tmp_path / "nox"
    nox.write_text('#!/bin/sh\nfor word; do printf "<%s>" "$word" >> asked; done\n[ "$2" != "$FAILS" ] || exit 4\n')
    nox.chmod(0o755)
    return tmp_path


def test_what_is_told_in_markdown_is_on_the_page_of_the_run(checkout: Path) -> None:
    (checkout / "reports").mkdir()
    (checkout / "reports" / "te_canary.md").write_text("## A step\n")
    page = checkout / "summary"
    for fails, code in (("", 0), ("lint", 4)):
        env = {**os.environ, "MEGACPP_JOB": json.dumps(JOB), "FAILS": fails, "GITHUB_STEP_SUMMARY": str(page)}
        assert subprocess.run([sys.executable, "ci/run_job.py"], cwd=checkout, env=env, check=False).returncode == code
    assert page.read_text() == "## A step\n" * 2


@pytest.mark.parametrize(
    ("job", "fails", "code", "asked"),
    [
        (json.dumps(JOB), "", 0, "<-s><lint><-s><te_canary><--><a b><$(touch x)>"),  # no shell reads it
        (json.dumps(JOB), "lint", 4, "<-s><lint>"),
        ('{"id": "images", "not_run": "there is no runner engine"}', "", 4, ""),
        (json.dumps(JOB | {"after": [["./nox", "-s", "report"]]}), "lint", 4, "<-s><lint><-s><report>"),
        (
            json.dumps(JOB | {"after": [["./nox", "-s", "report"]]}),
            "report",
            4,
            "<-s><lint><-s><te_canary><--><a b><$(touch x)><-s><report>",
        ),
        (json.dumps(JOB | {"after": [["rm"]]}), "", 2, ""),
        ("", "", 2, ""),
        ('{"commands": []}', "", 2, ""),
        ('{"commands": [["sh", "-c", "true"]]}', "", 2, ""),
        ('{"commands": [["./nox", "-s", "lint"], ["rm"]]}', "", 2, ""),
    ],
)
def test_a_job_is_calls_of_nox_and_nothing_else(job: str, fails: str, code: int, asked: str, checkout: Path) -> None:
    env = {**os.environ, "MEGACPP_JOB": job, "FAILS": fails}
    done = subprocess.run([sys.executable, "ci/run_job.py"], cwd=checkout, env=env, capture_output=True, check=False)
    assert done.returncode == code
    written = checkout / "asked"
    assert (written.read_text() if written.is_file() else "") == asked
