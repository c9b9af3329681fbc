"""Do emulator and runtime agree? Plans rehearsed on 8 workers: real processes and transfers, kernels replaced by waiting.

    python -m benchmarks.rehearsal [--quick]

`rehearsal_error_median` is over steps of several policies, VLM-S on H800 with 8 workers; `by_policy` has the errors one by
one (step time, rehearsed over emulated - 1) and the median difference of the ends of actions. `rehearsed_over_sequential`
is the speed of `wavefront` over `sequential` on CLIP-10, 8 A800, rehearsed and emulated, and how far the two are apart.
`benchmarks.semu` and `benchmarks.wavefront` call these. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.machine import cores, probe, report
from benchmarks.setups import cases
from benchmarks.wavefront_cases import JOBS, share_of
from pipeweaver.data.items import Share
from pipeweaver.model.graph import ModelGraph
from pipeweaver.planner.assign import share_out
from pipeweaver.policies import POLICIES
from pipeweaver.rehearsal.rehearse import Case, Rehearsed, rehearse
from pipeweaver.schedule.compile import compile_plan
from pipeweaver.schedule.ir import Plan
from pipeweaver.schedule.verify import verify
from pipeweaver.semu.costs import SemuCosts
from pipeweaver.semu.machine import load_machine

WORKERS = 8
DTYPE = "bfloat16"
PIPELINES = tuple(name for name in ("gpipe", "1f1b", "interleaved-1f1b", "dynamic", "pipeweaver") if name in POLICIES)
MINDS_MEMORY = ("dynamic", "pipeweaver")
"""The others keep everything, which gpipe could not on this machine; what is compared here is time."""
MICROBATCHES = 8
STEPS = 2
ROUNDS = 20
"""Of search per step: the order does not have to be the best one."""
REPEATS = 3
"""Times that a wavefront step is rehearsed; the median counts."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two policies, one step; wavefront plans left out")
    options = parser.parse_args()
    report("start", probe(cores(1)))
    figures: dict[str, Any] = pipelines(PIPELINES[1::2], steps=1) if options.quick else pipelines()
    figures["rehearsed_over_sequential"] = None if options.quick else over_sequential()
    report("end", probe(cores(1)))
    print(json.dumps(figures))


def pipelines(policies: Sequence[str] = PIPELINES, steps: int = STEPS) -> dict[str, Any]:
    """Pipelines of VLM-S: `rehearsal_error_median` over all steps, and the errors by policy."""
    setup = replace(cases()["VLM-S"], workers=WORKERS)
    shares = [
        share_out(setup.graph, setup.batch(seed=step, microbatches=MICROBATCHES), 1, setup.costs)[0]
        for step in range(steps)
    ]
    budgets = [setup.budget_bytes if policy in MINDS_MEMORY else None for policy in policies]
    found = rehearse(
        [
            _case(policy, setup.graph, shares, setup.costs, budget)
            for policy, budget in zip(policies, budgets, strict=True)
        ]
    )
    _print("VLM-S, H800", found)
    errors = {case.name: [abs(step.error) for step in case.steps] for case in found}
    return {
        "rehearsal_error_median": statistics.median(error for of_policy in errors.values() for error in of_policy),
        "by_policy": {
            case.name: {
                "errors": [round(step.error, 4) for step in case.steps],
                "ends_median": round(statistics.median(step.median for step in case.steps), 4),
                "stretched": round(case.factor, 3),
            }
            for case in found
        },
    }


def over_sequential() -> dict[str, float]:
    """CLIP-10: what `wavefront` gains over `sequential`."""
    job = JOBS["CLIP-10"]()
    costs = SemuCosts(job.graph, load_machine("A800"), dtype=DTYPE, widths={"pixels": job.pixels})
    shares = [share_of(job)] * REPEATS
    names = ("sequential", "wavefront")
    found = rehearse([_case(name, job.graph, shares, costs, costs.machine.memory_bytes) for name in names])
    _print("CLIP-10, A800", found)
    # Each case has its own stretch; without it times compare.
    rehearsed = [statistics.median(step.rehearsed_ns for step in case.steps) / case.factor for case in found]
    emulated = [case.steps[0].emulated_ns / case.factor for case in found]
    ratios = (rehearsed[0] / rehearsed[1], emulated[0] / emulated[1])
    return {"rehearsed": ratios[0], "emulated": ratios[1], "difference": ratios[0] / ratios[1] - 1}


def _case(policy: str, graph: ModelGraph, shares: Sequence[Share], costs: SemuCosts, budget_bytes: int | None) -> Case:
    made = POLICIES[policy]
    placement = made.place(graph, WORKERS, costs, [shares[0]], dtype=DTYPE, budget_bytes=budget_bytes)
    steps: list[list[Plan]] = []
    for share in shares:
        draft = made.plan(graph, placement, share, costs, budget_bytes=budget_bytes, seed=0, rounds=ROUNDS, dtype=DTYPE)
        plan = compile_plan(graph, share, draft, costs, dtype=DTYPE)
        verify([plan], graph, [share], dtype=DTYPE, budget_bytes=budget_bytes)
        steps.append([plan])
    return Case(name=policy, graph=graph, steps=steps, dtype=DTYPE)


def _print(title: str, found: Sequence[Rehearsed]) -> None:
    print(f"\n{title}, {WORKERS} workers{'':14}stretched  actions  emulated s  rehearsed s   error  ends of actions")
    for case in found:
        for step in case.steps:
            actions = sum(len(lane) for plan in step.plans for lane in plan.actions)
            print(
                f"  {case.name:34}{case.factor:7.2f}{actions:9}{step.emulated_ns / 1e9:12.3f}"
                f"{step.rehearsed_ns / 1e9:13.3f}{step.error:+8.2%}{step.median:17.2%}"
            )
    late = found[0].overslept_ns
    print(
        f"  sleeps too long by {statistics.median(late) / 1e6:.2f} ms on the median, {max(late) / 1e6:.0f} ms at most"
    )


if __name__ == "__main__":
    main()
