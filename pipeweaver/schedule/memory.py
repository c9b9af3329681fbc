"""Memory of a plan: what each worker holds, action by action.

Buffers are allocated by one action and freed by a named one, so memory follows from the order of the
actions alone. Example: static 100, Load +10, F +50 with workspace 30, B, Free -> held 110, 160, 160, 100;
peak 190 while F runs.
"""

from __future__ import annotations

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
    static = np.array(plan.head.static_bytes, np.int64)
    after, during, _ = _held(static, plan.actions, _unit_start(plan), len(plan.transfers.edge))
    return after, during


def flat_peak_bytes(plan: FlatPlan) -> tuple[int, ...]:
    """Highest memory of each worker, bytes."""
    static = np.array(plan.head.static_bytes, np.int64)
    _, _, peaks = _held(static, plan.actions, _unit_start(plan), len(plan.transfers.edge))
    return tuple(peaks.tolist())


def buffer_numbers(plan: FlatPlan) -> tuple[Ints, Ints, int]:
    """(number of every allocated buffer, of every freed one, how many numbers there are).

    Kind k of unit u of U is number k * U + u, transfer t number K * U + t for K kinds; -1 is a buffer of a chunk,
    part or transfer that does not exist.
    """
    actions, units, num_transfers = plan.actions, _unit_start(plan), len(plan.transfers.edge)
    allocated = (actions.allocation_kind, actions.allocation_first, actions.allocation_second)
    freed = (actions.free_kind, actions.free_first, actions.free_second)
    return (
        _numbers(*allocated, units, num_transfers),
        _numbers(*freed, units, num_transfers),
        int(len(BUFFERS) * units[-1] + num_transfers),
    )


def allocations(action: Action) -> tuple[tuple[Buffer, int], ...]:
    """(buffer, bytes) that an action allocates."""
    return action.allocations if isinstance(action, Load | Compute | Offload | Reload | Post) else ()


def _unit_start(plan: FlatPlan) -> Ints:
    """[chunks + 1]: the first unit of each chunk."""
    return starts([len(of) for of in plan.head.parts])


@numba.njit(cache=True)
def _number(kind, first, second, unit_start, num_transfers):  # type: ignore[no-untyped-def]
    """The number of a buffer, see `buffer_numbers`."""
    if kind == RECEIVED:
        exists = 0 <= first < num_transfers and second == 0
        return _KINDS * unit_start[-1] + first if exists else -1
    if not (0 <= first < len(unit_start) - 1 and 0 <= second < unit_start[first + 1] - unit_start[first]):
        return -1
    return kind * unit_start[-1] + unit_start[first] + second


@numba.njit(cache=True)
def _numbers(kind, first, second, unit_start, num_transfers):  # type: ignore[no-untyped-def]
    found = np.empty(len(kind), np.int64)
    for i in range(len(kind)):
        found[i] = _number(kind[i], first[i], second[i], unit_start, num_transfers)
    return found


@numba.njit(cache=True)
def _held(static, actions, unit_start, num_transfers):  # type: ignore[no-untyped-def]
    """(held after each action, highest while it runs) [A], (highest) [P]."""
    start = actions.start
    after, during = np.empty(start[-1], np.int64), np.empty(start[-1], np.int64)
    holds = np.zeros(_KINDS * unit_start[-1] + num_transfers, np.int64)
    peaks = static.copy()
    for w in range(len(start) - 1):
        holds[:] = 0
        held = static[w]
        for a in range(start[w], start[w + 1]):
            for i in range(actions.allocation_start[a], actions.allocation_start[a + 1]):
                kind, first, second = (
                    actions.allocation_kind[i],
                    actions.allocation_first[i],
                    actions.allocation_second[i],
                )
                number = _number(kind, first, second, unit_start, num_transfers)
                # What is on the host takes none of the worker's memory.
                if number >= 0 and kind != HOST:
                    holds[number] = actions.allocation_bytes[i]
                    held += holds[number]
            during[a] = held + actions.workspace_bytes[a]
            peaks[w] = max(peaks[w], during[a])
            for i in range(actions.free_start[a], actions.free_start[a + 1]):
                kind, first, second = actions.free_kind[i], actions.free_first[i], actions.free_second[i]
                number = _number(kind, first, second, unit_start, num_transfers)
                if number >= 0:
                    held -= holds[number]
                    holds[number] = 0
            after[a] = held
    return after, during, peaks


_KINDS = len(BUFFERS)
