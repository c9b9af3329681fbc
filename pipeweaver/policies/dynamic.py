"""Ours: every module cut for itself, images in parts, stages interleaved for the batch at hand.

*Once per run*: each module in K chunks per worker, so that every worker has a share of every module
(pipeweaver.md, section 1). K is chosen by scheduling a sample of real batches, transfers and the cost of small
parts included, module by module until nothing gets better.

*Each step*: encoders' items in parts of at most B, chosen by scheduling the batch with each of a few B; then the
order of the stages by the greedy dual queue and `rounds` of search, within the memory budget. Two workers, two
microbatches with two images each in parts of one; chunks 0 and 1 are vision, 2 and 3 language:

    worker 0   0F0 0F1 0F2 0F3 2F0 2F1 2B0 2B1 0B1 0B0 0B3 0B2
    worker 1   1F0 1F1 1F2 1F3 3F0 3B0 3F1 3B1 1B1 1B0 1B3 1B2

Memory is what the compiled plan needs: a draft that the compiler finds above the budget is planned again with
so much less. The last resort is one microbatch after the other; if that does not fit either, nothing does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeweaver.costs import Costs
from pipeweaver.data.items import Share
from pipeweaver.model.graph import ModelGraph
from pipeweaver.planner.instance import Instance, build_instance
from pipeweaver.planner.interleave import MemoryLimitError
from pipeweaver.planner.options import DEFAULTS, PolicyOptions
from pipeweaver.planner.partition import (
    by_modality,
    encoders,
    even_out,
    laid_out,
    layer_costs,
    modality_cuts,
    task_modules,
)
from pipeweaver.planner.parts import Parts, cut_parts, single_item_costs
from pipeweaver.planner.search import search
from pipeweaver.policies.policy import Policy
from pipeweaver.schedule.compile import compile_plan
from pipeweaver.schedule.groups import layers_on
from pipeweaver.schedule.ir import Draft, Placement, Stage

MOST_CHUNKS = 4
"""Largest K that is tried."""
PART_COUNTS = (1, 2, 3, 4, 6)
"""Parts that the fullest microbatch is cut into, tried in this order."""
LEAST_GAIN = 0.005
"""What a finer cut must bring: more stages mean more actions, whose own time is in no cost."""
MOST_MICROBATCHES = 32
"""K is chosen on so many microbatches of the sample, in whole shares, evenly spread; on one share at least."""
MOST_ATTEMPTS = 6
"""Plans that are made ever smaller to come down to the memory budget, before the last resort."""


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
    """Chunks of even cost, `options.chunks_per_worker` of them where set, else the K that schedules the sample best."""
    per_layer = layer_costs(graph, costs, shares)
    tasks = task_modules(graph, shares)
    sample = _sample(shares)

    def score(placement: Placement) -> int:
        problems = (_Problem(graph, placement, share, costs, options, dtype) for share in sample)
        return sum(_best_parts(problem).makespan_ns for problem in problems)

    def placed(chunks: Mapping[str, int]) -> Placement:
        return by_modality(graph, workers, per_layer, tasks, chunks)

    most = {
        name: min(MOST_CHUNKS, len(module.layers) // workers)
        for name, module in graph.by_name.items()
        if name not in options.chunks_per_worker
    }
    fixed = dict(options.chunks_per_worker)
    chosen = fixed | dict.fromkeys(most, 1)
    best = placed(chosen)
    best_score = score(best)

    def consider(chunks: dict[str, int]) -> bool:
        nonlocal chosen, best, best_score
        placement = placed(chunks)
        found = score(placement)
        if found >= best_score * (1 - LEAST_GAIN):
            return False
        chosen, best, best_score = chunks, placement, found
        return True

    for k in range(2, max(most.values(), default=1) + 1):
        consider(fixed | {name: max(1, min(k, limit)) for name, limit in most.items()})
    improved = len(most) > 1
    while improved:
        improved = False
        for name, limit in most.items():
            for k in range(1, limit + 1):
                if k != chosen[name]:
                    improved |= consider(chosen | {name: k})
    # Chunks even in each module may still add up unevenly: the last layer of every module is on the same worker.
    even = even_out(modality_cuts(graph, workers, per_layer, chosen), per_layer, workers)
    placement = laid_out(graph, workers, even, per_layer, tasks)
    return placement if placement != best and score(placement) < best_score else best


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
    """The best order found for the best parts found; raises ValueError if the budget cannot be kept."""
    problem = _Problem(graph, placement, share, costs, options, dtype, forward_only)

    def draft(choice: _Choice, orders: Sequence[Sequence[int]]) -> Draft:
        return Draft(
            placement=placement,
            parts=choice.parts,
            order=tuple(tuple(choice.stages[i] for i in order) for order in orders),
            forward_only=forward_only,
            policy="dynamic",
            seed=seed,
            rounds=rounds,
        )

    def best(limits: Sequence[int] | None) -> Draft:
        choice = _best_parts(problem, limits)
        schedule = search(choice.instance, limits=limits, seed=seed, rounds=rounds)
        return draft(choice, schedule.orders(choice.instance))

    def peaks(made: Draft) -> tuple[int, ...]:
        prediction = compile_plan(graph, share, made, costs, dtype=dtype).prediction
        assert prediction is not None
        return prediction.peak_bytes

    if budget_bytes is None:
        return best(None)
    static = [
        sum(costs.static_bytes(layer) for layer in layers_on(graph, placement, worker))
        for worker in range(placement.workers)
    ]
    limits = [budget_bytes - num_bytes for num_bytes in static]
    for _ in range(MOST_ATTEMPTS):
        try:
            found = best(limits)
        except MemoryLimitError:
            break
        excess = [peak - budget_bytes for peak in peaks(found)]
        if max(excess) <= 0:
            return found
        limits = [limit - max(0, over) for limit, over in zip(limits, excess, strict=True)]
    in_turn = [draft(choice, _one_after_the_other(choice.instance)) for choice in _choices(problem)]
    needed = [peaks(made) for made in in_turn]
    least = min(range(len(needed)), key=lambda i: max(needed[i]))
    if max(needed[least]) > budget_bytes:
        worker = max(range(placement.workers), key=lambda w: needed[least][w])
        raise ValueError(
            f"no plan of step {share.step} fits: worker {worker} needs {needed[least][worker]:,} bytes even with one "
            f"microbatch at a time, {needed[least][worker] - budget_bytes:,} more than the budget of {budget_bytes:,}; "
            f"{static[worker]:,} of them are parameters, gradients and optimizer state; use more workers, smaller "
            f"microbatches, or a larger budget"
        )
    return in_turn[least]


@dataclass(frozen=True)
class _Problem:
    """What a draft is made from."""

    graph: ModelGraph
    placement: Placement
    share: Share
    costs: Costs
    options: PolicyOptions
    dtype: str
    forward_only: bool = False


@dataclass(frozen=True, kw_only=True)
class _Choice:
    """Parts, and the problem of ordering their stages."""

    parts: Parts
    stages: tuple[Stage, ...]
    instance: Instance
    makespan_ns: int = 0


def _best_parts(problem: _Problem, limits: Sequence[int] | None = None) -> _Choice:
    """The parts with the shortest schedule, no finer than pays. Raises MemoryLimitError if no choice fits."""
    best: _Choice | None = None
    misses = 0
    refusal: MemoryLimitError | None = None
    for choice in _choices(problem):
        try:
            found = search(choice.instance, limits=limits).makespan_ns
        except MemoryLimitError as error:
            refusal = error
            continue
        if best is None or found < best.makespan_ns * (1 - LEAST_GAIN):
            best = _Choice(parts=choice.parts, stages=choice.stages, instance=choice.instance, makespan_ns=found)
            misses = 0
        else:
            misses += 1
        if misses == 2:
            break
    if best is None:
        assert refusal is not None
        raise refusal
    return best


def _choices(problem: _Problem) -> Iterator[_Choice]:
    """From coarse to fine: the fullest microbatch of each encoder in 1, 2, 3… parts, where B is not set."""
    graph, placement, share = problem.graph, problem.placement, problem.share
    costs, options = problem.costs, problem.options
    item_costs = single_item_costs(graph, share, costs) if options.even_parts == "cost" else None
    fullest = {name: 0 for name in encoders(graph) if name not in options.items_per_part}
    for microbatch in share.microbatches:
        for name in fullest:
            fullest[name] = max(fullest[name], sum(share.items[i].module == name for i in microbatch))
    tried: list[dict[str, int]] = []
    for count in PART_COUNTS:
        at_most = options.items_per_part | {name: -(-most // count) for name, most in fullest.items() if most}
        if at_most in tried:
            continue
        tried.append(at_most)
        parts = cut_parts(graph, placement, share, at_most, item_costs)
        stages, instance = build_instance(
            graph, placement, parts, share, costs, forward_only=problem.forward_only, dtype=problem.dtype
        )
        yield _Choice(parts=parts, stages=stages, instance=instance)


def _one_after_the_other(instance: Instance) -> list[list[int]]:
    """Every microbatch in the order of its stage numbers, one after the other."""
    orders: list[list[int]] = [[] for _ in range(instance.num_workers)]
    for m in range(instance.num_microbatches):
        for ends in (instance.forward_range, instance.backward_range):
            for stage in range(int(ends[m]), int(ends[m + 1])):
                orders[int(instance.worker[stage])].append(stage)
    return orders


def _sample(shares: Sequence[Share]) -> list[Share]:
    filled = [share for share in shares if share.items]
    mean = sum(len(share.microbatches) for share in filled) / len(filled)
    count = min(len(filled), max(1, int(MOST_MICROBATCHES / mean)))
    return [filled[i * len(filled) // count] for i in range(count)]


POLICY = Policy(place=place, plan=plan)
