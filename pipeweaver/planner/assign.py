"""Share a batch out over the replicas, and count what its losses are divided by.

A drawn microbatch stays together; the largest go first, each to the replica with the least so far. The
normaliser of a loss counts its units over the whole batch, so that the gradient does not depend on who got
what. Example, four microbatches of cost 5, 4, 3, 3 on two replicas:

    replica 0: microbatches 0, 3 (8)     replica 1: microbatches 1, 2 (7)
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeweaver.costs import Costs
from pipeweaver.data.items import Batch, Item, Sample, Share
from pipeweaver.model.graph import ModelGraph
from pipeweaver.planner.exchange import Groups, exchanged, sample_costs


def share_out(
    graph: ModelGraph, batch: Batch, num_replicas: int, costs: Costs | None = None, *, exchange: bool = False
) -> tuple[Share, ...]:
    """One share per replica: every microbatch in exactly one, in the order drawn; some may have none.

    With `costs` the replicas' work is balanced in nanoseconds, else in tokens. With `exchange` replicas exchange samples
    to become even (`exchange.py`). Raises ValueError for a joint loss on more than one replica.
    """
    assert num_replicas >= 1, num_replicas
    for module in graph.modules:
        if num_replicas > 1 and module.loss is not None and module.loss.joint:
            raise ValueError(
                f"the loss of {module.name} is joint: it needs the whole batch in one place, but there are "
                f"{num_replicas} replicas; use 1"
            )
    normalisers = count_normalisers(graph, batch.samples)
    if num_replicas == 1:
        return (_flatten(batch, batch.microbatches, 0, 1, normalisers),)
    cost = sample_costs(batch, costs)
    groups = _dealt(batch, num_replicas, cost)
    if exchange:
        groups = exchanged(batch, groups, cost)
    return tuple(_flatten(batch, group, replica, num_replicas, normalisers) for replica, group in enumerate(groups))


def single_share(graph: ModelGraph, batch: Batch) -> Share:
    """The whole batch as the share of an only replica."""
    return share_out(graph, batch, 1)[0]


def count_normalisers(graph: ModelGraph, samples: Sequence[Sample]) -> dict[str, int]:
    """ "task/module" of each loss that items count for -> its units over all samples, at least 1: no units, no loss
    to divide."""
    units: dict[str, int] = {}
    for sample in samples:
        for item in sample.items:
            loss = graph.by_name[item.module].loss
            if loss is not None:
                if loss.units not in item.sizes:
                    raise ValueError(
                        f"item {item.name} does not say how many units of the loss of {item.module} it has: "
                        f"no size {loss.units!r} among {', '.join(sorted(item.sizes))}"
                    )
                name = f"{item.task}/{item.module}"
                units[name] = units.get(name, 0) + item.sizes[loss.units]
    return {name: max(1, count) for name, count in units.items()}


def _dealt(batch: Batch, num_replicas: int, cost: Sequence[int]) -> Groups:
    """Whole microbatches, the largest first, each to the replica with the least so far."""
    sizes = [sum(cost[i] for i in group) for group in batch.microbatches]
    loads = [0] * num_replicas
    counts = [0] * num_replicas
    groups: list[list[int]] = [[] for _ in range(num_replicas)]
    for number in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        replica = min(range(num_replicas), key=lambda r: (loads[r], counts[r], r))
        loads[replica] += sizes[number]
        counts[replica] += 1
        groups[replica].append(number)
    return [[list(batch.microbatches[number]) for number in sorted(group)] for group in groups]


def _flatten(
    batch: Batch, groups: Sequence[Sequence[int]], replica: int, num_replicas: int, normalisers: dict[str, int]
) -> Share:
    items: list[Item] = []
    links: list[tuple[int, int]] = []
    microbatches: list[tuple[int, ...]] = []
    records: dict[str, int] = {}
    for group in groups:
        first = len(items)
        for i in group:
            sample = batch.samples[i]
            links += [(len(items) + source, len(items) + destination) for source, destination in sample.links]
            items += sample.items
            records[f"{sample.task}/{sample.draw}"] = sample.record
        microbatches.append(tuple(range(first, len(items))))
    return Share(
        step=batch.step,
        replica=replica,
        num_replicas=num_replicas,
        items=tuple(items),
        links=tuple(links),
        microbatches=tuple(microbatches),
        records=records,
        normalisers=normalisers,
    )
