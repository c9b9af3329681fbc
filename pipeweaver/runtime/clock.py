"""When each action of a step started and ended: on the host, or on a GPU's stream by events.

A worker runs one action after another, so a mark between two of them ends the one and starts the next:

    clock = make_clock(device)
    clock.mark(); run(first); clock.mark(); run(second); clock.mark()
    clock.times()   ->   three times, nanoseconds of time.perf_counter_ns

On a GPU the host runs ahead, and `times` waits for the device: once per step.
"""

from __future__ import annotations

import time

import torch


class HostClock:
    """Marks of the host's own time."""

    def __init__(self) -> None:
        self._marks: list[int] = []

    def mark(self) -> None:
        self._marks.append(time.perf_counter_ns())

    def reached(self) -> int:
        """Number of marks that execution has passed."""
        return len(self._marks)

    def times(self) -> list[int]:
        return self._marks


class StreamClock:
    """Marks on the current CUDA stream, told in the host's time.

    The first mark is set when the device is idle, so that it happens when the host says it does.
    """

    def __init__(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)
        self.device = device
        self._start_ns = 0
        self._marks: list[torch.cuda.Event] = []

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        if not self._marks:
            self._start_ns = time.perf_counter_ns()
        self._marks.append(event)

    def reached(self) -> int:
        """Number of marks that the device has passed; may be called from another thread."""
        marks = list(self._marks)
        return next((i for i, event in enumerate(marks) if not event.query()), len(marks))

    def times(self) -> list[int]:
        torch.cuda.synchronize(self.device)
        return [self._start_ns + round(self._marks[0].elapsed_time(event) * 1e6) for event in self._marks]


Clock = HostClock | StreamClock


def make_clock(device: torch.device) -> Clock:
    return StreamClock(device) if device.type == "cuda" else HostClock()
