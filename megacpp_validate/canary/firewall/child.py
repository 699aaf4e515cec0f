"""The process of one case: imports the bridge, asks for its verdict on the install, and writes one JSON object.

Started as a script by the firewall tier, never imported by it: this is the only file of the tier that runs
beside Transformer Engine. Usage: child.py ANSWER-FILE DUMP-AFTER-SECONDS PACKAGE MODULE...
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import signal
import sys
from pathlib import Path
from typing import Any


def import_modules(names: list[str]) -> dict[str, str]:
    """Module -> what importing it raised; empty for the ones that could be imported."""
    faults = {}
    for name in names:
        try:
            importlib.import_module(name)
            faults[name] = ""
        except BaseException as fault:
            faults[name] = f"{type(fault).__name__}: {fault}"
    return faults


def ask_entries(imports: Any) -> tuple[dict[str, str], list[str]]:
    """Accessor -> why it gives nothing, and what was wrong with how it says so."""
    missing, problems = {}, []
    for name, accessor in sorted(vars(imports).items()):
        if not (callable(getattr(accessor, "why_missing", None)) and callable(getattr(accessor, "require", None))):
            continue
        if accessor() is not None:
            continue
        missing[name] = accessor.why_missing()
        try:
            accessor.require()
            problems.append(f"{name}.require() gave a value where {name}() gave None")
        except imports.VendorEntryMissing as refusal:
            if str(refusal) != missing[name]:
                problems.append(f"{name}.require() gives another reason than {name}.why_missing()")
    return missing, problems


def ask(package: str, names: list[str]) -> dict[str, Any]:
    """Import every module, then ask for the verdict; what a question raises is an answer too."""
    imported = import_modules([f"{package}.{name}" for name in names])
    native = {name: getattr(sys.modules.get(f"{package}.{name}"), "NATIVE_PATH", "") for name in names}
    answer: dict[str, Any] = {
        "imported": imported,
        "native_paths": native,
        "available": None,
        "reason": "",
        "failure": None,
    }
    problems = ["importing the bridge imported transformer_engine"] if "transformer_engine" in sys.modules else []
    missing: dict[str, str] = {}
    try:
        imports = importlib.import_module(f"{package}.imports")
        answer["available"] = imports.is_te_available()
        answer["reason"] = imports.why_te_is_unavailable()
        answer["failure"] = imports.te_import_failure()
        if imports.is_te_available() != answer["available"]:
            problems.append("is_te_available() gave two answers in one process")
        missing, contradictions = ask_entries(imports)
        problems += contradictions
    except BaseException as fault:
        problems.append(f"asking the bridge raised {type(fault).__name__}: {fault}")
    return {**answer, "missing": missing, "problems": problems}


def main() -> None:
    """Answer; the standard error gets the place where the process hangs or dies."""
    target, dump_after, package, *names = sys.argv[1:]
    faulthandler.enable()
    faulthandler.dump_traceback_later(float(dump_after), exit=False)
    signal.alarm(int(float(dump_after) * 2) + 10)  # whoever would have killed it may have been killed
    answer = ask(package, names)
    aside = Path(f"{target}.part")
    aside.write_text(json.dumps(answer), encoding="utf-8")
    aside.rename(target)


if __name__ == "__main__":
    main()
