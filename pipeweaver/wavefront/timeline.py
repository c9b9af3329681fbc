"""When slices run: each, in a given sequence, as early as its MetaOp and the free workers allow.

Serial schedule generation: some sequence gives an optimal plan for given slices, and the sequence of any plan by start
gives one that ends no later. Example, four workers, sequence a[2 workers, 5], b[4, 3], c[2, 4]:

    a 0..5, b 5..8, c 0..4: c fits beside a, before b
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from pipeweaver.wavefront.metagraph import Links, MetaGraph, Slice

Ints = NDArray[np.int64]

NO_LIMIT = np.iinfo(np.int64).max


class Tables(NamedTuple):
    """A MetaGraph as arrays, for hot loops. M MetaOps, at most C counts and P sources each."""

    workers: int
    num_layers: Ints
    """[M]"""
    num_counts: Ints
    """[M], of those that the workers allow"""
    counts: Ints
    """[M, C]"""
    layer_ns: Ints
    """[M, C]"""
    before_ns: Ints
    """[M, C]"""
    after_ns: Ints
    """[M, C]"""
    num_sources: Ints
    """[M]"""
    sources: Ints
    """[M, P]"""
    moved_ns: Ints
    """[M, P + 1]: data over a flow, last: from layer to layer; ns if one worker moved all of it"""
    latency_ns: int
    """of a flow or a change of count, forward and back"""
    fastest_ns: Ints
    """[M]: a layer on the largest count"""
    tail_ns: Ints
    """[M]: at least so much time from the end of a MetaOp to the end of all that follows"""


class Pieces(NamedTuple):
    """Slices without times, in sequence: `size` of them are in use."""

    size: int
    op: Ints
    layers: Ints
    choice: Ints
    """positions in the MetaOp's counts"""


def tables(graph: MetaGraph, workers: int, links: Links) -> Tables:
    """Raises ValueError if a MetaOp needs more than `workers` workers."""
    ops = graph.ops
    for op in ops:
        op.fastest(workers)
    widest = max(len(op.counts) for op in ops)
    most = max(len(sources) for sources in graph.sources)

    def padded(rows: Sequence[Sequence[int]], width: int) -> Ints:
        return np.array([[*row, *(0,) * (width - len(row))] for row in rows], np.int64).reshape(len(ops), width)

    def alone_ns(num_bytes: int) -> int:
        return links.lag_ns(num_bytes, 1, 1) - links.lag_ns(0, 1, 1)

    fastest = [min(op.layer_ns[: sum(count <= workers for count in op.counts)]) for op in ops]
    tail = [0] * len(ops)
    for i in reversed(graph.order):
        for source in graph.sources[i]:
            tail[source] = max(tail[source], ops[i].num_layers * fastest[i] + tail[i])
    flow_bytes = {(flow.source, flow.destination): 0 for flow in graph.flows}
    for flow in graph.flows:
        flow_bytes[flow.source, flow.destination] += flow.num_bytes
    moved = padded([[alone_ns(flow_bytes[s, i]) for s in graph.sources[i]] for i in range(len(ops))], most + 1)
    moved[:, most] = [alone_ns(op.carried_bytes) for op in ops]
    return Tables(
        workers=workers,
        num_layers=np.array([op.num_layers for op in ops], np.int64),
        num_counts=np.array([sum(count <= workers for count in op.counts) for op in ops], np.int64),
        counts=padded([op.counts for op in ops], widest),
        layer_ns=padded([op.layer_ns for op in ops], widest),
        before_ns=padded([op.before_ns for op in ops], widest),
        after_ns=padded([op.after_ns for op in ops], widest),
        num_sources=np.array([len(sources) for sources in graph.sources], np.int64),
        sources=padded(graph.sources, max(1, most)),
        moved_ns=moved,
        latency_ns=links.lag_ns(0, 1, 1),
        fastest_ns=np.array(fastest, np.int64),
        tail_ns=np.array(tail, np.int64),
    )


