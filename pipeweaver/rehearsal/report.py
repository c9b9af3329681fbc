"""A rehearsal in words: emulated against rehearsed, step by step and by what actions do.

8 workers, times of H800, 3.1 times as slow, so that the median stage takes 30 ms
step 0 came to its end on all workers: emulated 6.952 s, rehearsed 7.081 s (+1.9 %)
                number    emulated s   rehearsed s
  forward          128         11.80         11.81
  ...
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from pipeweaver.rehearsal.rehearse import Rehearsed, RehearsedStep
from pipeweaver.rehearsal.stretch import LEAST_STAGE_NS
from pipeweaver.runtime.describe import describe
from pipeweaver.runtime.transport import Address
from pipeweaver.schedule.ir import Action, Compute, Load, Norm, Reduce, Settle, Step, Wait


def render(found: Rehearsed) -> list[str]:
    """Everything to know of a rehearsal. Times are those of the stretched plans."""
    plans = found.steps[0].plans
    workers = f"{plans[0].placement.workers} workers" + (f" in each of {len(plans)} replicas" if len(plans) > 1 else "")
    pace = (
        "no slower"
        if found.factor == 1
        else f"{found.factor:.3g} times as slow, so that the median stage takes {LEAST_STAGE_NS / 1e6:.0f} ms"
    )
    lines = [f"{workers}, {found.name}; {pace}"]
    for step in found.steps:
        lines += [
            f"step {step.plans[0].step} came to its end on all workers: emulated {step.emulated_ns / 1e9:.3f} s, "
            f"rehearsed {step.rehearsed_ns / 1e9:.3f} s ({step.error:+.1%})",
            *_kinds(step),
        ]
        worst = step.worst
        plan = step.plans[worst.replica]
        action = plan.actions[worst.worker][worst.action]
        lines.append(
            f"  ends of actions differ by {step.median:.2%} of the step on the median, most by {worst.share:+.2%}: "
            f"{describe(plan, Address(worst.replica, worst.worker), action)}"
        )
    late = found.overslept_ns
    if late:
        lines.append(
            f"sleeps were too long by {statistics.median(late) / 1e6:.2f} ms on the median, {max(late) / 1e6:.1f} ms at "
            "most, which is not counted; much more than 0.1 ms means that something else keeps this machine busy"
        )
    return lines


def _kinds(step: RehearsedStep) -> Iterator[str]:
    """A line for every kind of action: how many, and what they took together on all workers."""
    sums: dict[str, list[int]] = {}
    for plan, measurement in zip(step.plans, step.measurements, strict=True):
        assert plan.prediction is not None
        for actions, *lanes in zip(plan.actions, plan.prediction.spans, measurement.spans, strict=True):
            for action, emulated, measured in zip(actions, *lanes, strict=True):
                _add(sums, _kind(action), emulated.end_ns - emulated.start_ns, measured.end_ns - measured.start_ns)
        for emulated, measured in zip(plan.prediction.transfers, measurement.transfers, strict=True):
            _add(sums, "transfers", emulated.end_ns - emulated.start_ns, measured.end_ns - measured.start_ns)
    yield f"  {'':22}{'number':>8}{'emulated s':>13}{'rehearsed s':>13}"
    for kind in _KINDS:
        if kind in sums:
            number, emulated, measured = sums[kind]
            yield f"  {kind:22}{number:8}{emulated / 1e9:13.3f}{measured / 1e9:13.3f}"


def _add(sums: dict[str, list[int]], kind: str, emulated_ns: int, measured_ns: int) -> None:
    entry = sums.setdefault(kind, [0, 0, 0])
    for place, amount in enumerate((1, emulated_ns, measured_ns)):
        entry[place] += amount


_PHASES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}
_KINDS = (
    *_PHASES.values(),
    "loads",
    "transfers",
    "waits for transfers",
    "waits for copies",
    "reductions, norm",
    "optimizer",
    "the runtime itself",
)


def _kind(action: Action) -> str:
    match action:
        case Compute(stage=stage):
            return _PHASES[stage.phase]
        case Load():
            return "loads"
        case Wait():
            return "waits for transfers"
        case Settle():
            return "waits for copies"
        case Reduce() | Norm():
            return "reductions, norm"
        case Step():
            return "optimizer"
        case _:
            return "the runtime itself"
