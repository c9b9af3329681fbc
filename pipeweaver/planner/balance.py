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

from pipeweaver.model.graph import ModelGraph, topological
from pipeweaver.planner.boundaries import Floats, Ranges, period_of, refined
from pipeweaver.schedule.ir import Chunk, Placement

MOST_REFINED = 4
"""Ways to begin modules, the best in whole blocks, whose boundaries are moved."""
MOST_MOVED = 8
"""Layers of a second module that one move exchanges for one or two of a first."""


def balanced(
    graph: ModelGraph,
    workers: int,
    samples: Sequence[Mapping[str, Sequence[int]]],
    tasks: Mapping[str, Sequence[str]],
    chunks_per_worker: Mapping[str, int],
    fill: float = 0.0,
    early: float = 1.0,
) -> Placement:
    """Chunks for the K of each module (less where it has too few layers), balanced over `samples`.

    `samples`: for each batch, per module one cost per layer, as `layer_costs` gives them. A module with fewer
    layers than workers is spread one layer each over the workers that carry least. `fill`: what the last worker that the
    first part reaches loses until then, as a share of a worker's work; the others lose proportionally less, and get
    more to do. `early`: what the first chunk of a worker has of an even one, in modules that work begins with, if they have
    several per worker: the first part goes through those chunks before the last worker has anything to do.
    """
    modules = {name: np.array([sample[name] for sample in samples], np.float64) for name in topological(graph)}
    short = {name: costs for name, costs in modules.items() if costs.shape[1] < workers}
    spread = {name: costs for name, costs in modules.items() if name not in short}
    periods = {name: period_of(costs) for name, costs in spread.items()}
    least = {
        name: max(1, min(chunks_per_worker.get(name, 1), costs.shape[1] // periods[name] // workers))
        for name, costs in spread.items()
    }
    blocks = {name: costs.reshape(len(costs), -1, periods[name]).sum(axis=2) for name, costs in spread.items()}
    first_name = next(iter(spread), None)
    shared: list[tuple[float, dict[str, int], dict[str, list[int]]]] = []
    # Only where modules begin relative to each other matters.
    for places in product(*(range(workers) if name != first_name else (0,) for name in spread)):
        begins = dict(zip(spread, places, strict=True))
        score, counts = _share_out(workers, blocks, begins, least, fill)
        shared.append((score, begins, counts))
    small = {name: early if name in sources(graph) and least[name] > 1 else 1.0 for name in spread}
    kept = {name: workers - 1 for name in spread if small[name] < 1.0}
    best: tuple[float, dict[str, Ranges]] = (np.inf, {})
    for _, begins, counts in sorted(shared, key=lambda one: one[0])[:MOST_REFINED]:
        whole = {
            name: _laid_out(workers, counts[name], begins[name], least[name], periods[name], small[name])
            for name in spread
        }
        waits = _waits(workers, spread, begins, fill)
        score, chunks = refined(whole, spread, waits, kept)
        if score < best[0] * (1 - 1e-9):
            best = (score, chunks)
    _, chunks = best
    loads = np.zeros(workers)
    for name, ranges in chunks.items():
        for start, stop, worker in ranges:
            loads[worker] += spread[name][:, start:stop].sum()
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


def sources(graph: ModelGraph) -> list[str]:
    """Modules that work begins with: no other's output flows into them."""
    receiving = {flow.destination for flow in graph.flows if flow.source != flow.destination}
    return [name for name in topological(graph) if name not in receiving]


def _laid_out(workers: int, counts: Sequence[int], begin: int, rounds: int, period: int, early: float) -> Ranges:
    """The chunks: `rounds` turns over the workers from `begin` on, each worker's blocks of `period` layers in chunks as even
    as possible, larger ones first; but for the first turn, where all workers but the last have `early` of that."""
    sizes = np.zeros((rounds, workers), np.int64)
    for step in range(workers):
        count, rest = counts[(begin + step) % workers], rounds
        if early < 1.0 and step < workers - 1:
            sizes[0, step] = max(1, round(early * count / rounds))
            count, rest = count - sizes[0, step], rounds - 1
        for turn in range(rest):
            sizes[rounds - rest + turn, step] = count // rest + (turn < count % rest)
    chunks: Ranges = []
    at = 0
    for turn, step in product(range(rounds), range(workers)):
        size = period * int(sizes[turn, step])
        chunks.append((at, at + size, (begin + step) % workers))
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

    loads += _waits(workers, modules, begins, fill)

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


def _waits(workers: int, modules: Mapping[str, Floats], begins: Mapping[str, int], fill: float) -> Floats:
    """[samples, workers] ns until the first part is there."""
    num_samples = max((len(costs) for costs in modules.values()), default=0)
    work = sum((costs.sum(axis=1) for costs in modules.values()), np.zeros(num_samples)) / workers
    if not modules or fill == 0:
        return np.zeros((num_samples, workers))
    heaviest = max(modules, key=lambda name: float(modules[name].sum()))
    hops = (np.arange(workers) - begins[heaviest]) % workers
    return np.asarray(fill * work[:, None] * hops / max(1, workers - 1))


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
