"""Evaluation: forward-only plans over the held-out data, each sample once, in an order that is always the same.

    Order(data="held-out", is_last=False) ... Order(is_last=True)         handed out by orders.py
    summed(collected orders)       Evaluation(loss=0.41, samples=320, reported={"read": 0.94})

A loss is divided by its units over all held-out data, so that how samples are batched changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from pipeweaver.runtime.collect import Collected


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """Averages over the held-out data after `step` steps. `losses` by "task/module" without the loss's weight,
    `reported` by what layers report; `loss` is the weighted sum of losses. `duration_ns`: loading and running."""

    step: int
    loss: float
    losses: dict[str, float]
    reported: dict[str, float]
    samples: int
    duration_ns: int


def summed(collected: Sequence[Collected], weights: Mapping[str, float]) -> Evaluation:
    """One evaluation from all its orders. `weights` of the losses by "task/module"."""
    totals: dict[str, float] = {}
    units: dict[str, int] = {}
    metrics: dict[str, tuple[float, int]] = {}
    samples = duration_ns = 0
    for one in collected:
        heads = [plan.head for plan in one.order.plans]
        for name, loss in one.losses.items():
            totals[name] = totals.get(name, 0.0) + loss * heads[0].normalisers[name]
            units[name] = units.get(name, 0) + heads[0].normalisers[name]
        for name, (total, count) in one.metrics.items():
            before_total, before_count = metrics.get(name, (0.0, 0))
            metrics[name] = (before_total + total, before_count + count)
        samples += sum(len(head.records) for head in heads)
        duration_ns += max(measured.step_ns for measured in one.measurements)
    losses = {name: totals[name] / units[name] for name in totals}
    return Evaluation(
        step=collected[0].order.step,
        loss=weighted(losses, weights),
        losses=losses,
        reported=averages(metrics),
        samples=samples,
        duration_ns=duration_ns,
    )


def weighted(losses: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Sum of losses by "task/module", each times its weight."""
    return sum(loss * weights[name] for name, loss in losses.items())


def averages(metrics: Mapping[str, tuple[float, int]]) -> dict[str, float]:
    """Total over count, where something was counted."""
    return {name: total / count for name, (total, count) in metrics.items() if count}
