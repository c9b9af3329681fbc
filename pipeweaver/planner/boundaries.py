"""Move the boundaries between chunks so that workers are more even, a layer or two at a time.

Sharing out whole blocks leaves workers apart by up to the work of one. Where layers differ in cost, as attention (A) and
MLP (M) of a block do, a boundary that moves by one layer is a smaller step, and several moved together can be smaller still:

    worker 0   A M A M A        the last A goes from worker 1 to worker 0,
    worker 1   M A M A M        and an A of worker 2 to worker 1, which has what it had before
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Ranges = list[tuple[int, int, int]]
"""(start, stop, worker) of a module's chunks in order."""

MOST_PERIOD = 4
"""Layers of a block, at most."""
MOVES = 100_000
"""Tried in all: a boundary, drawn at random, by one or two layers."""
WARMEST, COLDEST = 3e-3, 1e-6
"""By how much unevenness may grow with a move, about, in the beginning and in the end."""
LARGER = 1.1
"""What a chunk may grow to, of the largest of its module in whole blocks."""
DOUBLINGS = 6
"""Workers are as uneven as the 2**6th norm of their loads: that of the busiest almost, but it falls where one of several does."""


def refined(
    chunks: Mapping[str, Ranges], costs: Mapping[str, Floats], waits: Floats, kept: Mapping[str, int]
) -> tuple[float, dict[str, Ranges]]:
    """(how far the busiest worker is above the mean, 1 for even ones; the chunks with their boundaries moved).

    `costs` [samples, layers] by module, `waits` [samples, workers] ns: what a load has beside layers. Simulated annealing
    (Kirkpatrick and others 1983), always the same. Each chunk keeps a layer at least, and none becomes much larger than
    its module's largest: parts go from worker to worker in step, and one large chunk makes all others wait until parts
    have queued up before it. The first `kept` chunks of a module stay no larger than they are.
    """
    edges, modules = _edges(chunks, costs), list(chunks)
    loads = waits.copy()
    for name, ranges in chunks.items():
        for start, stop, worker in ranges:
            loads[:, worker] += costs[name][:, start:stop].sum(axis=1)
    if not loads.any():
        return 1.0, dict(chunks)
    length = max(of.shape[1] for of in costs.values())
    work = np.zeros((len(modules), len(waits), length + 1))
    inner = np.zeros((len(modules), length + 1))
    for number, name in enumerate(modules):
        count = costs[name].shape[1]
        work[number, :, 1 : count + 1] = costs[name].cumsum(axis=1)
        inner[number, 1 : count + 1] = _without_ends(costs[name]).sum(axis=0).cumsum()
    largest = np.zeros(len(edges.place))
    for number, name in enumerate(modules):
        at = np.nonzero(edges.module == number)[0]
        sizes = np.diff(inner[number, edges.place[at]])
        largest[at[:-1]] = LARGER * sizes.max()
        largest[at[: kept.get(name, 0)]] = sizes[: kept.get(name, 0)]
    score, found = _anneal(edges, work, inner, loads, np.nonzero(edges.movable)[0], largest)
    result: dict[str, Ranges] = {}
    for number, name in enumerate(modules):
        starts = found[edges.module == number].tolist()
        result[name] = [
            (start, stop, worker) for start, stop, (_, _, worker) in zip(starts, starts[1:], chunks[name], strict=False)
        ]
    return float(score), result


def period_of(costs: Floats) -> int:
    """How many neighbouring layers make a block, of costs [samples, layers], all blocks costing the same but for the ends:
    2 where attention and MLP take turns."""
    count = costs.shape[1]
    inner = costs[:, 1 : count - 1]
    for period in range(1, MOST_PERIOD + 1):
        if count % period == 0 and (inner[:, period:] == inner[:, : inner.shape[1] - period]).all():
            return period
    return 1


class _Edges(NamedTuple):
    """[E] Where chunks begin, and where each module ends. `worker` has the chunk that begins there; `movable` are those
    between two workers."""

    place: Ints
    module: Ints
    worker: Ints
    movable: NDArray[np.bool_]


def _edges(chunks: Mapping[str, Ranges], costs: Mapping[str, Floats]) -> _Edges:
    rows: list[tuple[int, int, int, bool]] = []
    for number, (name, ranges) in enumerate(chunks.items()):
        before = -1
        for start, _, worker in ranges:
            rows.append((start, number, worker, start > 0 and worker != before))
            before = worker
        rows.append((costs[name].shape[1], number, -1, False))
    columns = np.array(rows, np.int64).reshape(-1, 4).T
    return _Edges(columns[0], columns[1], columns[2], columns[3].astype(np.bool_))


def _without_ends(costs: Floats) -> Floats:
    """The same without what comes before the first layer and after the last."""
    period, found = period_of(costs), costs.copy()
    if costs.shape[1] > 2 * period:
        found[:, 0], found[:, -1] = costs[:, period], costs[:, -1 - period]
    return found


@numba.njit(cache=True)
def _uneven(loads):  # type: ignore[no-untyped-def]
    """Of loads [samples, workers]: the mean over samples of how far the busiest workers are above the mean."""
    samples, workers = loads.shape
    total = 0.0
    for s in range(samples):
        mean = loads[s].mean()
        norm = 0.0
        for w in range(workers):
            power = loads[s, w] / mean
            for _ in range(DOUBLINGS):
                power *= power
            norm += power
        total += (norm / workers) ** (1.0 / (1 << DOUBLINGS))
    return total / samples


@numba.njit(cache=True)
def _anneal(edges, work, inner, loads, movable, largest):  # type: ignore[no-untyped-def]
    """(unevenness, places [E]) of the best that was found. `largest` [E]: what the chunk that begins there may grow to."""
    np.random.seed(0)
    place, samples = edges.place.copy(), loads.shape[0]
    score = _uneven(loads)
    best_score, best = score, place.copy()
    if len(movable) == 0:
        return best_score, best
    changed = loads.copy()
    for number in range(MOVES):
        e = movable[np.random.randint(len(movable))]
        step = np.random.randint(1, 3) * (1 if np.random.random() < 0.5 else -1)
        at, to, m = place[e], place[e] + step, edges.module[e]
        if not place[e - 1] < to < place[e + 1]:
            continue
        # Only the chunk that grows can become too large.
        grown = inner[m, to] - inner[m, place[e - 1]] if step > 0 else inner[m, place[e + 1]] - inner[m, to]
        if grown > largest[e - 1 if step > 0 else e]:
            continue
        giver, taker = edges.worker[e], edges.worker[e - 1]
        for s in range(samples):
            moved = work[m, s, to] - work[m, s, at]
            changed[s, giver] -= moved
            changed[s, taker] += moved
        found = _uneven(changed)
        warmth = WARMEST * (COLDEST / WARMEST) ** (number / MOVES)
        if found <= score or np.random.random() < np.exp((score - found) / warmth):
            score, place[e] = found, to
            loads[:] = changed
            if score < best_score - 1e-12:
                best_score = score
                best[:] = place
        else:
            changed[:] = loads
    return best_score, best
