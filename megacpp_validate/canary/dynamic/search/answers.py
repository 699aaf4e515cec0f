"""Answers kept in a folder, one file each, so that a search that was killed goes on where it was.

A file is written aside and renamed: there is a whole one or none. One that is damaged, or that answers another
question than its name says, is as good as none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from ....catalog.file import PACKAGE_ROOT, matrix_folder
from ....evidence.values import Frozen
from ....evidence.whole_file import write_whole
from ..bisect_result import Answer, Verdict

SCHEMA_ID: Final = "megacpp-validate/answer/1"
# That decide an answer.
_ROOMS: Final = ("bridge", "canary", "environments", "evidence", "jit", "native", "probes", "training")


class _Key(Frozen):
    """What is asked; two runs with one key may differ only where the point is flaky."""

    module: str
    tier: str
    tool: str
    conditions: str
    environment: str
    choices: dict[str, str]
    run: int


class _File(Frozen):
    schema_id: str
    key: _Key
    answer: Answer


@dataclass(frozen=True)
class Answers:
    """The answers of a folder.

    Attributes:
        folder: of the files; made when the first answer is kept.
        module, tier: of the question.
        tool: `digest_tool()`; an answer of other code is no answer.
        conditions: whatever else an answer depends on beside its point: the target, the seed, what it is compared with.
    """

    folder: Path
    module: str
    tier: str
    tool: str
    conditions: str = ""

    def find(self, choices: Mapping[str, str], environment: str, run: int) -> Answer | None:
        """What this run at this point gave, if it was kept and can be believed."""
        key = self._key(choices, environment, run)
        found = _read(self._place(key))
        return found.answer if found is not None and found.key == key else None

    def keep(self, choices: Mapping[str, str], environment: str, run: int, answer: Answer) -> None:
        """Keep an answer that would be the same tomorrow.

        Raises:
            OSError: the folder cannot be written.
        """
        if not answer.lasting:
            return
        key = self._key(choices, environment, run)
        text = _File(schema_id=SCHEMA_ID, key=key, answer=answer).model_dump_json(indent=2)
        write_whole(self._place(key), f"{text}\n")

    def recall(self) -> Iterator[tuple[dict[str, str], Verdict]]:
        """Every verdict on this module that lies here, whatever environment it was seen in; by file name."""
        for path in sorted(self.folder.glob("*.json")):
            found = _read(path)
            if found is not None and found.key.run == 0 and found.answer.verdict.tells:
                key = found.key
                asked = (self.module, self.tier, self.tool, self.conditions)
                if (key.module, key.tier, key.tool, key.conditions) == asked:
                    yield key.choices, found.answer.verdict

    def _key(self, choices: Mapping[str, str], environment: str, run: int) -> _Key:
        return _Key(
            module=self.module,
            tier=self.tier,
            tool=self.tool,
            conditions=self.conditions,
            environment=environment,
            choices=dict(choices),
            run=run,
        )

    def _place(self, key: _Key) -> Path:
        digest = sha256(_canonical(key.model_dump()).encode()).hexdigest()[:24]
        return self.folder / f"{key.module}-{digest}.json"


def digest_tool(matrix: Path | None = None) -> str:
    """A hash of the code and the matrix that decide an answer; the words in which it is told are left out."""
    digest = sha256()
    for folder in (*(PACKAGE_ROOT / room for room in _ROOMS), matrix or matrix_folder()):
        for path in sorted((*folder.rglob("*.py"), *folder.rglob("*.toml"))):
            digest.update(f"{folder.name}/{path.relative_to(folder)}\0".encode())
            digest.update(sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _read(path: Path) -> _File | None:
    try:
        found = _File.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
    return found if found.schema_id == SCHEMA_ID else None


def _canonical(data: dict[str, Any]) -> str:
    return json.dumps(data, sort_keys=True, ensure_ascii=True)
