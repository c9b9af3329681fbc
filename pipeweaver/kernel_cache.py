"""Where compiled code is kept: one folder for each state of the sources, so that none is ever out of date.

numba looks at the file that a compiled function is in, not at the files that it calls into. After an update that
changes `listing.py` alone, `explore.py`, which has `listing.py` compiled into it, would go on with the old one. So the
folder's name says what all compiled sources were:

    ~/.cache/pipeweaver/kernels-4f0c66d1a2b3/    ($XDG_CACHE_HOME, if set, in place of ~/.cache)

Folders of other states that nothing was added to for `KEPT_DAYS` are removed. Who sets NUMBA_CACHE_DIR decides alone.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from hashlib import blake2b
from pathlib import Path

KEPT_DAYS = 7


def use_kernel_cache() -> None:
    """Let numba keep its compiled code in this state's folder; where it can't be made, numba's own way stays."""
    if os.environ.get("NUMBA_CACHE_DIR"):
        return
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pipeweaver"
    folder = home / f"kernels-{_state(Path(__file__).parent)}"
    if not folder.is_dir():
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            return
        _remove_old(home, folder)
    os.environ["NUMBA_CACHE_DIR"] = str(folder)  # for this process and those it starts
    if "numba" in sys.modules:
        sys.modules["numba"].config.CACHE_DIR = str(folder)


def is_empty() -> bool:
    """Whether nothing is kept yet: then what comes first takes longer. False where numba's own way is in use."""
    folder = os.environ.get("NUMBA_CACHE_DIR", "")
    # numba makes its folders when modules are imported, files when something is compiled.
    return bool(folder) and not any(Path(folder).rglob("*.nbc"))


def _state(package: Path) -> str:
    """Sources that compiled code is made of, as 12 hexadecimal digits."""
    digest = blake2b(digest_size=6)
    for file in sorted(package.rglob("*.py")):
        text = file.read_bytes()
        if b"numba" in text:
            digest.update(str(file.relative_to(package)).encode() + b"\0" + text + b"\0")
    return digest.hexdigest()


def _remove_old(home: Path, current: Path) -> None:
    oldest = time.time() - KEPT_DAYS * 86_400
    for other in home.glob("kernels-*"):
        newest = max((entry.stat().st_mtime for entry in (other, *other.iterdir())), default=0)
        if other != current and newest < oldest:
            shutil.rmtree(other, ignore_errors=True)
