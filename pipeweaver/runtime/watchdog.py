"""A thread that turns a hang into an error: who waits where, for whom, for which tensor, since when.

    with watched(watchdog, lambda: "worker 1 of replica 0: 4F2 ...", limit_s=60): ...

A blocked Gloo wait cannot be interrupted, so the watchdog ends the process: it writes what hangs to stderr and
calls `os._exit`. The others then lose their peer, or their own watchdog speaks.

Time in which this process stood still itself (stopped and continued, a paused virtual machine) is no hang and does not
count: where two looks are further apart than five intervals, five are counted.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

EXIT_CODE = 75
"""Exit code of a process that its watchdog ended."""


class Watchdog:
    """Watches what the process does now. `limit_s` is the least that an activity may take before it is a hang.

    `on_hang` is called with the message before the process ends; `end` is what ends it.
    """

    def __init__(
        self,
        limit_s: float = 60.0,
        *,
        on_hang: Callable[[str], None] | None = None,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self.limit_s = limit_s
        self._on_hang = on_hang
        self._end = end
        self._activity: _Activity | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def start(self, describe: Callable[[], str], *, predicted_s: float = 0.0) -> None:
        """Something begins that may take max(limit_s, 10 x predicted_s). `describe` is called only if it hangs."""
        self._activity = _Activity(time.monotonic(), max(self.limit_s, 10 * predicted_s), describe)

    def stop(self) -> None:
        """What was going on has ended."""
        self._activity = None

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        # Often enough to be in time for a short limit, seldom enough not to matter.
        interval_s = min(1.0, self.limit_s / 20)
        watched, seconds, last_look = None, 0.0, time.monotonic()
        while not self._closed.wait(interval_s):
            before, last_look = last_look, time.monotonic()
            activity = self._activity
            if activity is None:
                continue
            if activity is not watched:
                watched, seconds = activity, 0.0
            seconds += min(last_look - max(before, activity.since), 5 * interval_s)
            if seconds > activity.limit_s:
                self._hang(activity, seconds)
                return

    def _hang(self, activity: _Activity, seconds: float) -> None:
        message = (
            f"error: nothing has moved for {seconds:.0f} s (limit {activity.limit_s:.0f} s): {activity.describe()}"
        )
        try:
            print(message, file=sys.stderr, flush=True)
            if self._on_hang is not None:
                self._on_hang(message)
            sys.stdout.flush()
        finally:
            self._end(EXIT_CODE)


@contextmanager
def watched(watchdog: Watchdog | None, what: str, *, predicted_s: float = 0.0) -> Iterator[None]:
    """Watch a block of code: `with watched(watchdog, "waiting for the plan of step 7"): ...`"""
    if watchdog is None:
        yield
        return
    watchdog.start(lambda: what, predicted_s=predicted_s)
    try:
        yield
    finally:
        watchdog.stop()


class _Activity(NamedTuple):
    since: float
    limit_s: float
    describe: Callable[[], str]
