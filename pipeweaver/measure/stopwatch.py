"""How long a call takes on a device: on the host's clock, of this thread alone, or on a GPU by events.

    result, ns = stopwatch(torch.device("cpu"), core_time=True)(lambda: x @ y)

A GPU waits for the host between single calls, so there a call is repeated and the mean counts; what writes in place
then does so several times, which costs the same each time. A thread that has a core of its own on a CPU is measured
while it has it: what other programs take away now is not what they will take away later.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from pipeweaver.runtime.clock import Clock, make_clock
from pipeweaver.semu.recorder import Stopwatch

REPETITIONS = 10


class ThreadClock:
    """Marks of the time that this thread has had a core."""

    def __init__(self) -> None:
        self._marks: list[int] = []

    def mark(self) -> None:
        self._marks.append(time.thread_time_ns())

    def times(self) -> list[int]:
        return self._marks


def clock(device: torch.device, core_time: bool) -> Clock | ThreadClock:
    """A clock of the runtime's kind; with `core_time` one that stands while this thread has no core."""
    return ThreadClock() if core_time else make_clock(device)


def stopwatch(device: torch.device, core_time: bool) -> Stopwatch:
    """The stopwatch of a device."""
    if device.type == "cuda":
        return _on_device(device)
    now = time.thread_time_ns if core_time else time.perf_counter_ns

    def timed(call: Callable[[], Any]) -> tuple[Any, float]:
        started = now()
        result = call()
        return result, now() - started

    return timed


def _on_device(device: torch.device) -> Stopwatch:
    def timed(call: Callable[[], Any]) -> tuple[Any, float]:
        result = call()
        marks = make_clock(device)
        marks.mark()
        for _ in range(REPETITIONS):
            call()
        marks.mark()
        start, end = marks.times()
        return result, (end - start) / REPETITIONS

    return timed
