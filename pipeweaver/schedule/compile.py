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

from typing import Literal

import msgspec

from pipeweaver.costs import Costs
from pipeweaver.data.items import Share, linked
from pipeweaver.model.graph import ModelGraph, positions
from pipeweaver.schedule.bounds import lower_bound_ns
from pipeweaver.schedule.connect import covers, is_whole
from pipeweaver.schedule.emulate import Queue, emulate, prediction
from pipeweaver.schedule.groups import layers_on, parameter_groups
from pipeweaver.schedule.ir import (
    ITEM_SIZES,
    Action,
    Allocation,
    Buffer,
    Compute,
    Draft,
    Free,
    Load,
    Norm,
    ParameterGroup,
    Plan,
    Post,
    Reduce,
    Stage,
    Step,
    Transfer,
    Wait,
)
from pipeweaver.schedule.stages import StepStages
from pipeweaver.schedule.timing import OrderError, StageTimes, time_stages

Direction = Literal["F", "B"]


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
    step = StepStages(graph, share, draft, costs, dtype)
    times = _time(step, draft)
    transfers, posts = _transfers(step, times, lead)
    groups = parameter_groups(graph, draft.placement, costs)
    outputs = _Outputs(step)
    plan = Plan(
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
        order=draft.order,
        edges=step.edges,
        transfers=tuple(transfers),
        groups=groups,
        normalisers=share.normalisers,
        actions=tuple(
            (
                *_worker_actions(step, outputs, worker, times, transfers, posts),
                *_ending(step, worker, groups, share.num_replicas),
            )
            for worker in range(draft.placement.workers)
        ),
        static_bytes=tuple(
            sum(costs.static_bytes(layer) for layer in layers_on(graph, draft.placement, worker))
            for worker in range(draft.placement.workers)
        ),
        costs=costs.source,
    )
    useful = useful_ns(graph, share, costs)
    bound = lower_bound_ns(draft.order, step.duration_ns, step.successors, step.number)
    return _with_prediction(plan, queue, useful, bound)


def useful_ns(graph: ModelGraph, share: Share, costs: Costs) -> int:
    """W of a share: forward and backward of all items at each module's most efficient size."""
    sources = linked(share.items, share.links)
    total = 0
    for module in graph.modules:
        chosen = [i for i, item in enumerate(share.items) if item.module == module.name]
        if chosen:
            total += costs.useful_ns(module.name, [share.items[i] for i in chosen], [sources[i] for i in chosen])
    return total


def _time(step: StepStages, draft: Draft) -> StageTimes:
    orders = [[step.number[stage] for stage in order] for order in draft.order]
    try:
        return time_stages(orders, step.duration_ns, step.successors)
    except OrderError as error:
        at = ", ".join(
            f"worker {worker} at {step.stages[stage]}" for worker, stage in enumerate(error.stuck) if stage is not None
        )
        raise ValueError(f"the order of policy {draft.policy or '(unnamed)'} has a circle of waiting: {at}") from None


def _transfers(step: StepStages, times: StageTimes, lead: int) -> tuple[list[Transfer], list[list[tuple[int, int]]]]:
    """All transfers in their total order, and per worker its posts as (slot, transfer), in that order.

    Slot k stands before the k-th stage of the worker's order.
    """
    chunks = step.draft.placement.chunks
    rank = {stage: i for i, stage in enumerate(times.completed)}
    slot = {step.number[stage]: k for order in step.draft.order for k, stage in enumerate(order)}
    worker_ranks = [[rank[step.number[stage]] for stage in order] for order in step.draft.order]
    events: list[tuple[int, int, Direction, int, int]] = []
    for i, edge in enumerate(step.edges):
        if not step.is_local[i]:
            sender, receiver = chunks[edge.source[0]].worker, chunks[edge.destination[0]].worker
            events.append((rank[step.number[Stage(*edge.source, "F")]], i, "F", sender, receiver))
            if edge.grad and not step.draft.forward_only:
                events.append((rank[step.number[step.gradient_stage(edge.destination)]], i, "B", receiver, sender))
    transfers: list[Transfer] = []
    posts: list[list[tuple[int, int]]] = [[] for _ in step.draft.order]
    passed = [0] * len(step.draft.order)  # stages of each worker that end before the event at hand
    for event, i, phase, sender, receiver in sorted(events):
        edge = step.edges[i]
        while passed[receiver] < len(worker_ranks[receiver]) and worker_ranks[receiver][passed[receiver]] < event:
            passed[receiver] += 1
        sent = slot[times.completed[event]] + 1
        earliest = posts[receiver][-1][0] if posts[receiver] else 0
        received = max(passed[receiver] - lead, earliest)
        posts[sender].append((sent, len(transfers)))
        posts[receiver].append((received, len(transfers)))
        transfers.append(
            Transfer(
                edge=i,
                phase=phase,
                sender=sender,
                receiver=receiver,
                shape=(edge.num_rows, edge.width),
                dtype=edge.dtype,
                num_bytes=step.edge_bytes[i],
                duration_ns=step.lag_ns[i],
            )
        )
    return transfers, posts


