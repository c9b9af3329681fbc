"""What each step of a planner brings: the paper's ablation beside its figures, and ours lever by lever.

    python -m benchmarks.search_ablation [--quick]

The paper (arXiv 2504.14145): VLM-S, step times from Megatron's interleaved schedule, balanced by parameters, to all of
PipeWeaver. What is reproduced are the ratios from step to step, on VLM-S and H800 as emulated (setups.py), step times
summed over batches:

    Megatron            pieces balanced by parameters, interleaved 1F1B
    + partitioning      every module in P K chunks by the floor rule; whole microbatches, interleaved 1F1B
    + interleaving      parts by the 95 % rule, dual queue, microbatches in their order
    + segment order     tree search
    + memory per layer  candidates and integer programs

What layers do before the last step the paper does not say. Two readings: all that can be are recomputed (`lean`: what
its first two levels plan with); or all follow one strategy, for each batch the fastest of keep, recompute attention
and recompute that fits into the memory (`uniform`). Ours: the makespan of `dynamic` without each of its levers over
that with all of them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from benchmarks.setups import Case, cases
from pipeweaver.data.items import Share
from pipeweaver.planner.assign import single_share
from pipeweaver.planner.candidates import CANDIDATES
from pipeweaver.planner.options import PolicyOptions
from pipeweaver.planner.segment_plan import SegmentPlanner
from pipeweaver.planner.step_search import StepPlanner
from pipeweaver.policies import POLICIES
from pipeweaver.policies.interleaved import unit_order
from pipeweaver.policies.levers import levers
from pipeweaver.policies.pieces import plan_in_units
from pipeweaver.schedule.compile import compile_flat
from pipeweaver.schedule.flat import FlatPlan
from pipeweaver.schedule.ir import Draft, Placement, Strategy
from pipeweaver.schedule.stages import StepStages
from pipeweaver.schedule.verify import verify_flat

DTYPE = "bfloat16"
PAPER_SECONDS = (26.13, 22.27, 18.81, 17.61, 16.05)
"""Step times of the paper's ablation."""
STEPS = ("Megatron", "+ partitioning", "+ interleaving", "+ segment order", "+ memory per layer")
ROUNDS = 100
"""Of tree search, ten orders each; and of search by `dynamic`."""
READINGS: dict[str, tuple[Strategy, ...]] = {
    "lean": ("recompute",),
    "uniform": ("keep", "recompute-attention", "recompute"),
}
"""Strategies of which all layers follow one until they may differ."""


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """What is measured: `batches` of `microbatches` each; `sample` batches for a placement; setups of our own
    ablation."""

    batches: int = 4
    microbatches: int = 32
    sample: int = 4
    setups: Sequence[str] = ("VLM-S", "VLM-L", "T2V-S")


QUICK = Ablation(batches=1, microbatches=16, sample=1, setups=())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one batch, the paper's ablation only")
    print(json.dumps(ablation(QUICK if parser.parse_args().quick else Ablation())))


def ablation(scope: Ablation) -> dict[str, object]:
    """Both ablations, printed as they are found: `ablation_paper`, one entry per step, `ablation_dynamic`, one per
    lever."""
    paper = [row for reading in READINGS for row in paper_ablation(scope, reading)]
    return {"ablation_paper": paper, "ablation_dynamic": dynamic_ablation(scope)}


def paper_ablation(scope: Ablation, reading: str) -> list[dict[str, object]]:
    """The paper's steps on VLM-S: step time, ratio to the step before, the paper's ratio, and whether it fits."""
    choices = READINGS[reading]
    case = cases()["VLM-S"]
    shares = _shares(case, scope)
    sample = [single_share(case.graph, case.batch(seed=1000 + i, microbatches=16)) for i in range(scope.sample)]
    by_parameters = PolicyOptions(balance="parameters")
    megatron = POLICIES["interleaved-1f1b"].place(case.graph, case.workers, case.costs, sample, by_parameters)
    cut = POLICIES["pipeweaver"].place(case.graph, case.workers, case.costs, sample)
    steps: tuple[Callable[[Share], FlatPlan], ...] = (
        lambda share: _fastest(case, (_static(case, megatron, share, strategy) for strategy in choices)),
        lambda share: _fastest(case, (_static(case, cut, share, strategy) for strategy in choices)),
        lambda share: _fastest(case, (_uniform(case, cut, share, strategy, 0) for strategy in choices)),
        lambda share: _fastest(case, (_uniform(case, cut, share, strategy, ROUNDS) for strategy in choices)),
        lambda share: _searched(case, cut, share, PolicyOptions(), ROUNDS),
    )
    title = f"VLM-S, {scope.microbatches} microbatches, {reading}"
    print(f"{title:32} {'step time':>10} {'ratio':>7} {'paper':>7} {'peak':>8}", flush=True)
    found: list[dict[str, object]] = []
    paper = (None, *(before / after for before, after in pairwise(PAPER_SECONDS)))
    before: int | None = None
    for name, planned, expected in zip(STEPS, steps, paper, strict=True):
        predictions = [plan.prediction for plan in map(planned, shares)]
        step_ns = sum(prediction.step_ns for prediction in predictions if prediction is not None)
        peak = max(max(prediction.peak_bytes) for prediction in predictions if prediction is not None)
        ratio = None if before is None else before / step_ns
        fits = peak <= case.budget_bytes
        print(
            f"{reading:8} {name:23} {step_ns / len(shares) / 1e6:7.0f} ms {ratio or 1:7.3f} {expected or 1:7.3f} "
            f"{peak / case.budget_bytes:8.0%} {'' if fits else 'of the memory: does not fit'}",
            flush=True,
        )
        found.append(
            {
                "reading": reading,
                "step": name,
                "step_ns": step_ns // len(shares),
                "ratio": ratio,
                "paper": expected,
                "fits": fits,
            }
        )
        before = step_ns
    return found


