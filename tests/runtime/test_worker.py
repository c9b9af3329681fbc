"""A worker's step on a hand-made plan equals a single process; every way that an edge can go is there."""

from __future__ import annotations

import pytest

from pipeweaver.planner.assign import share_out
from pipeweaver.runtime.optimizer import OptimizerConfig
from pipeweaver.schedule.compile import compile_plan
from pipeweaver.schedule.ir import Chunk, Draft, Part, Placement, Stage
from pipeweaver.schedule.verify import verify
from tests.runtime.graphs import batch_of, graph_of
from tests.runtime.threads import SingleProcess, assert_close, flat_costs, local_workers, run_steps


def two_chunks(graph, share, forward_only=False):
    """Vision on worker 0 and language in chunks on 0, 1 and 0; an image is a part, a microbatch of text is one."""
    layers = len(graph.by_name["language"].layers)
    chunks = [
        Chunk(task="main", module="vision", start=0, stop=len(graph.by_name["vision"].layers), worker=0),
        Chunk(task="main", module="language", start=0, stop=1, worker=1),
        Chunk(task="main", module="language", start=1, stop=2, worker=0),
        Chunk(task="main", module="language", start=2, stop=layers, worker=0),
    ]
    vision, language = [], []
    for m, microbatch in enumerate(share.microbatches):
        of = {name: [i for i in microbatch if share.items[i].module == name] for name in ("vision", "language")}
        vision += [Part(items=(i,), microbatch=m) for i in of["vision"]]
        language.append(Part(items=tuple(of["language"]), microbatch=m))
    parts = (tuple(vision), *(tuple(language),) * 3)
    order = [[], []]
    for c, chunk in enumerate(chunks):
        order[chunk.worker] += [Stage(c, p, "F") for p in range(len(parts[c]))]
    if not forward_only:
        for c, chunk in reversed(list(enumerate(chunks))):
            order[chunk.worker] += [Stage(c, p, "B") for p in range(len(parts[c]))]
    return Draft(
        placement=Placement(workers=2, chunks=tuple(chunks)),
        parts=parts,
        order=tuple(map(tuple, order)),
        forward_only=forward_only,
    )


def planned(graph, batch, forward_only=False, num_replicas=1):
    shares = share_out(graph, batch, num_replicas)
    plans = [
        compile_plan(graph, share, two_chunks(graph, share, forward_only), flat_costs(graph), dtype="float64")
        for share in shares
    ]
    verify(plans, graph, shares, dtype="float64")
    return plans


@pytest.mark.parametrize("queue", ["pair", "worker"])
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_step_equals_a_single_process(queue, num_replicas):
    graph = graph_of("encoder")
    batch = batch_of("mixed", graph, 2, seed=1)
    plans = planned(graph, batch, num_replicas=num_replicas)
    workers = local_workers(graph, plans[0].placement, num_replicas, queue=queue)
    results = run_steps(workers, [plans])
    single = SingleProcess(graph)
    losses = single.step(batch)
    for address, worker in workers.items():
        (result,) = results[address]
        assert result.losses == pytest.approx(losses, rel=1e-12)
        assert result.gradient_norm == pytest.approx(single.norm, rel=1e-12)
        trained = {name: p.grad for name, p in worker.parameters.items()}
        assert_close(trained, single.gradients)


def test_training_with_clipping_equals_a_single_process():
    graph = graph_of("encoder")
    config = OptimizerConfig(lr=1e-2, clip_norm=0.05)
    batches = [batch_of("mixed", graph, 2, seed=step, step=step) for step in range(3)]
    steps = [planned(graph, batch) for batch in batches]
    workers = local_workers(graph, steps[0][0].placement, 1, optimizer=config)
    rates = [1e-2, 2e-2, 5e-3]
    run_steps(workers, steps, rates)
    single = SingleProcess(graph, config)
    for batch, rate in zip(batches, rates, strict=True):
        single.step(batch, rate)
        assert single.norm > config.clip_norm
    for worker in workers.values():
        assert_close(dict(worker.parameters), dict(single.parameters))


def test_evaluation_gives_the_losses_and_makes_no_graph():
    graph = graph_of("encoder")
    batch = batch_of("mixed", graph, 2, seed=3)
    (plan,) = planned(graph, batch, forward_only=True)
    workers = local_workers(graph, plan.placement, 1)
    results = run_steps(workers, [[plan]])
    losses = SingleProcess(graph).step(batch)
    for address, worker in workers.items():
        assert results[address][0].losses == pytest.approx(losses, rel=1e-12)
        assert results[address][0].gradient_norm is None
        assert all(parameter.grad is None for parameter in worker.parameters.values())


def test_what_is_measured():
    graph = graph_of("encoder")
    (plan,) = planned(graph, batch_of("mixed", graph, 2, seed=3))
    results = run_steps(local_workers(graph, plan.placement, 1), [[plan]])
    for address, (result,) in results.items():
        actions = plan.actions[address.worker]
        assert len(result.spans) == len(actions)
        assert result.spans[0].start_ns == 0
        assert all(a.end_ns == b.start_ns for a, b in zip(result.spans, result.spans[1:], strict=False))
        mine = {n for n, t in enumerate(plan.transfers) if address.worker in (t.sender, t.receiver)}
        assert set(result.posted_ns) == set(result.finished_ns) == mine
        assert all(result.posted_ns[n] < result.finished_ns[n] for n in mine)
    language = plan.placement.chunks[3]
    reported = results[0, language.worker][0].metrics["main/language/tokens"]
    texts = [item for item in plan.items if item.module == "language"]
    assert reported == (sum(item.sizes["tokens"] for item in texts), len(plan.parts[3]))


def test_a_reader_that_sends_no_gradient_may_run_after_the_backward():
    graph = graph_of("detached")
    batch = batch_of("one microbatch", graph, 1, seed=2)
    (share,) = share_out(graph, batch, 1)
    chunks = tuple(
        Chunk(task="main", module=module.name, start=0, stop=len(module.layers), worker=0) for module in graph.modules
    )
    items = {c.module: tuple(i for i, item in enumerate(share.items) if item.module == c.module) for c in chunks}
    draft = Draft(
        placement=Placement(workers=1, chunks=chunks),
        parts=tuple((Part(items=items[c.module], microbatch=0),) for c in chunks),
        order=((Stage(0, 0, "F"), Stage(0, 0, "B"), Stage(1, 0, "F"), Stage(1, 0, "B")),),
    )
    plan = compile_plan(graph, share, draft, flat_costs(graph), dtype="float64")
    verify([plan], graph, [share], dtype="float64")
    workers = local_workers(graph, plan.placement, 1)
    run_steps(workers, [[plan]])
    single = SingleProcess(graph)
    single.step(batch)
    assert_close({name: p.grad for name, p in workers[0, 0].parameters.items()}, single.gradients)
