"""From a model graph, its tasks' items and costs to the MetaGraph of a step.

Every (task, module) with items is a chain of layers; flows of the model graph join the chains. Equal layers become
MetaOps (contract.py); what `before` and `after` of a module cost is extra time of its first and last layer. T(n) is the
time of the most expensive of n runs of consecutive items, forward and, where there is one, backward. Example:

    caption: vision of 4 layers -> language of 8;  text: the same language
    caption/vision[0:4], caption/language[0:8], text/language[0:8]; the last two share parameters
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from pipeweaver.costs import Costs, StageCost
from pipeweaver.data.items import Item, Share, linked
from pipeweaver.model.graph import ModelGraph, Module, positions, topological
from pipeweaver.schedule.gradients import gradients_of
from pipeweaver.schedule.ir import ITEM_SIZES, Chunk
from pipeweaver.wavefront.bound import Mixture, least_makespan_ns
from pipeweaver.wavefront.contract import Contraction, Layer, contract
from pipeweaver.wavefront.cuts import even_cuts
from pipeweaver.wavefront.metagraph import DataFlow, Links, MetaGraph, MetaOp
from pipeweaver.wavefront.place import Cluster

FINEST = 1.1
"""Numbers of workers that are considered grow by at least this factor: nearer ones differ too little to matter."""

_SMALL, _LARGE = 1 << 20, 1 << 26
"""Transfers, in bytes, that tell latency from bandwidth."""

Place = tuple[str, str, int]
"""(task, module, layer)."""


def bind(graph: ModelGraph, share: Share, costs: Costs, workers: int, *, dtype: str = "float32") -> MetaGraph:
    """The MetaGraph of a share on up to `workers` workers; `dtype` is what tensors between chunks are in.

    Raises ValueError if the share has no items.
    """
    asked = _Asked(graph, share, costs)
    places, found = _contracted(asked)
    ops = tuple(_meta_op(asked, places[run[0]], len(run), workers, dtype) for run in found.members)
    flows = [DataFlow(s, d, _flow_bytes(asked, ops[s], ops[d], dtype)) for s, d in found.flows]
    return MetaGraph(ops=ops, flows=tuple(flows))


def step_bound_ns(graph: ModelGraph, share: Share, costs: Costs, workers: int) -> int:
    """A bound on the makespan of any plan of a share that cuts its items like `bind`, on the same numbers of workers.

    Unlike a bound on the MetaGraph it holds for what workers really do: they need not wait for the one with the most
    expensive part, so that the device-time of a layer is the sum over its parts, and a path runs over the cheapest.
    Where items are paired, every one has a path of its own through the same layers; the longest of these is at least
    as long as their mean, for which a layer takes what it takes its items on average.
    """
    asked = _Asked(graph, share, costs)
    places, found = _contracted(asked)
    paired = {task for task, _ in asked.members if _is_paired(asked, task)}
    works = []
    for run in found.members:
        task, name, first = places[run[0]]
        counts = _counts(asked, task, name, first + len(run), workers)
        kinds: dict[int, list[int]] = {}  # Layers that cost the same: the ends for themselves.
        for layer in range(first, first + len(run)):
            kinds.setdefault(layer if _is_end(asked, name, layer) else -1, []).append(layer)
        mixtures = []
        for layers in kinds.values():
            ways = []
            for count in counts:
                parts = asked.parts(task, name, count)
                spent = [asked.ns(task, name, layers[0], part) for part in parts]
                sizes = [stop - start for start, stop in parts]
                mean = sum(ns * size for ns, size in zip(spent, sizes, strict=True)) // sum(sizes)
                ways.append((mean if task in paired else min(spent), sum(spent)))
            mixtures.append(Mixture(len(layers), tuple(ways)))
        works.append(mixtures)
    return least_makespan_ns(works, found.flows, workers)


def items_of(graph: ModelGraph, share: Share) -> dict[tuple[str, str], tuple[int, ...]]:
    """Positions of the items of each (task, module), in the order of the share; modules along the flows."""
    order = topological(graph)
    found: dict[tuple[str, str], list[int]] = {
        (task, module): [] for task in dict.fromkeys(item.task for item in share.items) for module in order
    }
    for position, item in enumerate(share.items):
        found[item.task, item.module].append(position)
    return {key: tuple(of_key) for key, of_key in found.items() if of_key}


def item_weights(
    graph: ModelGraph, share: Share, costs: Costs, items: Sequence[int], sources: Sequence[Sequence[Item]]
) -> list[int]:
    """What each of the items of one task and module costs alone, ns of a layer's forward: what cuts are made even in.

    `items` are positions in the share, `sources` the items linked to each item of the share.
    """
    one = share.items[items[0]]
    layer = min(1, len(graph.by_name[one.module].layers) - 1)
    chunk = Chunk(task=one.task, module=one.module, start=layer, stop=layer + 1, worker=0)
    known: dict[object, int] = {}
    weights = []
    for i in items:
        key = _key(share.items[i], sources[i])
        if key not in known:
            known[key] = costs.stage(chunk, [share.items[i]], [sources[i]]).forward_ns
        weights.append(known[key])
    return weights


def useful_counts(items: int, workers: int) -> list[int]:
    """Numbers of workers worth considering for so many items: each leaves fewer items per worker than the one before."""
    counts: list[int] = []
    for count in range(1, min(items, workers) + 1):
        fewer = not counts or -(-items // count) < -(-items // counts[-1])
        if fewer and (not counts or count >= FINEST * counts[-1] or count in (items, workers)):
            counts.append(count)
    return counts


def layer_at(module: Module, position: int) -> int:
    """The layer that a position goes with: `before` (-1) with the first, `after` with the last."""
    return min(max(position, 0), len(module.layers) - 1)


def cluster_of(costs: Costs, workers: int) -> Cluster:
    """Islands and links as the transfer times of the costs show them: an island ends where a transfer takes longer."""
    if workers == 1:
        return Cluster(workers=1, island=1)
    near = costs.transfer_ns(0, 1, _LARGE)
    beyond = [worker for worker in range(2, workers) if costs.transfer_ns(0, worker, _LARGE) > near * 1.05]
    island = beyond[0] if beyond else workers
    return Cluster(
        workers=workers,
        island=island,
        inside=_links(costs, 1),
        across=_links(costs, beyond[0] if beyond else 1),
    )


def _links(costs: Costs, other: int) -> Links:
    """Latency and bandwidth between worker 0 and another, from the times of a small and a large transfer."""
    small, large = costs.transfer_ns(0, other, _SMALL), costs.transfer_ns(0, other, _LARGE)
    if large <= small:
        return Links(latency_ns=small)
    bytes_per_us = max(1, (_LARGE - _SMALL) * 1_000 // (large - small))
    return Links(latency_ns=max(0, small - _SMALL * 1_000 // bytes_per_us), bytes_per_us=bytes_per_us)


class _Asked:
    """Costs of single layers on single parts of a share, each asked for once."""

    def __init__(self, graph: ModelGraph, share: Share, costs: Costs) -> None:
        if not share.items:
            raise ValueError("there is nothing to plan: the batch has no items")
        self.graph, self.share, self.costs = graph, share, costs
        self.members = items_of(graph, share)
        self.gradients = gradients_of(graph)
        self._sources = linked(share.items, share.links)
        self._weights = {
            key: item_weights(graph, share, costs, items, self._sources) for key, items in self.members.items()
        }
        # Where all items are alike, the cost of a run depends on its length alone, whatever the task.
        self._alike = {key: self._common_key(items) for key, items in self.members.items()}
        self._known: dict[object, int] = {}

    def parts(self, task: str, module: str, count: int) -> list[tuple[int, int]]:
        """The runs (first, one past the last) of the items on `count` workers, the most expensive first."""
        weights = self._weights[task, module]
        runs = [run for run in pairwise(even_cuts(weights, count)) if run[0] < run[1]]
        if self._alike[task, module] is not None:
            return sorted(runs, key=lambda run: run[0] - run[1])
        return sorted(runs, key=lambda run: -sum(weights[run[0] : run[1]]))

    def ns(self, task: str, module: str, layer: int, run: tuple[int, int]) -> int:
        """Forward and, where there is one, backward of a layer, with what goes before or after it."""
        alike = self._alike[task, module]
        key = (task, module, layer, run) if alike is None else (alike, module, layer, run[1] - run[0])
        if key not in self._known:
            cost = self.stage(task, module, layer, run)
            backward = self.gradients.backward[module, layer]
            self._known[key] = max(1, cost.forward_ns + (cost.backward_ns if backward else 0))
        return self._known[key]

    def _common_key(self, items: Sequence[int]) -> object:
        keys = {_key(self.share.items[i], self._sources[i]) for i in items}
        return keys.pop() if len(keys) == 1 else None

    def stage(self, task: str, module: str, layer: int, run: tuple[int, int]) -> StageCost:
        chosen = self.members[task, module][run[0] : run[1]]
        chunk = Chunk(task=task, module=module, start=layer, stop=layer + 1, worker=0)
        return self.costs.stage(chunk, [self.share.items[i] for i in chosen], [self._sources[i] for i in chosen])


def _contracted(asked: _Asked) -> tuple[list[Place], Contraction]:
    """All layers of all tasks, and which of them make up MetaOps."""
    layers, places = [], []
    for (task, name), items in asked.members.items():
        module = asked.graph.by_name[name]
        rows = sum(asked.share.items[i].sizes["tokens"] for i in items)
        for index, spec in enumerate(module.layers):
            kind = f"{name} {spec.kind} {asked.gradients.backward[name, index]} {_is_joint(module, index)}"
            layers.append(Layer(name=f"{task}/{name}.{index}", kind=kind, size=(len(items), rows)))
            places.append((task, name, index))
    return places, contract(layers, _layer_flows(asked, {place: i for i, place in enumerate(places)}))


def _layer_flows(asked: _Asked, number: dict[Place, int]) -> list[tuple[int, int]]:
    """Pairs of layers: one after another, and what flows bring to whoever reads it, where items are linked."""
    items = asked.share.items
    linked_modules = {(items[s].task, items[s].module, items[d].module) for s, d in asked.share.links}
    pairs = [(i, number[t, m, layer + 1]) for (t, m, layer), i in number.items() if (t, m, layer + 1) in number]
    for task, name in asked.members:
        for flow in asked.graph.flows:
            if flow.source != name or (
                flow.destination != name and (task, name, flow.destination) not in linked_modules
            ):
                continue
            sent = layer_at(asked.graph.by_name[name], asked.graph.sent(flow)[0])
            reading = asked.graph.by_name[flow.destination]
            for position, layer in positions(reading):
                ends = number[task, name, sent], number[task, flow.destination, layer_at(reading, position)]
                if flow.name in layer.reads and ends[0] != ends[1]:
                    pairs.append(ends)
    return pairs


def _meta_op(asked: _Asked, place: Place, num_layers: int, workers: int, dtype: str) -> MetaOp:
    task, name, first = place
    module = asked.graph.by_name[name]
    last, stop = len(module.layers) - 1, first + num_layers
    # What the ends of the module add is told from a layer of this run that is at neither end.
    plain = next((layer for layer in range(first, stop) if 0 < layer < last), first)
    rows: list[tuple[int, int, int, int]] = []
    for count in _counts(asked, task, name, stop, workers):
        part = asked.parts(task, name, count)[0]
        layer = asked.ns(task, name, plain, part)
        head = asked.ns(task, name, 0, part) if first == 0 else layer
        tail = asked.ns(task, name, last, part) if stop - 1 == last and num_layers > 1 else layer
        if num_layers <= 2:
            layer = min(head, tail)
        before, after = max(0, head - layer), max(0, tail - layer)
        faster = not rows or layer < rows[-1][1]
        if faster and (not rows or num_layers * layer + before + after < num_layers * rows[-1][1] + sum(rows[-1][2:])):
            rows.append((count, layer, before, after))
    names = [[layer for layer, _ in module.range(i, i + 1)] for i in range(first, stop)]
    everything = (0, len(asked.members[task, name]))
    tokens = sum(asked.share.items[i].sizes["tokens"] for i in asked.members[task, name])
    return MetaOp(
        name=f"{task}/{name}[{first}:{stop}]",
        num_layers=num_layers,
        counts=tuple(count for count, _, _, _ in rows),
        layer_ns=tuple(layer for _, layer, _, _ in rows),
        before_ns=tuple(before for _, _, before, _ in rows),
        after_ns=tuple(after for _, _, _, after in rows),
        task=task,
        module=name,
        first_layer=first,
        static_bytes=tuple(sum(asked.costs.static_bytes(layer) for layer in of_layer) for of_layer in names),
        saved_bytes=asked.stage(task, name, plain, everything).saved_bytes,
        carried_bytes=sum(
            tokens * spec.width * _item_bytes(spec.dtype, dtype) for spec in module.layers[plain].carries
        ),
    )


def _is_paired(asked: _Asked, task: str) -> bool:
    """Whether links of the task's modules join all items of one with all of the other, one to one."""
    items = asked.share.items
    ends: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for s, d in asked.share.links:
        if items[s].task == task:
            ends.setdefault((items[s].module, items[d].module), []).append((s, d))
    return all(
        len(pairs) == len(set(side)) == len(asked.members[task, name])
        for names, pairs in ends.items()
        for name, side in zip(names, zip(*pairs, strict=True), strict=True)
    )


