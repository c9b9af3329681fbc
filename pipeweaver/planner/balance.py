"""Share out the layers of all modules so that workers have equal work, modules cut apart.

A worker gets a number of layers of each module, in K chunks; where `before` and `after` fall counts too, and depends on
the worker that a module begins on. What a batch needs of each module differs, so the slowest worker is averaged over a
sample. Example, two workers, vision of 5 layers (10 ms) and language of 6 (4 ms, the head as much as two layers):

    vision 2 + 3, language 4 + 2 and the head         20 + 16 = 36 | 30 + 8 + 8 = 46
    vision 3 + 2, language 3 + 3 and the head         30 + 12 = 42 | 20 + 12 + 8 = 40
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from pipeweaver.model.graph import ModelGraph, topological
from pipeweaver.schedule.ir import Chunk, Placement

Floats = NDArray[np.float64]
MOST_MOVED = 8
"""Layers of a second module that one move exchanges for one or two of a first."""


def balanced(
    graph: ModelGraph,
    workers: int,
    samples: Sequence[Mapping[str, Sequence[int]]],
    tasks: Mapping[str, Sequence[str]],
    chunks_per_worker: Mapping[str, int],
    fill: float = 0.0,
) -> Placement:
    """Chunks for the K of each module (less where it has too few layers), balanced over `samples`.

    `samples`: for each batch, per module one cost per layer, as `layer_costs` gives them. A module with fewer
    layers than workers is spread one layer each over the workers that carry least. `fill`: what the last worker that the
    first part reaches loses until then, as a share of a worker's work; the others lose proportionally less, and get
    more to do.
    """
    modules = {name: np.array([sample[name] for sample in samples], np.float64) for name in topological(graph)}
    short = {name: costs for name, costs in modules.items() if costs.shape[1] < workers}
    spread = {name: costs for name, costs in modules.items() if name not in short}
    least = {
        name: max(1, min(chunks_per_worker.get(name, 1), costs.shape[1] // workers)) for name, costs in spread.items()
    }
    best: tuple[float, dict[str, int], dict[str, list[int]]] | None = None
    first_name = next(iter(spread), None)
    # Only where modules begin relative to each other matters.
    for places in product(*(range(workers) if name != first_name else (0,) for name in spread)):
        begins = dict(zip(spread, places, strict=True))
        score, counts = _share_out(workers, spread, begins, least, fill)
        if best is None or score < best[0] * (1 - 1e-9):
            best = (score, begins, counts)
    chunks: dict[str, list[tuple[int, int, int]]] = {}
    loads = np.zeros(workers)
    if best is not None:
        _, begins, counts = best
        for name, costs in spread.items():
            chunks[name] = _laid_out(workers, counts[name], begins[name], least[name])
            for start, stop, worker in chunks[name]:
                loads[worker] += costs[:, start:stop].sum()
    for name, costs in short.items():
        chosen = sorted(np.argsort(loads, kind="stable")[: costs.shape[1]].tolist())
        chunks[name] = [(i, i + 1, worker) for i, worker in enumerate(chosen)]
        loads[chosen] += costs.sum(axis=0)
    return Placement(
        workers=workers,
        chunks=tuple(
            Chunk(task=task, module=name, start=start, stop=stop, worker=worker)
            for task, names in tasks.items()
            for name in topological(graph)
            if name in names
            for start, stop, worker in chunks[name]
        ),
    )


def _laid_out(workers: int, counts: Sequence[int], begin: int, rounds: int) -> list[tuple[int, int, int]]:
    """(start, stop, worker) of the chunks: `rounds` turns over the workers from `begin` on, each worker's layers in
    chunks as even as possible, larger ones first."""
    chunks = []
    at = 0
    for turn in range(rounds):
        for step in range(workers):
            worker = (begin + step) % workers
            size = counts[worker] // rounds + (turn < counts[worker] % rounds)
            chunks.append((at, at + size, worker))
            at += size
    return chunks


def _share_out(
    workers: int, modules: Mapping[str, Floats], begins: Mapping[str, int], least: Mapping[str, int], fill: float
) -> tuple[float, dict[str, list[int]]]:
    """(mean over samples of the largest load, layers of each module per worker), by local search.

    A load is work and the wait for the first part, which goes along the chunks of the module with most work.

    A move takes a few layers of one module from one worker to another, and some of another module back.
    """
    num_samples = max((costs.shape[0] for costs in modules.values()), default=0)
    loads = np.zeros((num_samples, workers))
    layer: dict[str, Floats] = {}
    counts: dict[str, list[int]] = {}
    for name, costs in modules.items():
        inner = costs[:, 1:-1] if costs.shape[1] > 2 else costs
        layer[name] = inner.mean(axis=1)
        loads[:, begins[name]] += costs[:, 0] - layer[name]
        loads[:, (begins[name] - 1) % workers] += costs[:, -1] - layer[name]
    for name, costs in modules.items():
        base, rest = divmod(costs.shape[1], workers)
        counts[name] = [base] * workers
        loads += base * layer[name][:, None]
        for _ in range(rest):
            worker = int(loads.sum(axis=0).argmin())
            counts[name][worker] += 1
            loads[:, worker] += layer[name]

    if modules and fill > 0:
        heaviest = max(modules, key=lambda name: float(modules[name].sum()))
        hops = (np.arange(workers) - begins[heaviest]) % workers
        loads += fill * loads.mean(axis=1, keepdims=True) * hops / max(1, workers - 1)

    def score(candidate: Floats) -> tuple[float, float]:
        return float(candidate.max(axis=1).mean()), float((candidate**2).sum())

    best = score(loads) if num_samples else (0.0, 0.0)
    improved = bool(num_samples)
    while improved:
        improved = False
        for a, b in product(range(workers), repeat=2):
            if a == b:
                continue
            for one, moved, other, back in _moves(counts, least, a, b):
                candidate = loads.copy()
                change = moved * layer[one] - (back * layer[other] if other else 0.0)
                candidate[:, a] -= change
                candidate[:, b] += change
                found = score(candidate)
                if found < (best[0] * (1 - 1e-9), best[1]) or (found[0] <= best[0] and found[1] < best[1] * (1 - 1e-9)):
                    best, loads, improved = found, candidate, True
                    counts[one][a] -= moved
                    counts[one][b] += moved
                    if other:
                        counts[other][a] += back
                        counts[other][b] -= back
                    break
    return best[0], counts


def _moves(
    counts: Mapping[str, Sequence[int]], least: Mapping[str, int], a: int, b: int
) -> list[tuple[str, int, str | None, int]]:
    """(module, layers from a to b, other module or None, layers from b to a) that leave no worker too few."""
    moves: list[tuple[str, int, str | None, int]] = []
    for one in counts:
        for moved in (1, 2):
            if counts[one][a] - moved < least[one]:
                break
            moves.append((one, moved, None, 0))
            for other in counts:
                if other != one:
                    most = min(MOST_MOVED, counts[other][b] - least[other])
                    moves += [(one, moved, other, back) for back in range(1, most + 1)]
    return moves
