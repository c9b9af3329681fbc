"""Trace events: well formed, nothing overlaps on a lane, arrows have both ends."""

import itertools
import json
import random
from collections import defaultdict

import pytest
from msgspec.structs import replace

from pipeweaver.report.trace import describe, describe_transfer, lanes, trace_events, write_trace
from pipeweaver.schedule.ir import Span


def check(events):
    """What ui.perfetto.dev needs of a file. Returns slices by lane and arrows by id."""
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    processes = {e["pid"] for e in events if e["name"] == "process_name"}
    by_lane, arrows = defaultdict(list), defaultdict(list)
    times = [e["ts"] for e in events if e["ph"] != "M"]
    assert times == sorted(times)
    for event in events:
        assert event["ph"] in "MXCstf"
        assert event["pid"] in processes
        if event["ph"] == "X":
            assert event["dur"] > 0
            assert (event["pid"], event["tid"]) in named
            by_lane[event["pid"], event["tid"]].append(event)
        elif event["ph"] in "stf":
            arrows[event["id"]].append(event)
    for slices in by_lane.values():
        for before, after in itertools.pairwise(slices):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-6
    for arrow in arrows.values():
        assert [e["ph"] for e in arrow] == ["s", *["t"] * (len(arrow) - 2), "f"]
        for event in arrow:  # each hangs on a slice
            around = by_lane[event["pid"], event["tid"]]
            assert any(s["ts"] <= event["ts"] < s["ts"] + s["dur"] for s in around)
    return by_lane, arrows


def test_predicted_and_measured_stand_side_by_side(plan, measurement, tmp_path):
    path = tmp_path / "deep" / "trace.json"
    write_trace(path, [plan], [measurement])
    events = json.loads(path.read_text())["traceEvents"]
    by_lane, arrows = check(events)
    assert len(arrows) == 2 * len(plan.transfers)
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {"replica 0 predicted, step 7", "replica 0 measured, step 7"}
    lane_names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert lane_names == {f"worker {w} {kind}" for w in (0, 1) for kind in ("compute", "transfers")}
    slices = [e for lane in by_lane.values() for e in lane]
    forward = [e for e in slices if e["name"] == "vision 0F1"]
    assert [(e["ts"], e["dur"]) for e in forward] == [(15.0, 10.0), (16.5, 11.0)]
    assert forward[0]["cname"] != next(e for e in slices if e["name"] == "language 1F0")["cname"]
    assert forward[0]["args"]["tokens"] == 8


def test_memory_counters_reach_the_peak(plan):
    events = trace_events([plan])
    counted = [e for e in events if e["ph"] == "C" and e["name"] == "memory worker 0"]
    assert max(e["args"]["bytes"] for e in counted) == plan.prediction.peak_bytes[0]
    assert counted[-1]["args"]["bytes"] == plan.static_bytes[0]


def test_a_plan_without_times_shows_nothing(unpredicted, measurement):
    assert trace_events([unpredicted]) == []
    check(trace_events([unpredicted], [measurement]))


def test_transfers_that_never_ended_have_no_slice_and_no_arrow(plan, measurement):
    lost = replace(measurement, transfers=(Span(0, 0), *measurement.transfers[1:]))
    _, arrows = check(trace_events([plan], [lost]))
    assert len(arrows) == 2 * len(plan.transfers) - 1


def test_names_of_actions(plan):
    names = [describe(plan, action) for action in plan.actions[0]]
    assert names[:3] == ["vision load 0.0", "vision 0F0", "post vision 0F0"]
    assert names[-1] == "step"
    assert describe_transfer(plan, plan.transfers[3]) == "vision 0B1"


@pytest.mark.parametrize("seed", range(20))
def test_lanes_never_overlap_and_are_few(seed):
    draw = random.Random(seed)
    spans = [Span(start, start + draw.randint(1, 30)) for start in (draw.randint(0, 100) for _ in range(40))]
    of_lane = lanes(spans)
    for lane in set(of_lane):
        mine = sorted(span for span, number in zip(spans, of_lane, strict=True) if number == lane)
        assert all(a.end_ns <= b.start_ns for a, b in itertools.pairwise(mine))
    busiest = max(sum(s.start_ns <= t < s.end_ns for s in spans) for t in range(131))
    assert len(set(of_lane)) == busiest
