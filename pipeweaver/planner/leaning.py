"""Memory strategies of a step's units, chosen for all of them alike: how much of what they save they may hold.

A *level* of 0.6 says that every unit holds at most 60 % of what it would keep. Its layers take the strategies that reach
this at the least price: time that is added to the backward, plus, at a small price, time on the way to the host and
back, which runs beside compute. Example, four equal layers, level 0.5, offloading allowed: two layers are offloaded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from pipeweaver.costs import LayerStrategies, StageCost, with_strategies
from pipeweaver.schedule.ir import Strategy
from pipeweaver.schedule.stages import StepStages, UnitCosts, unit_costs

Strategies = tuple[Strategy, ...]
BUSY = 0.8
"""Share of a stage's own time that copies to (and from) the host may take before they cost as much as compute."""
TRAVEL_PRICE = 0.05
"""Price of travelling below that, as a share of compute."""


def leaned(step: StepStages, level: float, allowed: Sequence[Strategy]) -> tuple[list[Strategies], UnitCosts]:
    """(strategies of every unit, () for keep throughout; costs of the units under them)."""
    if level >= 1:
        return [()] * len(step), step.costs
    known: dict[int, Strategies] = {}
    chosen: list[Strategies] = []
    costs: list[StageCost] = []
    priced: dict[int, int] = {}
    for unit, number in enumerate(step.alike):
        if number not in known:
            layers = step.layer_strategies(unit) if step.learns[unit] else ()
            cost = step.stage_costs[unit]
            known[number] = lean(layers, level, allowed, cost.forward_ns)
            priced[number] = len(costs)
            costs.append(with_strategies(cost, known[number], layers) if known[number] else cost)
        chosen.append(known[number])
    columns = unit_costs(costs)
    index = np.array([priced[number] for number in step.alike], np.int64)
    return chosen, UnitCosts(*(column[index] for column in columns))


def lean(layers: Sequence[LayerStrategies], level: float, allowed: Sequence[Strategy], forward_ns: int) -> Strategies:
    """Strategies that hold at most `level` of what the layers keep, at the least price as a greedy choice finds it;
    the leanest ones if that is not possible, () if nothing is saved by any."""
    kept = sum(known["keep"].saved_bytes for known in layers)
    result: list[Strategy] = ["keep"] * len(layers)
    held, travelled = kept, 0
    # Equal layers in equal states are one case, of which the first is taken.
    cases: dict[tuple[int, Strategy], deque[int]] = {}
    for i, known in enumerate(layers):
        cases.setdefault((id(known), "keep"), deque()).append(i)
    while held > level * kept:
        late = max(0.0, travelled - BUSY * forward_ns)
        best: tuple[float, int, Strategy] | None = None
        for (_, before), members in cases.items():
            if not members:
                continue
            i = members[0]
            now = layers[i][before]
            for strategy, cost in layers[i].items():
                freed = now.saved_bytes - cost.saved_bytes
                if strategy not in allowed or freed <= 0:
                    continue
                travel = cost.offload_ns - now.offload_ns
                later = max(0.0, travelled + travel - BUSY * forward_ns) - late
                price = cost.extra_ns - now.extra_ns + TRAVEL_PRICE * travel + later
                if best is None or (price / freed, i) < best[:2]:
                    best = (price / freed, i, strategy)
        if best is None:
            break
        _, i, strategy = best
        known, before = layers[i], result[i]
        held -= known[before].saved_bytes - known[strategy].saved_bytes
        travelled += known[strategy].offload_ns - known[before].offload_ns
        result[i] = strategy
        cases[id(known), before].popleft()
        cases.setdefault((id(known), strategy), deque()).append(i)
    return tuple(result) if held < kept else ()
