"""Why a build failed, from what the engine said: what happened, the likely cause, the next step."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .plan_result import ImagePlan

_MOST_WORDS: Final = 700
_STEP_SAID: Final = re.compile(r"^#?\d* ?\d+\.\d+ (?P<words>.+)$")


class BuildFailed(RuntimeError):
    """No image was built; `infrastructure` is whether the same build may go well another time."""

    def __init__(self, words: str, *, infrastructure: bool) -> None:
        super().__init__(words)
        self.infrastructure = infrastructure


@dataclass(frozen=True)
class _Cause:
    """What an engine says, and what that means; `infrastructure` as in `BuildFailed`."""

    pattern: re.Pattern[str]
    says: Callable[[ImagePlan, str], str]
    infrastructure: bool


def _say_full(plan: ImagePlan, name: str) -> str:
    return (
        f"the disk is full: the build of {plan.target} was given up in the middle, and {name} is not set. Likely "
        "cause: the disk of the engine's data folder, or that of temporary files, has no room. Next step: make room "
        "(`docker buildx du` says what the cache holds; `docker buildx prune` gives it up) and start it again: steps "
        "that ended are kept."
    )


def _say_other_digest(plan: ImagePlan, name: str) -> str:
    return (
        f"the registry answers another image than {plan.pulled} names, or none for {plan.platform}; {name} is not set. "
        "Likely cause: the digest was typed wrong, the image was taken down, or a mirror does not have it. Next step: "
        f"`docker buildx imagetools inspect {plan.pulled.partition('@')[0]}` says what is there; `nox -s lock` checks "
        "the pins against it."
    )


def _say_down(plan: ImagePlan, name: str) -> str:
    return (
        f"the registry of {plan.pulled.partition('@')[0]} does not answer; {name} is not set. Likely cause: there is "
        "no way to it from here, or it is down. Next step: name a mirror in MEGACPP_REGISTRY_MIRROR (the digest stays "
        "what it is), load the base from an archive and give it with --base, or run again where it can be reached."
    )


def _say_denied(plan: ImagePlan, name: str) -> str:
    return (
        f"the registry refuses {plan.pulled.partition('@')[0]} or {name}. Likely cause: it wants a login. Next step: "
        "`docker login` there (nvcr.io: user `$oauthtoken`, the password is the API key)."
    )


def _say_lost(plan: ImagePlan, name: str) -> str:
    return (
        f"the engine lost a layer while it built {plan.target}, and {name} is not set. Likely cause: images that share "
        "the layer were removed in the same minute. Next step: the same command again, which makes it anew."
    )


def _say_push(_: ImagePlan, name: str) -> str:
    return (
        f"{name} was built and could not be pushed. Likely cause: the registry is down, speaks no TLS, or wants a "
        "login. Next step: `docker login` there, or start it; then the same command again, which builds nothing anew."
    )


# In this order: a full disk is what other failures are made of.
_CAUSES: Final = (
    _Cause(re.compile(r"no space left on device|disk quota exceeded", re.IGNORECASE), _say_full, infrastructure=True),
    _Cause(re.compile(r"parent snapshot \S+ does not exist"), _say_lost, infrastructure=True),
    _Cause(re.compile(r"failed to push|error: failed to .*push", re.IGNORECASE), _say_push, infrastructure=True),
    _Cause(
        re.compile(r"failed to resolve source metadata.*(unauthorized|denied|forbidden|\b40[13]\b)", re.IGNORECASE),
        _say_denied,
        infrastructure=False,
    ),
    _Cause(
        re.compile(
            r"failed to resolve source metadata.*(not found|manifest unknown)|no match for platform|"
            r"unexpected (commit )?digest|failed precondition: unexpected|failed to verify|digest mismatch",
            re.IGNORECASE,
        ),
        _say_other_digest,
        infrastructure=False,
    ),
    _Cause(
        re.compile(
            r"failed to resolve source metadata.*(no such host|connection refused|dial tcp|timeout|EOF|\b50\d\b)|"
            r"failed to do request.*dial tcp",
            re.IGNORECASE,
        ),
        _say_down,
        infrastructure=True,
    ),
)


def explain_build(plan: ImagePlan, name: str, lines: Sequence[str], log: Path) -> BuildFailed:
    """What a client's lines mean; where nothing is known of them, what the step that failed said last."""
    text = "\n".join(lines)
    for cause in _CAUSES:
        if cause.pattern.search(text):
            return BuildFailed(f"{cause.says(plan, name)} The log: {log}.", infrastructure=cause.infrastructure)
    said = _last_of_step(lines)
    return BuildFailed(
        f"the build of {plan.target} failed, and {name} is not set. It said: {said}. Next step: the log has every "
        f"line: {log}; where a package could not be fetched, look at `pip config list`, which the build was given.",
        infrastructure=False,
    )


def _last_of_step(lines: Sequence[str]) -> str:
    """What the step said before it ended: the client shows that again between two rules, after the step's name."""
    starts = [place for place, line in enumerate(lines) if line.startswith("------")]
    shown = lines[starts[0] + 1 : starts[1]] if len(starts) > 1 else lines[-15:]
    words = [match["words"] if (match := _STEP_SAID.match(line)) else line.strip() for line in shown]
    kept = " ".join(" ".join(word for word in words if word and not word.startswith(("WARNING", ">", "#"))).split())
    last = next((line for line in reversed(lines) if line.strip()), "nothing")
    return kept[-_MOST_WORDS:] or last[-_MOST_WORDS:]
