"""The verb of images, as it is typed, on a machine without an engine."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from megacpp_validate.cli.app import app
from megacpp_validate.cli.images import images_verbs

BASE = f"127.0.0.1:5000/base@sha256:{'0' * 64}"


def images(*words: str) -> tuple[int, str, str]:
    """Exit code, standard output and error; with a PATH that has no Docker client."""
    assert images_verbs.images
    variables = {"PATH": "/nowhere", "MEGACPP_BASE": None}
    done = CliRunner().invoke(app, ["images", *words], env=variables)
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("cpu", "--base", BASE), 5, "there is no Docker client on PATH"),
        (("h100",), 2, "there is no image for h100"),
        ((), 3, "no target is named"),
        (("cpu", "--push", "https://registry"), 2, "'https://registry' is no registry"),
        (("cpu", "--base", "debian:bookworm"), 2, "is not pinned by a digest"),
        (("h200", "--prove"), 2, "--prove runs the image on this machine"),
        (("cpu", "--plan", "--output", "/"), 2, "/ cannot be written"),
    ],
)
def test_what_is_refused(words: tuple[str, ...], code: int, said: str) -> None:
    ended, _, words_of_it = images(*words)
    assert ended == code, words_of_it
    assert said in words_of_it
    assert "Next step" in words_of_it


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("images", "--plan"), "table json"), (("lock", "--check"), "table json markdown"),
        (("fits",), "table json markdown"), (("bundle", "cpu"), "table json markdown"),
        (("image-verify", "x"), "table json markdown"), (("prewarm", "--target", "cpu"), "table json"),
        (("jit-verify", "--target", "cpu"), "table json"), (("jit-cache", "check"), "table json"),
    ],
)  # fmt: skip
def test_a_form_is_offered_where_it_is_told_and_nowhere_else(words: tuple[str, ...], offered: str) -> None:
    """A verb that refuses at its end has done, and may have written, all of its work by then."""
    done = CliRunner().invoke(app, [*words, "--format", "junit"], env={"COLUMNS": "200"})
    assert done.exit_code == 2, done.output
    assert all(f"'{form}'" in done.output for form in offered.split()), done.output
    assert "'html'" not in done.output


def test_a_plan_needs_no_engine_and_says_what_was_not_looked_at() -> None:
    code, text, _ = images("--plan", "--format", "json")
    told = json.loads(text)
    assert [plan["target"] for plan in told["plans"]] == ["h200", "b200", "gb10", "cpu"]
    assert all("@sha256:" in plan["reference"] and plan["lock_hash"] for plan in told["plans"])
    checks = [lint for lint in told["lints"] if lint["linter"].startswith("docker buildx")]
    assert {lint["outcome"] for lint in checks} == {"not-run"}
    assert code == 4, "what was not looked at is not clean"
