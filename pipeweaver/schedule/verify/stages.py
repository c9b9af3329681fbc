"""Rule "stages": every item passes every layer once, forward and backward, where its chunk is."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np

from pipeweaver.model.graph import ModelGraph, Module, positions
from pipeweaver.schedule.convert import action_of
from pipeweaver.schedule.flat import COMPUTE, PHASES, FlatPlan, Ints, starts
from pipeweaver.schedule.gradients import gradients_of
from pipeweaver.schedule.ir import Chunk, Placement, Plan, Stage
from pipeweaver.schedule.verify.words import PlanError

_COUNTS = {False: [[1, 0, 0, 0]], True: [[1, 1, 0, 0], [1, 0, 1, 1]]}
"""How often F, B, I and W may run, without and with a backward."""


def check_stages(plan: FlatPlan, graph: ModelGraph) -> None:
    gradients = gradients_of(graph)
    head = plan.head
    chunks = head.placement.chunks
    if len(head.parts) != len(chunks) or plan.num_workers != head.placement.workers:
        raise PlanError(
            "stages", f"{len(head.parts)} part lists for {len(chunks)} chunks, {plan.num_workers} action lists"
        )
    for number, chunk in enumerate(chunks):
        module = graph.by_name.get(chunk.module)
        if module is None or not 0 <= chunk.start < chunk.stop <= len(module.layers):
            raise PlanError("stages", f"chunk {number} {chunk} is not a range of layers of the model")
        if not 0 <= chunk.worker < head.placement.workers:
            raise PlanError("stages", f"chunk {number} {chunk} is on a worker that does not exist")
    covered = covered_of(graph, head.placement)
    _check_items(head, graph, covered)
    _check_joint(head, graph)
    units = _check_order(plan)
    for number, chunk in enumerate(chunks):
        backward = not head.forward_only and any(gradients.backward[chunk.module, p] for p in covered[number])
        counts = units[number]
        right = np.zeros(len(counts), np.bool_)
        for expected in _COUNTS[backward]:
            right |= (counts == expected).all(axis=1)
        for part in np.nonzero(~right)[0].tolist():
            text = " ".join(f"{phase} {times}x" for phase, times in zip(PHASES, counts[part].tolist(), strict=True))
            raise PlanError(
                "stages",
                f"part {part} of chunk {number} {chunk} runs {text}; it {'needs' if backward else 'has no'} backward",
            )
    _check_strategies(plan, [len(of) for of in covered])


def covered_of(graph: ModelGraph, placement: Placement) -> tuple[tuple[int, ...], ...]:
    """For each chunk, positions of the layers that it runs, `before` (-1) and `after` (n) included; found once for a
    graph and a placement, and kept."""
    key = (id(graph), placement)
    if key not in _known:
        found = tuple(tuple(_inside(graph.by_name[chunk.module], chunk)) for chunk in placement.chunks)
        _known[key] = (graph, found)  # the graph is kept, so that no other one gets its id
        if len(_known) > _MOST_KNOWN:
            _known.popitem(last=False)
    return _known[key][1]


_MOST_KNOWN = 64
_known: OrderedDict[tuple[int, Placement], tuple[ModelGraph, tuple[tuple[int, ...], ...]]] = OrderedDict()


def _inside(module: Module, chunk: Chunk) -> Iterable[int]:
    for position, _ in positions(module):
        if chunk.start <= min(max(position, 0), len(module.layers) - 1) < chunk.stop:
            yield position


def _check_items(plan: Plan, graph: ModelGraph, covered: Sequence[tuple[int, ...]]) -> None:
    """Every item goes once through every layer of its module, in chunks of its task, and through no other."""
    number_of = {key: i for i, key in enumerate(dict.fromkeys((item.module, item.task) for item in plan.items))}
    belongs = np.array([number_of[item.module, item.task] for item in plan.items], np.int64)
    times: dict[tuple[str, int], Ints] = {}  # how often each item goes through (module, position)
    known: dict[int, Ints] = {}
    for number, (chunk, parts) in enumerate(zip(plan.placement.chunks, plan.parts, strict=True)):
        if id(parts) not in known:
            items = np.array(list(chain.from_iterable(part.items for part in parts)), np.int64)
            wrong = (items < 0) | (items >= len(plan.items))
            if wrong.any():
                part = int(np.searchsorted(starts([len(p.items) for p in parts]), np.argmax(wrong), side="right")) - 1
                raise PlanError(
                    "stages", f"part {part} of chunk {number} has item {items[wrong][0]} of {len(plan.items)}"
                )
            known[id(parts)] = np.bincount(items, minlength=len(plan.items))
        count = known[id(parts)]
        foreign = np.nonzero((count > 0) & (belongs != number_of.get((chunk.module, chunk.task), -1)))[0]
        if len(foreign):
            raise PlanError("stages", f"{plan.items[foreign[0]].name} is in a part of chunk {number} {chunk}")
        for position in covered[number]:
            key = (chunk.module, position)
            times[key] = times[key] + count if key in times else count
    for name in {item.module for item in plan.items}:
        mine = np.array([item.module == name for item in plan.items], np.bool_)
        for position, _ in positions(graph.by_name[name]):
            count = times.get((name, position), np.zeros(len(plan.items), np.int64))
            for i in np.nonzero(mine & (count != 1))[0][:1].tolist():
                raise PlanError(
                    "stages", f"{plan.items[i].name} goes {count[i]} times through layer {position} of {name}"
                )


def _check_joint(plan: Plan, graph: ModelGraph) -> None:
    """A loss that mixes items has all items of a task in one part."""
    together: Counter[tuple[str, str]] = Counter()
    for chunk, parts in zip(plan.placement.chunks, plan.parts, strict=True):
        module = graph.by_name[chunk.module]
        if module.loss is not None and module.loss.joint and chunk.stop == len(module.layers):
            together[chunk.task, chunk.module] += len(parts)
    for (task, name), count in together.items():
        if count * plan.num_replicas > 1:
            raise PlanError(
                "stages",
                f"the loss of {name} is joint, but task {task} has it in {count} parts of {plan.num_replicas} replicas",
            )


def _check_order(plan: FlatPlan) -> list[Ints]:
    """The actions compute the order's stages, each where its chunk is. Returns how often each part of each chunk
    runs which phase: [parts, 4] per chunk."""
    order, actions, chunks = plan.order, plan.actions, plan.head.placement.chunks
    if len(order.start) != len(actions.start):
        raise PlanError("stages", f"{len(order.start) - 1} orders for {plan.num_workers} action lists")
    computes = actions.kind == COMPUTE
    computed = np.stack([actions.first[computes], actions.second[computes], actions.phase[computes]])
    counts = starts(computes)[actions.start]
    listed = np.stack([order.chunk, order.part, order.phase])
    if not np.array_equal(counts, order.start) or not np.array_equal(computed, listed):
        for worker in range(plan.num_workers):
            here = listed[:, order.start[worker] : order.start[worker + 1]]
            if not np.array_equal(computed[:, counts[worker] : counts[worker + 1]], here):
                raise PlanError(
                    "stages", f"worker {worker} computes other stages, or in another order, than its order says"
                )
    parts = starts([len(of) for of in plan.head.parts])
    chunk, part, phase = order.chunk, order.part, order.phase
    at = np.repeat(np.arange(plan.num_workers), np.diff(order.start))
    exists = (chunk >= 0) & (chunk < len(chunks)) & (part >= 0)
    exists[exists] = part[exists] < np.diff(parts)[chunk[exists]]
    for i in np.nonzero(~exists)[0][:1].tolist():
        raise PlanError("stages", f"worker {at[i]} runs {_stage(listed, i)}, which does not exist")
    home = np.array([one.worker for one in chunks], np.int64)
    for i in np.nonzero(home[chunk] != at)[0][:1].tolist():
        raise PlanError(
            "stages", f"{_stage(listed, i)} runs on worker {at[i]}, but its chunk {chunks[chunk[i]]} is not there"
        )
    size = int(parts[-1])
    times = np.bincount((parts[chunk] + part) * len(PHASES) + phase, minlength=size * len(PHASES))
    by_unit = times.reshape(size, len(PHASES))
    return [by_unit[parts[c] : parts[c + 1]] for c in range(len(chunks))]


def _stage(listed: Ints, number: int) -> Stage:
    chunk, part, phase = listed[:, number].tolist()
    return Stage(chunk, part, PHASES[phase])


def _check_strategies(plan: FlatPlan, num_layers: list[int]) -> None:
    """Where memory strategies are given there is one for every layer."""
    actions = plan.actions
    given = np.array([len(strategies) for strategies in plan.strategies], np.int64)
    computes = np.nonzero(actions.kind == COMPUTE)[0]
    count = given[actions.detail[computes]]
    wanted = np.array(num_layers, np.int64)[actions.first[computes]] if len(computes) else count
    for i in np.nonzero((count > 0) & (count != wanted))[0][:1].tolist():
        action = action_of(plan, int(computes[i]))
        raise PlanError(
            "stages",
            f"{action.stage} has {count[i]} memory strategies for {wanted[i]} layers",  # type: ignore[union-attr]
        )
