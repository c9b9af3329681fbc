"""What each memory strategy of a layer costs, from its traces: all kept, recomputed, or sent to the host.

    layer_options(kept, {"recompute": rows, ...}, backward, machine, layout)      # one mapping per part

Recomputation is traced as the runtime does it, so it stops where nothing more is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeweaver.costs import StageCost, StrategyCost
from pipeweaver.schedule.ir import Strategy
from pipeweaver.semu.latency import BACKWARD_LIVE, FORWARD_LIVE, SAVED_BYTES, LayerCosts, Layout
from pipeweaver.semu.machine import Machine

Rows = Sequence[tuple[LayerCosts, int]]
"""For each part: among which costs of a layer, and in which row."""
Options = tuple[dict[Strategy, StrategyCost], ...]
"""For every layer of a stage, what each memory strategy costs."""


def layer_options(
    kept: Rows, recomputed: Mapping[Strategy, Rows], backward: bool, machine: Machine, layout: Layout
) -> list[dict[Strategy, StrategyCost]]:
    """For each part what each strategy of a layer costs, ns and bytes of the whole worker: from its traces with all kept,
    and with what is `recomputed`. Only "keep" where there is no `backward`."""
    found = []
    for i, keep in enumerate(kept):
        options: dict[Strategy, StrategyCost] = {"keep": _option(keep, keep, backward, machine, layout)}
        for name, of in recomputed.items():
            options[name] = _option(of[i], keep, True, machine, layout)
        if backward and machine.kernels != "cpu":  # a CPU's memory is the host's
            away = options["keep"].saved_bytes / layout.tensor_parallel
            offload_ns = round(1e9 * away / machine.host_bandwidth)
            options["offload"] = StrategyCost(saved_bytes=0, extra_ns=0, offload_ns=offload_ns)
        found.append(options)
    return found


def _option(
    cost: tuple[LayerCosts, int], keep: tuple[LayerCosts, int], backward: bool, machine: Machine, layout: Layout
) -> StrategyCost:
    costs, row = cost
    extra, degree = 0.0, layout.tensor_parallel
    if cost is not keep:
        before = keep[0].phase_ns[keep[1]].tolist()
        extra = sum(costs.phase_ns[row].tolist()) - sum(before) + machine.overheads.recompute_ns
    numbers = costs.numbers[row].tolist()
    saved = numbers[SAVED_BYTES] * degree if backward else 0
    return StrategyCost(
        saved_bytes=saved,
        extra_ns=max(0, round(extra)),
        forward_workspace_bytes=max(0, numbers[FORWARD_LIVE] * degree - saved),
        backward_workspace_bytes=max(0, numbers[BACKWARD_LIVE] * degree - saved) if backward else 0,
    )


def slower_options(found: Options, factor: float) -> Options:
    """The same where all computing takes `factor` times as long; what was one object for equal layers stays one."""
    if factor == 1.0:
        return found
    distinct = {id(of): of for of in found}
    slowed = {
        number: {name: cost._replace(extra_ns=round(cost.extra_ns * factor)) for name, cost in of.items()}
        for number, of in distinct.items()
    }
    return tuple([slowed[id(of)] for of in found])


def slower(cost: StageCost, factor: float) -> StageCost:
    """A stage that computes `factor` times as long."""
    if factor == 1.0:
        return cost
    return cost._replace(
        forward_ns=round(cost.forward_ns * factor),
        backward_ns=round(cost.backward_ns * factor),
        input_ns=round(cost.input_ns * factor),
        weight_ns=round(cost.weight_ns * factor),
    )
