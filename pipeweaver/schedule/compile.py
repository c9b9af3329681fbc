"""From a policy's draft to a plan: every worker's list of actions, as projections of one total order.

Stages are timed under the draft's orders. A transfer is a single event, at the end of the stage that
produces its tensor; every worker posts its transfers in the order of these events, so both ends queue
them alike. The receiver posts before the stage that it runs at that time (`lead` stages earlier still, but
never ahead of a transfer that it has to post first), so that data moves while it computes. Waits stand
where the data is needed. Hence no deadlock: take the earliest transfer in the total order that never
completes; its posts and all posts queued before it precede, at both ends, everything that could wait for it.

Example, one image part and one text part on two workers:

    worker 0   Load 0F0, 0F0, post send, ...              wait gradient, 0B0, ...
    worker 1   post receive, Load 1F0, wait, 1F0, 1B0, post send, ...
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from pipeweaver.costs import Costs, with_strategies
from pipeweaver.data.items import Share
from pipeweaver.model.graph import ModelGraph
from pipeweaver.schedule.actions import build_actions, place_copies
from pipeweaver.schedule.bounds import lower_bound_ns
from pipeweaver.schedule.connect import Ints
from pipeweaver.schedule.convert import records
from pipeweaver.schedule.emulate import FlatTimeline, Queue, emulate_flat
from pipeweaver.schedule.flat import (
    COMPUTE,
    NORM,
    REDUCE,
    STEP,
    FlatActions,
    FlatEdges,
    FlatPlan,
    FlatPrediction,
    FlatStages,
    FlatTransfers,
    ints,
    starts,
)
from pipeweaver.schedule.groups import layers_on, parameter_groups, static_bytes
from pipeweaver.schedule.ir import Draft, ParameterGroup, Placement, Plan, Strategy
from pipeweaver.schedule.memory import flat_peak_bytes
from pipeweaver.schedule.stages import (
    Orders,
    StageGraph,
    StepStages,
    UnitCosts,
    orders_of,
    stage_graph,
    stage_of,
    unit_costs,
)
from pipeweaver.schedule.timing import OrderError, StageTimes, time_stages
from pipeweaver.schedule.transfers import Posts, step_transfers, tensor_names

Strategies = tuple[tuple[tuple[Strategy, ...], ...], ...]
"""Of every layer of every part of every chunk; none means that all is kept."""


def compile_plan(
    graph: ModelGraph,
    share: Share,
    draft: Draft,
    costs: Costs,
    *,
    dtype: str = "float32",
    lead: int = 1,
    queue: Queue = "pair",
) -> Plan:
    """The plan of one replica, with its prediction (the replica emulated alone).

    `dtype` is what tensors between chunks are in. `lead` is how many stages ahead of need a receive is posted.
    Raises ValueError if the draft's orders wait for each other in a circle, or lack a stage.
    """
    step = StepStages(graph, draft.placement, share, draft.parts, costs, dtype=dtype, forward_only=draft.forward_only)
    return records(compile_flat(step, draft, lead=lead, queue=queue))


def compile_flat(step: StepStages, draft: Draft, *, lead: int = 1, queue: Queue = "pair") -> FlatPlan:
    """The same as flat arrays, from stages that are known already."""
    orders = orders_of(step, draft)
    return completed(step, _emulated(_bare(step, draft, orders, lead, None), orders, queue))


class Emulated(NamedTuple):
    """A step of one replica, emulated alone: times of actions and transfers, and the most that each worker holds.
    `bare` is the plan as far as its emulation takes it, of the stages in these `orders`."""

    step_ns: int
    makespan_ns: int
    peak_bytes: tuple[int, ...]
    timeline: FlatTimeline
    bare: FlatPlan
    orders: Orders


def emulate_orders(
    step: StepStages,
    orders: Orders,
    *,
    strategies: Strategies = (),
    costs: UnitCosts | None = None,
    lead: int = 1,
    queue: Queue = "pair",
) -> Emulated:
    """What `compile_flat` would predict of a draft with these orders and strategies, without the plan: for those who
    ask again and again. `costs` are those of the units under their strategies, where they are known already. Raises
    ValueError as it does."""
    return _emulated(_bare(step, _draft(step, strategies), orders, lead, costs), orders, queue)


def completed(step: StepStages, found: Emulated) -> FlatPlan:
    """The plan that was emulated, with order, edges, prediction and bound."""
    orders = found.orders
    # What memory strategies cost is no work that has to be done.
    kept = stage_graph(step, step.costs, orders.split)
    prediction = FlatPrediction(
        *found.timeline,
        makespan_ns=found.makespan_ns,
        step_ns=found.step_ns,
        peak_bytes=found.peak_bytes,
        useful_ns=sum(step.work.values()),
        lower_bound_ns=lower_bound_ns(kept, orders),
    )
    return replace(found.bare, order=_flat_stages(step, orders), edges=_flat_edges(step), prediction=prediction)


def _draft(step: StepStages, strategies: Strategies) -> Draft:
    return Draft(
        placement=step.placement,
        parts=step.parts,
        order=(),
        strategies=strategies,
        forward_only=step.forward_only,
        policy="",
        seed=0,
        rounds=0,
    )


def _bare(step: StepStages, draft: Draft, orders: Orders, lead: int, known: UnitCosts | None) -> FlatPlan:
    """A plan without order, edges and prediction: all that its emulation takes. `known`: what its units cost."""
    strategies, used = _strategies(step, draft)
    costs = known
    if costs is None:
        costs = step.costs if not draft.strategies else _priced(step, strategies, used)
    graph = stage_graph(step, costs, orders.split)
    times = _time(step, draft, graph, orders)
    transfers, posts = step_transfers(step, orders, times, lead)
    ending = _ending_of(step, draft.forward_only)
    none = ints([])
    return FlatPlan(
        head=_head(step, draft, ending),
        names=tuple(tensor_names(step)),
        loads=step.wiring.loads,
        strategies=strategies,
        order=FlatStages(none, none, none, none),
        edges=FlatEdges(*[none] * len(FlatEdges._fields)),
        transfers=transfers,
        actions=_actions(step, costs, graph, orders, times, transfers, posts, ending, strategies, used),
    )


def _emulated(flat: FlatPlan, orders: Orders, queue: Queue) -> Emulated:
    (timeline,) = emulate_flat([flat], queue)
    is_stage = flat.actions.kind == COMPUTE
    return Emulated(
        step_ns=int(timeline.end_ns.max(initial=0)),
        makespan_ns=int(timeline.end_ns[is_stage].max(initial=0)),
        peak_bytes=flat_peak_bytes(flat),
        timeline=timeline,
        bare=flat,
        orders=orders,
    )


def _time(step: StepStages, draft: Draft, graph: StageGraph, orders: Orders) -> StageTimes:
    try:
        return time_stages(graph, orders)
    except OrderError as error:
        at = ", ".join(
            f"worker {worker} at {stage_of(step, stage, orders.split)}"
            for worker, stage in enumerate(error.stuck)
            if stage is not None
        )
        raise ValueError(f"the order of policy {draft.policy or '(unnamed)'} has a circle of waiting: {at}") from None


def _actions(
    step: StepStages,
    costs: UnitCosts,
    graph: StageGraph,
    orders: Orders,
    times: StageTimes,
    transfers: FlatTransfers,
    posts: Posts,
    ending: _Ending,
    strategies: tuple[tuple[Strategy, ...], ...],
    used: Ints,
) -> FlatActions:
    units = step.units
    loads = np.array([bool(names) for names in step.wiring.loads], np.bool_)[units.chunk]
    offloads = np.array(["offload" in chosen for chosen in strategies], np.bool_)[used]
    settled, returns = place_copies(
        orders.start, orders.stage, times.start_ns, times.end_ns, offloads, costs.offload_ns
    )
    columns = build_actions(
        orders,
        times.end_ns,
        graph.duration_ns,
        step.edges,
        step.grad,
        step.is_local,
        step.is_whole,
        step.edge_bytes,
        step.post_ns,
        transfers,
        posts,
        units.chunk,
        units.part,
        step.learns,
        loads,
        costs,
        step.output_bytes,
        used,
        offloads,
        settled,
        returns,
        ending.start,
        ending.rows,
    )
    return FlatActions(*columns)


def _flat_edges(step: StepStages) -> FlatEdges:
    names, edges, units = tensor_names(step), step.edges, step.units
    inlets = [inlet for of in step.wiring.inlets for inlet in of]
    static = ints([(names[i.output], names[i.input], names[i.dtype], i.width, i.grad) for i in inlets])  # type: ignore[misc]
    output, name, dtype, width, grad = static.reshape(-1, 5)[edges.inlet].T.copy()
    return FlatEdges(
        source_chunk=units.chunk[edges.source],
        source_part=units.part[edges.source],
        destination_chunk=units.chunk[edges.destination],
        destination_part=units.part[edges.destination],
        output=output,
        input=name,
        dtype=dtype,
        width=width,
        grad=grad,
        run_start=edges.run_start,
        runs=edges.runs,
    )


def _flat_stages(step: StepStages, orders: Orders) -> FlatStages:
    third, unit = np.divmod(orders.stage, max(1, len(step)))
    if not len(orders.stage):
        return FlatStages(orders.start, orders.stage, orders.stage, orders.stage)
    phase = np.where(third == 0, 0, np.where(third == 2, 3, 1 + orders.split[unit]))
    return FlatStages(orders.start, step.units.chunk[unit], step.units.part[unit], phase)


def _strategies(step: StepStages, draft: Draft) -> tuple[tuple[tuple[Strategy, ...], ...], Ints]:
    """The distinct strategies, none first, and the number of each unit's. Without a backward there is nothing to save."""
    table: dict[tuple[Strategy, ...], int] = {(): 0}
    used = np.zeros(len(step), np.int64)
    if draft.strategies:
        for unit, (chunk, part) in enumerate(step.units.pairs):
            if step.learns[unit]:
                used[unit] = table.setdefault(draft.strategies[chunk][part], len(table))
    return tuple(table), used


