"""What is chosen about a step: ladders, groups, memory strategies; the search over them is anytime and repeatable."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_cases import GRAPHS, flat_costs, graph_of, share_of

from pipeweaver.costs import one_by_one
from pipeweaver.data.table import ItemTable
from pipeweaver.planner.choices import Choice, Ladders, costliest, item_costs
from pipeweaver.planner.leaning import leaned
from pipeweaver.planner.options import PolicyOptions
from pipeweaver.planner.partition import by_modality, layer_costs, task_modules
from pipeweaver.planner.parts import cut_parts
from pipeweaver.planner.regroup import ROOM, evened, merged
from pipeweaver.planner.step_search import BLOCK, StepPlanner
from pipeweaver.schedule.stages import StepStages, useful_ns
from pipeweaver.schedule.verify import verify_flat


def planner_of(name, workers, counts, *, spread=1, budget=None, options=PolicyOptions(), seed=0):  # noqa: B008 (frozen)
    """Modules cost up to `spread` times as much as others."""
    graph = graph_of(name, (4, 4, 4))
    names = [module.name for module in graph.modules]
    row_ns = {module: 1_000 + 1_000 * (spread - 1) * i // max(1, len(names) - 1) for i, module in enumerate(names)}
    costs = flat_costs(graph, layer_bytes=100, row_ns={module: int(ns) for module, ns in row_ns.items()})
    share = share_of(graph, counts)
    sample = share if share.items else share_of(graph, [1])
    placement = by_modality(graph, workers, layer_costs(graph, costs, [sample]), task_modules(graph, [sample]), {})
    return StepPlanner(graph, placement, share, costs, budget_bytes=budget, options=options, seed=seed)


@settings(max_examples=40)
@given(
    st.sampled_from(GRAPHS),
    st.integers(1, 4),
    st.lists(st.integers(0, 5), max_size=5),
    st.sampled_from((1, 1.2, 20)),
    st.one_of(st.none(), st.floats(0, 1)),
    st.integers(0, 3),
)
def test_the_best_so_far_is_proven_and_never_gets_worse(name, workers, counts, spread, tightness, seed):
    free = planner_of(name, workers, counts, spread=spread, seed=seed)
    free.run(8)
    budget = None
    if tightness is not None:
        most = max(free.plan().prediction.peak_bytes)
        least = max(planner_of(name, workers, counts, spread=spread, budget=0).leanest()[1].prediction.peak_bytes)
        budget = int(least + tightness * max(0, most - least))
    planner = planner_of(name, workers, counts, spread=spread, budget=budget, seed=seed)
    before = None
    for _ in range(6):
        planner.run(8)
        plan = planner.plan()
        verify_flat([plan], planner.graph, [planner.share], budget_bytes=budget)
        assert plan.prediction.makespan_ns >= plan.prediction.lower_bound_ns
        assert before is None or plan.prediction.makespan_ns <= before
        before = plan.prediction.makespan_ns
    again = planner_of(name, workers, counts, spread=spread, budget=budget, seed=seed)
    again.run(planner.rounds)
    assert again.draft().order == planner.draft().order


def test_levers_that_are_off_stay_off():
    off = PolicyOptions(regroup=False, split_backward=False, strategies=())
    free = planner_of("encoder", 2, [3, 5, 1, 4])
    free.run(100)
    budget = max(free.plan().prediction.peak_bytes) * 3 // 4
    planner = planner_of("encoder", 2, [3, 5, 1, 4], budget=budget, options=off)
    planner.run(100)
    draft = planner.draft()
    assert not draft.strategies
    assert {stage.phase for order in draft.order for stage in order} == {"F", "B"}
    assert {part.microbatch for parts in draft.parts for part in parts} == {0, 1, 2, 3}
    assert all(
        (choice.merge, choice.even, choice.split, choice.level) == (1, False, False, 1) for choice in planner.tried
    )


def test_a_split_backward_is_chosen_where_it_pays():
    planner = planner_of("one", 3, [0] * 4)
    planner.run(100)
    draft = planner.draft()
    assert "W" in {stage.phase for order in draft.order for stage in order}
    whole = planner_of("one", 3, [0] * 4, options=PolicyOptions(split_backward=False))
    whole.run(100)
    assert planner.best_ns < whole.best_ns


def test_neighbours_are_one_step_away_on_one_ladder():
    ladders = Ladders(merges=(1, 2), evens=(False, True), parts=(1, 2, 4), levels=(1.0, 0.5), splits=(True,))
    here = Choice(parts=2, split=True)
    finer, coarser = here._replace(parts=4), [here._replace(parts=1), here._replace(merge=2)]
    others = [here._replace(level=0.5), here._replace(even=True)]
    assert list(ladders.neighbours(here, finer_first=True)) == [finer, *coarser, *others]
    assert list(ladders.neighbours(here, finer_first=False)) == [*coarser, finer, *others]
    assert list(Ladders().neighbours(Choice(), finer_first=True)) == []


def test_items_between_those_asked_for_lie_between_their_costs():
    graph = graph_of("encoder")
    costs = flat_costs(graph)
    share = share_of(graph, [3, 5, 2] * 8)
    found = item_costs(graph, ItemTable(share.items, share.links), costs)
    assert found == [3 * 1_000 * 4 * item.sizes["tokens"] for item in share.items]


def test_the_module_with_most_work_is_cut():
    graph = graph_of("two encoders")
    share = share_of(graph, [3, 2])
    for costly in ("vision", "audio"):
        work = useful_ns(graph, ItemTable(share.items, share.links), flat_costs(graph, row_ns={costly: 5_000}))
        assert costliest(graph, share, work) == costly
    assert costliest(graph, share_of(graph, [0, 0]), {"language": 1}) is None


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(1, 3), st.integers(1, 4), st.booleans())
def test_groups_hold_the_same_samples(counts, per_microbatch, count, halve_first):
    graph = graph_of("encoder")
    share = share_of(graph, counts, per_microbatch=per_microbatch)
    costs = item_costs(graph, ItemTable(share.items, share.links), flat_costs(graph, row_ns={"vision": 9_000}))
    drawn = sorted(i for group in share.microbatches for i in group)

    def loads(found):
        return [sum(costs[i] for i in group) for group in found.microbatches]

    def rows(found):
        return [
            sum(share.items[i].sizes["tokens"] for i in group if share.items[i].module == "language")
            for group in found.microbatches
        ]

    even, together = evened(share, costs, "language"), merged(share, count, halve_first=halve_first)
    for found in (even, together):
        assert sorted(i for group in found.microbatches for i in group) == drawn
        assert (found.items, found.links, found.normalisers) == (share.items, share.links, share.normalisers)
        for group in found.microbatches:  # samples stay whole
            draws = {share.items[i].draw for i in group}
            assert [i for i in drawn if share.items[i].draw in draws] == sorted(group)
    assert max(rows(even)) <= ROOM * max(rows(share))
    halved = halve_first and 0 < count // 2 < len(share.microbatches)
    assert len(together.microbatches) == -(-len(share.microbatches) // count) + halved
    assert len(loads(even)) == len(share.microbatches) or len(share.microbatches) > len(counts)


def test_evened_groups_are_nearly_equal():
    graph = graph_of("encoder")
    share = share_of(graph, [9, 8, 2, 1, 0, 9, 0, 1], per_microbatch=2)
    costs = item_costs(graph, ItemTable(share.items, share.links), flat_costs(graph, row_ns={"vision": 30_000}))

    def spread(found):
        sums = [sum(costs[i] for i in group) for group in found.microbatches]
        return max(sums) / np.mean(sums)

    assert spread(evened(share, costs, "language")) < 0.85 * spread(share)


@pytest.mark.parametrize("level", [0.7, 0.4, 0.0])
def test_units_hold_no_more_than_their_level(level):
    graph = graph_of("encoder")
    costs, share = flat_costs(graph), share_of(graph, [3, 1])
    placement = by_modality(graph, 2, layer_costs(graph, costs, [share]), task_modules(graph, [share]), {})
    step = StepStages(graph, placement, share, cut_parts(graph, placement, share, {}), costs, dtype="float32")
    chosen, priced = leaned(step, level, ("recompute", "recompute-attention", "offload"))
    assert (priced.saved_bytes <= level * step.costs.saved_bytes).all()
    assert all(chosen)
    only, _ = leaned(step, level, ("recompute",))
    assert {strategy for of in only for strategy in of} <= {"keep", "recompute"}
    none, kept = leaned(step, level, ())
    assert not any(none) and (kept.saved_bytes == step.costs.saved_bytes).all()


class DearHalves:
    """Flat costs whose split backwards take half as long again as whole ones."""

    def __init__(self, costs):
        self._costs = costs

    def __getattr__(self, name):
        return getattr(self._costs, name)

    def stage(self, chunk, items, links):
        cost = self._costs.stage(chunk, items, links)
        return cost._replace(input_ns=cost.backward_ns, weight_ns=cost.backward_ns // 2)

    def stages(self, table, asked):
        return one_by_one(self.stage, table, asked)


def test_a_split_backward_is_not_chosen_where_it_costs_more_than_it_brings():
    graph = graph_of("one")
    share = share_of(graph, [0] * 6)
    costs = flat_costs(graph)
    placement = by_modality(graph, 2, layer_costs(graph, costs, [share]), task_modules(graph, [share]), {})
    for rounds in (1, 100):
        planner = StepPlanner(graph, placement, share, DearHalves(costs))
        planner.run(rounds)
        draft = planner.draft()
        assert {stage.phase for order in draft.order for stage in order} == {"F", "B"}


def test_an_order_over_the_budget_is_left_alone(monkeypatch):
    planner = planner_of("encoder", 2, [3, 5, 1, 4])
    while planner._agenda is not None:
        planner.run(1)
    plan = planner.plan()
    planner._close = planner._close[1:]  # others search faster than the best, which compiles to the shortest plan
    monkeypatch.setattr(planner, "_consider", lambda one: np.ones(2, np.int64))
    planner.run(10 * BLOCK)
    assert planner.plan().prediction.makespan_ns == plan.prediction.makespan_ns
