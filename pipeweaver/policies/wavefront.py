"""Wavefront plans (Spindle, 2409.03365; spindle.md): what scales badly runs side by side, in waves.

    wavefront          ours: no barriers between levels, searched; the best of this and the others by emulation
    wavefront-levels   the paper's method
    sequential         one task after another on all workers
    task-parallel      whole tasks side by side

*Once per run*: MetaOps from a batch of the sample (the one with most modules, else the middle one), schedules of them,
workers for their slices. Compiled and emulated, the one with the shortest step counts: transfers, reductions over the
holders of every parameter, the optimizer and memory are part of it. Where activations of a whole step do not fit, it is
planned in 2, 3, 4… passes of forward and backward. *Each step*: the items at hand are cut over the workers of every
slice, and passes are made finer where this batch needs more memory than the sample did.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from pipeweaver.costs import Costs
from pipeweaver.data.items import Share
from pipeweaver.model.graph import ModelGraph
from pipeweaver.planner.options import DEFAULTS, PolicyOptions
from pipeweaver.planner.partition import task_modules
from pipeweaver.policies.policy import Place as PlaceRun
from pipeweaver.policies.policy import PlanStep, Policy
from pipeweaver.schedule.compile import compile_plan
from pipeweaver.schedule.groups import static_bytes
from pipeweaver.schedule.ir import Draft, Placement, Prediction
from pipeweaver.wavefront.baselines import sequential, task_parallel
from pipeweaver.wavefront.bind import bind, cluster_of
from pipeweaver.wavefront.draft import draft_of, placement_of, with_idle
from pipeweaver.wavefront.levels import plan_levels
from pipeweaver.wavefront.metagraph import MetaGraph, Schedule
from pipeweaver.wavefront.passes import split_passes
from pipeweaver.wavefront.place import Cluster, Held, MemoryShortage, add_held, place
from pipeweaver.wavefront.plan import plan_wavefront

PASSES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Numbers of passes that are tried, in this order, until one fits into memory."""
EFFORT = 5_000_000
"""Of the searches for all passes together, see `plan_wavefront`, for many MetaOps; few need less."""
MANY = 8
"""MetaOps from which the whole effort is made."""
CLOSE, LONGER = 1.05, 20
"""A search that ends farther above its bound is made again with so many times the effort, where memory suffices: seconds,
once per run."""
SEARCHES = 3
"""Searches with links as fast as inside an island, which most slices stay in; one more expects slow ones."""
HOPELESS = 1.5
"""A placed schedule this much longer than the best emulated one so far is not emulated."""

Planner = Callable[[MetaGraph, Cluster, int], Schedule]
"""A MetaGraph, workers, and the number of passes of which this is one."""


def _searched(number: int, times: int = 1) -> Planner:
    def plan(graph: MetaGraph, cluster: Cluster, passes: int) -> Schedule:
        links = cluster.inside if number < SEARCHES else cluster.across
        few = min(1.0, len(graph.ops) / MANY) ** 2
        effort = round(times * EFFORT * few / passes)
        return plan_wavefront(graph, cluster.workers, links, seed=number, effort=effort)

    return plan


def _levels(graph: MetaGraph, cluster: Cluster, passes: int) -> Schedule:
    return plan_levels(graph, cluster.workers, cluster.inside)


def _task_parallel(graph: MetaGraph, cluster: Cluster, passes: int) -> Schedule:
    return task_parallel(graph, cluster.workers, cluster.inside)


def _sequential(graph: MetaGraph, cluster: Cluster, passes: int) -> Schedule:
    return sequential(graph, cluster.workers, cluster.inside)


PLANNERS: dict[str, tuple[Planner, ...]] = {
    "wavefront": (*map(_searched, range(SEARCHES + 1)), _levels, _task_parallel, _sequential),
    "wavefront-levels": (_levels,),
    "task-parallel": (_task_parallel,),
    "sequential": (_sequential,),
}
"""What each policy emulates to choose from."""
LONGER_PLANNERS: dict[str, tuple[Planner, ...]] = {
    "wavefront": tuple(_searched(number, LONGER) for number in range(SEARCHES + 1))
}
"""What is emulated beside where the best of those is farther above its bound than `CLOSE`."""


