"""What a worker process does to itself: tie its life to the launcher's, end with a code and a line.

    tie_to_parent()
    run_worker(lambda: train(job))

Light to import, so that a worker is tied to its launcher before it loads torch.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

PARENT = "PIPEWEAVER_PARENT"
"""Environment variable: process id of the launcher, set for the workers it starts."""

_PR_SET_PDEATHSIG = 1


def is_worker(environment: Mapping[str, str] = os.environ) -> bool:
    """True in a process that `launch` or torchrun started as a worker."""
    return "RANK" in environment and "WORLD_SIZE" in environment


def tie_to_parent() -> None:
    """Called first thing in a worker: it ends when its launcher does, whatever ended that one."""
    if PARENT not in os.environ:
        return
    parent = int(os.environ[PARENT])
    if sys.platform == "linux":
        # Acts on a frozen worker too, which no thread of the worker could.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch_parent, args=(parent,), name="parent watch", daemon=True).start()
    if os.getppid() != parent:
        os._exit(1)


class RunError(RuntimeError):
    """A run that cannot go on, for a reason that its message tells in full: a traceback would add nothing.

    `code` is the exit code. `once_per_host`: all workers have the same to say, and one of each host does.
    """

    def __init__(self, message: str, *, code: int = 1, once_per_host: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.once_per_host = once_per_host


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """A disk that is full or read-only is told in one line: a RunError that names the folder."""
    try:
        yield
    except OSError as error:
        raise RunError(f"cannot write to {folder}: {error.strerror or error}") from None


@contextmanager
def told_once_per_host() -> Iterator[None]:
    """A mistake of the user's that every worker comes upon alike is told by one of each host, not by all."""
    try:
        yield
    except ValueError as error:
        if os.environ.get("PIPEWEAVER_TRACEBACK"):
            raise
        raise RunError(str(error), code=2, once_per_host=True) from None


def run_worker(function: Callable[[], None]) -> NoReturn:
    """Run a worker's function and end the process.

    Exit code 0 if it returns; 2 for ValueError, what users do wrong, and 1 for RunError, both told in one line;
    1 with a traceback for everything else; 130 on Ctrl-C. The process does not wait for its threads: one that
    waits for a dead peer would never return.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        function()
        code = 0
    except KeyboardInterrupt:
        code = 130
    except Exception as error:
        code = exit_code(error)
        if not is_known(error) or os.environ.get("PIPEWEAVER_TRACEBACK"):
            traceback.print_exc()
        quiet = isinstance(error, RunError) and error.once_per_host and os.environ.get("LOCAL_RANK", "0") != "0"
        if not quiet:
            print(f"error: worker process {os.environ.get('RANK', '0')}: {in_words(error)}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def use_cores(cores: Collection[int]) -> None:
    """Keep the calling thread to `cores`, where the system can; an empty collection changes nothing."""
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)  # 0 is this thread, not the process


def exit_code(error: Exception) -> int:
    if isinstance(error, ValueError):
        return 2
    return error.code if isinstance(error, RunError) else 1


def is_known(error: Exception) -> bool:
    """Whether the message says all: a mistake of the user's, or a RunError that no other error caused."""
    if isinstance(error, BrokenPipeError):  # whoever read what is printed is gone: `pipeweaver train ... | head`
        return True
    return isinstance(error, ValueError) or (isinstance(error, RunError) and error.__cause__ is None)


def in_words(error: Exception) -> str:
    return str(error) if is_known(error) else f"{type(error).__name__}: {error}"


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _watch_parent(parent: int) -> NoReturn:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
