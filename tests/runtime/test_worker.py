"""A worker's step on a hand-made plan equals a single process; every way that an edge can go is there."""

from __future__ import annotations

import threading

import msgspec
import pytest
import torch

from pipeweaver.planner.assign import share_out
from pipeweaver.runtime.optimizer import OptimizerConfig
from pipeweaver.schedule.compile import compile_plan
from pipeweaver.schedule.ir import Chunk, Draft, Part, Placement, Stage
from pipeweaver.schedule.verify import verify
from tests.runtime.cases import Case, make_plans
from tests.runtime.graphs import batch_of, graph_of
from tests.runtime.threads import SingleProcess, assert_close, flat_costs, in_threads, local_workers, run_steps


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


def test_regrouping_the_same_samples_leaves_gradients_equal():
    """Microbatches, parts and replicas do not matter; noise and time steps belong to items."""
    graph = graph_of("encoder and diffusion")
    batch = batch_of("mixed", graph, 2, seed=6)
    order = list(range(len(batch.samples)))[::-1]
    regrouped = msgspec.structs.replace(
        batch,
        samples=tuple(batch.samples[i] for i in order),
        microbatches=tuple((i,) for i in range(len(order))),
    )
    single = SingleProcess(graph)
    single.step(batch)
    for grouped, policy, replicas in ((batch, "gpipe", 1), (regrouped, "1f1b", 1), (regrouped, "gpipe", 2)):
        case = Case(
            graph="encoder and diffusion", policy=policy, workers=2, num_replicas=replicas, batch="mixed", seed=6
        )
        (plans,) = make_plans(case, graph, [grouped])
        workers = local_workers(graph, plans[0].placement, replicas)
        run_steps(workers, [plans])
        for worker in workers.values():
            assert_close({name: p.grad for name, p in worker.parameters.items()}, single.gradients)


def test_what_saw_no_data_has_gradient_zero_and_is_stepped():
    graph = graph_of("encoder")
    batch = batch_of("no images", graph, 2, seed=1)
    plans = planned(graph, batch)
    workers = local_workers(graph, plans[0].placement, 1)
    before = {name: p.detach().clone() for name, p in workers[0, 0].parameters.items()}
    run_steps(workers, [plans])
    for name, parameter in workers[0, 0].parameters.items():
        if name.startswith("vision"):
            assert torch.equal(parameter.grad, torch.zeros_like(parameter))
            # AdamW's weight decay alone, as in a single process that fills zeros.
            assert torch.allclose(parameter, before[name] * (1 - 1e-3 * 0.01), rtol=1e-12)


def test_modules_outside_the_task_set_are_not_stepped():
    """Worker 0 holds vision, but this step's placement is of a task that does not use it."""
    graph = graph_of("encoder")
    (share,) = share_out(graph, batch_of("no images", graph, 2, seed=1), 1)
    whole = two_chunks(graph, share)
    draft = Draft(
        placement=Placement(workers=2, chunks=whole.placement.chunks[1:]),
        parts=whole.parts[1:],
        order=tuple(tuple(s._replace(chunk=s.chunk - 1) for s in order if s.chunk) for order in whole.order),
    )
    plan = compile_plan(graph, share, draft, flat_costs(graph), dtype="float64")
    workers = local_workers(graph, whole.placement, 1)
    before = {name: p.detach().clone() for name, p in workers[0, 0].parameters.items()}
    run_steps(workers, [[plan]])
    for name, parameter in workers[0, 0].parameters.items():
        assert torch.equal(parameter, before[name]) == name.startswith("vision"), name


def test_another_plan_of_the_same_shape_is_noticed_before_the_step():
    graph = graph_of("encoder")
    plans = planned(graph, batch_of("mixed", graph, 2, seed=1))
    for forward_only in (False, True):
        plans = planned(graph, batch_of("mixed", graph, 2, seed=1), forward_only)
        workers = local_workers(graph, plans[0].placement, 1)
        before = {a: {n: p.detach().clone() for n, p in w.parameters.items()} for a, w in workers.items()}
        other = msgspec.structs.replace(plans[0], seed=99)
        with pytest.raises(ValueError, match=r"worker . of replica 0 ran another plan than worker . of replica 0"):
            in_threads(workers, lambda w, pair=(plans[0], other): w.run(pair[w.transport.address.worker]))
        for address, worker in workers.items():
            assert all(torch.equal(p, before[address][name]) for name, p in worker.parameters.items())


def test_replicas_must_agree_on_what_they_share():
    graph = graph_of("encoder")
    plans = planned(graph, batch_of("mixed", graph, 2, seed=1), num_replicas=2)
    plans[1] = msgspec.structs.replace(plans[1], normalisers={"main/language": 1})
    workers = local_workers(graph, plans[0].placement, 2)
    with pytest.raises(ValueError, match="ran another plan"):
        run_steps(workers, [plans])


