"""The verifier: accepts the plans of a step, or says what is wrong with them. It runs on every plan before use.

It shares no code with the compiler beyond the records, where gradients flow and the memory of a plan: rows are traced item by
item, and actions are run symbolically. Rules, by the name that a rejection carries:

    items       the replicas' plans hold exactly the items of the batch, each once
    stages      each (task, layer, item) goes forward exactly once, backward exactly once where a gradient
                is needed and nowhere else, on the worker that holds the chunk
    edges       rows, width, dtype and gradient of every tensor between chunks
    transfers   one per edge that crosses workers and direction, with the edge's shape and dtype
    actions     nothing is used before it is there, or after it is freed; nothing is left over
    groups      the holders of a parameter are its reduction group; reductions after the last backward, in one order
    normaliser  each loss is divided by its units over the whole batch
    progress    no deadlock: with one queue per pair of workers, and with one queue per worker
    memory      peak within budget on every worker
    prediction  of this plan: one span per action and transfer
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pipeweaver.data.items import Share
from pipeweaver.model.graph import ModelGraph
from pipeweaver.schedule.convert import action_of, flatten
from pipeweaver.schedule.flat import FlatPlan
from pipeweaver.schedule.ir import Plan
from pipeweaver.schedule.memory import flat_held_bytes
from pipeweaver.schedule.verify.actions import check_actions
from pipeweaver.schedule.verify.edges import check_edges, check_transfers
from pipeweaver.schedule.verify.groups import check_groups
from pipeweaver.schedule.verify.progress import check_progress
from pipeweaver.schedule.verify.stages import check_stages
from pipeweaver.schedule.verify.words import PlanError, describe

__all__ = ["PlanError", "verify", "verify_flat"]


def verify(
    plans: Sequence[Plan],
    graph: ModelGraph,
    shares: Sequence[Share],
    *,
    dtype: str = "float32",
    budget_bytes: int | None = None,
) -> tuple[FlatPlan, ...]:
    """Accept all plans of a step, replica by replica and together, and return them flat, or raise PlanError.

    `shares[r]` is what replica r was given; `budget_bytes` the memory of each worker, None for no limit.
    """
    flats = tuple(map(flatten, plans))
    verify_flat(flats, graph, shares, dtype=dtype, budget_bytes=budget_bytes)
    for plan in plans:
        _check_spans(plan)
    return flats


def verify_flat(
    plans: Sequence[FlatPlan],
    graph: ModelGraph,
    shares: Sequence[Share],
    *,
    dtype: str = "float32",
    budget_bytes: int | None = None,
) -> None:
    """The same for flat plans, with arrays that `flatten` or `wire.unpack` made."""
    for plan in plans:
        _check_lists(plan)
    _check_items([plan.head for plan in plans], shares)
    for plan in plans:
        place = f"replica {plan.head.replica}: "
        try:
            check_stages(plan, graph)
            check_edges(plan, graph, dtype)
            check_transfers(plan)
            check_actions(plan, graph)
            _check_memory(plan, budget_bytes)
        except PlanError as error:
            raise PlanError(error.rule, place + str(error).removeprefix(error.rule + ": ")) from None
    check_groups(plans, graph)
    for per_worker in (False, True):
        check_progress(plans, per_worker)
    for plan in plans:
        _check_prediction(plan)


def _check_lists(plan: FlatPlan) -> None:
    """One entry per worker or chunk: what a plan from a file need not have."""
    head, workers = plan.head, plan.head.placement.workers
    lists = {"order": len(plan.order.start) - 1, "actions": plan.num_workers, "memory": len(head.static_bytes)}
    for name, found in lists.items():
        if found != workers:
            raise PlanError("stages", f"replica {head.replica}: {found} lists of {name} for {workers} workers")
    if len(head.parts) != len(head.placement.chunks):
        raise PlanError(
            "stages", f"replica {head.replica}: {len(head.parts)} part lists for {len(head.placement.chunks)} chunks"
        )


def _check_prediction(plan: FlatPlan) -> None:
    """It has a time for everything that is measured. It is no part of the fingerprint."""
    predicted = plan.prediction
    if predicted is None:
        return
    actions, transfers = len(plan.actions.kind), len(plan.transfers.edge)
    wanted = [actions, actions, transfers, transfers, plan.num_workers]
    times = (predicted.start_ns, predicted.end_ns, predicted.moved_ns, predicted.arrived_ns, predicted.peak_bytes)
    found = [len(of) for of in times]
    if found != wanted:
        raise PlanError(
            "prediction",
            f"replica {plan.head.replica}: {found} starts and ends of actions and transfers, and peaks, not {wanted}",
        )


def _check_spans(plan: Plan) -> None:
    """Predicted spans are those of the same workers' actions, which flat plans cannot have otherwise."""
    if plan.prediction is None:
        return
    wanted, found = list(map(len, plan.actions)), list(map(len, plan.prediction.spans))
    if found != wanted:
        raise PlanError("prediction", f"replica {plan.replica}: workers have {found} spans, not {wanted}")


