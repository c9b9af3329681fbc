"""Memory of a worker over the actions of a plan: what it holds while each action runs, and after it.

Buffers are allocated by one action and freed by a named one, so memory depends on the order of actions
alone; times only say where to draw it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipeweaver.schedule.ir import Buffer, Compute, Free, Load, Plan, Post, Span


class Held(NamedTuple):
    """Bytes on a worker while an action runs (workspace included) and after it."""

    during: int
    after: int


def held_bytes(plan: Plan, worker: int) -> tuple[Held, ...]:
    """One entry per action of a worker; static memory included."""
    sizes: dict[Buffer, int] = {}
    total = plan.static_bytes[worker]
    held = []
    for action in plan.actions[worker]:
        if isinstance(action, Load | Compute | Post):
            for allocation in action.allocations:
                sizes[allocation.buffer] = allocation.num_bytes
                total += allocation.num_bytes
        if isinstance(action, Free):
            total -= sum(sizes.pop(buffer) for buffer in action.buffers)
        workspace = action.workspace_bytes if isinstance(action, Compute) else 0
        held.append(Held(total + workspace, total))
    return tuple(held)


def memory_over_time(plan: Plan, worker: int, spans: Sequence[Span]) -> list[tuple[int, int]]:
    """(time, bytes) where the memory of a worker changes, the actions being at `spans`; times never fall."""
    points = [(0, plan.static_bytes[worker])]
    for held, span in zip(held_bytes(plan, worker), spans, strict=True):
        for time, num_bytes in ((span.start_ns, held.during), (span.end_ns, held.after)):
            if num_bytes != points[-1][1]:
                points.append((time, num_bytes))
    return points
