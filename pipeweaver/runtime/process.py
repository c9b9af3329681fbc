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
from collections.abc import Callable, Mapping
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


def run_worker(function: Callable[[], None]) -> NoReturn:
    """Run a worker's function and end the process with 0, or 1 and one line that says why.

    The process ends without waiting for threads: one that waits for a dead peer would never return. Errors that
    are ours (anything but ValueError, RuntimeError and OSError) come with their traceback.
    """
    code = 1
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        function()
        code = 0
    except KeyboardInterrupt:
        code = 130
    except (ValueError, RuntimeError, OSError) as error:
        if os.environ.get("PIPEWEAVER_TRACEBACK"):
            traceback.print_exc()
        print(f"error: worker process {os.environ.get('RANK', '0')}: {error}", file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _watch_parent(parent: int) -> NoReturn:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
