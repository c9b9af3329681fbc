"""Workers watch over each other until the steps begin: joining, calibrating, building.

    company = Company(store, rank=0, world_size=4, patience_s=60)      # in every worker, before it waits for another
    ...                                                                # worker 1 is frozen: worker 0 says so and ends
    company.close()                                                    # from here on the watchdog knows what is waited for

In a step the plan says who waits for whom and how long it may take, and `watchdog.py` ends a hang. Before the first
step nobody knows how long things take, so silence is what counts: a thread of every worker says each second that the
process lives, and listens to the next worker in a ring. A worker that waits in a collective cannot be interrupted,
so the process is ended, as the watchdog does.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

from pipeweaver.runtime.exchange import MOST_BEAT_S, Silence, Store
from pipeweaver.runtime.watchdog import EXIT_CODE

LEAST_PATIENCE_S = 10.0
"""A short watchdog suits steps; what comes before them may keep a thread from running for a while."""
START_S = 300.0
"""From the first worker's start to that of the last: processes load their libraries, on several hosts."""
_LEFT = 1 << 40
"""Added to the count of a worker that needs nobody to watch over it any more."""


class Company:
    """`patience_s` is how long a worker may give no sign of life. `end` is what ends this process."""

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        world_size: int,
        patience_s: float,
        start_s: float = START_S,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self._store = store.clone()
        self._rank, self._next, self._world_size = rank, (rank + 1) % world_size, world_size
        self._patience_s, self._start_s = patience_s, max(start_s, patience_s)
        self._beat_s = min(MOST_BEAT_S, patience_s / 5)
        self._end = end
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="company", daemon=True)
        if world_size > 1:
            self._thread.start()

    def close(self) -> None:
        """This worker is through with what may wait for silent ones, and may be silent itself."""
        if self._world_size == 1 or self._closed.is_set():
            return
        self._closed.set()
        self._thread.join()
        self._store.add(f"alive/{self._rank}", _LEFT)

    def _run(self) -> None:
        silence, heard = Silence(self._beat_s), 0
        try:
            while True:
                self._store.add(f"alive/{self._rank}", 1)
                count = self._store.add(f"alive/{self._next}", 0)  # reads it, whether or not there was a beat yet
                silent_s = silence.after(count)
                heard = max(heard, count)
                if heard < _LEFT and silent_s > (self._patience_s if heard else self._start_s):
                    self._give_up(silent_s)
                    return
                if self._closed.wait(self._beat_s):
                    return
        except Exception:
            return  # the store is gone, and whoever started the workers with it: they are being ended

    def _give_up(self, silent_s: float) -> None:
        try:
            print(
                f"error: worker process {self._rank}: worker process {self._next} of {self._world_size} has given no "
                f"sign of life for {silent_s:.0f} s, before the first step: it is dead, frozen, or cut off",
                file=sys.stderr,
                flush=True,
            )
            sys.stdout.flush()
        finally:
            self._end(EXIT_CODE)
