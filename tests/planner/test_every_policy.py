"""Whatever the batch, the costs and the budget: every policy's plan is proven, repeatable, above its bound, or refused."""

from __future__ import annotations

import random
from dataclasses import dataclass

import msgspec
import pytest
from planner_cases import GRAPHS, graph_of, share_of

from pipeweaver.costs import FlatCosts, StageCost
from pipeweaver.data.items import Share
from pipeweaver.model.graph import ModelGraph
from pipeweaver.planner.options import PolicyOptions
from pipeweaver.policies import POLICIES
from pipeweaver.policies.policy import Policy
from pipeweaver.schedule.compile import compile_plan
from pipeweaver.schedule.ir import Placement, Plan
from pipeweaver.schedule.verify import PlanError, verify

SEARCHING = ("dynamic", "pipeweaver", "wavefront")
"""Policies that mind the budget: what they hand out is within it, or they say that nothing is."""


@dataclass(frozen=True, kw_only=True)
class RoughCosts(FlatCosts):
    """Layers cost 1 to `spread` times as much, at random; some chunks cannot be split, loading and workspaces count."""

    seed: int = 0
    spread: float = 1.0
    load_ns: int = 0
    workspace_bytes: int = 0

    def stage(self, chunk, items, links) -> StageCost:
        cost = super().stage(chunk, items, links)
        layers = [random.Random(f"{self.seed} {chunk.module} {i}") for i in range(chunk.start, chunk.stop)]
        factor = sum(draw.uniform(1, self.spread) for draw in layers) / len(layers)
        draw = random.Random(f"{self.seed} {chunk.module} {chunk.start} split")
        backward = int(cost.backward_ns * factor)
        weight = backward * draw.randint(1, 9) // 10 if draw.random() < 0.6 else 0
        return cost._replace(
            forward_ns=int(cost.forward_ns * factor),
            backward_ns=backward,
            input_ns=backward - weight if weight else 0,
            weight_ns=weight,
            weight_bytes=cost.weight_bytes if weight else 0,
            load_ns=self.load_ns,
            loaded_bytes=8 * sum(item.sizes["tokens"] for item in items) if chunk.start == 0 else 0,
            forward_workspace_bytes=self.workspace_bytes,
            backward_workspace_bytes=2 * self.workspace_bytes,
            weight_workspace_bytes=self.workspace_bytes // 2,
        )


def of_two_tasks(graph, share: Share, draw: random.Random) -> Share:
    """The share with every sample given to one of two tasks."""
    task = {item.draw: draw.choice(("main", "text")) for item in share.items}
    records = {
        f"{task[int(name.partition('/')[2])]}/{name.partition('/')[2]}": at for name, at in share.records.items()
    }
    items = tuple(msgspec.structs.replace(item, task=task[item.draw]) for item in share.items)
    normalisers: dict[str, int] = {}
    for item in items:
        loss = graph.by_name[item.module].loss
        if loss is not None:
            key = f"{item.task}/{item.module}"
            normalisers[key] = normalisers.get(key, 0) + item.sizes[loss.units]
    return msgspec.structs.replace(share, items=items, records=records, normalisers=normalisers)


@dataclass(frozen=True, kw_only=True)
class Case:
    """`share` is planned, on a placement for `sample`."""

    graph: ModelGraph
    workers: int
    costs: FlatCosts
    share: Share
    sample: Share
    options: PolicyOptions
    forward_only: bool
    rounds: int


def random_case(seed: int) -> Case:
    draw = random.Random(seed)
    graph = graph_of(draw.choice(GRAPHS), [draw.randint(1, 9) for _ in range(3)])
    counts = [draw.choice((0, 0, 1, 2, 5)) for _ in range(draw.choice((0, 1, 1, 2, 4, 7)))]
    share = share_of(graph, counts, seed=seed, per_microbatch=draw.choice((1, 1, 2, 3)))
    sample = share_of(graph, [draw.randint(0, 3) for _ in range(draw.randint(1, 3))], seed=seed + 1)
    if share.items and draw.random() < 0.3:
        share = of_two_tasks(graph, share, draw)
        sample = share
    if draw.random() < 0.3:  # images that no text shows, texts that show some of their images
        share = msgspec.structs.replace(share, links=tuple(pair for pair in share.links if draw.random() < 0.8))
    costs = RoughCosts(
        layers={module.name: len(module.layers) for module in graph.modules},
        row_ns={module.name: draw.choice((1, 1_000, 20_000)) for module in graph.modules},
        row_bytes=draw.choice((0, 64, 4096)),
        layer_bytes=draw.choice((1, 5_000)),
        latency_ns=draw.choice((0, 10_000, 10_000_000)),
        posting_ns=draw.choice((0, 3_000)),
        bytes_per_us=draw.choice((1, 1_000)),
        seed=seed,
        spread=draw.choice((1.0, 1.2, 20.0)),
        load_ns=draw.choice((0, 500)),
        workspace_bytes=draw.choice((0, 10_000)),
    )
    options = PolicyOptions(
        encoder_first=draw.random() < 0.2,
        even_parts=draw.choice(("items", "cost")),
        regroup=draw.random() < 0.7,
        split_backward=draw.random() < 0.8,
        items_per_part={module.name: draw.randint(1, 4) for module in graph.modules if draw.random() < 0.2},
    )
    return Case(
        graph=graph,
        workers=draw.choice((1, 2, 3, 4, 8)),
        costs=costs,
        share=share,
        sample=sample,
        options=options,
        forward_only=draw.random() < 0.25,
        rounds=draw.choice((0, 12)),
    )


def planned(policy: Policy, placement: Placement, case: Case, budget_bytes: int | None) -> Plan:
    draft = policy.plan(
        case.graph,
        placement,
        case.share,
        case.costs,
        budget_bytes=budget_bytes,
        seed=3,
        rounds=case.rounds,
        forward_only=case.forward_only,
        options=case.options,
    )
    plan = compile_plan(case.graph, case.share, draft, case.costs)
    verify([plan], case.graph, [case.share], budget_bytes=budget_bytes)
    assert plan.prediction.lower_bound_ns <= plan.prediction.makespan_ns
    return plan


@pytest.fixture(autouse=True)
def quick_search(monkeypatch):
    monkeypatch.setattr("pipeweaver.policies.wavefront.EFFORT", 4_000)


@pytest.mark.parametrize("name", POLICIES)
def test_plans_are_proven_repeatable_above_their_bound_and_within_their_budget(name):
    policy, fits, refused = POLICIES[name], 0, 0
    for seed in range(12):
        case = random_case(seed)
        try:
            placement = policy.place(case.graph, case.workers, case.costs, [case.sample], case.options)
        except ValueError as error:
            assert "layers" in str(error)
            continue
        free = planned(policy, placement, case, None)
        assert planned(policy, placement, case, None).fingerprint == free.fingerprint
        least, most = max(free.static_bytes), max(free.prediction.peak_bytes)
        planned(policy, placement, case, most)  # what a plan without a budget needs suffices
        for generosity in (0.9, 0.5, 0.0):
            budget = int(least + generosity * (most - least))
            try:
                planned(policy, placement, case, budget)
            except ValueError as error:
                assert not (name in SEARCHING and isinstance(error, PlanError)), error
                assert f"{budget:,}" in str(error) and "\n" not in str(error)
                refused += 1
            else:
                fits += 1
    assert fits >= 8 and refused >= 4
