"""Ours: every module cut for itself, items in parts, stages ordered for the batch at hand.

*Once per run*: each module in K chunks per worker, so that every worker has a share of every module
(pipeweaver.md, section 1). K is chosen by planning a sample of real batches, transfers and the cost of small parts
included, module by module until nothing gets better; layers are shared out so that workers are even over the sample,
or those that work reaches last have somewhat less to do, or begin with smaller chunks, where that plans the sample
better.

*Each step*: how samples are grouped, how items are cut into parts, what is kept in memory and which backwards are
split, each a try of the search in `planner/step_search.py`; then `rounds` of search over the order of the stages,
within the memory budget. Two workers, two microbatches with two images each in parts of one; chunks 0 and 1 are
vision, 2 and 3 language:

    worker 0   0F0 0F1 0F2 0F3 2F0 2F1 2B0 2B1 0B1 0B0 0B3 0B2
    worker 1   1F0 1F1 1F2 1F3 3F0 3B0 3F1 3B1 1B1 1B0 1B3 1B2
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

from pipeweaver.costs import Costs
from pipeweaver.data.items import Share
from pipeweaver.model.graph import ModelGraph
from pipeweaver.planner.balance import balanced, sources
from pipeweaver.planner.options import DEFAULTS, PolicyOptions
from pipeweaver.planner.partition import layer_costs, task_modules
from pipeweaver.planner.step_search import StepPlanner
from pipeweaver.policies.policy import Policy
from pipeweaver.schedule.ir import Draft, Placement

CHUNKS = (1, 2, 3, 4, 6, 8)
"""Values of K that are tried, and the most that a module's layers allow where that is less than the last."""
LEAST_GAIN = 0.002
"""What more chunks must bring: more stages mean more actions, whose own time is in no cost."""
MOST_MICROBATCHES = 64
"""K is chosen on so many microbatches of the sample, in whole shares, evenly spread; on one share at least."""
PLACE_ROUNDS = 40
"""Rounds of search for each K and share of the sample."""
HOPELESS = 0.03
"""What a share may take longer than under the best placement so far, for the others to be planned too."""
FILLS = (0.006, 0.009, 0.012, 0.015, 0.02)
"""What the last worker may lose until the first part reaches it, as shares of a worker's work (`balance.py`)."""
EARLIES, FEW = (1.0, 0.5), 3
"""What the first chunks may have of an even one, where a module that work begins with has few per worker; of many, each is
small."""


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
    """Chunks of even cost, `options.chunks_per_worker` of them where set, else the K that plans the sample best."""
    per_layer = [layer_costs(graph, costs, [share]) for share in shares if share.items]
    tasks = task_modules(graph, shares)
    sample = _sample(shares)

    def placed(chunks: Mapping[str, int], fill: float = 0.0, early: float = 1.0) -> Placement:
        return balanced(graph, workers, per_layer, tasks, chunks, fill, early)

    def score(placement: Placement, known: Sequence[float] = ()) -> list[float]:
        """Makespans of the shares, ns; infinite if one does not fit, or is hopeless beside what is `known`."""
        found: list[float] = []
        for share in sample:
            planner = StepPlanner(
                graph, placement, share, costs, budget_bytes=budget_bytes, options=options, dtype=dtype
            )
            planner.run(PLACE_ROUNDS)
            found.append(float("inf") if planner.best is None else planner.best_ns)
            if known and found[-1] > known[len(found) - 1] * (1 + HOPELESS):
                return [float("inf")]
        return found

    ladders = {
        name: _ladder(max(1, len(module.layers) // workers))
        for name, module in graph.by_name.items()
        if name not in options.chunks_per_worker
    }
    fixed = dict(options.chunks_per_worker)
    chosen = fixed | dict.fromkeys(ladders, 1)
    considered = [chosen]
    best = placed(chosen)
    scores = score(best) if any(len(ladder) > 1 for ladder in ladders.values()) else []

    def consider(chunks: dict[str, int]) -> bool:
        nonlocal chosen, best, scores
        if chunks in considered:
            return False
        considered.append(chunks)
        placement = placed(chunks)
        found = score(placement, scores)
        more = sum(chunks.values()) > sum(chosen.values())
        if sum(found) >= sum(scores) * (1 - LEAST_GAIN * more):
            return False
        chosen, best, scores = chunks, placement, found
        return True

    for k in sorted({k for ladder in ladders.values() for k in ladder}):
        consider(fixed | {name: max(value for value in ladder if value <= k) for name, ladder in ladders.items()})
    improved = True
    while improved:
        improved = False
        for name, ladder in ladders.items():
            for k in ladder:
                improved |= consider(chosen | {name: k})
    tried = {best}
    begun = [chosen[name] for name in sources(graph) if name in chosen]
    earlies = EARLIES if any(1 < k <= FEW for k in begun) else (1.0,)
    _, *others = product(earlies, (0.0, *FILLS))  # the first is as K was chosen
    for early, fill in others:
        placement = placed(chosen, fill, early)
        if placement not in tried:
            tried.add(placement)
            scores = scores or score(best)
            found = score(placement, scores)
            if sum(found) < sum(scores):
                best, scores = placement, found
    return best


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
    """The best that `rounds` of search find; raises ValueError if the budget cannot be kept."""
    planner = StepPlanner(
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
    return planner.draft()


def _ladder(most: int) -> tuple[int, ...]:
    """Values of K that are tried for a module with `most` layers per worker."""
    return tuple(sorted({min(k, most) for k in CHUNKS}))


def _sample(shares: Sequence[Share]) -> list[Share]:
    filled = [share for share in shares if share.items]
    mean = sum(len(share.microbatches) for share in filled) / len(filled)
    count = min(len(filled), max(1, int(MOST_MICROBATCHES / mean)))
    return [filled[i * len(filled) // count] for i in range(count)]


POLICY = Policy(place=place, plan=plan, search=StepPlanner)
