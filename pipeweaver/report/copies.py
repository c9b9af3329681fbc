"""When the copies of what is offloaded run: they begin with an action and end before another one has waited.

    offload 2F0   settle          a copy of 3 that is not waited for: as long as planned
    |=====>       |
    reload 2F0 settle----|        one that is: until the wait is over
    |====================>

Copies in one direction come one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipeweaver.schedule.ir import Offload, Plan, Reload, Settle, Span


class CopySpan(NamedTuple):
    """The copy that an action begins, and when it runs, nanoseconds from the start of the step."""

    action: Offload | Reload
    span: Span


def copy_spans(plan: Plan, worker: int, spans: Sequence[Span]) -> list[CopySpan]:
    """All copies of a worker whose actions are at `spans`, in the order in which they begin."""
    found: list[CopySpan] = []
    free = {Offload: 0, Reload: 0}
    begun: dict[tuple[int, int], tuple[Offload | Reload, Span]] = {}
    for action, span in zip(plan.actions[worker], spans, strict=True):
        if isinstance(action, Offload | Reload):
            begun[action.chunk, action.part] = (action, span)
        elif isinstance(action, Settle):
            first, at = begun[action.chunk, action.part]
            start = max(at.start_ns, free[type(first)])
            end = max(start + first.duration_ns, at.end_ns)
            end = span.end_ns if span.end_ns > span.start_ns else min(end, span.start_ns)
            free[type(first)] = end
            found.append(CopySpan(first, Span(min(start, end), end)))
    return sorted(found, key=lambda copy: copy.span)