def _worker_actions(
    step: StepStages,
    outputs: _Outputs,
    worker: int,
    times: StageTimes,
    transfers: list[Transfer],
    posts: list[list[tuple[int, int]]],
) -> list[Action]:
    """Loads, stages, posts, waits and frees of a worker. Before stage k come, in this order: what stage k-1
    lets go of, posts, waits for sends long on their way and what these free, the load of stage k and waits
    for its tensors."""
    order = step.draft.order[worker]
    size = len(order)
    ends = [times.end_ns[step.number[stage]] for stage in order]
    number = {(transfer.edge, transfer.phase): i for i, transfer in enumerate(transfers)}
    freed: list[list[Buffer]] = [[] for _ in range(size + 1)]
    posted: list[list[Post]] = [[] for _ in range(size + 1)]
    sent: list[list[Wait]] = [[] for _ in range(size + 1)]
    slot_of_wait: dict[int, int] = {}
    slot_of_stage = {stage: k for k, stage in enumerate(order)}
    for slot, i in posts[worker]:
        transfer = transfers[i]
        allocation = (Allocation(Buffer("received", i), transfer.num_bytes),) if transfer.receiver == worker else ()
        posted[slot].append(Post(transfer=i, allocations=allocation))
        if transfer.sender == worker:
            # One stage past the predicted arrival: by then the wait finds the send done.
            edge = step.edges[transfer.edge]
            at = edge.source if transfer.phase == "F" else edge.destination
            producer = Stage(*at, "F") if transfer.phase == "F" else step.gradient_stage(at)
            arrival = times.end_ns[step.number[producer]] + transfer.duration_ns
            wait = slot
            while wait < size and ends[wait] <= arrival:
                wait += 1
            slot_of_wait[i] = min(wait + 1, size)
            sent[slot_of_wait[i]].append(Wait(transfer=i))
    late: set[Buffer] = set()  # "saved" ones with outputs that are needed as long as those of kind "output"
    loads: list[list[Action]] = [[] for _ in range(size)]
    computes: list[Compute] = []
    loaded_names = {number: _loads(step, number) for number in step.draft.placement.on(worker)}
    for k, stage in enumerate(order):
        at = (stage.chunk, stage.part)
        cost = step.cost[at]
        last = slot_of_stage[step.last_stage(at)]
        allocations: list[Allocation] = []
        workspace = cost.backward_workspace_bytes
        if stage.phase == "F":
            workspace = cost.forward_workspace_bytes
            names = loaded_names[stage.chunk]
            if names:
                loaded = Buffer("loaded", *at)
                loads[k].append(
                    Load(
                        chunk=stage.chunk,
                        part=stage.part,
                        names=names,
                        allocations=(Allocation(loaded, cost.loaded_bytes),),
                        duration_ns=cost.load_ns,
                    )
                )
                freed[last + 1].append(loaded)
            assembled = 0
            incoming = step.incoming.get(at, ())
            for i in incoming:
                whole = is_whole(step.edges, incoming, i)
                assembled += 0 if whole else step.edge_bytes[i]
                if not step.is_local[i]:
                    loads[k].append(Wait(transfer=number[i, "F"]))
                    freed[(last if whole else k) + 1].append(Buffer("received", number[i, "F"]))
            output = outputs.num_bytes(at)
            if step.backward[stage.chunk]:
                saved = Buffer("saved", *at)
                allocations.append(Allocation(saved, cost.saved_bytes + output + assembled))
                # A reader that sends no gradient back may come after the backward, or its send's wait may.
                used = _last_use(step, at, "F", slot_of_wait, number, slot_of_stage, k)
                freed[max(last + 1, used)].append(saved)
                if used > last:
                    late.add(saved)
            else:
                workspace += assembled
                if at in step.outgoing:
                    outlet = Buffer("output", *at)
                    allocations.append(Allocation(outlet, output))
                    freed[_last_use(step, at, "F", slot_of_wait, number, slot_of_stage, k)].append(outlet)
        elif stage.phase in "BI":
            for i in step.outgoing.get(at, ()):
                edge = step.edges[i]
                if edge.grad and not step.is_local[i]:
                    loads[k].append(Wait(transfer=number[i, "B"]))
                    freed[k + 1].append(Buffer("received", number[i, "B"]))
            returned = sum(step.edge_bytes[i] for i in step.incoming.get(at, ()) if step.edges[i].grad)
            if returned:
                gradient = Buffer("gradient", *at)
                allocations.append(Allocation(gradient, returned))
                freed[_last_use(step, at, "B", slot_of_wait, number, slot_of_stage, k)].append(gradient)
            if stage.phase == "I":
                weight = Buffer("weight", *at)
                allocations.append(Allocation(weight, cost.weight_bytes))
                freed[slot_of_stage[Stage(*at, "W")] + 1].append(weight)
        computes.append(
            Compute(
                stage=stage,
                allocations=tuple(allocations),
                workspace_bytes=workspace,
                duration_ns=step.duration_ns[step.number[stage]],
            )
        )
    actions: list[Action] = []
    for k in range(size + 1):
        tensors = tuple(buffer for buffer in freed[k] if buffer in late or buffer.kind in ("output", "gradient"))
        others = tuple(buffer for buffer in freed[k] if buffer not in tensors)
        actions += [Free(buffers=others)] if others else []
        actions += posted[k]
        actions += sent[k]
        actions += [Free(buffers=tensors)] if tensors else []
        if k < size:
            actions += [*loads[k], computes[k]]
    return actions


