"""Policy `pipeweaver`: each step of the paper against brute force, and proven plans for any graph, batch and budget."""

from __future__ import annotations

import random
from itertools import pairwise, permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_cases import GRAPHS, flat_costs, graph_of, share_of

from pipeweaver.costs import StageCost, StrategyCost, with_strategies
from pipeweaver.planner.candidates import COPY_PRICE, Candidate, candidates
from pipeweaver.planner.memory_program import Slots, candidate_table, fits, greedy, latencies, least_ns, solve
from pipeweaver.planner.options import PolicyOptions
from pipeweaver.planner.segment_plan import SegmentPlanner
from pipeweaver.planner.segments import chunks_per_worker, items_per_part
from pipeweaver.planner.tree_search import TreeSearch
from pipeweaver.policies import POLICIES
from pipeweaver.schedule.compile import compile_plan
from pipeweaver.schedule.verify import verify

POLICY = POLICIES["pipeweaver"]
ALL = ("recompute", "recompute-attention", "offload")


def planned(graph, placement, share, costs, **given):
    arguments = {"budget_bytes": None, "seed": 0, "rounds": 0} | given
    draft = POLICY.plan(graph, placement, share, costs, **arguments)
    plan = compile_plan(graph, share, draft, costs)
    verify([plan], graph, [share], budget_bytes=arguments["budget_bytes"])
    return plan


# Plans


@settings(max_examples=60)
@given(
    st.sampled_from(GRAPHS),
    st.integers(1, 4),
    st.lists(st.integers(0, 5), max_size=5),
    st.booleans(),
    st.integers(0, 4),
    st.sampled_from((1, 20)),
)
def test_any_graph_and_batch_gives_a_proven_plan(name, workers, counts, forward_only, rounds, uneven):
    graph = graph_of(name, (5, 3, 2))
    costs = flat_costs(graph, row_ns={graph.modules[0].name: 1_000 * uneven})
    placement = POLICY.place(graph, workers, costs, [share_of(graph, [2, 1])])
    planned(graph, placement, share_of(graph, counts), costs, forward_only=forward_only, rounds=rounds)


@settings(max_examples=30)
@given(
    st.sampled_from(GRAPHS),
    st.integers(1, 3),
    st.lists(st.integers(0, 4), min_size=1, max_size=5),
    st.floats(0, 1),
    st.sampled_from((ALL, ("recompute",), ())),
)
def test_a_budget_that_suffices_for_lean_microbatches_one_by_one_is_kept(name, workers, counts, generosity, allowed):
    graph = graph_of(name, (4, 3, 2))
    costs = flat_costs(graph, layer_bytes=100, row_bytes=256)
    share = share_of(graph, counts)
    options = PolicyOptions(strategies=allowed)
    placement = POLICY.place(graph, workers, costs, [share_of(graph, [2, 1])])
    free = planned(graph, placement, share, costs)
    ample = 2 * max(free.prediction.peak_bytes)
    # What recomputation alone can do is possible with copies allowed.
    used = PolicyOptions(strategies=ALL[:2]) if "offload" in allowed and generosity < 0.5 else options
    planner = SegmentPlanner(graph, placement, share, costs, budget_bytes=ample, options=used)
    lean = planner._in_turn("pipeweaver")[1].prediction.peak_bytes
    budget = max(lean) + int(generosity * max(0, max(free.prediction.peak_bytes) - max(lean)))
    planned(graph, placement, share, costs, budget_bytes=budget, options=options, rounds=2)


def test_a_budget_that_nothing_fits_is_refused_with_worker_and_bytes():
    graph = graph_of("encoder")
    costs = flat_costs(graph)
    share = share_of(graph, [3, 3])
    placement = POLICY.place(graph, 2, costs, [share])
    with pytest.raises(ValueError, match=r"no plan of step 0 fits: worker \d needs [\d,]+ bytes even with one"):
        POLICY.plan(graph, placement, share, costs, budget_bytes=4 * 6 * costs.layer_bytes + 1000, seed=0, rounds=1)


def test_memory_strategies_are_used_where_memory_is_short_and_only_there():
    graph = graph_of("encoder", (8, 8))
    costs = flat_costs(graph, layer_bytes=100, row_bytes=4_096)
    share = share_of(graph, [3, 1, 4, 2, 3, 3])
    placement = POLICY.place(graph, 2, costs, [share])
    free = planned(graph, placement, share, costs)
    most = max(free.prediction.peak_bytes)
    times = []
    for share_of_most in (1.2, 0.7, 0.4):
        plan = planned(graph, placement, share, costs, budget_bytes=int(share_of_most * most), rounds=3)
        used = {s for of in plan.actions for action in of for s in getattr(action, "strategies", ())} - {"keep"}
        assert bool(used) == (share_of_most < 1)
        times.append(plan.prediction.makespan_ns)
    assert times == sorted(times)


