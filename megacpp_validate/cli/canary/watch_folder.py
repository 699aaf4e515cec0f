"""The folder of the watch: its state, what was found, and the issue texts; one run at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from ...canary.dynamic.upgrade_result import UpgradeResult
from ...canary.dynamic.watch_result import WatchState
from ...environments.restart import FolderTaken, own_folder
from ...evidence.strict_json import refuse_what_json_hides
from ...evidence.whole_file import write_whole
from ...report.machine import read_json

STATE: Final = "state.json"
_HALF: Final = re.compile(r"\.(state|[0-9][0-9a-z.!+]*)\.(json|md)\.\d+")  # as `write_whole` names them


class StateDamaged(RuntimeError):
    """The state cannot be believed; the text says what to do."""


class WatchTaken(RuntimeError):
    """Another run holds the folder."""


class WatchFolder:
    """What is kept between runs. Every file is written aside and renamed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def own(self) -> Iterator[None]:
        """Hold the folder against a second run; the lock goes with the process, whatever kills it.

        Raises:
            WatchTaken: another run holds it.
            OSError: it cannot be written.
        """
        with ExitStack() as held:
            try:
                held.enter_context(own_folder(self.folder))
            except FolderTaken as fault:
                raise WatchTaken(
                    f"another run of the watch holds {self.folder}. Likely cause: it was started twice. Next step: "
                    "wait for it; what it finds is found once."
                ) from fault
            self._drop_halves()
            yield

    def _drop_halves(self) -> None:
        """Drop what a killed run was writing aside; nobody else is at it now."""
        for place in (self.folder, self.folder / "results", self.folder / "issues"):
            for path in place.glob(".*"):
                if _HALF.fullmatch(path.name):
                    path.unlink(missing_ok=True)

    def read_state(self, distribution: str) -> WatchState | None:
        """What is known; None before a first run.

        Raises:
            StateDamaged: there is a state, and it is none of ours.
        """
        path = self.folder / STATE
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as fault:
            raise _damaged(path, str(fault)) from fault
        try:
            refuse_what_json_hides(text)
            state = WatchState.model_validate_json(text)
        except ValueError as fault:
            raise _damaged(path, " ".join(str(fault).split())[:300]) from fault
        names = [row.version for row in state.releases]
        if len(names) != len(set(names)):
            raise _damaged(path, "a release is there twice")
        if state.distribution != distribution:
            raise _damaged(path, f"it is of {state.distribution}, and {distribution} is watched")
        return state

    def write_state(self, state: WatchState) -> None:
        """Keep what is known."""
        write_whole(self.folder / STATE, state.model_dump_json(indent=2) + "\n")

    def result_file(self, release: str, *, gpu: bool = False) -> Path:
        """Where the answer on a release lies."""
        return self.folder / "results" / f"{release}{'.gpu' if gpu else ''}.json"

    def read_result(self, release: str, *, gpu: bool = False) -> UpgradeResult | None:
        """The answer on a release; None where there is no whole one."""
        return read_upgrade(self.result_file(release, gpu=gpu))

    def write_issue(self, release: str, text: str) -> Path:
        """Keep an issue text under the name of its release."""
        path = self.folder / "issues" / f"{release}.md"
        write_whole(path, text)
        return path


def read_upgrade(path: Path) -> UpgradeResult | None:
    """An answer of the canary; None where there is no whole one."""
    try:
        text = path.read_text(encoding="utf-8")
        refuse_what_json_hides(text)
        result = read_json(text)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return result if isinstance(result, UpgradeResult) else None


def _damaged(path: Path, why: str) -> StateDamaged:
    return StateDamaged(
        f"{path} is no state of the watch: {why}. Likely cause: it was edited by hand, or written by a newer version. "
        "Next step: put back the one of the last run, or move it away: then releases that are newer than the pinned "
        "one are looked at anew, what was found of them is taken from results/, and no issue is opened twice."
    )
