"""The README's map names every file, and its links and those of the pages lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_map_is_up_to_date() -> None:
    done = subprocess.run([sys.executable, "docs/map.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_links_lead_to_files() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
            if not target.startswith("https://"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_architecture_names_files_that_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for name in re.findall(r"`((?:\w+/)*\w+\.py)`", text):
        inside = (ROOT / "pipeweaver").rglob("*.py")
        assert (ROOT / name).exists() or any(path.as_posix().endswith(f"/{name}") for path in inside), name