def _check_items(plans: Sequence[Plan], shares: Sequence[Share]) -> None:
    if len(plans) != len(shares):
        raise PlanError("items", f"{len(plans)} plans for {len(shares)} shares")
    seen: Counter[tuple[str, int, str, int]] = Counter()
    for number, (plan, share) in enumerate(zip(plans, shares, strict=True)):
        if (plan.replica, plan.num_replicas, plan.step) != (number, len(plans), share.step):
            raise PlanError(
                "items",
                f"plan {number} of {len(plans)} says replica {plan.replica} of {plan.num_replicas}, step {plan.step}, "
                f"in step {share.step}",
            )
        if plan.items != share.items or plan.links != share.links or plan.records != share.records:
            lost = {item.name for item in share.items} ^ {item.name for item in plan.items}
            raise PlanError(
                "items", f"replica {number}: items, links or records differ from its share {sorted(lost)[:5]}"
            )
        if plan.normalisers != share.normalisers:
            raise PlanError("normaliser", f"replica {number}: {plan.normalisers} but the batch has {share.normalisers}")
        if plan.forward_only != plans[0].forward_only:
            raise PlanError("items", f"replica {number} and replica 0 disagree on forward_only")
        if plan.placement != plans[0].placement or plan.groups != plans[0].groups:
            raise PlanError("groups", f"replica {number} and replica 0 have different placements or groups")
        seen.update([(item.task, item.draw, item.module, item.position) for item in plan.items])
    if seen and max(seen.values()) > 1:
        (task, draw, module, position), times = seen.most_common(1)[0]
        raise PlanError("items", f"item {task}/{draw}/{module}/{position} is in {times} shares")


def _check_memory(plan: FlatPlan, budget_bytes: int | None) -> None:
    if min(plan.head.static_bytes, default=0) < 0:  # makes room for what does not fit
        raise PlanError("memory", f"parameters of a worker take {min(plan.head.static_bytes):,} bytes")
    if budget_bytes is None:
        return
    _, during = flat_held_bytes(plan)
    for worker in range(plan.num_workers):
        first, stop = plan.actions.start[worker : worker + 2].tolist()
        static = plan.head.static_bytes[worker]
        peak = max([static, int(during[first:stop].max(initial=0))])
        if peak > budget_bytes:
            at = int(during[first:stop].argmax()) if first < stop else 0
            what = describe(action_of(plan, first + at)) if first < stop and during[first + at] == peak else "start"
            raise PlanError(
                "memory",
                f"worker {worker} peaks at {peak:,} bytes in {what}, {peak - budget_bytes:,} over its budget of "
                f"{budget_bytes:,}; {static:,} are parameters, gradients and optimizer state; "
                "use more workers, smaller microbatches, a larger budget (workers.memory), or policy dynamic, which minds it",
            )
