"""Float64 gradients of wavefront plans equal a single process that runs all tasks (rule 6).

Tasks share modules; slices are drawn at random, so that counts change several times inside a module and do not divide
the batch; one loss is joint, one module may be frozen. Workers are threads.
"""

from __future__ import annotations

import random

import pytest

from pipeweaver.data.items import Batch, Item, Sample
from pipeweaver.model.graph import Flow, LayerSpec, LossSpec, ModelGraph, Module
from pipeweaver.planner.assign import single_share
from pipeweaver.policies import POLICIES
from pipeweaver.schedule.compile import compile_plan
from pipeweaver.schedule.ir import Chunk, Placement
from pipeweaver.schedule.verify import verify
from pipeweaver.wavefront.bind import bind
from pipeweaver.wavefront.draft import draft_of, placement_of
from pipeweaver.wavefront.metagraph import FREE, Schedule, Slice
from pipeweaver.wavefront.place import Cluster, place
from pipeweaver.wavefront.timeline import pieces_of, tables, timed
from tests.runtime.graphs import X, diffusion, encoder, language
from tests.runtime.test_joint import Contrast, Meet
from tests.runtime.threads import SingleProcess, assert_close, flat_costs, local_workers, run_steps

LAYERS = 4


def four_tasks(*, frozen: bool) -> ModelGraph:
    pairs = Module(
        name="pairs",
        layers=(LayerSpec(kind="pairs.meet", build=Meet, reads=("vision", "audio"), carries=(X,)),),
        after=LayerSpec(kind="pairs.after", build=Contrast),
        loss=LossSpec(units="pairs", joint=True),
    )
    return ModelGraph(
        modules=(
            encoder("vision", LAYERS, trainable=not frozen),
            encoder("audio", LAYERS),
            language(LAYERS, reads=("vision",), sends=True),
            diffusion(LAYERS),
            pairs,
        ),
        flows=(
            Flow(source="vision", tensor="features", destination="language", name="vision"),
            Flow(source="language", tensor="hidden", destination="diffusion", name="condition"),
            Flow(source="vision", tensor="features", destination="pairs", name="vision"),
            Flow(source="audio", tensor="features", destination="pairs", name="audio"),
        ),
    )


def batch_of(seed: int, counts: dict[str, int]) -> Batch:
    draw = random.Random(seed)
    samples = []
    for task, count in counts.items():
        for number in range(count):

            def item(module, **sizes):
                return Item(task=task, draw=number, module=module, position=0, sizes=sizes)  # noqa: B023

            rows = draw.randint(2, 6)
            picture = item("vision", tokens=rows, features=draw.randint(1, rows))
            pictures = picture.sizes["features"] if task == "caption" else 0
            tokens = pictures + draw.randint(1, 5)
            text = item(
                "language", tokens=tokens, supervised=draw.randint(0, 3) % (tokens + 1), vision=pictures, audio=0
            )
            latents = item("diffusion", tokens=3, elements=6)
            sound = item("audio", tokens=4, features=2)
            pair = item("pairs", tokens=1, pairs=1)
            items, links = {
                "caption": ((picture, text), ((0, 1),)),
                "text": ((text,), ()),
                "paint": ((text, latents), ((0, 1),)),
                "matching": ((picture, sound, pair), ((0, 2), (1, 2))),
            }[task]
            samples.append(Sample(task=task, draw=number, record=number, items=items, links=links))
    return Batch(step=0, samples=tuple(samples), microbatches=(tuple(range(len(samples))),))


def random_schedule(meta, workers: int, draw: random.Random) -> Schedule:
    """Slices of one to a few layers, every one on a count of its own, in a random order that respects the flows."""
    left = [0] * len(meta.ops)
    slices = []
    while True:
        able = [
            i
            for i, op in enumerate(meta.ops)
            if left[i] < op.num_layers and all(left[s] == meta.ops[s].num_layers for s in meta.sources[i])
        ]
        if not able:
            break
        number = draw.choice(able)
        op = meta.ops[number]
        stop = min(op.num_layers, left[number] + draw.randint(1, 2))
        count = draw.choice([count for count in op.counts if count <= workers])
        slices.append(Slice(number, left[number], stop, count, 0, 0))
        left[number] = stop
    pieces = pieces_of(meta, slices)
    return Schedule(workers=workers, slices=timed(meta, tables(meta, workers, FREE), pieces), policy="random")