def timed(graph: MetaGraph, table: Tables, pieces: Pieces) -> tuple[Slice, ...]:
    """Slices with times, in the order in which they start; neighbours on the same count, back to back, are one slice."""
    scratch = scratch_for(table, len(pieces.op))
    makespan = place_in_time(table, pieces.size, pieces.op, pieces.layers, pieces.choice, scratch, NO_LIMIT)
    assert makespan >= 0, "a slice precedes what it needs"
    done = [0] * len(graph.ops)
    slices: list[Slice] = []
    last: dict[int, int] = {}
    for k in range(pieces.size):
        op, layers = int(pieces.op[k]), int(pieces.layers[k])
        count = graph.ops[op].counts[int(pieces.choice[k])]
        piece = Slice(op, done[op], done[op] + layers, count, int(scratch.start[k]), int(scratch.end[k]))
        done[op] += layers
        previous = slices[last[op]] if op in last else None
        if previous is not None and previous.workers == count and previous.end_ns == piece.start_ns:
            slices[last[op]] = previous._replace(stop=piece.stop, end_ns=piece.end_ns)
        else:
            last[op] = len(slices)
            slices.append(piece)
    return tuple(sorted(slices, key=lambda piece: (piece.start_ns, piece.op)))


def pieces_of(graph: MetaGraph, slices: Sequence[Slice]) -> Pieces:
    """Slices, in the given sequence, as arrays."""
    return Pieces(
        len(slices),
        np.array([piece.op for piece in slices], np.int64),
        np.array([piece.stop - piece.start for piece in slices], np.int64),
        np.array([graph.ops[piece.op].counts.index(piece.workers) for piece in slices], np.int64),
    )


class Scratch(NamedTuple):
    """Room for `place_in_time`; afterwards `start` and `end` hold the times of the slices."""

    start: Ints
    end: Ints
    op_end: Ints
    op_done: Ints
    op_count: Ints
    moment: Ints
    free: Ints


def scratch_for(table: Tables, most: int) -> Scratch:
    """Room for at most `most` slices."""
    ops = len(table.num_layers)
    sizes = (most, most, ops, ops, ops, 2 * most + 4, 2 * most + 4)
    return Scratch(*(np.zeros(size, np.int64) for size in sizes))


@numba.njit(cache=True)
def place_in_time(table, size, op, layers, index, scratch, limit):  # type: ignore[no-untyped-def]
    """Makespan of a sequence of slices; -1 if it is above `limit`, or a slice comes before all of its MetaOp's sources
    are done."""
    start, end, op_end, op_done, op_count, moment, free = scratch
    op_done[:] = 0
    # The workers free from moment[i] to moment[i + 1]; the last piece never ends.
    moments = 1
    moment[0], free[0] = 0, table.workers
    makespan = 0
    last_source = table.moved_ns.shape[1] - 1
    for k in range(size):
        m = op[k]
        count = table.counts[m, index[k]]
        ready = 0
        if op_done[m] == 0:
            for j in range(table.num_sources[m]):
                source = table.sources[m, j]
                if op_done[source] < table.num_layers[source]:
                    return -1
                lag = table.latency_ns + table.moved_ns[m, j] // min(count, op_count[source])
                ready = max(ready, op_end[source] + lag)
        else:
            ready = op_end[m]
            if op_count[m] != count:
                ready += table.latency_ns + table.moved_ns[m, last_source] // min(count, op_count[m])
        time = layers[k] * table.layer_ns[m, index[k]]
        if op_done[m] == 0:
            time += table.before_ns[m, index[k]]
        op_done[m] += layers[k]
        if op_done[m] == table.num_layers[m]:
            time += table.after_ns[m, index[k]]
        i = moments - 1
        while moment[i] > ready:
            i -= 1
        begin = ready
        while True:
            j = i
            while j < moments and (j == i or moment[j] < begin + time):
                if free[j] < count:
                    break
                j += 1
            if j == moments or (j > i and moment[j] >= begin + time):
                break
            i = j + 1
            begin = moment[i]
        stop = begin + time
        if stop + (table.num_layers[m] - op_done[m]) * table.fastest_ns[m] + table.tail_ns[m] > limit:
            return -1
        if moment[i] < begin:
            for q in range(moments, i + 1, -1):
                moment[q], free[q] = moment[q - 1], free[q - 1]
            i += 1
            moment[i], free[i] = begin, free[i - 1]
            moments += 1
        j = i
        while j < moments and moment[j] < stop:
            j += 1
        if j == moments or moment[j] > stop:
            for q in range(moments, j, -1):
                moment[q], free[q] = moment[q - 1], free[q - 1]
            moment[j], free[j] = stop, free[j - 1]
            moments += 1
        for q in range(i, j):
            free[q] -= count
        start[k], end[k] = begin, stop
        op_end[m], op_count[m] = stop, count
        makespan = max(makespan, stop)
    return makespan
