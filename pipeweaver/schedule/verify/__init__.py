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
from pipeweaver.schedule.flat import FlatPlan, flatten
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
) -> None:
    """Accept all plans of a step, replica by replica and together, or raise PlanError.

    `shares[r]` is what replica r was given; `budget_bytes` the memory of each worker, None for no limit.
    """
    for plan in plans:
        _check_lists(plan)
    verify_flat([flatten(plan) for plan in plans], graph, shares, dtype=dtype, budget_bytes=budget_bytes)
    for plan in plans:
        _check_prediction(plan)


def verify_flat(
    plans: Sequence[FlatPlan],
    graph: ModelGraph,
    shares: Sequence[Share],
    *,
    dtype: str = "float32",
    budget_bytes: int | None = None,
) -> None:
    """The same for flat plans."""
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


def _check_lists(plan: Plan) -> None:
    """One entry per worker, chunk or action: what a plan from a file need not have."""
    workers, lists = plan.placement.workers, {"order": plan.order, "actions": plan.actions, "memory": plan.static_bytes}
    for name, found in lists.items():
        if len(found) != workers:
            raise PlanError("stages", f"replica {plan.replica}: {len(found)} lists of {name} for {workers} workers")
    if len(plan.parts) != len(plan.placement.chunks):
        raise PlanError(
            "stages", f"replica {plan.replica}: {len(plan.parts)} part lists for {len(plan.placement.chunks)} chunks"
        )


def _check_prediction(plan: Plan) -> None:
    """It has a span for everything that is measured. It is no part of the fingerprint."""
    if plan.prediction is None:
        return
    wanted = [*map(len, plan.actions), len(plan.transfers), plan.placement.workers]
    found = [*map(len, plan.prediction.spans), len(plan.prediction.transfers), len(plan.prediction.peak_bytes)]
    if found != wanted:
        raise PlanError("prediction", f"replica {plan.replica}: {found} spans, transfers and peaks, not {wanted}")


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
            what = describe(plan.action(first + at)) if first < stop and during[first + at] == peak else "start"
            raise PlanError(
                "memory",
                f"worker {worker} peaks at {peak:,} bytes in {what}, {peak - budget_bytes:,} over its budget of "
                f"{budget_bytes:,}; {static:,} are parameters, gradients and optimizer state; "
                "use more workers, smaller microbatches, a larger budget (workers.memory), or policy dynamic, which minds it",
            )