def check(graph, batch, placements, drafts_of):
    share = single_share(graph, batch)
    costs = flat_costs(graph)
    single = SingleProcess(graph)
    losses = single.step(batch)
    for placement in placements:
        plan = compile_plan(graph, share, drafts_of(placement, share, costs), costs, dtype="float64")
        verify([plan], graph, [share], dtype="float64")
        workers = local_workers(graph, placement, 1)
        results = run_steps(workers, [[plan]])
        found = set()
        for address, worker in workers.items():
            (result,) = results[address]
            for key, value in result.losses.items():
                assert value == pytest.approx(losses[key], rel=1e-11, abs=1e-300)
            gradients = {name: p.grad for name, p in worker.parameters.items() if p.requires_grad}
            assert_close(gradients, single.gradients)
            found |= gradients.keys()
        assert found == single.gradients.keys()
        yield plan


@pytest.mark.parametrize("seed", range(8))
def test_random_slices(seed):
    draw = random.Random(seed)
    graph = four_tasks(frozen=seed % 3 == 0)
    batch = batch_of(seed, {"caption": 5, "text": 7, "paint": 3, "matching": 4})
    share = single_share(graph, batch)
    workers = draw.choice([3, 4, 5])
    meta = bind(graph, share, flat_costs(graph), workers)
    cluster = Cluster(workers=workers, island=2)
    placed = place(meta, random_schedule(meta, workers, draw), cluster, by_flow=bool(seed % 2))
    placement = placement_of([meta], [placed])
    finer = 1 + seed % 2

    def drafts_of(placement, share, costs):
        return draft_of(graph, placement, share, costs, finer=finer)

    (plan,) = check(graph, batch, [placement], drafts_of)
    if finer == 1:
        changes = [
            len({piece.workers for piece in placed.slices if piece.op == number}) for number in range(len(meta.ops))
        ]
        assert max(changes) >= 2 and len(plan.groups) >= 3


@pytest.mark.parametrize("policy", ["sequential", "task-parallel", "wavefront-levels", "wavefront"])
def test_policies(policy, monkeypatch):
    monkeypatch.setattr("pipeweaver.policies.wavefront.EFFORT", 50_000)
    graph = four_tasks(frozen=False)
    batch = batch_of(1, {"caption": 5, "text": 7, "paint": 3, "matching": 4})
    costs = flat_costs(graph)
    placement = POLICIES[policy].place(graph, 3, costs, [single_share(graph, batch)], dtype="float64")

    def drafts_of(placement, share, costs):
        return POLICIES[policy].plan(graph, placement, share, costs, budget_bytes=None, seed=0, rounds=0)

    assert len(list(check(graph, batch, [placement], drafts_of))) == 1


def test_counts_that_change_twice_in_a_module():
    """Two, one and three workers for five captions; layers of language have three different sets of holders."""
    graph = four_tasks(frozen=False)
    batch = batch_of(3, {"caption": 5, "text": 7, "paint": 3, "matching": 4})
    slices = (
        ("caption", "vision", 0, LAYERS, (0, 1)),
        ("text", "language", 0, LAYERS, (1,)),
        ("caption", "language", 0, 1, (0, 1)),
        ("caption", "language", 1, 2, (2,)),
        ("caption", "language", 2, LAYERS, (0, 1, 2)),
        ("paint", "language", 0, 3, (1,)),
        ("paint", "language", 3, LAYERS, (0, 2)),
        ("paint", "diffusion", 0, LAYERS, (1, 0)),
        ("matching", "vision", 0, LAYERS, (2, 1, 0)),
        ("matching", "audio", 0, LAYERS, (1,)),
        ("matching", "pairs", 0, 1, (2,)),
    )
    chunks = [
        Chunk(task=task, module=module, start=start, stop=stop, worker=worker)
        for task, module, start, stop, workers in slices
        for worker in workers
    ]
    placement = Placement(workers=3, chunks=tuple(chunks))

    def drafts_of(placement, share, costs):
        return draft_of(graph, placement, share, costs)

    (plan,) = check(graph, batch, [placement], drafts_of)
    holders = {group.holders for group in plan.groups if any("language" in name for name in group.parameters)}
    assert holders == {(0, 1), (1, 2), (0, 1, 2)}
