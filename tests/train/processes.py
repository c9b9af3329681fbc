"""Processes that tests start, and whether they are gone again."""

import os
import time
from pathlib import Path

import pipeweaver

ROOT = Path(pipeweaver.__file__).parent.parent


def environment(**changes):
    """This process's environment, in which `import pipeweaver` finds the package under test."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    clean = {name: value for name, value in os.environ.items() if name not in names}
    return clean | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | changes


def wait_for(condition, seconds=30.0):
    """The first true value of `condition()`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError(f"waited {seconds} s in vain")


def alive(pid):
    """Whether a process is there and more than a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children(pid):
    """Process ids of the direct children of a process."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []
