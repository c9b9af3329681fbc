"""Never into a corner: a stage may start only if all that is left can still run, one stage after the other.

Fix a reference order of all stages. A state is *safe* if the stages that are not done, run one by one in the
reference, stay within every worker's limit. From a safe state the first of them may always start; so there is
always a stage that may, until all are done. (A banker's check, with one order instead of all of them.)

Checking is one lookup in a tree per worker. Leaf i holds what worker w would use while stage i runs, if all that is
done has run and then the reference up to i; the root has the largest. Running stage s early adds what it keeps to
all leaves before it, and removes its own. Example, limit 10, reference F0 B0 F1 B1, F takes 5, B gives 5:

    start    5 5 5 5       F1 first: 10 10 - 5: safe     then F2 (takes 5 too): 15 15 …: refused
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from pipeweaver.planner.problem import Ints

REMOVED = -(1 << 60)
"""Value of the leaf of a stage that is done."""


class Safety(NamedTuple):
    """Trees of all workers in one array each: worker w's has `leaves[w]` leaves and begins at `base[w]`; node k has
    the children 2k and 2k + 1. `largest` of a node counts what was added to it in `added` and below, not above.
    `leaf` by effect; `used` by worker, as if all stages that have started were done."""

    base: Ints
    leaves: Ints
    largest: Ints
    added: Ints
    leaf: Ints
    used: Ints


@numba.njit(cache=True)
def make_safety(problem, reference):  # type: ignore[no-untyped-def]
    """The state in which nothing is done."""
    workers, num_effects = problem.num_workers, len(problem.effect_worker)
    leaf, count = np.zeros(num_effects, np.int64), np.zeros(workers, np.int64)
    for s in reference:
        for e in range(problem.effect_start[s], problem.effect_start[s + 1]):
            leaf[e] = count[problem.effect_worker[e]]
            count[problem.effect_worker[e]] += 1
    base, leaves = np.zeros(workers + 1, np.int64), np.ones(workers, np.int64)
    for w in range(workers):
        while leaves[w] < count[w]:
            leaves[w] *= 2
        base[w + 1] = base[w] + 2 * leaves[w]
    largest, added = np.full(base[workers], REMOVED, np.int64), np.zeros(base[workers], np.int64)
    held = np.zeros(workers, np.int64)
    for s in reference:
        for e in range(problem.effect_start[s], problem.effect_start[s + 1]):
            w = problem.effect_worker[e]
            takes = problem.effect_takes[e]
            largest[base[w] + leaves[w] + leaf[e]] = held[w] + takes + problem.effect_passing[e]
            held[w] += takes - problem.effect_gives[e]
    for w in range(workers):
        for k in range(leaves[w] - 1, 0, -1):
            largest[base[w] + k] = max(largest[base[w] + 2 * k], largest[base[w] + 2 * k + 1])
    return Safety(base, leaves, largest, added, leaf, np.zeros(workers, np.int64))


@numba.njit(cache=True)
def first_unsafe(safety, limits):  # type: ignore[no-untyped-def]
    """A worker whose limit the reference itself exceeds, -1 for none."""
    for w in range(len(limits)):
        if safety.largest[safety.base[w] + 1] > limits[w]:
            return w
    return -1


@numba.njit(cache=True)
def admit(problem, safety, limits, s, undo):  # type: ignore[no-untyped-def]
    """Start stage s: -1, and `safety` is the state after it; or the worker whose limit forbids it, and nothing changes.

    `undo` has room for as many values as a stage has effects.
    """
    first, stop = problem.effect_start[s], problem.effect_start[s + 1]
    for e in range(first, stop):
        w = problem.effect_worker[e]
        if safety.used[w] + problem.effect_takes[e] + problem.effect_passing[e] > limits[w]:
            return w
    for e in range(first, stop):
        w = problem.effect_worker[e]
        undo[e - first] = safety.largest[safety.base[w] + safety.leaves[w] + safety.leaf[e]]
        kept = problem.effect_takes[e] - problem.effect_gives[e]
        if _change(safety, w, safety.leaf[e], kept, REMOVED) > limits[w]:
            for earlier in range(e, first - 1, -1):
                v = problem.effect_worker[earlier]
                kept = problem.effect_takes[earlier] - problem.effect_gives[earlier]
                _change(safety, v, safety.leaf[earlier], -kept, undo[earlier - first])
            return w
    for e in range(first, stop):
        safety.used[problem.effect_worker[e]] += problem.effect_takes[e] - problem.effect_gives[e]
    return -1


@numba.njit(cache=True)
def _change(safety, w, leaf, amount, value):  # type: ignore[no-untyped-def]
    """Add an amount to all leaves before `leaf`, and set its own node to a value. Returns the largest of all."""
    base = safety.base[w]
    node = safety.leaves[w] + leaf
    safety.largest[base + node] = value
    while node > 1:
        if node & 1:
            safety.largest[base + node - 1] += amount
            safety.added[base + node - 1] += amount
        parent = node >> 1
        left, right = safety.largest[base + 2 * parent], safety.largest[base + 2 * parent + 1]
        safety.largest[base + parent] = max(left, right) + safety.added[base + parent]
        node = parent
    return safety.largest[base + 1]
