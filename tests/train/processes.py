"""Processes that tests start, and whether they are gone again."""

import os
import time
from contextlib import suppress
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


def descendants(pid):
    """Process ids of the children of a process, whichever of its threads started them, and of theirs."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            found += [int(child) for child in path.read_text().split()]
    return found + [other for child in found for other in descendants(child)]
