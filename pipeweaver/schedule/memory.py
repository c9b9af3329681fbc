"""Memory of a plan: what each worker holds, action by action.

Buffers are allocated by one action and freed by a named one, so memory follows from the order of the
actions alone. Example: static 100, Load +10, F +50 with workspace 30, B, Free -> held 110, 160, 160, 100;
peak 190 while F runs.
"""

from __future__ import annotations

from pipeweaver.schedule.ir import Action, Buffer, Compute, Free, Load, Plan, Post


def held_bytes(plan: Plan, worker: int) -> tuple[list[int], list[int]]:
    """(held after each action, highest while it runs), bytes, for the actions of a worker.

    Raises KeyError if a buffer is freed that is not held; the verifier says it in words.
    """
    sizes: dict[Buffer, int] = {}
    held = plan.static_bytes[worker]
    after, during = [], []
    for action in plan.actions[worker]:
        for buffer, num_bytes in allocations(action):
            sizes[buffer] = num_bytes
            held += num_bytes
        during.append(held + (action.workspace_bytes if isinstance(action, Compute) else 0))
        if isinstance(action, Free):
            held -= sum(sizes.pop(buffer) for buffer in action.buffers)
        after.append(held)
    return after, during


def peak_bytes(plan: Plan) -> tuple[int, ...]:
    """Highest memory of each worker, bytes."""
    return tuple(
        max([plan.static_bytes[worker], *held_bytes(plan, worker)[1]]) for worker in range(plan.placement.workers)
    )


def allocations(action: Action) -> tuple[tuple[Buffer, int], ...]:
    """(buffer, bytes) that an action allocates."""
    return action.allocations if isinstance(action, Load | Compute | Post) else ()
