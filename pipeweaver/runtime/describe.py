"""An action in words: what a watchdog or an error says of it.

worker 1 of replica 0, step 7: waits for vision (28x256 float32) from worker 0, from vision[0:4]@0 to
language[0:2]@1 (0F3 -> 2F1, transfer 12)
"""

from __future__ import annotations

from pipeweaver.runtime.transport import Address
from pipeweaver.schedule.ir import (
    Action,
    Compute,
    Free,
    Load,
    Norm,
    Offload,
    Plan,
    Post,
    Reduce,
    Reload,
    Settle,
    Stage,
    Step,
    Transfer,
    Wait,
)


def describe(plan: Plan, address: Address, action: Action | None) -> str:
    """One line naming worker, action, peer and tensor. None is what comes after the last action."""
    where = f"batch {plan.step} of an evaluation" if plan.forward_only else f"step {plan.step}"
    what = "meets all workers at the end" if action is None else _action(plan, address.worker, action)
    return f"{address}, {where}: {what}"


def _action(plan: Plan, worker: int, action: Action) -> str:
    match action:
        case Load(chunk=chunk, part=part, names=names):
            return f"loads {', '.join(names)} for {plan.placement.chunks[chunk]}, part {part}"
        case Compute(stage=stage):
            return f"computes {stage}, {plan.placement.chunks[stage.chunk]}"
        case Offload(chunk=chunk, part=part):
            return f"offloads what {plan.placement.chunks[chunk]} saved of part {part}"
        case Reload(chunk=chunk, part=part):
            return f"reloads what {plan.placement.chunks[chunk]} saved of part {part}"
        case Settle(chunk=chunk, part=part):
            return f"waits for the copy of what {plan.placement.chunks[chunk]} saved of part {part}"
        case Post(transfer=number):
            return f"posts {_transfer(plan, worker, number)}"
        case Wait(transfer=number):
            return f"waits for {_transfer(plan, worker, number)}"
        case Free(buffers=buffers):
            return f"frees {len(buffers)} buffers"
        case Reduce(group=number):
            group = plan.groups[number]
            shown = ", ".join(group.parameters[:3]) + (" …" if len(group.parameters) > 3 else "")
            return (
                f"reduces gradients of group {number} ({shown}) with workers "
                f"{', '.join(map(str, group.holders))} of {plan.num_replicas} replicas"
            )
        case Norm():
            return "sums the gradient norm with all workers"
        case Step():
            return "steps the optimizer"


def _transfer(plan: Plan, worker: int, number: int) -> str:
    transfer: Transfer = plan.transfers[number]
    edge = plan.edges[transfer.edge]
    ends = [(edge.source, edge.output), (edge.destination, edge.input)]
    if transfer.phase == "B":
        ends.reverse()
    (source, name), (destination, _) = ends
    peer = f"to worker {transfer.receiver}" if worker == transfer.sender else f"from worker {transfer.sender}"
    chunks = plan.placement.chunks
    return (
        f"{'the gradient of ' if transfer.phase == 'B' else ''}{name} "
        f"({'x'.join(map(str, transfer.shape))} {transfer.dtype}) {peer}, "
        f"from {chunks[source[0]]} to {chunks[destination[0]]} "
        f"({Stage(*source, transfer.phase)} -> {Stage(*destination, transfer.phase)}, transfer {number})"
    )