def test_equal_arguments_give_equal_plans_and_more_rounds_no_worse_ones():
    graph = graph_of("two encoders")
    costs = flat_costs(graph, row_bytes=1_024)
    share = share_of(graph, [3, 0, 5, 1])
    placement = POLICY.place(graph, 2, costs, [share])
    assert placement == POLICY.place(graph, 2, costs, [share])
    budget = max(planned(graph, placement, share, costs).prediction.peak_bytes) - 50_000
    plans = [planned(graph, placement, share, costs, seed=7, rounds=6, budget_bytes=budget) for _ in range(2)]
    assert plans[0].fingerprint == plans[1].fingerprint
    planner = SegmentPlanner(graph, placement, share, costs, seed=7)
    before = planner.plan().prediction.makespan_ns
    planner.run(10)
    assert planner.plan().prediction.makespan_ns <= before
    assert 1 < planner.evaluations <= 101


# Sizes of segments


class Overhead:
    """Costs with a fixed time per stage beside one per item."""

    def __init__(self, fixed_ns, item_ns):
        self.fixed_ns, self.item_ns = fixed_ns, item_ns

    def stage(self, chunk, items, links):
        ns = self.fixed_ns[chunk.module] + self.item_ns[chunk.module] * len(items)
        return StageCost(forward_ns=ns, backward_ns=2 * ns)


def test_b_is_the_fewest_items_within_five_per_cent_of_the_best_and_k_the_floor_of_latencies():
    graph = graph_of("encoder", (24, 24))
    shares = [share_of(graph, [3, 5, 0, 9])]
    costs = Overhead({"vision": 100, "language": 0}, {"vision": 100, "language": 3_000})
    # Time per item is 100 (1 + 1 / n), best at 64: within 5 % from n = 16 on.
    parts = items_per_part(graph, shares, costs)
    assert parts == {"vision": 16}
    # T is 3 * 1700 for vision, 3 * 3000 for a language sequence.
    assert chunks_per_worker(graph, 4, shares, costs, parts) == {"vision": 1, "language": 1}
    costs.item_ns["language"] = 5_200
    assert chunks_per_worker(graph, 4, shares, costs, parts) == {"vision": 1, "language": 3}
    assert chunks_per_worker(graph, 12, shares, costs, parts) == {"vision": 1, "language": 2}, "as layers allow"


def test_settings_of_the_user_are_kept():
    graph = graph_of("encoder", (8, 8))
    costs = flat_costs(graph)
    share = share_of(graph, [5, 7])
    options = PolicyOptions(chunks_per_worker={"vision": 2, "language": 1}, items_per_part={"vision": 3})
    placement = POLICY.place(graph, 2, costs, [share], options)
    assert [chunk.module for chunk in placement.chunks] == ["vision"] * 4 + ["language"] * 2
    plan = planned(graph, placement, share, costs, options=options)
    assert [len(part.items) for part in plan.parts[0]] == [2, 3, 2, 2, 3]


# Tree search


def order_score(seed, count):
    """A makespan-like score: prefixes matter, and pairs that follow each other."""
    draw = random.Random(seed)
    weights = [[draw.randint(0, 100) for _ in range(count)] for _ in range(count)]
    pairs = [[draw.randint(0, 100) for _ in range(count)] for _ in range(count)]

    def score(order):
        found = 2_000 + sum(weights[i][thing] for i, thing in enumerate(order))
        return found + sum(pairs[a][b] for a, b in pairwise(order.tolist()))

    return score


def best_of_random(score, first, evaluations, seed):
    draw = np.random.default_rng(seed)
    return min(score(first), *(score(draw.permutation(first)) for _ in range(evaluations - 1)))


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_the_tree_finds_the_best_of_few_orders_and_stops(count):
    score = order_score(3, count)
    search = TreeSearch(score, np.arange(count), seed=0)
    search.run(1_000)
    assert search.best_ns == min(score(np.array(order)) for order in permutations(range(count)))
    evaluations = search.evaluations
    search.run(10)
    assert search.evaluations == evaluations


def test_the_tree_is_no_worse_than_random_orders_at_equal_evaluations():
    ratios = []
    for seed in range(12):
        graph = graph_of(("encoder", "decoder", "two encoders")[seed % 3], (4, 4, 4))
        costs = flat_costs(graph, row_ns={"vision": 3_000, "diffusion": 2_000}, latency_ns=20_000)
        share = share_of(graph, [(seed * 7 + 3 * i) % 6 for i in range(8)], seed=seed)
        placement = POLICY.place(graph, 3, costs, [share])
        planner = SegmentPlanner(graph, placement, share, costs, seed=seed)
        planner.run(60)
        first = np.arange(len(set(planner._group.tolist())))
        at_random = [best_of_random(planner.score, first, planner.evaluations, s) for s in range(3)]
        ratios.append(planner._best.makespan_ns / (sum(at_random) / 3))
    assert sum(ratios) / len(ratios) <= 1, ratios


