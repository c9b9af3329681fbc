"""A device that computes nothing and takes its time: the clock of one worker in a rehearsal.

    device.begin(start_ns)        the step begins, at the same moment for all workers
    device.after(action)          returns when a device would have done the action, not before

It waits by sleeping, so that many workers share few cores, and until deadlines, not for durations: what a sleep takes
too long is not counted twice. A worker that woke 0.2 ms late is 0.2 ms behind its device, and the next action ends
when it would have ended; what the runtime itself takes between two actions does count.

    deadline 30.0   awake 30.2   device 30.0     next action of 10 ms: deadline 40.0
"""

from __future__ import annotations

import time

from pipeweaver.schedule.ir import Action, Compute, Load, Norm, Offload, Post, Reduce, Reload, Settle, Step


class Device:
    """Times are nanoseconds of `time.perf_counter_ns`, which all processes of a machine share.

    Copies to the host and back run beside compute, one after the other in each direction. `overslept_ns` lists by how
    much each sleep was too long.
    """

    def __init__(self) -> None:
        self.overslept_ns: list[int] = []
        self._behind_ns = 0
        self._began_ns = 0
        self._copying_ns: dict[type[Action], int] = {}
        self._copied_ns: dict[tuple[int, int], int] = {}

    def begin(self, start_ns: int) -> None:
        """A step begins then; nothing is left of the one before."""
        self._behind_ns = 0
        self._copying_ns.clear()
        self._copied_ns.clear()
        self.until(start_ns)
        self._began_ns = start_ns

    def now_ns(self) -> int:
        """What the device's time is: the host's, less what the last sleep took too long."""
        return time.perf_counter_ns() - self._behind_ns

    def until(self, deadline_ns: int) -> None:
        """Return when the device is through with something that ends then; at once if that is past."""
        if self.now_ns() >= deadline_ns:
            return
        while (left_ns := deadline_ns - time.perf_counter_ns()) > 0:
            time.sleep(left_ns / 1e9)
        self._behind_ns = time.perf_counter_ns() - deadline_ns
        self.overslept_ns.append(self._behind_ns)

    def met(self, began_ns: int) -> None:
        """The action at hand, a meeting, began only when its last member was there."""
        self._began_ns = began_ns

    def after(self, action: Action) -> None:
        """The host has done its part of an action, while the device did its own: wait for the later one."""
        match action:
            case Compute() | Load() | Post() | Step() | Reduce() | Norm():
                self.until(self._began_ns + action.duration_ns)
            case Offload() | Reload():
                start_ns = max(self._copying_ns.get(type(action), 0), self._began_ns)
                self._copying_ns[type(action)] = start_ns + action.duration_ns
                self._copied_ns[action.chunk, action.part] = start_ns + action.duration_ns
            case Settle():
                self.until(self._copied_ns[action.chunk, action.part])
        self._began_ns = self.now_ns()