def _flow_bytes(asked: _Asked, source: MetaOp, destination: MetaOp, dtype: str) -> int:
    """Bytes that pass from one MetaOp to another, to the next layer or over flows."""
    if source.module == destination.module:
        return source.carried_bytes
    items, total = asked.share.items, 0
    for flow in asked.graph.flows:
        if (flow.source, flow.destination) == (source.module, destination.module):
            spec = asked.graph.sent(flow)[1]
            rows = sum(
                items[s].sizes[spec.rows]
                for s, d in asked.share.links
                if (items[s].task, items[s].module, items[d].module) == (source.task, flow.source, flow.destination)
            )
            total += rows * spec.width * _item_bytes(spec.dtype, dtype)
    return total


def _key(item: Item, sources: Sequence[Item]) -> object:
    """Equal for items that cost the same."""
    return tuple(item.sizes.items()), tuple((source.module, *source.sizes.items()) for source in sources)


def _counts(asked: _Asked, task: str, name: str, stop: int, workers: int) -> list[int]:
    """Numbers of workers for a MetaOp that ends before layer `stop`; one where a joint loss needs all items together."""
    if _is_joint(asked.graph.by_name[name], stop - 1):
        return [1]
    return useful_counts(len(asked.members[task, name]), workers)


def _is_joint(module: Module, layer: int) -> bool:
    return module.loss is not None and module.loss.joint and layer == len(module.layers) - 1


def _is_end(asked: _Asked, name: str, layer: int) -> bool:
    return layer in (0, len(asked.graph.by_name[name].layers) - 1)


def _item_bytes(dtype: str, model: str) -> int:
    return ITEM_SIZES[model if dtype == "model" else dtype]