def test_a_gradient_that_is_not_a_number_ends_the_run():
    graph = graph_of("encoder")
    plans = planned(graph, batch_of("mixed", graph, 2, seed=1))
    workers = local_workers(graph, plans[0].placement, 1)
    with torch.no_grad():
        workers[0, 1].parameters["language.layers.0.own.weight"][0, 0] = float("nan")
    before = {name: p.detach().clone() for name, p in workers[0, 0].parameters.items()}
    with pytest.raises(ValueError, match=r"step 0: the gradient norm is nan.*parameters were not changed"):
        run_steps(workers, [plans])
    assert all(torch.equal(p, before[name]) for name, p in workers[0, 0].parameters.items())


def test_an_error_in_a_layer_names_worker_and_stage():
    graph = graph_of("encoder")
    plans = planned(graph, batch_of("mixed", graph, 2, seed=1))
    workers = local_workers(graph, plans[0].placement, 1)
    workers[0, 1].modules["language.layers.0"].own.weight.data = torch.zeros(5, 5, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"worker 1 of replica 0, step 0: computes 1F0, language\[0:1\]@1: "):
        run_steps(workers, [plans])


def test_loading_ahead_changes_nothing_but_the_thread():
    graph = graph_of("encoder")
    batch = batch_of("mixed", graph, 2, seed=1)
    plans = planned(graph, batch)
    gradients = []
    for ahead in (0, 1, 50):
        workers = local_workers(graph, plans[0].placement, 1, loads_ahead=ahead)
        names = set()
        for worker in workers.values():
            worker.load = watching(worker.load, names)
        run_steps(workers, [plans])
        assert all(name.startswith("loading") == (ahead > 0) for name in names)
        gradients.append({n: p.grad.clone() for w in workers.values() for n, p in w.parameters.items()})
    for found in gradients[1:]:
        assert all(torch.equal(found[name], gradient) for name, gradient in gradients[0].items())


def test_an_error_of_the_data_set_arrives_where_the_part_is_needed():
    graph = graph_of("encoder")
    plans = planned(graph, batch_of("mixed", graph, 2, seed=1))
    for ahead in (0, 2):
        workers = local_workers(graph, plans[0].placement, 1, loads_ahead=ahead)

        def missing(items, records, names):
            raise ValueError(f"image 7 of sample {items[0].draw} is missing")

        workers[0, 1].load = missing
        with pytest.raises(ValueError, match="image 7 of sample 0 is missing"):
            run_steps(workers, [plans])


def watching(load, names):
    def run(*arguments):
        names.add(threading.current_thread().name)
        return load(*arguments)

    return run


def test_layers_that_two_tasks_use_on_different_workers_are_reduced_over_both():
    """Task a runs language on worker 0; task b its first half on worker 1, and the rest on both, cut by parts."""
    graph = graph_of("one module")
    drawn = batch_of("mixed", graph, 2, seed=8)
    samples = tuple(as_task(sample, "ab"[number % 2]) for number, sample in enumerate(drawn.samples))
    batch = msgspec.structs.replace(drawn, samples=samples)
    (share,) = share_out(graph, batch, 1)
    layers = len(graph.by_name["language"].layers)
    ranges = (("a", 0, layers, 0), ("b", 0, 2, 1), ("b", 2, layers, 0), ("b", 2, layers, 1))
    chunks = tuple(Chunk(task=t, module="language", start=a, stop=b, worker=w) for t, a, b, w in ranges)
    of = {task: [i for i, item in enumerate(share.items) if item.task == task] for task in "ab"}
    half = len(of["b"]) // 2
    items = (of["a"], of["b"], of["b"][:half], of["b"][half:])
    draft = Draft(
        placement=Placement(workers=2, chunks=chunks),
        parts=tuple((Part(items=tuple(chosen), microbatch=0),) for chosen in items),
        order=tuple(
            tuple(Stage(c, 0, phase) for phase, order in (("F", cs), ("B", cs[::-1])) for c in order)
            for cs in ((0, 2), (1, 3))
        ),
    )
    plan = compile_plan(graph, share, draft, flat_costs(graph), dtype="float64")
    verify([plan], graph, [share], dtype="float64")
    assert {group.holders for group in plan.groups} == {(0, 1)}
    workers = local_workers(graph, plan.placement, 1)
    results = run_steps(workers, [[plan]])
    single = SingleProcess(graph)
    losses = single.step(batch)
    for address, worker in workers.items():
        assert results[address][0].losses == pytest.approx(losses, rel=1e-12)
        assert results[address][0].gradient_norm == pytest.approx(single.norm, rel=1e-12)
        assert_close({name: p.grad for name, p in worker.parameters.items()}, single.gradients)


def as_task(sample, task):
    items = tuple(msgspec.structs.replace(item, task=task) for item in sample.items)
    return msgspec.structs.replace(sample, task=task, items=items)
