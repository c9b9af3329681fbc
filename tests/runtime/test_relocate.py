"""Task sets that change: parameters and optimizer state arrive bit for bit, and training goes on as if nothing had moved."""

from __future__ import annotations

import random

import pytest
import torch

from pipeweaver.model.graph import ModelGraph
from pipeweaver.planner.assign import single_share
from pipeweaver.runtime.optimizer import OptimizerConfig
from pipeweaver.runtime.relocate import homes_of, relocate, relocation
from pipeweaver.schedule.compile import compile_plan
from pipeweaver.schedule.ir import Chunk, Placement
from pipeweaver.wavefront.draft import draft_of
from tests.runtime.graphs import language
from tests.runtime.threads import SingleProcess, assert_close, flat_costs, in_threads, local_workers
from tests.wavefront.test_exactness import LAYERS, batch_of, four_tasks

CONFIG = OptimizerConfig(lr=1e-2, weight_decay=0.1, clip_norm=0.0)
MODULES = {
    "caption": ("vision", "language"),
    "text": ("language",),
    "paint": ("language", "diffusion"),
    "matching": ("vision", "audio", "pairs"),
}
SETS = (("caption", "text"), ("text",), ("caption", "matching"), ("paint", "text", "caption"), ("matching", "paint"))


def random_placement(graph: ModelGraph, tasks, workers: int, draw: random.Random) -> Placement:
    """Chunks of one to a few layers anywhere; every module of a task once."""
    chunks = []
    for task in tasks:
        for name in MODULES[task]:
            start, count = 0, len(graph.by_name[name].layers)
            while start < count:
                stop = min(count, start + draw.randint(1, 3))
                chunks.append(Chunk(task=task, module=name, start=start, stop=stop, worker=draw.randrange(workers)))
                start = stop
    order = {name: i for i, name in enumerate(("vision", "audio", "language", "diffusion", "pairs"))}
    chunks.sort(key=lambda chunk: (order[chunk.module], chunk.start))
    return Placement(workers=workers, chunks=tuple(chunks))


def states_of(worker):
    """Bits of all that a worker holds of each trained parameter, waiting ones too."""
    found = {}
    for name, parameter in worker.parameters.items():
        if parameter.requires_grad:
            state = worker.optimizer.state.get(parameter, {})
            found[name] = [parameter.detach().clone(), *(state[key].clone() for key in sorted(state))]
    return found


@pytest.mark.parametrize("seed", range(4))
def test_sets_come_and_go(seed):
    draw = random.Random(seed)
    graph, workers_count = four_tasks(frozen=False), 3
    single = SingleProcess(graph, CONFIG)
    placements = [random_placement(graph, tasks, workers_count, draw) for tasks in SETS]
    plans, batches = [], []
    for number, (tasks, placement) in enumerate(zip(SETS, placements, strict=True)):
        batch = batch_of(seed + number, {task: draw.randint(2, 4) for task in tasks})
        batch = replaced(batch, number)
        share, costs = single_share(graph, batch), flat_costs(graph)
        plans.append(compile_plan(graph, share, draft_of(graph, placement, share, costs), costs, dtype="float64"))
        batches.append(batch)
    workers = local_workers(graph, placements[0], 1, optimizer=CONFIG)

    def train(worker):
        homes = homes_of(graph, placements[0])
        losses, seen = [], []
        for number, plan in enumerate(plans):
            if number:
                before = states_of(worker)
                homes, moves = relocation(graph, homes, placements[number])
                relocate(worker, homes, moves, placements[number])
                after = states_of(worker)
                seen.append((before, after, dict(worker.waiting)))
            losses.append(worker.run(plan).losses)
        return losses, seen, homes

    results = in_threads(workers, train)

    # Every copy of a parameter has the bits that its holders had before, whatever way it came.
    for switch in range(len(SETS) - 1):
        current, arrived = {}, {}
        for _, seen, _ in results.values():
            before, after, _ = seen[switch]
            for name, tensors in before.items():
                current.setdefault(name, tensors)
            for name, tensors in after.items():
                arrived.setdefault(name, []).append(tensors)
        for name, copies in arrived.items():
            for tensors in copies if name in current else copies[1:]:
                expected = current.get(name, copies[0])
                assert len(tensors) == len(expected), name
                assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True)), name

    # As in one process that steps only what the tasks of the set activate.
    for number, batch in enumerate(batches):
        active = {name for task in SETS[number] for name in MODULES[task]}
        held = {name: p for name, p in single.trained.items() if name.split(".")[0] in active}
        untouched = {name: p.detach().clone() for name, p in single.trained.items() if name not in held}
        losses = step_only(single, batch, held)
        for result, _, _ in results.values():
            assert result[number] == pytest.approx(losses, rel=1e-9)
        assert all(torch.equal(single.trained[name], before) for name, before in untouched.items())
    for worker in workers.values():
        trained = {name: p.detach() for name, p in worker.parameters.items() if p.requires_grad}
        assert_close(trained, {name: single.trained[name].detach() for name in trained})
    # Nothing is lost: what the last set does not train waits somewhere.
    somewhere = {name for worker in workers.values() for name in (*worker.parameters, *worker.waiting)}
    assert somewhere == set(single.parameters)


