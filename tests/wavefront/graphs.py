"""Small and random MetaGraphs for the tests of the planner."""

from __future__ import annotations

import random

from pipeweaver.wavefront.metagraph import DataFlow, MetaGraph, MetaOp
from pipeweaver.wavefront.scaling import repaired


def meta_op(name: str, num_layers: int, times: dict[int, int], **more) -> MetaOp:
    """A MetaOp from its times per layer by count, in ns."""
    return MetaOp(name=name, num_layers=num_layers, counts=tuple(times), layer_ns=tuple(times.values()), **more)


def random_graph(seed: int, *, most_ops: int = 10, workers: int = 8) -> MetaGraph:
    """Up to `most_ops` MetaOps, deep or flat, some that scale well, badly or unevenly; some with ends and bytes."""
    draw = random.Random(seed)
    density = draw.choice([0.0, 0.15, 0.4])
    ops, flows = [], []
    for number in range(draw.randint(1, most_ops)):
        batch = draw.choice([1, 2, 3, 4, 6, 8, 16, 32])
        counts = [n for n in range(1, batch + 1) if batch % n == 0 or draw.random() < 0.1]
        if draw.random() < 0.1:
            counts = [n for n in counts if n > 1 and n <= workers] or counts
        fixed, work = draw.randint(1, 2_000_000), draw.randint(10_000, 20_000_000)
        bend = draw.choice([1.0, 1.0, 0.7, 1.2])
        counts, layer_ns = repaired(counts, [int(fixed + work / n**bend) for n in counts])
        ends = [tuple(2 * time for time in layer_ns) if draw.random() < 0.2 else () for _ in range(2)]
        op = meta_op(
            f"op{number}", draw.choice([1, 2, 5, 8, 24]), dict(zip(counts, layer_ns, strict=True)),
            before_ns=ends[0], after_ns=ends[1], carried_bytes=draw.choice([0, 10_000_000]),
        )  # fmt: skip
        ops.append(op)
        flows += [DataFlow(s, number, draw.choice([0, 1_000_000])) for s in range(number) if draw.random() < density]
    return MetaGraph(ops=tuple(ops), flows=tuple(flows))