def _priced(step: StepStages, strategies: tuple[tuple[Strategy, ...], ...], used: Ints) -> UnitCosts:
    """Costs of the units under their strategies."""
    return unit_costs(
        [
            with_strategies(cost, strategies[number], step.layer_strategies(unit) if number else ())
            for unit, (cost, number) in enumerate(zip(step.stage_costs, used.tolist(), strict=True))
        ]
    )


def _head(step: StepStages, draft: Draft, ending: _Ending) -> Plan:
    share = step.share
    return Plan(
        step=share.step,
        replica=share.replica,
        num_replicas=share.num_replicas,
        policy=draft.policy,
        seed=draft.seed,
        rounds=draft.rounds,
        forward_only=draft.forward_only,
        items=share.items,
        links=share.links,
        records=share.records,
        placement=draft.placement,
        parts=draft.parts,
        order=(),
        edges=(),
        transfers=(),
        groups=ending.groups,
        normalisers=share.normalisers,
        actions=(),
        static_bytes=ending.static_bytes,
        costs=step.pricing.source,
    )


@dataclass(frozen=True, kw_only=True)
class _Ending:
    """What depends on the placement alone: parameter groups, what workers hold throughout, and the rows that end
    their lists (reductions in the order of the groups, the norm, the optimizer's step) as kind, group, duration, from
    `start[w]` on."""

    groups: tuple[ParameterGroup, ...]
    static_bytes: tuple[int, ...]
    start: Ints
    rows: Ints


