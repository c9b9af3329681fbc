"""Let measured steps correct the costs: a factor per module on the times of its stages.

A table is made once; the machine may be warmer, busier or shared by then. After a step in which the stages
of vision took 10 % longer than planned, its factor rises by a part of that:

    factors = updated(factors, plans, measurements)          {"vision": 1.03, "language": 1.0}
    costs = costs.corrected(factors)                         what later plans are made with

Factors are inputs of planning like all costs, so a run that lets them in is repeated by replaying its plans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeweaver.schedule.ir import Compute, Measurement, Plan

GAIN = 0.3
"""Part of a step's deviation that is taken over. Plans are made a step ahead, so more would overshoot."""

MOST = 2.0
"""A step counts as at most this many times too slow, or too fast: one disturbance must not spoil the costs."""


def updated(
    factors: Mapping[str, float], plans: Sequence[Plan], measurements: Sequence[Measurement]
) -> dict[str, float]:
    """Factors after a step, from the plans of all its replicas and what was measured of each."""
    result = dict(factors)
    for module, (measured_ns, planned_ns) in _stage_times(plans, measurements).items():
        if measured_ns and planned_ns:
            ratio = min(max(measured_ns / planned_ns, 1 / MOST), MOST)
            result[module] = result.get(module, 1.0) * ratio**GAIN
    return result


def _stage_times(plans: Sequence[Plan], measurements: Sequence[Measurement]) -> dict[str, tuple[int, int]]:
    """(measured, planned) time of all stages of each module, nanoseconds."""
    found: dict[str, tuple[int, int]] = {}
    for plan, measurement in zip(plans, measurements, strict=True):
        for actions, spans in zip(plan.actions, measurement.spans, strict=True):
            for action, span in zip(actions, spans, strict=True):
                if isinstance(action, Compute):
                    module = plan.placement.chunks[action.stage.chunk].module
                    measured, planned = found.get(module, (0, 0))
                    found[module] = (measured + span.end_ns - span.start_ns, planned + action.duration_ns)
    return found
