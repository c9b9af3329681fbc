"""Slow enough to be told apart: plans with everything some times as long.

stages of 3, 4 and 8 ms, the median is to take 30 ms     ->     factor 7.5
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from msgspec.structs import replace

from pipeweaver.schedule.emulate import emulate, prediction
from pipeweaver.schedule.ir import Action, Compute, Load, Norm, Offload, Plan, Post, Reduce, Reload, Step

LEAST_STAGE_NS = 30_000_000
"""The median stage takes at least as long: what the runtime itself takes, some 0.1 ms an action, is little beside it."""


def stretch(steps: Sequence[Sequence[Plan]], least_stage_ns: int = LEAST_STAGE_NS) -> float:
    """The factor at which the median stage of the plans takes so long; 1 if it does anyway.

    Raises ValueError if there is no stage that takes any time.
    """
    stages = [
        action.duration_ns
        for plans in steps
        for plan in plans
        for actions in plan.actions
        for action in actions
        if isinstance(action, Compute) and action.duration_ns
    ]
    if not stages:
        raise ValueError("there is nothing to rehearse: no stage of the plans takes any time")
    return max(1.0, least_stage_ns / statistics.median(stages))


def stretched(plans: Sequence[Plan], factor: float) -> tuple[Plan, ...]:
    """The plans of a step with everything `factor` times as long, and what the emulator says of that."""
    longer = [
        replace(
            plan,
            actions=tuple(tuple(_longer(action, factor) for action in actions) for actions in plan.actions),
            transfers=tuple(replace(t, duration_ns=round(t.duration_ns * factor)) for t in plan.transfers),
        )
        for plan in plans
    ]
    found = []
    for plan, timeline in zip(longer, emulate(longer), strict=True):
        useful_ns, bound_ns = (plan.prediction.useful_ns, plan.prediction.lower_bound_ns) if plan.prediction else (0, 0)
        said = prediction(plan, timeline, useful_ns=round(useful_ns * factor), lower_bound_ns=round(bound_ns * factor))
        found.append(replace(plan, prediction=said))
    return tuple(found)


def _longer(action: Action, factor: float) -> Action:
    match action:
        case Compute() | Load() | Post() | Offload() | Reload() | Reduce() | Norm() | Step():
            return replace(action, duration_ns=round(action.duration_ns * factor))
        case _:
            return action
