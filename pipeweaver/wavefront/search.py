"""Local search over sequences of slices: simulated annealing, seeded, on the makespan.

A state is a sequence of (MetaOp, layers, count); its makespan is that of `timeline.place_in_time`. Moves: a slice goes
elsewhere in the sequence, takes another count, gives layers to another slice of its MetaOp, or is split in two, the
second part on another count. Sequences that run a MetaOp before its sources are no states. Example, two workers:

    a[2 workers, 4 layers] b[1, 3]   ->   a[2, 2] b[1, 3] a[1, 2]     b runs beside the end of a
"""

from __future__ import annotations

import numba
import numpy as np

from pipeweaver.wavefront.rng import below, seeded, uniform
from pipeweaver.wavefront.timeline import NO_LIMIT, Pieces, Tables, place_in_time, scratch_for

WARM, COLD = 0.003, 0.0001
"""First and last temperature, as shares of the makespan."""
SLICE = 1e-5
"""What a slice costs, as a share of the makespan: of equally long plans that with fewer slices."""


def anneal(table: Tables, pieces: Pieces, *, seed: int, evaluations: int, most: int, warm: float = WARM) -> Pieces:
    """The best sequence found within `evaluations`, of at most `most` slices or as many as `pieces` has; never longer."""
    most = max(most, pieces.size)
    op, layers, index = (np.zeros(most, np.int64) for _ in range(3))
    for array, given in zip((op, layers, index), pieces[1:], strict=True):
        array[: pieces.size] = given[: pieces.size]
    scratch = scratch_for(table, most)
    size = _anneal(table, pieces.size, op, layers, index, scratch, seed, evaluations, warm, COLD)
    size = _tidy(table, size, op, layers, index, scratch)
    return Pieces(int(size), op, layers, index)


def makespan_ns(table: Tables, pieces: Pieces) -> int:
    """Makespan of a sequence, ns. Asserts that no slice comes before its MetaOp's sources are done."""
    scratch = scratch_for(table, len(pieces.op))
    found = int(place_in_time(table, pieces.size, pieces.op, pieces.layers, pieces.choice, scratch, NO_LIMIT))
    assert found >= 0, "a MetaOp runs before its sources"
    return found


@numba.njit(cache=True)
def _anneal(table, size, op, layers, index, scratch, seed, evaluations, warm, cold):  # type: ignore[no-untyped-def]
    """The best sequence is left in `op`, `layers` and `index`; returns its size."""
    most = len(op)
    random = seeded(seed)
    makespan = place_in_time(table, size, op, layers, index, scratch, NO_LIMIT)
    slice_cost = SLICE * makespan
    current = makespan + size * slice_cost
    best_makespan, best, best_size = makespan, current, size
    best_op, best_layers, best_index = op.copy(), layers.copy(), index.copy()
    old_op, old_layers, old_index = op.copy(), layers.copy(), index.copy()
    cooling = (cold / warm) ** (1.0 / max(1, evaluations))
    temperature = warm * makespan
    for _ in range(evaluations):
        temperature *= cooling
        old_size = size
        for q in range(size):
            old_op[q], old_layers[q], old_index[q] = op[q], layers[q], index[q]
        kind = below(random, 100)
        k = below(random, size)
        m = op[k]
        if kind < 35:
            _move(op, layers, index, k, below(random, size))
        elif kind < 55:
            if table.num_counts[m] < 2:
                continue
            if below(random, 4) == 0:
                index[k] = below(random, table.num_counts[m])
            else:
                index[k] = min(max(index[k] + 2 * below(random, 2) - 1, 0), table.num_counts[m] - 1)
        elif kind < 80:
            j = (k + 1 + below(random, size)) % size
            for _ in range(size):
                if op[j] == m and j != k:
                    break
                j = (j + 1) % size
            if op[j] != m or j == k:
                continue
            given = 1 if below(random, 2) else 1 + below(random, layers[k])
            size = _give(op, layers, index, size, k, j, given)
        else:
            if layers[k] < 2 or size == most:
                continue
            given = 1 + below(random, layers[k] - 1)
            layers[k] -= given
            op[size], layers[size], index[size] = m, given, below(random, table.num_counts[m])
            size += 1
            _move(op, layers, index, size - 1, k + 1 + below(random, size - 1 - k))
        # Accepted with probability exp((current - found) / temperature): what is above the limit need not be finished.
        limit = current - temperature * np.log(1.0 - uniform(random)) - size * slice_cost
        makespan = place_in_time(table, size, op, layers, index, scratch, np.int64(limit))
        if makespan >= 0:
            found = makespan + size * slice_cost
            current = found
            if found < best and makespan <= best_makespan:
                best_makespan, best, best_size = makespan, found, size
                best_op[:size], best_layers[:size], best_index[:size] = op[:size], layers[:size], index[:size]
        else:
            size = old_size
            for q in range(size):
                op[q], layers[q], index[q] = old_op[q], old_layers[q], old_index[q]
    op[:], layers[:], index[:] = best_op, best_layers, best_index
    return best_size


@numba.njit(cache=True)
def _tidy(table, size, op, layers, index, scratch):  # type: ignore[no-untyped-def]
    """Give all layers of a slice to another one of its MetaOp wherever the makespan allows; returns the size."""
    limit = place_in_time(table, size, op, layers, index, scratch, NO_LIMIT)
    old_op, old_layers, old_index = op.copy(), layers.copy(), index.copy()
    k = 0
    while k < size:
        merged = False
        for j in range(size):
            if j == k or op[j] != op[k]:
                continue
            old_op[:], old_layers[:], old_index[:] = op, layers, index
            smaller = _give(op, layers, index, size, k, j, layers[k])
            if place_in_time(table, smaller, op, layers, index, scratch, limit) >= 0:
                size, merged = smaller, True
                break
            op[:], layers[:], index[:] = old_op, old_layers, old_index
        if not merged:
            k += 1
    return size


@numba.njit(cache=True)
def _give(op, layers, index, size, giver, taker, given):  # type: ignore[no-untyped-def]
    """Move layers from one slice to another; an empty one leaves the sequence. Returns the size."""
    layers[taker] += given
    layers[giver] -= given
    if layers[giver] == 0:
        _move(op, layers, index, giver, size - 1)
        return size - 1
    return size


@numba.njit(cache=True)
def _move(op, layers, index, source, destination):  # type: ignore[no-untyped-def]
    """Take a slice out of the sequence and put it in so that it stands at `destination`."""
    a, b, c = op[source], layers[source], index[source]
    step = 1 if destination > source else -1
    for q in range(source, destination, step):
        op[q], layers[q], index[q] = op[q + step], layers[q + step], index[q + step]
    op[destination], layers[destination], index[destination] = a, b, c
