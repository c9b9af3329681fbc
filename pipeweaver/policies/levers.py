"""What a policy does beyond a plain schedule, lever by lever, each with the settings that switch it off.

To see what a lever brings on a batch, plan the batch again without it (`pipeweaver plan --explain`). Example, policy
`dynamic` with its defaults: `several chunks per worker` is off with K = 1, `split backward` with `split_backward =
false`."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from pipeweaver.model.graph import ModelGraph
from pipeweaver.planner.options import PolicyOptions
from pipeweaver.schedule.ir import Placement

WHOLE = 1 << 30
"""Items of a part that no microbatch has more of."""


class Lever(NamedTuple):
    """`options` and `rounds` are settings without it; `anew`: they need a placement of their own."""

    name: str
    options: PolicyOptions
    rounds: int
    anew: bool = False


def levers(
    policy: str,
    graph: ModelGraph,
    placement: Placement,
    options: PolicyOptions,
    rounds: int,
    *,
    limited: bool,
    replicas: int,
) -> tuple[Lever, ...]:
    """The levers of a policy that these settings leave on; `limited`: there is a memory budget."""
    found: list[Lever] = []

    def add(name: str, **off: object) -> None:
        without = msgspec.structs.replace(options, **off)
        anew = bool({"balance", "chunks_per_worker", "pieces_per_worker"} & set(off))
        if without != options:
            found.append(Lever(name, without, rounds, anew))

    names = [module.name for module in graph.modules]
    if policy in ("gpipe", "1f1b", "interleaved-1f1b"):
        add("split by measured cost, not by parameters", balance="parameters")
    if policy == "interleaved-1f1b":
        add("several pieces per worker", pieces_per_worker=1)
    if policy in ("pipeweaver", "dynamic"):
        if _has_several_chunks(placement):
            add("several chunks per worker", chunks_per_worker=dict.fromkeys(names, 1))
        add("parts smaller than microbatches", items_per_part=dict.fromkeys(names, WHOLE))
    if policy == "dynamic":
        add("parts even in cost, not in number", even_parts="items")
        add("samples grouped anew", regroup=False)
        if replicas > 1:
            add("samples exchanged between replicas", exchange=False)
        add("split backward", split_backward=False)
    if policy in ("pipeweaver", "dynamic"):
        if limited:
            add("memory strategies", strategies=())
        if rounds:
            found.append(Lever("rounds of search", options, 0))
    return tuple(found)


def _has_several_chunks(placement: Placement) -> bool:
    """Whether some worker has two chunks of one module."""
    where = [(chunk.task, chunk.module, chunk.worker) for chunk in placement.chunks]
    return len(set(where)) < len(where)