def place_with(policy: str) -> PlaceRun:
    """The `place` of a policy by its name in PLANNERS."""

    def place_run(
        graph: ModelGraph,
        workers: int,
        costs: Costs,
        shares: Sequence[Share],
        options: PolicyOptions = DEFAULTS,
        *,
        dtype: str = "float32",
        budget_bytes: int | None = None,
    ) -> Placement:
        share = _typical(shares)
        cluster = replace(cluster_of(costs, workers), memory_bytes=budget_bytes)
        shortage: MemoryShortage | None = None
        tasks = task_modules(graph, shares)
        for passes in PASSES:
            graphs = [bind(graph, part, costs, workers, dtype=dtype) for part in split_passes(graph, share, passes)]
            tried = _Tried()

            def consider(planner: Planner, graphs: Sequence[MetaGraph] = graphs, tried: _Tried = tried) -> None:
                schedules = _placed(graphs, planner, cluster)
                planned_ns = sum(schedule.makespan_ns for schedule in schedules)
                tried.planned(planned_ns, sum(schedule.lower_bound_ns for schedule in schedules))
                if tried.best is not None and planned_ns > HOPELESS * tried.best[0].makespan_ns:
                    return
                placement = with_idle(placement_of(graphs, schedules), tasks, graph)
                draft = draft_of(graph, placement, share, costs, policy=policy)
                predicted = _predicted(graph, share, draft, costs, dtype)
                missing = max(predicted.peak_bytes) - (budget_bytes or 0)
                if budget_bytes is not None and missing > 0:
                    words = _too_much(share, predicted, placement, graph, costs, budget_bytes)
                    raise MemoryShortage(words, missing)
                if tried.best is None or predicted.step_ns < tried.best[0].step_ns:
                    tried.best = predicted, placement

            for planner in PLANNERS[policy]:
                try:
                    consider(planner)
                except MemoryShortage as error:
                    shortage = error
            if tried.best is not None and not tried.is_close:
                for planner in LONGER_PLANNERS.get(policy, ()):
                    with suppress(MemoryShortage):
                        consider(planner)
            if tried.best is not None:
                return tried.best[1]
            if passes >= len(share.items):
                break
        assert shortage is not None
        raise shortage

    return place_run


def plan_with(policy: str) -> PlanStep:
    """The `plan` of a policy by its name in PLANNERS."""

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
        """Parts for the items at hand. Raises ValueError if the budget cannot be kept."""
        least: Prediction | None = None
        for finer in PASSES:
            draft = draft_of(
                graph, placement, share, costs, finer=finer, forward_only=forward_only, policy=policy, seed=seed,
                rounds=rounds,
            )  # fmt: skip
            if budget_bytes is None:
                return draft
            predicted = _predicted(graph, share, draft, costs, dtype)
            if max(predicted.peak_bytes) <= budget_bytes:
                return draft
            if least is None or max(predicted.peak_bytes) < max(least.peak_bytes):
                least = predicted
            if finer >= len(share.items):
                break
        assert least is not None and budget_bytes is not None
        raise ValueError(_too_much(share, least, placement, graph, costs, budget_bytes))

    return plan


POLICIES = {name: Policy(place=place_with(name), plan=plan_with(name)) for name in PLANNERS}


class _Tried:
    """What was emulated with some number of passes: the best so far, and how far planning is from its bound."""

    def __init__(self) -> None:
        self.best: tuple[Prediction, Placement] | None = None
        self._shortest_ns, self._bound_ns = float("inf"), 0

    def planned(self, makespan_ns: int, bound_ns: int) -> None:
        self._shortest_ns, self._bound_ns = min(self._shortest_ns, makespan_ns), max(self._bound_ns, bound_ns)

    @property
    def is_close(self) -> bool:
        return self._shortest_ns <= CLOSE * self._bound_ns


def _placed(graphs: Sequence[MetaGraph], planner: Planner, cluster: Cluster) -> list[Schedule]:
    """A placed schedule for every pass; parameters that one pass put somewhere are there in the others."""
    held: Held = {}
    schedules = []
    for graph in graphs:
        schedules.append(place(graph, planner(graph, cluster, len(graphs)), cluster, held=held))
        held = add_held(graph, schedules[-1], held)
    return schedules


def _typical(shares: Sequence[Share]) -> Share:
    """The share with most modules and tasks; among those, the one in the middle by tokens."""
    filled = [share for share in shares if share.items]
    if not filled:
        raise ValueError("there is nothing to plan: the sample of batches is empty")
    modules = [len({(item.task, item.module) for item in share.items}) for share in filled]
    widest = [share for share, count in zip(filled, modules, strict=True) if count == max(modules)]
    widest.sort(key=lambda share: sum(item.sizes["tokens"] for item in share.items))
    return widest[len(widest) // 2]


def _predicted(graph: ModelGraph, share: Share, draft: Draft, costs: Costs, dtype: str) -> Prediction:
    predicted = compile_plan(graph, share, draft, costs, dtype=dtype).prediction
    assert predicted is not None
    return predicted


def _too_much(
    share: Share, predicted: Prediction, placement: Placement, graph: ModelGraph, costs: Costs, budget_bytes: int
) -> str:
    worker = max(range(placement.workers), key=lambda worker: predicted.peak_bytes[worker])
    static = static_bytes(graph, placement, costs)[worker]
    return (
        f"no wavefront plan of step {share.step} fits: worker {worker} needs {predicted.peak_bytes[worker]:,} bytes even in "
        f"the most passes that its samples allow, {predicted.peak_bytes[worker] - budget_bytes:,} more than the budget of "
        f"{budget_bytes:,}; {static:,} of them are parameters, gradients and optimizer state; use more workers, smaller "
        f"batches, or a larger budget (workers.memory)"
    )