def step_only(single, batch, held):
    """A step of a single process in which the optimizer has only `held`."""
    parameters = {name: parameter.detach().clone() for name, parameter in single.trained.items()}
    state = {name: {k: v.clone() for k, v in single.optimizer.state[p].items()} for name, p in single.trained.items()}
    losses = single.step(batch)
    with torch.no_grad():
        for name, parameter in single.trained.items():
            if name not in held:
                parameter.copy_(parameters[name])
                single.optimizer.state[parameter] = state[name]
    return losses


def test_ends_of_a_tied_embedding_part_and_meet():
    graph = ModelGraph(modules=(language(LAYERS, tied=True),))
    whole, parted = (
        Placement(
            workers=2,
            chunks=(
                Chunk(task="text", module="language", start=0, stop=2, worker=0),
                Chunk(task="text", module="language", start=2, stop=LAYERS, worker=last),
            ),
        )
        for last in (0, 1)
    )
    placements = (whole, parted, whole, parted)
    single, plans, batches = SingleProcess(graph, CONFIG), [], []
    for number, placement in enumerate(placements):
        batches.append(replaced(batch_of(number, {"text": 3}), number))
        share, costs = single_share(graph, batches[-1]), flat_costs(graph)
        plans.append(compile_plan(graph, share, draft_of(graph, placement, share, costs), costs, dtype="float64"))
    workers = local_workers(graph, whole, 1, optimizer=CONFIG)

    def train(worker):
        homes = homes_of(graph, whole)
        for plan in plans:
            homes, moves = relocation(graph, homes, plan.placement)
            relocate(worker, homes, moves, plan.placement)
            worker.run(plan)

    in_threads(workers, train)
    for batch in batches:
        single.step(batch)
    for worker in workers.values():
        assert "language.before.weight" in worker.parameters
        assert_close({name: p.detach() for name, p in worker.parameters.items()}, detached(single))


def replaced(batch, step):
    return type(batch)(step=step, samples=batch.samples, microbatches=batch.microbatches)


def detached(single):
    return {name: parameter.detach() for name, parameter in single.parameters.items()}


def test_what_moves_and_what_waits():
    graph = four_tasks(frozen=True)

    def placed(*chunks):
        made = [Chunk(task="t", module=m, start=a, stop=b, worker=w) for m, a, b, w in chunks]
        return Placement(workers=3, chunks=tuple(made))

    first = placed(("audio", 0, 2, 0), ("audio", 2, LAYERS, 1), ("vision", 0, LAYERS, 0))
    homes = homes_of(graph, first)
    assert {name.split(".")[0] for name in homes} == {"audio"}, "frozen layers are drawn again wherever they are needed"
    homes, moves = relocation(graph, homes, placed(("language", 0, LAYERS, 2)))
    assert moves == ()
    assert {w for name, w in homes.items() if name.startswith("audio.layers.3")} == {(1,)}
    homes, moves = relocation(graph, homes, placed(("audio", 0, LAYERS, 1), ("audio", 2, LAYERS, 2)))
    ends = {(move.sender, move.receiver): {name.split(".")[-2] for name in move.names} for move in moves}
    assert set(ends) == {(0, 1), (1, 2)}
    assert all(workers == (1, 2) for name, workers in homes.items() if name.startswith("audio.layers.3"))
    assert all(workers == (2,) for name, workers in homes.items() if name.startswith("language"))
