"""Let measured steps correct the costs: a factor per module and worker on the times of its stages.

A machine is measured once; it may be warmer, busier or shared by then, and one worker more than another. After a step
in which the stages of vision on worker 1 took 10 % longer than they would by the costs, their factor goes a part of the
way there. Plans are made steps ahead, with factors of then (`used`):

    factors = updated(factors, used, plans, measurements)     {"vision/0": 1.0, "vision/1": 1.03, "language/0": 1.0}
    costs = costs.corrected(factors)                          what later plans are made with
    uncorrected_ns(plans, used)                               what the step would have been predicted to take without

What a worker does on account of a stage, before it can begin anything else, counts into the stage: posting its outputs,
for which plans have time, and freeing buffers, for which they have none.

Factors are inputs of planning like all costs, so a run that lets them in is repeated by replaying its plans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from pipeweaver.schedule.emulate import emulate
from pipeweaver.schedule.ir import Action, Compute, Free, Measurement, Plan, Post, Span

GAIN = 0.2
"""Part of the way that factors go to what a step says; more in the first ones (`gain`)."""

MOST = 2.0
"""A stage counts as at most this many times too slow, or too fast: one disturbance must not spoil the costs."""

Factors = Mapping[str, float]
"""By module and worker (`key_of`); 1 where there is none."""


def key_of(module: str, worker: int) -> str:
    """Under which a module on a worker has its factor."""
    return f"{module}/{worker}"


def rounded(factors: Factors) -> dict[str, float]:
    """To the hundredth: costs that differ by less are one, so that what was planned with them can be used again."""
    return {key: round(factor, 2) for key, factor in factors.items()}


def gain(steps: int) -> float:
    """Part of the way that factors go after so many steps: at first all steps count alike, the calibration as one."""
    return max(GAIN, 1 / (steps + 2))


def updated(
    factors: Factors, used: Factors, plans: Sequence[Plan], measurements: Sequence[Measurement], part: float = GAIN
) -> dict[str, float]:
    """Factors after a step, from the plans of all its replicas, made with the factors `used`, and what was measured of
    each: `part` of the way to what this step says."""
    result = dict(factors)
    for key, (measured_ns, planned_ns) in _stage_times(plans, measurements).items():
        if measured_ns and planned_ns:
            found = used.get(key, 1.0) * measured_ns / planned_ns
            result[key] = result.get(key, 1.0) ** (1 - part) * found**part
    return result


def uncorrected_ns(plans: Sequence[Plan], factors: Factors) -> int:
    """The step of plans that were made with these factors, as it would be predicted without them."""
    return max(span.end_ns for plan in plans for spans in emulate([_without(plan, factors)])[0].spans for span in spans)


def _without(plan: Plan, factors: Factors) -> Plan:
    chunks = plan.placement.chunks

    def duration_ns(action: Compute) -> int:
        chunk = chunks[action.stage.chunk]
        return round(action.duration_ns / factors.get(key_of(chunk.module, chunk.worker), 1.0))

    return msgspec.structs.replace(
        plan,
        actions=tuple(
            tuple(
                msgspec.structs.replace(action, duration_ns=duration_ns(action))
                if isinstance(action, Compute)
                else action
                for action in actions
            )
            for actions in plan.actions
        ),
    )


def _stage_times(plans: Sequence[Plan], measurements: Sequence[Measurement]) -> dict[str, tuple[float, float]]:
    """(measured, planned) time of all stages of each module on each worker, nanoseconds; replicas together."""
    found: dict[str, tuple[float, float]] = {}
    for plan, measurement in zip(plans, measurements, strict=True):
        for worker, (actions, spans) in enumerate(zip(plan.actions, measurement.spans, strict=True)):
            for action, taken_ns, planned in _occupied(actions, spans):
                taken = min(max(taken_ns, planned / MOST), planned * MOST)
                key = key_of(plan.placement.chunks[action.stage.chunk].module, worker)
                measured, before = found.get(key, (0.0, 0.0))
                found[key] = measured + taken, before + planned
    return found


def _occupied(actions: Sequence[Action], spans: Sequence[Span]) -> list[tuple[Compute, int, int]]:
    """Stages of a worker and for how long each kept it busy, with the posts and frees right behind it, ns: measured and
    planned."""
    found: list[tuple[Compute, int, int]] = []
    behind_stage = False
    for action, span in zip(actions, spans, strict=True):
        if isinstance(action, Compute):
            found.append((action, span.end_ns - span.start_ns, action.duration_ns))
            behind_stage = True
        elif behind_stage and isinstance(action, (Post, Free)):
            stage, taken_ns, planned_ns = found[-1]
            more_ns = action.duration_ns if isinstance(action, Post) else 0
            found[-1] = stage, taken_ns + span.end_ns - span.start_ns, planned_ns + more_ns
        else:
            behind_stage = False
    return found
