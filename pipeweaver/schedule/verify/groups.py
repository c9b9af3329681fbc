"""Rule "groups": the holders of a parameter are its reduction group; reductions end every list."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from pipeweaver.model.graph import ModelGraph
from pipeweaver.schedule.flat import NORM, REDUCE, STEP, FlatPlan
from pipeweaver.schedule.verify.words import PlanError


def check_groups(plans: Sequence[FlatPlan], graph: ModelGraph) -> None:
    plan = plans[0].head
    holders: dict[str, set[int]] = {}
    for chunk in plan.placement.chunks:
        module = graph.by_name[chunk.module]
        for name, layer in module.range(chunk.start, chunk.stop):
            if layer.trainable:
                holders.setdefault(name, set()).add(chunk.worker)
    for module in graph.modules:
        for alias, canonical in module.tied.items():
            ends = [f"{module.name}.{end}" for end in (alias, canonical)]
            found = [held for name, held in holders.items() if any(end.startswith(name + ".") for end in ends)]
            if found:
                holders[ends[1]] = set().union(*found)
    listed = Counter(name for group in plan.groups for name in group.parameters)
    for name in {*holders, *listed}:
        if listed[name] != 1 or name not in holders:
            raise PlanError(
                "groups",
                f"{name} is in {listed[name]} parameter groups and {'has' if name in holders else 'has no'} holders",
            )
    for number, group in enumerate(plan.groups):
        for name in group.parameters:
            if set(group.holders) != holders[name] or len(set(group.holders)) != len(group.holders):
                raise PlanError(
                    "groups",
                    f"{name} is held by workers {sorted(holders[name])}, group {number} has {list(group.holders)}",
                )
    names = {REDUCE: "Reduce", NORM: "Norm", STEP: "Step"}
    for one in plans:
        actions = one.actions
        for worker in range(one.num_workers):
            here = slice(actions.start[worker], actions.start[worker + 1])
            ending = np.isin(actions.kind[here], list(names))
            pairs = zip(actions.kind[here][ending].tolist(), actions.first[here][ending].tolist(), strict=True)
            got = [(names[kind], group if kind == REDUCE else -1) for kind, group in pairs]
            expected = [
                ("Reduce", number)
                for number, group in enumerate(plan.groups)
                if worker in group.holders and len(group.holders) * len(plans) > 1
            ]
            wanted = [] if one.head.forward_only else [*expected, ("Norm", -1), ("Step", -1)]
            if sorted(got) != sorted(wanted) or got[len(expected) :] != wanted[len(expected) :]:
                raise PlanError(
                    "groups", f"replica {one.head.replica} worker {worker} ends with {got}; it should end with {wanted}"
                )
