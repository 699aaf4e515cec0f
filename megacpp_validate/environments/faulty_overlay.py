"""A copy of a real Transformer Engine with a fault in it: the folder to put on the path in place of the clean one.

Files are hard links, so that a copy of gigabytes takes milliseconds and no space, and so that Transformer Engine, which
looks for its libraries beside its own file, finds them in the copy. (`find_spec("transformer_engine").origin` in
common/__init__.py, 2.12 to 2.20, resolves no link; a symbolic link would be led back to the clean folder by a release
that did.) On another disk files are copied with their times. What is edited is a file of its own, written anew, so
nothing is ever changed in the clean folder. A compiled file of an edited source is left out.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ..catalog.planted import Edit, EditDoesNotFit, PlantedFault
from .interpreter import hash_parts, list_files

PACKAGE: Final = "transformer_engine"
STAMP: Final = ".megacpp-fault"


def make_faulty(clean: Path, release: str, fault: PlantedFault | None, scratch: Path) -> Path:
    """A site folder with a copy of `clean`, changed as the fault says; one that is there already is taken.

    Made aside and renamed, so that it is whole or not there.

    Args:
        clean: site folder with `transformer_engine/`, its libraries and its metadata.
        release: of it.
        fault: what is planted; None for a copy without a fault.
        scratch: where copies lie, each in a folder named after its fault.

    Raises:
        EditDoesNotFit: an edit wants a text or a file that is not there, or is there twice.
        OSError: the copy cannot be written.
    """
    edits = fault.edits_for(release) if fault is not None else ()
    edited = _edit(clean / PACKAGE, edits)
    place = scratch.absolute() / f"te-{release}" / (fault.id if fault is not None else "clean-copy")
    # Another install, release or fault is another copy.
    stamp = hash_parts((str(clean.absolute()), *list_files(clean), release, repr(edits)))
    if (place / STAMP).is_file() and (place / STAMP).read_text(encoding="utf-8") == stamp:
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
    try:
        shutil.copytree(clean, aside, copy_function=_link, dirs_exist_ok=True)
        for name, text in edited.items():
            file = aside / PACKAGE / name
            file.unlink(missing_ok=True)  # never other bytes in the file that it is a link to
            for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
                compiled.unlink()
            if text is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")
        (aside / STAMP).write_text(stamp, encoding="utf-8")
        aside.chmod(0o755)  # mkdtemp lets nobody else in
        shutil.rmtree(place, ignore_errors=True)
        aside.rename(place)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return place


def _edit(package: Path, edits: Sequence[Edit]) -> dict[str, str | None]:
    """The files that differ: their text, None where there is none any more."""
    changed: dict[str, str | None] = {}
    for edit in edits:
        file = package / edit.file
        text = changed.get(edit.file, file.read_text("utf-8") if file.is_file() else None)
        if text is None:
            raise EditDoesNotFit(
                f"there is no {PACKAGE}/{edit.file} in {package.parent}, or an edit before has removed it. Likely "
                "cause: the edit was written for another release. Next step: give the fault a text for this one."
            )
        changed[edit.file] = None if edit.delete or edit.rename else edit.change(text)
        if edit.rename:
            changed[edit.rename] = text
    return changed


def _link(source: str, into: str) -> None:
    """Put a file into a copy, by a copy with its times where no link can be made; compiled sources too."""
    try:
        Path(into).hardlink_to(Path(source).resolve())
    except OSError:
        shutil.copy2(source, into)
