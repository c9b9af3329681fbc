"""Where the bubble of a plan is: shares that add up to it, in ns of worker time.

The bubble of P workers over a makespan M is P M - W, with W the useful work (design.md). Each worker's time is what it
computes or loads, and what it idles. The worker that is busy longest, b, decides; so

    small parts   computing beyond W, recomputation aside: parts that are smaller than the most efficient size
    loading       bringing pixels and tokens to the device
    imbalance     what the others compute and load less than b
    fill          P times what b idles before its first backward
    drain         P times what b idles after its last forward
    memory        recomputation; and P times what b idles waiting for copies to and from the host, or where its next
                  forward could have run but for the budget
    dependency    P times the rest of what b idles: stages of others, and transfers, that come late

Example, 1F1B on P equal workers, forward f and backward b: fill + drain = P (P - 1) (f + b), all else is 0. What is
both before the first backward and after the last forward counts as fill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipeweaver.costs import Costs
from pipeweaver.data.items import linked
from pipeweaver.schedule.flat import FlatPlan
from pipeweaver.schedule.ir import Compute, Load, Plan, Post, Settle, Span, Stage
from pipeweaver.schedule.memory import allocations, held_bytes


class Bubble(NamedTuple):
    """Shares of the bubble of one replica's plan, ns of worker time. They add up to `total_ns`."""

    small_parts: int
    loading: int
    imbalance: int
    fill: int
    drain: int
    memory: int
    dependency: int

    @property
    def total_ns(self) -> int:
        return sum(self)


class Explanation(NamedTuple):
    """Of the plans of a step: each replica's bubble, and the makespan without each of the policy's levers, None where
    no plan fits the memory budget without it."""

    bubbles: tuple[Bubble, ...]
    without: tuple[tuple[str, int | None], ...]


def longest_ns(plans: Sequence[Plan | FlatPlan]) -> int:
    """The makespan of a step: that of its slowest replica."""
    return max((plan.prediction.makespan_ns for plan in plans if plan.prediction is not None), default=0)


def busiest(plan: Plan) -> int:
    """The worker that computes and loads longest; of equals the first."""
    busy = [_busy_ns(plan, worker) for worker in range(plan.placement.workers)]
    return busy.index(max(busy))


def explain(plan: Plan, costs: Costs, budget_bytes: int | None = None) -> Bubble:
    """The bubble of a predicted plan, share by share. `budget_bytes` is what a worker may hold, as it was planned with.

    A bubble is that of a training step: forward-only plans have none.
    """
    assert plan.prediction is not None and not plan.forward_only
    workers, makespan = plan.placement.workers, plan.prediction.makespan_ns
    busy = [_busy_ns(plan, worker) for worker in range(workers)]
    loading = sum(
        span.end_ns - span.start_ns
        for worker in range(workers)
        for action, span in _actions(plan, worker)
        if isinstance(action, Load)
    )
    recomputing = recompute_ns(plan, costs)
    slowest = busiest(plan)
    fill, drain, memory, dependency = _idle(plan, slowest, budget_bytes)
    assert fill + drain + memory + dependency == makespan - busy[slowest]
    return Bubble(
        small_parts=sum(busy) - loading - recomputing - plan.prediction.useful_ns,
        loading=loading,
        imbalance=sum(busy[slowest] - own for own in busy),
        fill=workers * fill,
        drain=workers * drain,
        memory=workers * memory + recomputing,
        dependency=workers * dependency,
    )


def recompute_ns(plan: Plan, costs: Costs) -> int:
    """What the plan's memory strategies add to its backwards, all workers together."""
    sources = linked(plan.items, plan.links)
    total = 0
    for worker in range(plan.placement.workers):
        for action in plan.actions[worker]:
            if isinstance(action, Compute) and any(strategy != "keep" for strategy in action.strategies):
                chunk = plan.placement.chunks[action.stage.chunk]
                items = plan.parts[action.stage.chunk][action.stage.part].items
                layers = costs.strategies(chunk, [plan.items[i] for i in items], [sources[i] for i in items])
                total += sum(known[s].extra_ns for s, known in zip(action.strategies, layers, strict=True))
    return total


def _actions(plan: Plan, worker: int) -> list[tuple[object, Span]]:
    assert plan.prediction is not None
    return list(zip(plan.actions[worker], plan.prediction.spans[worker], strict=True))


def _busy_ns(plan: Plan, worker: int) -> int:
    return sum(
        span.end_ns - span.start_ns for action, span in _actions(plan, worker) if isinstance(action, Compute | Load)
    )


