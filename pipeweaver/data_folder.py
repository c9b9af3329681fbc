"""Where measurements of others lie: `--data DIR`, or PIPEWEAVER_DATA, or ../shared/data beside the repository."""

from __future__ import annotations

import os
from pathlib import Path


def data_folder(given: str | Path | None = None) -> Path:
    """The folder of measured data. Raises ValueError that says where it was looked for and how to name it."""
    repository = Path(__file__).resolve().parents[1]
    folder = Path(given or os.environ.get("PIPEWEAVER_DATA") or repository.parent / "shared" / "data")
    if not folder.is_dir():
        raise ValueError(f"no folder of measured data at {folder}; name it with --data DIR or PIPEWEAVER_DATA=DIR")
    return folder
