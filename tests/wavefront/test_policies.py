"""Wavefront policies from the model graph to verified plans."""

from __future__ import annotations

import random

import msgspec
import pytest

from pipeweaver.policies import POLICIES
from pipeweaver.schedule.compile import compile_plan
from pipeweaver.schedule.ir import Chunk, Placement
from pipeweaver.schedule.verify import verify
from pipeweaver.wavefront.bind import step_bound_ns
from pipeweaver.wavefront.draft import draft_of, slices_of, with_idle
from tests.wavefront.jobs import costs_of, graph_of, share_of

NAMES = ("sequential", "task-parallel", "wavefront-levels", "wavefront")


@pytest.fixture(autouse=True)
def quick_search(monkeypatch):
    monkeypatch.setattr("pipeweaver.policies.wavefront.EFFORT", 50_000)


def planned(name, graph, share, costs, workers, *, shares=None, budget=None, forward_only=False):
    policy = POLICIES[name]
    placement = policy.place(graph, workers, costs, shares or [share], budget_bytes=budget)
    draft = policy.plan(
        graph, placement, share, costs, budget_bytes=budget, seed=0, rounds=0, forward_only=forward_only
    )
    plan = compile_plan(graph, share, draft, costs)
    verify([plan], graph, [share], budget_bytes=budget)
    return plan


@pytest.mark.parametrize("seed", range(12))
def test_random_jobs_are_planned_verified_and_never_slower_than_the_others(seed):
    draw = random.Random(seed)
    graph = graph_of(draw.choice([1, 2, 5]), frozen=seed % 4 == 0)
    tasks = draw.sample(["caption", "text", "paint", "matching"], draw.randint(1, 4))
    share = share_of(graph, {task: draw.randint(1, 9) for task in tasks}, seed=seed)
    costs = costs_of(graph)
    workers = draw.choice([1, 2, 3, 4, 6, 8])
    plans = {name: planned(name, graph, share, costs, workers) for name in NAMES}
    bound = step_bound_ns(graph, share, costs, workers)
    for plan in plans.values():
        assert plan.policy in NAMES
        assert plan.prediction.makespan_ns >= bound
        assert plan.prediction.step_ns >= plans["wavefront"].prediction.step_ns
    again = planned("wavefront", graph, share, costs, workers)
    assert again.fingerprint == plans["wavefront"].fingerprint
    planned("wavefront", graph, share, costs, workers, forward_only=True)


def test_items_of_one_slice_are_shared_out_over_its_workers():
    graph = graph_of(2)
    share = share_of(graph, {"text": 5}, uneven=False)
    plan = planned("sequential", graph, share, costs_of(graph), 3)
    chunks = plan.placement.chunks
    assert [str(chunk) for chunk in chunks if chunk.module == "language"] == [f"language[0:4]@{w}" for w in range(3)]
    assert [len(part.items) for parts in plan.parts for part in parts] == [2, 2, 1]
    assert [[str(stage) for stage in order] for order in plan.order] == [[f"{w}F0", f"{w}B0"] for w in range(3)]


def test_a_batch_unlike_the_sample_is_planned_on_the_same_placement():
    graph = graph_of(2)
    costs = costs_of(graph)
    sample = share_of(graph, {"caption": 4, "text": 6, "paint": 2})
    placement = POLICIES["wavefront"].place(graph, 4, costs, [sample])
    for seed in range(6):
        draw = random.Random(seed)
        batch = {task: draw.randint(0, 7) for task in ("caption", "text", "paint")}
        share = share_of(graph, batch, seed=seed)
        draft = POLICIES["wavefront"].plan(graph, placement, share, costs, budget_bytes=None, seed=0, rounds=0)
        verify([compile_plan(graph, share, draft, costs)], graph, [share])


def test_modules_that_the_sample_lacks_are_placed_and_can_be_used_later():
    graph = graph_of(2)
    costs = costs_of(graph)
    texts = share_of(graph, {"text": 4})
    placement = POLICIES["wavefront"].place(graph, 3, costs, [texts])
    assert {chunk.module for chunk in placement.chunks} == {module.name for module in graph.modules}
    captions = share_of(graph, {"caption": 3})
    renamed = renamed_to(captions, "text")
    draft = POLICIES["wavefront"].plan(graph, placement, renamed, costs, budget_bytes=None, seed=0, rounds=0)
    verify([compile_plan(graph, renamed, draft, costs)], graph, [renamed])


def renamed_to(share, task):
    return msgspec.structs.replace(
        share,
        items=tuple(msgspec.structs.replace(item, task=task) for item in share.items),
        records={name.replace("caption", task): record for name, record in share.records.items()},
        normalisers={name.replace("caption", task): units for name, units in share.normalisers.items()},
    )


def test_idle_modules_get_a_chunk_in_every_pass_of_their_task():
    graph = graph_of(2)
    chunk = Chunk(task="a", module="language", start=0, stop=4, worker=0)
    placement = Placement(workers=2, chunks=(chunk, chunk), passes=(1,))
    found = with_idle(placement, {"a": ("vision", "language")}, graph)
    assert found.passes == (2,)
    assert [(str(c), c.task) for c in found.chunks] == [("language[0:4]@0", "a"), ("vision[0:2]@1", "a")] * 2
    assert slices_of(found) == [[0], [1], [2], [3]]


