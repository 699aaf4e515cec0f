"""The process of one case: imports the bridge, asks for its verdict on the install, and writes one JSON object.

Started as a script by the firewall tier, never imported by it: this is the only file of the tier that runs
beside Transformer Engine. Usage: child.py ANSWER-FILE DUMP-AFTER-SECONDS PACKAGE MODULE...
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import sys
from pathlib import Path
from typing import Any


def ask(package: str, names: list[str]) -> dict[str, Any]:
    """Import every module, then ask for the verdict; what a question raises is an answer too."""
    imported, native, missing, problems = {}, {}, {}, []
    answer: dict[str, Any] = {"available": None, "reason": "", "failure": None}
    for name in names:
        try:
            native[name] = getattr(importlib.import_module(f"{package}.{name}"), "NATIVE_PATH", "")
            imported[f"{package}.{name}"] = ""
        except BaseException as fault:
            imported[f"{package}.{name}"] = f"{type(fault).__name__}: {fault}"
    if "transformer_engine" in sys.modules:
        problems.append("importing the bridge imported transformer_engine")
    try:
        imports = importlib.import_module(f"{package}.imports")
        answer["available"] = imports.is_te_available()
        answer["reason"] = imports.why_te_is_unavailable()
        answer["failure"] = imports.te_import_failure()
        entries = {name: value for name, value in vars(imports).items() if callable(getattr(value, "why_missing", 0))}
        missing = {name: entry.why_missing() for name, entry in sorted(entries.items()) if entry() is None}
    except BaseException as fault:
        problems.append(f"asking the bridge raised {type(fault).__name__}: {fault}")
    return {**answer, "imported": imported, "native_paths": native, "missing": missing, "problems": problems}


def main() -> None:
    """Answer; the standard error gets the place where the process hangs or dies."""
    target, dump_after, package, *names = sys.argv[1:]
    faulthandler.enable()
    faulthandler.dump_traceback_later(float(dump_after), exit=False)
    Path(target).write_text(json.dumps(ask(package, names)), encoding="utf-8")


if __name__ == "__main__":
    main()
