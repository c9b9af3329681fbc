"""Memory of a plan: what each worker holds, action by action.

Buffers are allocated by one action and freed by a named one, so memory follows from the order of the
actions alone. Example: static 100, Load +10, F +50 with workspace 30, B, Free -> held 110, 160, 160, 100;
peak 190 while F runs.
"""

from __future__ import annotations

from itertools import pairwise

import numba
import numpy as np

from pipeweaver.schedule.flat import BUFFERS, HOST, RECEIVED, FlatPlan, Ints, starts
from pipeweaver.schedule.ir import Action, Buffer, Compute, Free, Load, Offload, Plan, Post, Reload


def held_bytes(plan: Plan, worker: int) -> tuple[list[int], list[int]]:
    """(held after each action, highest while it runs), bytes, for the actions of a worker.

    Raises KeyError if a buffer is freed that is not held; the verifier says it in words.
    """
    sizes: dict[Buffer, int] = {}
    held = plan.static_bytes[worker]
    after, during = [], []
    for action in plan.actions[worker]:
        for buffer, num_bytes in allocations(action):
            # What is on the host takes none of the worker's memory.
            sizes[buffer] = 0 if buffer.kind == "host" else num_bytes
            held += sizes[buffer]
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


def flat_held_bytes(plan: FlatPlan) -> tuple[Ints, Ints]:
    """(held after each action, highest while it runs) [A], bytes, of all workers' actions.

    Buffers that do not exist, or are freed without being held, count as nothing: the verifier rejects them.
    """
    actions = plan.actions
    allocated, freed, size = buffer_numbers(plan)
    return _held(
        np.array(plan.head.static_bytes, np.int64),
        actions.start,
        actions.workspace_bytes,
        actions.allocation_start,
        allocated,
        np.where(actions.allocation_kind == HOST, 0, actions.allocation_bytes),
        actions.free_start,
        freed,
        size,
    )


def flat_peak_bytes(plan: FlatPlan) -> tuple[int, ...]:
    """Highest memory of each worker, bytes."""
    _, during = flat_held_bytes(plan)
    bounds = zip(plan.head.static_bytes, pairwise(plan.actions.start.tolist()), strict=True)
    return tuple(max(static, int(during[a:b].max(initial=0))) for static, (a, b) in bounds)


def buffer_numbers(plan: FlatPlan) -> tuple[Ints, Ints, int]:
    """(number of every allocated buffer, of every freed one, how many numbers there are).

    Kind k of unit u of U is number k * U + u, transfer t number K * U + t for K kinds; -1 is a buffer of a chunk,
    part or transfer that does not exist.
    """
    actions = plan.actions
    units = starts([len(of) for of in plan.head.parts])
    num_transfers = len(plan.transfers.edge)

    def numbers(kind: Ints, first: Ints, second: Ints) -> Ints:
        received = kind == RECEIVED
        is_chunk = ~received & (first >= 0) & (first < len(units) - 1) & (second >= 0)
        chunk = np.where(is_chunk, first, 0)
        if len(units) == 1:
            return np.where(received, first, -1)
        unit = units[chunk] + second
        is_transfer = received & (first >= 0) & (first < num_transfers) & (second == 0)
        is_unit = is_chunk & (unit < units[chunk + 1])
        return np.where(is_unit, kind * units[-1] + unit, np.where(is_transfer, len(BUFFERS) * units[-1] + first, -1))

    allocated = numbers(actions.allocation_kind, actions.allocation_first, actions.allocation_second)
    freed = numbers(actions.free_kind, actions.free_first, actions.free_second)
    return allocated, freed, int(len(BUFFERS) * units[-1] + num_transfers)


def allocations(action: Action) -> tuple[tuple[Buffer, int], ...]:
    """(buffer, bytes) that an action allocates."""
    return action.allocations if isinstance(action, Load | Compute | Offload | Reload | Post) else ()


@numba.njit(cache=True)
def _held(static, start, workspace, allocation_start, allocated, sizes, free_start, freed, size):  # type: ignore[no-untyped-def]
    after, during = np.zeros(start[-1], np.int64), np.zeros(start[-1], np.int64)
    holds = np.zeros(size, np.int64)
    for w in range(len(start) - 1):
        holds[:] = 0
        held = static[w]
        for a in range(start[w], start[w + 1]):
            for i in range(allocation_start[a], allocation_start[a + 1]):
                if allocated[i] >= 0:
                    holds[allocated[i]] = sizes[i]
                    held += sizes[i]
            during[a] = held + workspace[a]
            for i in range(free_start[a], free_start[a + 1]):
                if freed[i] >= 0:
                    held -= holds[freed[i]]
                    holds[freed[i]] = 0
            after[a] = held
    return after, during