def dynamic_ablation(scope: Ablation) -> list[dict[str, object]]:
    """For every setup and lever of `dynamic`: makespan without it over makespan with all, within the memory."""
    found: list[dict[str, object]] = []
    for name in scope.setups:
        case = cases()[name]
        sample = [single_share(case.graph, case.batch(seed=1000 + i, microbatches=16)) for i in range(scope.sample)]
        shares = [single_share(case.graph, case.batch(seed=i, microbatches=16)) for i in range(scope.batches)]
        options = PolicyOptions()
        placement = _placed(case, sample, options)
        full = sum(_dynamic(case, placement, share, options, ROUNDS) for share in shares)
        print(f"{name}, 16 microbatches: {full / len(shares) / 1e6:.0f} ms; without, over with:", flush=True)
        for lever in levers("dynamic", case.graph, placement, options, ROUNDS, limited=True, replicas=1):
            other = _placed(case, sample, lever.options) if lever.anew else placement
            try:
                ratio = sum(_dynamic(case, other, share, lever.options, lever.rounds) for share in shares) / full
            except ValueError:  # no plan fits the memory
                ratio = None
            print(f"    {name} {lever.name:36} {'no plan fits' if ratio is None else f'{ratio:.3f}'}", flush=True)
            found.append({"setup": name, "lever": lever.name, "ratio": ratio})
    return found


def _shares(case: Case, scope: Ablation) -> list[Share]:
    return [single_share(case.graph, case.batch(seed=i, microbatches=scope.microbatches)) for i in range(scope.batches)]


def _fastest(case: Case, plans: Iterator[FlatPlan | None]) -> FlatPlan:
    """The fastest plan that fits; the leanest, if none does."""
    found = [(plan, plan.prediction) for plan in plans if plan is not None and plan.prediction is not None]
    fitting = [one for one in found if max(one[1].peak_bytes) <= case.budget_bytes]
    if fitting:
        return min(fitting, key=lambda one: one[1].step_ns)[0]
    return min(found, key=lambda one: max(one[1].peak_bytes))[0]


def _static(case: Case, placement: Placement, share: Share, strategy: Strategy) -> FlatPlan:
    """Interleaved 1F1B on any placement, every layer under a strategy where it has it."""
    plan = plan_in_units("interleaved-1f1b", unit_order)
    draft = plan(case.graph, placement, share, case.costs, budget_bytes=None, seed=0, rounds=0, dtype=DTYPE)
    step = StepStages(case.graph, placement, share, draft.parts, case.costs, dtype=DTYPE)
    alike = msgspec.structs.replace(draft, strategies=tuple(_alike(step, draft, strategy)))
    return _proven(case, share, compile_flat(step, alike), budget_bytes=None)


def _alike(step: StepStages, draft: Draft, strategy: Strategy) -> Iterator[tuple[tuple[Strategy, ...], ...]]:
    """For each chunk, the strategies of its parts."""
    unit = 0
    for parts in draft.parts:
        of: list[tuple[Strategy, ...]] = []
        for _ in parts:
            layers = step.layer_strategies(unit) if step.learns[unit] else ()
            of.append(tuple(strategy if strategy in known else "keep" for known in layers))
            unit += 1
        yield tuple(of)


def _uniform(case: Case, placement: Placement, share: Share, strategy: Strategy, rounds: int) -> FlatPlan | None:
    """The paper's planner with all layers under a strategy where it saves memory; None if that does not fit."""
    options = PolicyOptions(strategies=() if strategy == "keep" else (strategy,))
    try:
        return _searched(case, placement, share, options, rounds, num_candidates=1)
    except ValueError:
        return None


def _searched(
    case: Case,
    placement: Placement,
    share: Share,
    options: PolicyOptions,
    rounds: int,
    num_candidates: int = CANDIDATES,
) -> FlatPlan:
    planner = SegmentPlanner(
        case.graph,
        placement,
        share,
        case.costs,
        budget_bytes=case.budget_bytes,
        options=options,
        dtype=DTYPE,
        num_candidates=num_candidates,
    )
    planner.run(rounds)
    return _proven(case, share, planner.plan(), budget_bytes=case.budget_bytes)


def _proven(case: Case, share: Share, plan: FlatPlan, *, budget_bytes: int | None) -> FlatPlan:
    verify_flat([plan], case.graph, [share], dtype=DTYPE, budget_bytes=budget_bytes)
    return plan


def _placed(case: Case, sample: Sequence[Share], options: PolicyOptions) -> Placement:
    place = POLICIES["dynamic"].place
    budget = case.budget_bytes
    return place(case.graph, case.workers, case.costs, sample, options, dtype=DTYPE, budget_bytes=budget)


def _dynamic(case: Case, placement: Placement, share: Share, options: PolicyOptions, rounds: int) -> int:
    """Makespan of `dynamic`, ns."""
    planner = StepPlanner(
        case.graph, placement, share, case.costs, budget_bytes=case.budget_bytes, options=options, dtype=DTYPE
    )
    planner.run(rounds)
    prediction = planner.plan().prediction
    assert prediction is not None
    return prediction.makespan_ns


if __name__ == "__main__":
    main()
