"""The house rules that no linter knows: names that say nothing, and sizes that grew too far."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EMPTY_NAMES = {"base", "common", "helper", "helpers", "manager", "managers", "misc", "util", "utils"}
MOST_LINES_OF_A_FILE = 600
MOST_LINES_OF_A_FUNCTION = 60


def read_files() -> list[Path]:
    """Python files of the project, those that git does not know yet included."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / line for line in done.stdout.splitlines() if (ROOT / line).is_file()]


def find_faults(path: Path) -> list[str]:
    """What is against the house rules in one file."""
    shown = path.relative_to(ROOT)
    faults = [
        f"{shown}: `{part}` says nothing of what lies in it; name the file after what it does"
        for part in (*shown.parts[:-1], path.stem)
        if part.lower() in EMPTY_NAMES
    ]
    text = path.read_text(encoding="utf-8")
    lines = text.count("\n")
    if lines > MOST_LINES_OF_A_FILE:
        faults.append(f"{shown}: {lines} lines, {MOST_LINES_OF_A_FILE} at most; split it along what it does")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size = (node.end_lineno or node.lineno) - node.lineno + 1
            if size > MOST_LINES_OF_A_FUNCTION:
                faults.append(
                    f"{shown}:{node.lineno}: {node.name} has {size} lines, {MOST_LINES_OF_A_FUNCTION} at most"
                )
    return faults


def main() -> int:
    """Print every fault; 1 if there is one."""
    faults = [fault for path in read_files() for fault in find_faults(path)]
    for fault in faults:
        print(fault, file=sys.stderr)
    print(f"house rules: {len(faults)} fault(s)")
    return 1 if faults else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
