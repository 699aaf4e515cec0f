"""The one file that restores a bundle, put together from the files of `restore/`: so it needs nothing beside itself."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).with_name("restore")
FILES: Final = ("listing", "reading", "p256", "folders", "engines", "door")  # each after what it imports
_HEAD: Final = "#!/usr/bin/env python3\n"


def compose_restore() -> str:
    """The text of `restore.py`: the imports of every file once, then their code, as it is.

    Names must differ between the files, because here they meet: a test runs what comes out.
    """
    imports, bodies, said = set[str](), list[str](), ""
    for name in FILES:
        text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
        tree, lines = ast.parse(text), text.splitlines()
        said = f'"""{ast.get_docstring(tree, clean=False)}"""'
        start = 0
        for node in tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                if not (isinstance(node, ast.ImportFrom) and (node.level or node.module == "__future__")):
                    imports.add("\n".join(lines[node.lineno - 1 : node.end_lineno]))
                start = node.end_lineno or 0
        bodies.append(
            f"# --- {name}: {(ast.get_docstring(tree) or '').splitlines()[0]}\n\n" + "\n".join(lines[start:]).strip()
        )
    ordered = sorted(imports, key=lambda line: (line.startswith("from "), line))
    head = (_HEAD + said, "from __future__ import annotations", "\n".join(ordered))
    return "\n\n".join(head) + "\n\n\n" + "\n\n\n".join(bodies) + "\n"
