"""Writes the map at the end of README.md: one line per file, from the first sentence of its docstring.

python docs/map.py            # writes it
python docs/map.py --check    # fails if it is not up to date
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("pipeweaver", "benchmarks", "examples", "docs")
START = "<!-- map: written by docs/map.py -->\n"


def main() -> None:
    readme = ROOT / "README.md"
    before, found, _ = readme.read_text(encoding="utf-8").partition(START)
    assert found, f"README.md has no line {START}"
    wanted = before + START + file_map()
    if "--check" in sys.argv[1:]:
        if readme.read_text(encoding="utf-8") != wanted:
            sys.exit("the map in README.md is not up to date: run python docs/map.py")
        return
    readme.write_text(wanted, encoding="utf-8")


def file_map() -> str:
    """Markdown: a heading per folder, a line per file that has something in it."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    lines: list[str] = []
    folder = None
    for path in sorted(paths, key=lambda path: (path.parent.as_posix(), path.name)):
        sentence = first_sentence(path)
        if sentence is None:
            continue
        if path.parent != folder:
            folder = path.parent
            lines += ["", f"**{folder.relative_to(ROOT).as_posix()}/**", ""]
        lines.append(f"- `{path.name}`: {sentence}")
    return "\n".join(lines) + "\n"


def first_sentence(path: Path) -> str | None:
    """Of the file's docstring; None for an empty file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if not tree.body:
        return None
    docstring = ast.get_docstring(tree)
    assert docstring, f"{path} has no docstring"
    return docstring.splitlines()[0].rstrip(".")


if __name__ == "__main__":
    main()
