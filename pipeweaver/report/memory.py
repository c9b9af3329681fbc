"""When the memory of a worker changes over a step: the order of its actions says how much, their times say when."""

from __future__ import annotations

from collections.abc import Sequence

from pipeweaver.schedule.ir import Plan, Span
from pipeweaver.schedule.memory import held_bytes


def memory_over_time(plan: Plan, worker: int, spans: Sequence[Span]) -> list[tuple[int, int]]:
    """(time, bytes) where the memory of a worker changes, its actions being at `spans`; times never fall."""
    points = [(0, plan.static_bytes[worker])]
    after, during = held_bytes(plan, worker)
    for span, highest, left in zip(spans, during, after, strict=True):
        for time_ns, num_bytes in ((span.start_ns, highest), (span.end_ns, left)):
            if num_bytes != points[-1][1]:
                points.append((time_ns, num_bytes))
    return points