def _ending_of(step: StepStages, forward_only: bool) -> _Ending:
    key = (id(step.graph), id(step.pricing), step.placement, step.share.num_replicas, forward_only)
    if key not in _endings:
        found = _ending(step.graph, step.placement, step.pricing, step.share.num_replicas, forward_only)
        _endings[key] = (step.graph, step.pricing, found)  # both are kept, so that no others get their ids
        if len(_endings) > _MOST_ENDINGS:
            _endings.popitem(last=False)
    return _endings[key][2]


_MOST_ENDINGS = 64
_endings: OrderedDict[tuple[int, int, Placement, int, bool], tuple[ModelGraph, Costs, _Ending]] = OrderedDict()


def _ending(graph: ModelGraph, placement: Placement, costs: Costs, num_replicas: int, forward_only: bool) -> _Ending:
    groups = parameter_groups(graph, placement, costs)
    held = [layers_on(graph, placement, worker) for worker in range(placement.workers)]
    rows: list[tuple[int, ...]] = []
    counts = []
    for worker, layers in enumerate(held):
        before = len(rows)
        if not forward_only:
            for number, group in enumerate(groups):
                members = len(group.holders) * num_replicas
                if worker in group.holders and members > 1:
                    rows.append((REDUCE, number, costs.reduce_ns(members, group.num_bytes)))
            workers = placement.workers * num_replicas
            rows.append((NORM, 0, costs.reduce_ns(workers, 8) if workers > 1 else 0))
            rows.append((STEP, 0, sum(costs.optimizer_ns(layer) for layer in layers)))
        counts.append(len(rows) - before)
    return _Ending(
        groups=groups,
        static_bytes=static_bytes(graph, placement, costs),
        start=starts(counts),
        rows=np.array(rows, np.int64).reshape(-1, 3),
    )
