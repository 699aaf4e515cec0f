"""The few calls of GitHub's REST API that the scripts beside this make. Standard library only."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

LIMIT_S = 30.0
PAGE = 100
MOST_PAGES = 50


class NoAnswer(RuntimeError):
    """GitHub did not do what was asked; the text says what, and what to do."""


class Repository:
    """One repository, as a job of a workflow sees it.

    Args:
        variables: GITHUB_REPOSITORY, GITHUB_TOKEN, and GITHUB_API_URL where it is not github.com.

    Raises:
        NoAnswer: one of them is missing.
    """

    def __init__(self, variables: Mapping[str, str] = os.environ) -> None:
        self.name = variables.get("GITHUB_REPOSITORY", "")
        self._token = variables.get("GITHUB_TOKEN", "")
        self._api = variables.get("GITHUB_API_URL", "https://api.github.com").rstrip("/")
        if not (self.name and self._token):
            raise NoAnswer(
                "GITHUB_REPOSITORY or GITHUB_TOKEN is not set. Likely cause: this runs outside of a workflow. Next "
                "step: run it in one, or set both."
            )

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """One call below the repository, its answer as JSON.

        Raises:
            NoAnswer: refused, or nobody answers.
        """
        request = urllib.request.Request(  # noqa: S310 - the address is the one that the workflow has
            f"{self._api}/repos/{self.name}/{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={
                "Accept": "application/vnd.github+json",
                "Authorization": f"Bearer {self._token}",
                "Content-Type": "application/json",
                "X-GitHub-Api-Version": "2022-11-28",
            },
        )
        try:
            with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:  # noqa: S310
                return json.loads(answer.read())
        except urllib.error.HTTPError as fault:
            said = fault.read(500).decode("utf-8", "replace")
            cause = (
                "the job lacks a permission"
                if fault.code in (401, 403, 404)
                else "the request is not as GitHub wants it"
            )
            raise NoAnswer(
                f"{method} {path} was refused with {fault.code}: {said}. Likely cause: {cause}. Next step: look at "
                "`permissions` of the job."
            ) from fault
        except (OSError, ValueError) as fault:
            raise NoAnswer(
                f"{method} {path} got no answer: {fault}. Likely cause: GitHub is not reached from here. Next step: "
                "run the job again; what was done is found again."
            ) from fault

    def every(self, path: str) -> Iterator[dict[str, Any]]:
        """Every row of a list, page after page."""
        joint = "&" if "?" in path else "?"
        for page in range(1, MOST_PAGES + 1):
            rows = self.call("GET", f"{path}{joint}per_page={PAGE}&page={page}")
            yield from rows
            if len(rows) < PAGE:
                return
