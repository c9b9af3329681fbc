"""Every schedule of the same samples gives the loss and the gradients of one process on the whole batch.

Over kinds of model graphs, policies, workers, replicas and batches: all pairs of them, in float64, and the
parameters after three AdamW steps with clipping active.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from pipeweaver.runtime.optimizer import OptimizerConfig
from tests.runtime.cases import CHOICES, Case, make_batch, make_graph, make_plans, num_layers, pairwise
from tests.runtime.processes import Job, Pool
from tests.runtime.threads import SingleProcess, assert_close, local_workers, run_steps

RATES = (1e-2, 2e-2, 5e-3)


@pytest.mark.parametrize("case", pairwise(seed=0, extra=10), ids=str)
def test_a_schedule_equals_a_single_process(case: Case) -> None:
    graph = make_graph(case)
    batches = [make_batch(case, graph, step) for step in range(len(RATES))]
    steps = make_plans(case, graph, batches)
    single = SingleProcess(graph)
    losses = single.step(batches[0])
    queue = "worker" if case.seed % 2 else "pair"

    # One step without clipping: losses and gradients.
    workers = local_workers(graph, steps[0][0].placement, case.num_replicas, queue=queue)
    results = run_steps(workers, steps[:1])
    found = set()
    for address, worker in workers.items():
        (result,) = results[address]
        assert result.losses == pytest.approx(losses, rel=1e-11, abs=1e-300)
        assert result.gradient_norm == pytest.approx(single.norm, rel=1e-11)
        gradients = {name: p.grad for name, p in worker.parameters.items() if p.requires_grad}
        assert_close(gradients, single.gradients)
        found |= gradients.keys()
    assert found == single.gradients.keys()

    # Three steps, clipped: parameters, and no more than a single process changes.
    config = OptimizerConfig(clip_norm=single.norm / 4)
    workers = local_workers(graph, steps[0][0].placement, case.num_replicas, queue=queue, optimizer=config)
    run_steps(workers, steps, RATES)
    single = SingleProcess(graph, config)
    for batch, rate in zip(batches, RATES, strict=True):
        single.step(batch, rate)
    for worker in workers.values():
        assert_close(dict(worker.parameters), dict(single.parameters))


def test_every_pair_of_choices_occurs():
    cases = pairwise(seed=0)
    names = list(CHOICES)
    for one, other in itertools.combinations(names, 2):
        found = {(getattr(case, one), getattr(case, other)) for case in cases}
        assert found == set(itertools.product(CHOICES[one], CHOICES[other])), (one, other)


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    pool = Pool(4, tmp_path_factory.mktemp("pool"))
    yield pool
    pool.close()


SPREAD = [case for case in pairwise(seed=1) if case.workers * case.num_replicas <= 4][:30]


@pytest.mark.parametrize("number", range(len(SPREAD)), ids=[str(case) for case in SPREAD])
def test_real_processes_equal_a_single_one(pool: Pool, number: int) -> None:
    case = SPREAD[number]
    graph = make_graph(case)
    batches = [make_batch(case, graph, step) for step in range(len(RATES))]
    steps = make_plans(case, graph, batches)
    single = SingleProcess(graph)
    losses = single.step(batches[0])
    gradients, norm = single.gradients, single.norm
    config = OptimizerConfig(clip_norm=norm / 4)
    single = SingleProcess(graph, config)
    for batch, rate in zip(batches, RATES, strict=True):
        single.step(batch, rate)

    job = Job(
        number=number,
        graph=case.graph,
        layers=num_layers(case),
        steps=steps,
        rates=list(RATES),
        clip_norm=config.clip_norm,
    )
    for result in pool.run(case.workers * case.num_replicas, job):
        assert result["losses"] == pytest.approx(losses, rel=1e-11, abs=1e-300)
        assert result["norm"] == pytest.approx(norm, rel=1e-11)
        assert_close({name: torch.from_numpy(g) for name, g in result["gradients"].items()}, gradients)
        assert_close({name: torch.from_numpy(p) for name, p in result["parameters"].items()}, dict(single.parameters))
