"""Copies to the host and back are where they belong in a timeline, and in the trace."""

from __future__ import annotations

import msgspec

from pipeweaver.report.copies import copy_spans
from pipeweaver.report.trace import trace_events
from pipeweaver.schedule.ir import Allocation, Buffer, Offload, Reload, Settle, Span


def test_copies_take_turns_and_end_when_waited_for(plan):
    actions = (
        Offload(chunk=0, part=0, allocations=(Allocation(Buffer("host", 0, 0), 8),), duration_ns=10_000),
        Offload(chunk=0, part=1, allocations=(Allocation(Buffer("host", 0, 1), 8),), duration_ns=10_000),
        Settle(chunk=0, part=0),
        Settle(chunk=0, part=1),
        Reload(chunk=0, part=0, allocations=(Allocation(Buffer("returned", 0, 0), 8),), duration_ns=10_000),
        Settle(chunk=0, part=0),
    )
    us = [(0, 0), (5, 5), (40, 40), (40, 40), (50, 50), (51, 63)]
    spans = tuple(Span(a * 1_000, b * 1_000) for a, b in us)
    plan = msgspec.structs.replace(plan, actions=(actions, plan.actions[1]))
    found = [(c.action, c.span.start_ns // 1_000, c.span.end_ns // 1_000) for c in copy_spans(plan, 0, spans)]
    # The second waits for the first to be done; the one back takes longer than planned.
    assert found == [(actions[0], 0, 10), (actions[1], 10, 20), (actions[4], 50, 63)]

    prediction = msgspec.structs.replace(plan.prediction, spans=(spans, plan.prediction.spans[1]))
    events = trace_events([msgspec.structs.replace(plan, prediction=prediction)])
    lanes = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    slices = [(e["tid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert (lanes["worker 0 to host"], "vision offload 0.1", 10.0, 10.0) in slices
    assert (lanes["worker 0 from host"], "vision reload 0.0", 50.0, 13.0) in slices
    assert (lanes["worker 0 compute"], "vision settle 0.0", 51.0, 12.0) in slices
