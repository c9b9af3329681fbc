"""A loss that mixes items: two towers whose features meet in one part with the whole batch."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
import torch
from torch import nn

from pipeweaver.data.items import Batch, Item, Sample
from pipeweaver.model.graph import Flow, LayerSpec, LossSpec, ModelGraph, Module
from pipeweaver.planner.assign import share_out, single_share
from pipeweaver.policies import POLICIES
from pipeweaver.schedule.compile import compile_plan
from pipeweaver.schedule.verify import PlanError, verify
from tests.runtime.cases import Case, make_plans
from tests.runtime.graphs import WIDTH, X, encoder
from tests.runtime.threads import SingleProcess, assert_close, flat_costs, local_workers, run_steps


class Meet(nn.Module):
    """One row per pair and tower: the mean of the features linked to it, both towers side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, state, part):
        means = [
            torch.stack([rows.mean(0) for rows in state[name].split(part.linked_sizes(name, "features"))])
            for name in ("vision", "audio")
        ]
        return {"x": self.project(torch.cat(means, dim=1)) + means[0] - means[1]}


class Contrast(nn.Module):
    def forward(self, state, part):
        similar = state["x"] @ state["x"].T
        return {"loss": nn.functional.cross_entropy(similar, torch.arange(len(similar)), reduction="sum")}


def two_towers() -> ModelGraph:
    pairs = Module(
        name="pairs",
        layers=(LayerSpec(kind="pairs.meet", build=Meet, reads=("vision", "audio"), carries=(X,)),),
        after=LayerSpec(kind="pairs.after", build=Contrast),
        loss=LossSpec(units="pairs", joint=True),
    )
    flows = tuple(Flow(source=n, tensor="features", destination="pairs", name=n) for n in ("vision", "audio"))
    return ModelGraph(modules=(encoder("vision", 3), encoder("audio", 3), pairs), flows=flows)


def batch(num_pairs: int) -> Batch:
    samples = []
    for draw in range(num_pairs):
        towers = tuple(
            Item(
                task="main",
                draw=draw,
                module=name,
                position=0,
                sizes={"tokens": 2 + draw % 3, "features": 1 + draw % 2},
            )
            for name in ("vision", "audio")
        )
        pair = Item(task="main", draw=draw, module="pairs", position=0, sizes={"tokens": 1, "pairs": 1})
        samples.append(Sample(task="main", draw=draw, record=draw, items=(*towers, pair), links=((0, 2), (1, 2))))
    return Batch(step=0, samples=tuple(samples), microbatches=(tuple(range(num_pairs)),))


@pytest.mark.parametrize("policy", ["gpipe", "interleaved-1f1b", "dynamic"])
@pytest.mark.parametrize("seed", range(3))
def test_a_joint_loss_equals_a_single_process(policy, seed):
    graph = two_towers()
    case = Case(graph="joint", policy=policy, workers=2, num_replicas=1, batch="one microbatch", seed=seed)
    (plans,) = make_plans(case, graph, [batch(7)], whole=("pairs",))
    workers = local_workers(graph, plans[0].placement, 1)
    run_steps(workers, [plans])
    single = SingleProcess(graph)
    single.step(batch(7))
    for worker in workers.values():
        assert_close({name: p.grad for name, p in worker.parameters.items()}, single.gradients)


def test_a_plan_that_takes_a_joint_loss_apart_is_rejected():
    graph = two_towers()
    share = single_share(graph, batch(4))
    halves = msgspec.structs.replace(
        share, microbatches=tuple(tuple(i for i in range(12) if i // 6 == half) for half in range(2))
    )
    placement = POLICIES["gpipe"].place(graph, 1, flat_costs(graph), [share])
    with pytest.raises(ValueError, match=r"joint"):
        POLICIES["gpipe"].plan(graph, placement, halves, flat_costs(graph), budget_bytes=None, seed=0, rounds=0)
    joint = replace(graph.by_name["pairs"], loss=LossSpec(units="pairs"))
    apart = ModelGraph(modules=(*graph.modules[:2], joint), flows=graph.flows)
    draft = POLICIES["gpipe"].plan(apart, placement, halves, flat_costs(graph), budget_bytes=None, seed=0, rounds=0)
    plan = compile_plan(apart, halves, draft, flat_costs(graph))
    verify([plan], apart, [halves])
    with pytest.raises(PlanError, match=r"stages: .*the loss of pairs is joint, but task main has it in 2 parts"):
        verify([plan], graph, [halves])


def test_a_joint_loss_on_two_replicas_is_refused():
    with pytest.raises(ValueError, match="the loss of pairs is joint"):
        share_out(two_towers(), batch(4), 2)
