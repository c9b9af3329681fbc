"""Cases of the exactness matrix: every pair of choices occurs, the rest is drawn by seed.

Case(graph="tied", policy="1f1b", workers=4, num_replicas=2, batch="no images", seed=17)
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import msgspec

from pipeweaver.costs import FlatCosts
from pipeweaver.data.items import Batch
from pipeweaver.model.graph import ModelGraph
from pipeweaver.planner.assign import share_out
from pipeweaver.planner.options import PolicyOptions
from pipeweaver.policies import POLICIES
from pipeweaver.schedule.compile import compile_plan
from pipeweaver.schedule.ir import Draft, Plan, Stage, Strategy
from pipeweaver.schedule.verify import verify
from tests.runtime.graphs import BATCHES, GRAPHS, batch_of, graph_of

STRATEGIES: tuple[Strategy, ...] = ("keep", "recompute", "recompute-attention", "offload")

CHOICES = {
    "graph": GRAPHS,
    "policy": tuple(POLICIES),
    "workers": (1, 2, 4),
    "num_replicas": (1, 2),
    "batch": BATCHES,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    graph: str
    policy: str
    workers: int
    num_replicas: int
    batch: str
    seed: int

    def __str__(self) -> str:
        return f"{self.graph}-{self.policy}-{self.workers}x{self.num_replicas}-{self.batch}-{self.seed}"


def pairwise(seed: int = 0, extra: int = 0) -> list[Case]:
    """Cases in which every pair of choices occurs, greedily few, and `extra` ones drawn at random."""
    draw = random.Random(seed)
    names = list(CHOICES)
    missing = {
        ((one, a), (other, b))
        for one, other in itertools.combinations(names, 2)
        for a in CHOICES[one]
        for b in CHOICES[other]
    }
    cases = []
    while missing:
        best: dict = {}
        covered: set = set()
        for pair in draw.sample(sorted(missing, key=repr), min(10, len(missing))):
            chosen = {name: draw.choice(CHOICES[name]) for name in names} | dict(pair)
            new = set(itertools.combinations(chosen.items(), 2)) & missing
            if len(new) > len(covered):
                best, covered = chosen, new
        missing -= covered
        cases.append(Case(**best, seed=draw.randrange(1000)))
    for _ in range(extra):
        cases.append(Case(**{n: draw.choice(CHOICES[n]) for n in names}, seed=draw.randrange(1000)))
    return cases


def num_layers(case: Case) -> int:
    """Layers per module: enough for two pieces per worker, also where there is one module alone."""
    return 2 * case.workers if case.graph in ("one module", "skip") else case.workers + 1


def make_graph(case: Case) -> ModelGraph:
    return graph_of(case.graph, num_layers(case))


def make_batch(case: Case, graph: ModelGraph, step: int) -> Batch:
    return batch_of(case.batch, graph, case.workers, case.seed + step, step)


def make_plans(
    case: Case, graph: ModelGraph, batches: list[Batch], forward_only: bool = False, whole: tuple[str, ...] = ()
) -> list[list[Plan]]:
    """Verified plans, per step and replica; costs, options, memory strategies and which backwards are split are drawn
    by seed. Modules named in `whole` keep the items of a microbatch together."""
    draw = random.Random(case.seed)
    costs = FlatCosts(
        layers={module.name: len(module.layers) for module in graph.modules},
        row_ns={module.name: draw.randint(300, 3000) for module in graph.modules},
        missing=frozenset(
            f"{module.name}.{end}"
            for module in graph.modules
            for end, layer in (("before", module.before), ("after", module.after))
            if layer is None
        ),
    )
    options = PolicyOptions(
        encoder_first=case.workers == 1 and draw.random() < 0.5,
        items_per_part={
            module.name: draw.randint(1, 3)
            for module in graph.modules
            if draw.random() < 0.5 and module.name not in whole
        },
        even_parts=draw.choice(["items", "cost"]),
    )
    policy = POLICIES[case.policy]
    exchange = case.policy == "dynamic"
    shares = [share_out(graph, batch, case.num_replicas, costs, exchange=exchange) for batch in batches]
    placement = policy.place(graph, case.workers, costs, [share for step in shares for share in step], options)
    steps = []
    for of_step in shares:
        plans = []
        for share in of_step:
            draft = policy.plan(
                graph,
                placement,
                share,
                costs,
                budget_bytes=None,
                seed=case.seed,
                rounds=1,
                forward_only=forward_only,
                options=options,
            )
            draft = forgetting(graph, splitting(draft, draw), draw)
            plans.append(compile_plan(graph, share, draft, costs, dtype="float64"))
        verify(plans, graph, of_step, dtype="float64")
        steps.append(plans)
    return steps


def splitting(draft: Draft, draw: random.Random) -> Draft:
    """The draft with about half of its backwards split, each W anywhere behind its I."""
    orders = []
    for order in draft.order:
        changed: list[Stage] = []
        later: list[Stage] = []
        for stage in order:
            if stage.phase == "B" and draw.random() < 0.5:
                changed.append(stage._replace(phase="I"))
                later.append(stage._replace(phase="W"))
            else:
                changed.append(stage)
        for stage in later:
            after = changed.index(stage._replace(phase="I")) + 1
            changed.insert(draw.randint(after, len(changed)), stage)
        orders.append(tuple(changed))
    return msgspec.structs.replace(draft, order=tuple(orders))


def forgetting(graph: ModelGraph, draft: Draft, draw: random.Random) -> Draft:
    """The draft with memory strategies of the layers of some parts drawn at random."""
    strategies = []
    for chunk, parts in zip(draft.placement.chunks, draft.parts, strict=True):
        layers = list(graph.by_name[chunk.module].range(chunk.start, chunk.stop))
        strategies.append(
            tuple(
                tuple(draw.choice(STRATEGIES) for _ in layers) if draw.random() < 0.5 else ("keep",) * len(layers)
                for _ in parts
            )
        )
    return msgspec.structs.replace(draft, strategies=tuple(strategies))
