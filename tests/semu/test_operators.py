"""Traces down to operators: every stage is covered, slices lie in one another and fill each other to the nanosecond."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from pipeweaver.cli import app
from pipeweaver.data.items import Batch, Item, Sample
from pipeweaver.planner.assign import share_out
from pipeweaver.policies import POLICIES
from pipeweaver.report.trace import Inside, trace_events
from pipeweaver.schedule.compile import compile_plan
from pipeweaver.schedule.ir import Compute, Plan, Strategy
from pipeweaver.semu.costs import SemuCosts
from pipeweaver.semu.machine import load_machine
from pipeweaver.semu.operators import insides, launched
from tests.runtime.cases import splitting
from tests.semu.layers import WIDTHS, tiny_vlm

DIGITS = Path(__file__).parents[2] / "examples" / "digits.toml"


def a_plan(tensor_parallel: int) -> tuple[SemuCosts, Plan]:
    """Two workers; layers of every memory strategy; half of the backwards split."""
    costs = SemuCosts(tiny_vlm(4), load_machine("H800"), tensor_parallel=tensor_parallel, widths=WIDTHS)
    draw = random.Random(4)
    samples = []
    for number in range(4):
        sizes = {"tokens": 64, "features": 16, "height": 8, "width": 8}
        image = Item(task="main", draw=number, module="vision", position=0, sizes=sizes)
        text = Item(task="main", draw=number, module="language", position=0, sizes={"tokens": 40, "supervised": 24})
        samples.append(Sample(task="main", draw=number, record=number, items=(image, text), links=((0, 1),)))
    batch = Batch(step=0, samples=tuple(samples), microbatches=((0, 1), (2, 3)))
    (share,) = share_out(costs.graph, batch, 1, costs)
    policy = POLICIES["1f1b"]
    placement = policy.place(costs.graph, 2, costs, [share])
    draft = policy.plan(costs.graph, placement, share, costs, budget_bytes=None, seed=0, rounds=0)
    choices: tuple[Strategy, ...] = ("keep", "recompute", "recompute-attention", "offload")
    strategies = tuple(
        tuple(
            tuple(draw.choice(choices) for _ in costs.graph.by_name[chunk.module].range(chunk.start, chunk.stop))
            for _ in parts
        )
        for chunk, parts in zip(draft.placement.chunks, draft.parts, strict=True)
    )
    draft = splitting(replace(draft, strategies=strategies), draw)
    return costs, compile_plan(costs.graph, share, draft, costs, dtype="bfloat16")


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_layers_and_operators_fill_their_stage(tensor_parallel: int) -> None:
    costs, plan = a_plan(tensor_parallel)
    inside = insides(costs, [plan])
    stages = [action for lane in plan.actions for action in lane if isinstance(action, Compute)]
    assert {stage.stage.phase for stage in stages} == set("FBIW")
    said = set()
    for action in stages:
        found = inside(plan, action)
        chunk = plan.placement.chunks[action.stage.chunk]
        names = [name for name, _ in costs.graph.by_name[chunk.module].range(chunk.start, chunk.stop)]
        layers = [place for place, one in enumerate(found) if one.name in names]
        expected = names if action.stage.phase == "F" else names[::-1]
        assert [found[place].name for place in layers] == expected
        fill([found[place] for place in layers], 0, action.duration_ns)
        for first, after in pairwise([*layers, len(found)]):
            operators = found[first + 1 : after]
            assert operators or found[first].span.start_ns == found[first].span.end_ns
            if operators:
                fill(operators, *found[first].span)
        said |= {one.arguments.get("recomputed") for one in found}
    assert "yes" in said
    assert tensor_parallel == 1 or any(one.name.startswith("exchange") for s in stages for one in inside(plan, s))


def test_stages_last_as_long_as_their_operators() -> None:
    """The scale that makes slices fill a stage corrects rounding, and nothing else."""
    costs, plan = a_plan(2)
    for lane in plan.actions:
        for action in lane:
            if isinstance(action, Compute):
                chunk, part = (
                    plan.placement.chunks[action.stage.chunk],
                    plan.parts[action.stage.chunk][action.stage.part],
                )
                sources = [[plan.items[a] for a, b in plan.links if b == i] for i in part.items]
                strategies = next(
                    a.strategies for a in lane if isinstance(a, Compute) and a.stage == action.stage._replace(phase="F")
                )
                layers = costs.layers(chunk, [plan.items[i] for i in part.items], sources, strategies)
                phases = {"F": "F", "B": "IW", "I": "I", "W": "W"}[action.stage.phase]
                total = sum(ns for cost, _ in layers for _, ns, _ in launched(cost, phases))
                assert abs(total - action.duration_ns) <= len(layers) + 1


def test_the_file_is_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "trace.json"
    settings = [part for key in ("tasks.main.microbatches=2", "policy.name=1f1b") for part in ("--set", key)]
    result = CliRunner().invoke(app, ["estimate", str(DIGITS), *settings, "--trace", str(path)])
    assert result.exit_code == 0, result.stderr
    assert result.stdout.endswith(f"wrote {path}\n")
    events = json.loads(path.read_text())["traceEvents"]
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"worker 0 compute", "worker 1 compute", "worker 0 transfers"} <= set(named.values())
    assert {e["name"] for e in events if e["ph"] == "C"} == {"memory worker 0", "memory worker 1"}
    lanes: dict[tuple[int, int], list[dict]] = {}
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] > 0 and isinstance(event["args"], dict)
            lanes.setdefault((event["pid"], event["tid"]), []).append(event)
    for place, slices in lanes.items():
        covered = nested(slices)
        if named[place].endswith("compute"):
            stages = [s for s in slices if "planned_us" in s["args"] and "chunk" in s["args"]]
            assert stages and all(covered[id(stage)] == pytest.approx(stage["dur"], abs=0.002) for stage in stages)


def test_without_costs_there_is_nothing_inside() -> None:
    _, plan = a_plan(1)
    assert not [event for event in trace_events([plan]) if event.get("cat") == "inside"]


def fill(slices: list[Inside], start_ns: int, end_ns: int) -> None:
    assert slices[0].span.start_ns == start_ns and slices[-1].span.end_ns == end_ns
    assert all(one.span.end_ns == other.span.start_ns for one, other in pairwise(slices))


def nested(slices: list[dict]) -> dict[int, float]:
    """What each slice's children take, in microseconds; slices of a lane lie in one another or apart."""
    covered = {id(one): 0.0 for one in slices}
    open_slices: list[dict] = []
    for one in slices:  # outer ones come first
        while open_slices and open_slices[-1]["ts"] + open_slices[-1]["dur"] <= one["ts"] + 1e-4:
            open_slices.pop()
        if open_slices:
            assert one["ts"] + one["dur"] <= open_slices[-1]["ts"] + open_slices[-1]["dur"] + 1e-4
            covered[id(open_slices[-1])] += one["dur"]
        open_slices.append(one)
    return covered