def _last_use(
    step: StepStages,
    at: tuple[int, int],
    phase: Direction,
    slot_of_wait: dict[int, int],
    number: dict[tuple[int, Direction], int],
    slot_of_stage: dict[Stage, int],
    produced: int,
) -> int:
    """Slot in which the outputs ("F") or input gradients ("B") of a (chunk, part) are no longer needed:
    their sends are waited for, and the stages on this worker that take them are done."""
    edges = step.outgoing if phase == "F" else step.incoming
    slots = [produced + 1]
    for i in edges.get(at, ()):
        edge = step.edges[i]
        if phase == "B" and not edge.grad:
            continue
        if not step.is_local[i]:
            slots.append(slot_of_wait[number[i, phase]])
        elif phase == "F":
            slots.append(slot_of_stage[step.last_stage(edge.destination)] + 1)
        else:
            slots.append(slot_of_stage[step.gradient_stage(edge.source)] + 1)
    return max(slots)


def _loads(step: StepStages, number: int) -> tuple[str, ...]:
    chunk = step.draft.placement.chunks[number]
    module = step.graph.by_name[chunk.module]
    names = [name for _, layer in module.range(chunk.start, chunk.stop) for name in layer.loads]
    return tuple(dict.fromkeys(names))


class _Outputs:
    """Bytes of the distinct tensors that leave a (chunk, part), whole."""

    def __init__(self, step: StepStages) -> None:
        self.step = step
        self._row_bytes: dict[tuple[int, str], tuple[str, int]] = {}
        for number, chunk in enumerate(step.draft.placement.chunks):
            module = step.graph.by_name[chunk.module]
            for position, layer in positions(module):
                if covers(module, chunk, position):
                    carries = layer.carries if position == chunk.stop - 1 else ()
                    for spec in (*layer.sends, *carries):
                        dtype = step.dtype if spec.dtype == "model" else spec.dtype
                        self._row_bytes[number, spec.name] = (spec.rows, spec.width * ITEM_SIZES[dtype])

    def num_bytes(self, at: tuple[int, int]) -> int:
        total = 0
        items = self.step.draft.parts[at[0]][at[1]].items
        for name in {self.step.edges[i].output for i in self.step.outgoing.get(at, ())}:
            rows, row_bytes = self._row_bytes[at[0], name]
            total += row_bytes * sum(self.step.share.items[i].sizes[rows] for i in items)
        return total


def _ending(step: StepStages, worker: int, groups: tuple[ParameterGroup, ...], num_replicas: int) -> list[Action]:
    """Reductions, in the order of the groups; then the norm; then the optimizer's step."""
    if step.draft.forward_only:
        return []
    actions: list[Action] = []
    for number, group in enumerate(groups):
        members = len(group.holders) * num_replicas
        if worker in group.holders and members > 1:
            actions.append(Reduce(group=number, duration_ns=step.costs.reduce_ns(members, group.num_bytes)))
    workers = step.draft.placement.workers * num_replicas
    actions.append(Norm(duration_ns=step.costs.reduce_ns(workers, 8) if workers > 1 else 0))
    layers = layers_on(step.graph, step.draft.placement, worker)
    actions.append(Step(duration_ns=sum(step.costs.optimizer_ns(layer) for layer in layers)))
    return actions


def _with_prediction(plan: Plan, queue: Queue, useful: int, bound: int) -> Plan:
    (timeline,) = emulate([plan], queue)
    return msgspec.structs.replace(plan, prediction=prediction(plan, timeline, useful_ns=useful, lower_bound_ns=bound))