# Memory strategies


@st.composite
def layer_strategies(draw):
    kinds = draw(st.integers(1, 3))
    number = st.integers(0, 12)
    options = []
    for _ in range(kinds):
        keep = draw(st.integers(1, 12))
        known = {"keep": StrategyCost(keep, 0)}
        for name in ALL[: draw(st.integers(0, 3))]:
            known[name] = StrategyCost(draw(st.integers(0, keep)), draw(number), draw(number) * (name == "offload"))
        options.append(known)
    return [options[draw(st.integers(0, kinds - 1))] for _ in range(draw(st.integers(1, 5)))]


@settings(max_examples=200)
@given(layer_strategies(), st.integers(0, 20), st.integers(2, 10))
def test_candidates_are_the_fastest_within_their_memory(layers, forward_ns, count):
    kept = sum(known["keep"].saved_bytes for known in layers)
    cost = StageCost(forward_ns=forward_ns, backward_ns=2 * forward_ns, saved_bytes=100 + kept)
    found = candidates(cost, layers, ALL, count)
    all_choices = []
    for names in product(*(known for known in layers)):
        priced = with_strategies(cost, names, layers)
        travel = priced.offload_ns
        stall = max(0, travel - forward_ns) + max(0, travel - priced.backward_ns)
        all_choices.append((priced.saved_bytes, forward_ns + priced.backward_ns + stall + 2 * travel // COPY_PRICE))
    assert found[0].latency_ns == min(ns for _, ns in all_choices)
    assert found[-1].held_bytes == min(held for held, _ in all_choices)
    for candidate in found:
        assert with_strategies(cost, candidate.strategies, layers) == candidate.cost
        within = [ns for held, ns in all_choices if held <= candidate.held_bytes]
        assert candidate.latency_ns == min(within)
    for before, after in pairwise(found):
        assert after.held_bytes < before.held_bytes and after.latency_ns >= before.latency_ns
    # Each limit between the ends has the best that fits.
    spread = found[0].held_bytes - found[-1].held_bytes
    for k in range(1, count - 1):
        limit = found[-1].held_bytes + spread * k // (count - 1)
        best = min(ns for held, ns in all_choices if held <= limit)
        assert min(c.latency_ns for c in found if c.held_bytes <= limit) == best
    assert len(found) <= count


def memory_case(seed):
    """A worker's order with random units, candidates and a limit that the leanest keep to."""
    draw = random.Random(seed)
    units = draw.randint(1, 5)
    by_kind = []
    for _ in range(units):
        held, ns, found = draw.randint(5, 20), draw.randint(10, 20), []
        for _ in range(draw.randint(1, 3)):
            cost = StageCost(0, ns, saved_bytes=held << 20, backward_workspace_bytes=draw.randint(0, 6) << 20)
            found.append(Candidate((), cost, 0, ns))
            held, ns = held - draw.randint(1, 5), ns + draw.randint(1, 9)
        by_kind.append(found)
    slots = sorted(2 * list(range(units)), key=lambda _: draw.random())
    first = np.array([slots.index(u) for u in range(units)])
    last = np.array([len(slots) - 1 - slots[::-1].index(u) for u in range(units)])
    base = np.array([draw.randint(0, 30) << 20 for _ in slots])
    table = candidate_table(range(units), by_kind)
    limits = np.array([int(base.max()) + (draw.randint(0, 40) << 20)])
    return Slots(np.array([0, len(slots)]), base, first, last), table, limits


@pytest.mark.parametrize("seed", range(40))
def test_the_integer_program_finds_what_enumeration_finds(seed):
    slots, table, limits = memory_case(seed)
    numbers = [range(int(n) + 1) for n in table.leanest]
    possible = [np.array(choice) for choice in product(*numbers) if fits(slots, table, limits, np.array(choice))]

    def latency(choice):
        return int(table.latency_ns[table.kind, choice].sum())

    each = latencies(table, np.zeros(len(table.kind), np.int64))
    best = min(latency(choice) for choice in possible)
    exact = solve(slots, table, each, limits, gap=0.0)
    start = greedy(slots, table, each, limits)
    assert fits(slots, table, limits, exact) and fits(slots, table, limits, start)
    assert latency(exact) == best
    assert least_ns(slots, table, each, int(limits[0]), 0) <= best + 1e-6
    within = latency(solve(slots, table, each, limits))
    assert best <= within <= min(latency(start), best / 0.95)