def test_a_pass_that_had_no_items_of_a_module_has_it_where_another_pass_has():
    graph = graph_of(2)
    text = Chunk(task="a", module="language", start=0, stop=4, worker=0)
    images = [Chunk(task="a", module="vision", start=0, stop=2, worker=worker) for worker in (0, 1)]
    placement = Placement(workers=2, chunks=(text, *images, text), passes=(1,))
    found = with_idle(placement, {"a": ("vision", "language")}, graph)
    assert (found.passes, found.chunks) == ((3,), (text, *images, *images, text))
    share = renamed_to(share_of(graph, {"caption": 4}), "a")
    costs = costs_of(graph)
    verify([compile_plan(graph, share, draft_of(graph, found, share, costs), costs)], graph, [share])


def test_passes_come_where_activations_do_not_fit_at_once():
    graph = graph_of(3)
    share = share_of(graph, {"caption": 8, "text": 8}, uneven=False)
    costs = costs_of(graph, row_bytes=4_000)
    whole = planned("wavefront", graph, share, costs, 2)
    peak = max(whole.prediction.peak_bytes)
    static = max(whole.static_bytes)
    for share_of_activations in (0.7, 0.4, 0.25):
        budget = static + int((peak - static) * share_of_activations)
        plan = planned("wavefront", graph, share, costs, 2, budget=budget)
        assert len({part.microbatch for parts in plan.parts for part in parts}) > 1
        assert max(plan.prediction.peak_bytes) <= budget
        assert plan.prediction.makespan_ns >= whole.prediction.makespan_ns * 0.9


def test_a_batch_larger_than_the_sample_is_cut_into_finer_passes():
    graph = graph_of(3)
    costs = costs_of(graph, row_bytes=4_000)
    small, large = (share_of(graph, {"text": count}, uneven=False) for count in (4, 16))
    placement = POLICIES["wavefront"].place(graph, 2, costs, [small])
    budget = max(planned("wavefront", graph, small, costs, 2).prediction.peak_bytes) + 10_000
    draft = POLICIES["wavefront"].plan(graph, placement, large, costs, budget_bytes=budget, seed=0, rounds=0)
    assert {part.microbatch for parts in draft.parts for part in parts} == {0, 1, 2, 3}
    verify([compile_plan(graph, large, draft, costs)], graph, [large], budget_bytes=budget)


def test_joint_losses_stay_whole_in_passes():
    graph = graph_of(3)
    share = share_of(graph, {"matching": 4, "caption": 6}, uneven=False)
    costs = costs_of(graph, row_bytes=4_000)
    peak = max(planned("sequential", graph, share, costs, 2).prediction.peak_bytes)
    plan = planned("sequential", graph, share, costs, 2, budget=int(peak * 0.7))
    (match,) = [c for c, chunk in enumerate(plan.placement.chunks) if chunk.module == "match"]
    assert [len(part.items) for part in plan.parts[match]] == [4]


def test_a_hopeless_budget_is_said_with_numbers():
    graph = graph_of(2)
    share = share_of(graph, {"text": 3})
    with pytest.raises(ValueError, match=r"does not fit: a worker would need [\d,]+ bytes, [\d,]+ more than its 1,000"):
        POLICIES["wavefront"].place(graph, 2, costs_of(graph), [share], budget_bytes=1_000)
    placement = POLICIES["wavefront"].place(graph, 2, costs_of(graph), [share])
    with pytest.raises(ValueError, match=r"no wavefront plan of step 0 fits: worker \d needs [\d,]+ bytes"):
        POLICIES["wavefront"].plan(graph, placement, share, costs_of(graph), budget_bytes=1_000, seed=0, rounds=0)


def test_items_of_an_unknown_task_and_a_split_joint_loss_are_said():
    graph = graph_of(2)
    costs = costs_of(graph)
    placement = POLICIES["wavefront"].place(graph, 2, costs, [share_of(graph, {"text": 3, "caption": 2})])
    with pytest.raises(ValueError, match="belongs to module language of task paint, which the placement does not hold"):
        draft_of(graph, placement, share_of(graph, {"paint": 1}), costs)
    split = tuple(Chunk(task="matching", module=m, start=0, stop=s, worker=w) for m, s in
                  (("vision", 2), ("text", 2), ("match", 1)) for w in (0, 1))  # fmt: skip
    with pytest.raises(ValueError, match=r"the loss of match is joint: .* last layer is on 2 workers"):
        draft_of(graph, Placement(workers=2, chunks=split), share_of(graph, {"matching": 2}), costs)


def test_an_empty_sample_is_said():
    graph = graph_of(2)
    with pytest.raises(ValueError, match="the sample of batches is empty"):
        POLICIES["wavefront"].place(graph, 2, costs_of(graph), [share_of(graph, {})])
