"""PipeWeaver (Xue et al., 2504.14145; pipeweaver.md, sections 1 to 3), as the paper has it: our yardstick.

*Once per run* every module is cut for itself into P * K_i chunks of even cost, K_i by the floor rule. *Each step* its
items go in equal parts of at most B_i, and a tree search over segment orders, a greedy dual queue and an integer
program per worker give an order and memory strategies (`planner/segments.py`, `segment_plan.py`). `rounds` are nodes of
the search tree, ten orders each. Two workers, two microbatches of two images in parts of one, K = 1:

    worker 0   0F0 0F1 2F0 0F2 2B0 0F3 2F1 0B0 0B1 2B1 0B2 0B3
    worker 1   1F0 1F1 3F0 3B0 1F2 1F3 3F1 3B1 1B0 1B1 1B2 1B3
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeweaver.costs import Costs
from pipeweaver.data.items import Share
from pipeweaver.model.graph import ModelGraph
from pipeweaver.planner.options import DEFAULTS, PolicyOptions
from pipeweaver.planner.partition import by_modality, layer_costs, task_modules
from pipeweaver.planner.segment_plan import SegmentPlanner
from pipeweaver.planner.segments import chunks_per_worker, items_per_part
from pipeweaver.policies.policy import Policy
from pipeweaver.schedule.ir import Draft, Placement


def place(
    graph: ModelGraph,
    workers: int,
    costs: Costs,
    shares: Sequence[Share],
    options: PolicyOptions = DEFAULTS,
    *,
    dtype: str = "float32",
    budget_bytes: int | None = None,
) -> Placement:
    """K_i chunks of module i on every worker, even in cost; K_i by the floor rule where `options` do not set it."""
    tasks = task_modules(graph, shares)
    parts = items_per_part(graph, shares, costs) | options.items_per_part
    chunks = chunks_per_worker(graph, workers, shares, costs, parts) | options.chunks_per_worker
    return by_modality(graph, workers, layer_costs(graph, costs, shares), tasks, chunks)


def plan(
    graph: ModelGraph,
    placement: Placement,
    share: Share,
    costs: Costs,
    *,
    budget_bytes: int | None,
    seed: int,
    rounds: int,
    forward_only: bool = False,
    options: PolicyOptions = DEFAULTS,
    dtype: str = "float32",
) -> Draft:
    """The best order found; raises ValueError if the budget cannot be kept."""
    planner = SegmentPlanner(
        graph,
        placement,
        share,
        costs,
        budget_bytes=budget_bytes,
        seed=seed,
        forward_only=forward_only,
        options=options,
        dtype=dtype,
    )
    planner.run(rounds)
    return planner.best()[0]


POLICY = Policy(place=place, plan=plan, search=SegmentPlanner)