def _idle(plan: Plan, worker: int, budget_bytes: int | None) -> tuple[int, int, int, int]:
    """(fill, drain, memory, dependency): what a worker idles up to the makespan, ns."""
    assert plan.prediction is not None
    makespan = plan.prediction.makespan_ns
    found = _actions(plan, worker)
    busy = [(i, action, span) for i, (action, span) in enumerate(found) if isinstance(action, Compute | Load)]
    stages = [(action.stage, span) for _, action, span in busy if isinstance(action, Compute)]
    # Without a backward of its own a worker is filled when its first stage begins.
    backwards = [span.start_ns for stage, span in stages if stage.phase in "BI"]
    first_backward = min(backwards, default=min((span.start_ns for _, span in stages), default=makespan))
    last_forward = max((span.end_ns for stage, span in stages if stage.phase == "F"), default=0)
    fill = drain = memory = dependency = 0
    held_back = _held_back(plan, worker, budget_bytes) if budget_bytes is not None else {}
    ends = [(-1, 0), *((i, span.end_ns) for i, _, span in busy), (len(found), makespan)]
    begins = [*(span.start_ns for _, _, span in busy), makespan]
    for (before, start), (after, _), end in zip(ends, ends[1:], begins, strict=False):
        end = max(start, end)
        copies = sum(
            max(0, span.end_ns - max(start, span.start_ns))
            for action, span in found[before + 1 : after]
            if isinstance(action, Settle)
        )
        # Idle from when on a forward could have run, had there been memory.
        waiting = max(copies, end - max(start, held_back[after])) if after in held_back else copies
        memory += waiting
        end -= waiting
        filling = max(0, min(end, first_backward) - start)
        draining = max(0, end - max(start, last_forward, min(end, first_backward)))
        fill, drain = fill + filling, drain + draining
        dependency += end - start - filling - draining
    return fill, drain, memory, dependency


def _held_back(plan: Plan, worker: int, budget_bytes: int) -> dict[int, int]:
    """Action numbers of backwards before which the worker's next forward was ready but did not fit the budget, and from
    when on it was ready, ns."""
    ready = _ready_ns(plan)
    after, _ = held_bytes(plan, worker)
    actions = plan.actions[worker]
    found: dict[int, int] = {}
    following: int | None = None
    needed = 0
    for i in range(len(actions) - 1, -1, -1):
        action = actions[i]
        if isinstance(action, Compute) and action.stage.phase == "F":
            following, needed = i, 0
        if following is not None and (i == following or isinstance(action, Load | Post)):
            own = isinstance(action, Compute) or _is_for(plan, action, actions[following])
            needed += sum(size for buffer, size in allocations(action) if buffer.kind != "host") if own else 0
            needed += action.workspace_bytes if isinstance(action, Compute) else 0
        if isinstance(action, Compute) and action.stage.phase != "F" and following is not None and i > 0:
            forward = actions[following]
            assert isinstance(forward, Compute)
            if after[i - 1] + needed > budget_bytes:
                found[i] = ready[forward.stage]
    return found


def _is_for(plan: Plan, action: object, forward: object) -> bool:
    """Whether a load or the post of a receive belongs to a forward."""
    assert isinstance(forward, Compute)
    if isinstance(action, Load):
        return (action.chunk, action.part) == (forward.stage.chunk, forward.stage.part)
    assert isinstance(action, Post)
    transfer = plan.transfers[action.transfer]
    destination = plan.edges[transfer.edge].destination
    return transfer.phase == "F" and destination == (forward.stage.chunk, forward.stage.part)


def _ready_ns(plan: Plan) -> dict[Stage, int]:
    """When all that each forward needs is there: its producers' ends, and the time that their tensors travel."""
    assert plan.prediction is not None
    ends: dict[Stage, int] = {}
    for worker in range(plan.placement.workers):
        for action, span in _actions(plan, worker):
            if isinstance(action, Compute):
                ends[action.stage] = span.end_ns
    travel = {transfer.edge: transfer.duration_ns for transfer in plan.transfers if transfer.phase == "F"}
    ready = {stage: 0 for stage in ends if stage.phase == "F"}
    for number, edge in enumerate(plan.edges):
        destination = Stage(*edge.destination, "F")
        source = Stage(*edge.source, "F")
        if destination in ready and source in ends:
            ready[destination] = max(ready[destination], ends[source] + travel.get(number, 0))
    return ready
