"""Both ways side by side, and policy `auto`: the fastest of those that can run the job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipeweaver.config import Job, load
from pipeweaver.costs import FlatCosts
from pipeweaver.policies import POLICIES
from pipeweaver.policies.policy import Policy
from pipeweaver.runtime import compare, orders, prepare
from tests.train.test_tasks import JOB

SETTINGS = ["policy.name=auto", "policy.rounds=2", "workers.pipeline=2"]


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The arguments of `compare` for a job of four tasks."""
    monkeypatch.setattr("pipeweaver.policies.wavefront.EFFORT", 50_000)
    (tmp_path / "job.toml").write_text(JOB)
    return arguments(load(tmp_path / "job.toml", SETTINGS))


def arguments(job: Job):
    graph = prepare.job_graph(job)
    sample = prepare.job_sample(job, prepare.job_loaders(job, prepare.job_datasets(job)["train"]))
    costs = FlatCosts(layers={module.name: len(module.layers) for module in graph.modules})
    return job, graph, sample, costs, None


def broken(*_args, **_more):
    raise ValueError("two islands are one too many")


def test_the_fastest_is_taken_and_the_words_say_by_how_much(asked):
    first, second = compare.compare(*asked)
    assert {first.policy, second.policy} == {"dynamic", "wavefront"}
    assert 0 < first.step_ns <= second.step_ns and min(first.peak_bytes, second.peak_bytes) > 0
    assert compare.place(*asked).policy == first.policy
    faster = f"{first.policy} is {second.step_ns / first.step_ns:.2f} times as fast as {second.policy}, with "
    assert compare.in_words((first, second), "1f1b")[-1].startswith(faster)
    assert "policy.name" not in compare.in_words((first, second), first.policy)[-1]
    told = compare.in_words((first, second), second.policy)[-1]
    assert f'; policy.name = "{first.policy}" is the faster one for this job, and "auto" finds it by itself' in told
    swapped = (replace(first, peak_bytes=2 << 20), replace(second, peak_bytes=1 << 20))
    assert compare.in_words(swapped, "1f1b")[-1].endswith("with 2.00 times its memory")


@pytest.mark.parametrize("policy", compare.CANDIDATES)
def test_what_cannot_run_the_job_is_left_out_with_its_reason(asked, monkeypatch, policy):
    monkeypatch.setitem(POLICIES, policy, Policy(place=broken, plan=broken))
    able, unable = compare.compare(*asked)
    assert unable.policy == policy != compare.place(*asked).policy == able.policy
    assert compare.in_words((able, unable), policy)[1:] == [
        f"{policy} cannot run this job: two islands are one too many"
    ]


def test_a_job_that_nothing_can_run(asked, monkeypatch):
    for policy in compare.CANDIDATES:
        monkeypatch.setitem(POLICIES, policy, Policy(place=broken, plan=broken))
    with pytest.raises(
        ValueError, match="policy auto: none of dynamic, wavefront can run the job: dynamic: two islands"
    ):
        compare.place(*asked)


def test_a_run_says_what_auto_took(asked, monkeypatch, capsys):
    job, graph, sample, costs, budget_bytes = asked
    loaders = {"train": prepare.job_loaders(job, prepare.job_datasets(job)["train"])}
    monkeypatch.setattr(orders, "pack_costs", lambda _: b"")
    monkeypatch.setattr(prepare, "job_sample", lambda *_: sample)
    orders.planned_orders(job, graph, loaders, costs, orders.Corrections(), budget_bytes)
    taken = compare.place(*asked).policy
    said = capsys.readouterr().out.splitlines()
    assert len(said) == len(job.task_sets)
    assert said[0] == f"policy auto takes {taken} for {', '.join(job.task_sets[0].tasks)}"
