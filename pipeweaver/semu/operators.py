"""What happens inside the stages of an emulated step: layers, and in them operators, for traces.

    language 3B0                 [                 13.20 ms                ]
      language.layers.7          [        6.60        ][...
        matmul mlp.down.weight   [0.33][0.35]...

A stage's time is the sum over its layers and their operators (`costs.py`), so nothing is left over. What a
tensor-parallel group exchanges stands at the end of its layer: where it happens among the operators is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipeweaver.data.items import linked
from pipeweaver.report.trace import Inside
from pipeweaver.schedule.ir import Compute, Phase, Plan, Span
from pipeweaver.semu.costs import SemuCosts
from pipeweaver.semu.counts import COUNT, COUNTED_FLOPS
from pipeweaver.semu.latency import LayerCost

_PHASES: dict[Phase, str] = {"F": "F", "B": "IW", "I": "I", "W": "W"}


def insides(costs: SemuCosts, plans: Sequence[Plan]) -> Callable[[Plan, Compute], list[Inside]]:
    """For stages of `plans`, made with `costs`: what is inside, outer before inner, ns from the stage's start."""
    links = {plan.replica: linked(plan.items, plan.links) for plan in plans}
    strategies = {
        (plan.replica, action.stage.chunk, action.stage.part): action.strategies
        for plan in plans
        for actions in plan.actions
        for action in actions
        if isinstance(action, Compute) and action.stage.phase == "F"
    }

    def inside(plan: Plan, action: Compute) -> list[Inside]:
        stage = action.stage
        chunk, chosen = plan.placement.chunks[stage.chunk], plan.parts[stage.chunk][stage.part].items
        names = [name for name, _ in costs.graph.by_name[chunk.module].range(chunk.start, chunk.stop)]
        layers = costs.layers(
            chunk,
            [plan.items[i] for i in chosen],
            [links[plan.replica][i] for i in chosen],
            strategies.get((plan.replica, stage.chunk, stage.part), ()),
        )
        known = [
            (name, launched(cost, _PHASES[stage.phase]))
            for name, (cost, backward) in zip(names, layers, strict=True)
            if backward or stage.phase == "F"
        ]
        return _laid_out(known if stage.phase == "F" else known[::-1], action.duration_ns)

    return inside


def launched(cost: LayerCost, phases: str) -> list[tuple[str, float, dict[str, float | str]]]:
    """(name, ns, arguments) of what a layer launches in some phases: its operators in order, then its exchanges.

    What is computed again is so in the first half of a split backward, whichever half needs it.
    """
    found: list[tuple[str, float, dict[str, float | str]]] = []
    counts = cost.counts
    for row, operator in enumerate(counts.operators):
        if ("I" if operator.again else operator.phase) in phases:
            name = f"{operator.name.removeprefix('aten.')} {operator.parameter}".rstrip()
            arguments: dict[str, float | str] = {
                "kind": operator.kind,
                "launches": float(counts.table[row, COUNT]),
                "flops": float(counts.table[row, COUNTED_FLOPS]),
            }
            if operator.again:
                arguments["recomputed"] = "yes"
            found.append((name, float(cost.operator_ns[row]), arguments))
    for row, exchange in enumerate(counts.structure.exchanges):
        if ("I" if exchange.again else exchange.phase) in phases:
            size = float(counts.exchanged_bytes[row])
            found.append((f"exchange {exchange.kind}", float(cost.exchange_ns[row]), {"bytes": size}))
    return found


def _laid_out(
    layers: Sequence[tuple[str, list[tuple[str, float, dict[str, float | str]]]]], duration_ns: int
) -> list[Inside]:
    """Layers one after the other, so that they fill the stage to the nanosecond."""
    total = sum(ns for _, operators in layers for _, ns, _ in operators)
    scale = duration_ns / total if total else 0.0
    found: list[Inside] = []
    at = 0.0
    for name, operators in layers:
        place, start = len(found), at
        for operator, ns, arguments in operators:
            first, at = at, at + ns
            found.append(Inside(operator, Span(round(first * scale), round(at * scale)), arguments))
        found.insert(place, Inside(name, Span(round(start * scale), round(at * scale)), {}))
    return found
