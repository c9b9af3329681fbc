"""Whole runs of several tasks: on any number of workers the same numbers, also where task sets come and go."""

from __future__ import annotations

import pytest
import torch

from pipeweaver.report.metrics import read_metrics
from tests.train.test_train import evaluations, parameters, run

pytestmark = pytest.mark.timeout(180)

JOB = """
[run]
device = "cpu"
dtype = "float64"
evaluate_every = 2
task_sets = [
    { tasks = ["caption", "text"], steps = 2 },
    { tasks = ["match", "text"], steps = 2 },
    { tasks = ["paint", "caption", "match"], steps = 1 },
]

[workers]
pin = false

[policy]
name = "wavefront-levels"

[model]
flows = ["vision.features -> language", "language.hidden -> diffusion", "vision.features -> match", "words.hidden -> match"]

[model.vision]
type = "vit"
layers = 2
hidden = 16
heads = 2
patch = 4
merge = 2
channels = 1
output = 16

[model.language]
type = "language"
layers = 2
hidden = 16
heads = 2
vocab = 259
placeholders = { vision = 258 }
sends_hidden = true
tied = true

[model.diffusion]
type = "diffusion"
layers = 2
hidden = 16
heads = 2
channels = 16

[model.words]
type = "language"
layers = 1
hidden = 16
heads = 2
vocab = 259
head = false
sends_hidden = true

[model.match]
type = "contrastive"
width = 8

[tasks.caption]
modules = ["vision", "language"]
backbone = "language"
tokens_per_microbatch = 512
microbatches = 1
[tasks.caption.data]
type = "digits"
held_out_records = 5

[tasks.text]
modules = ["language"]
backbone = "language"
tokens_per_microbatch = 256
microbatches = 2
weight = 0.5
[tasks.text.data]
type = "digits"
kind = "text"
max_tokens = 256
held_out_records = 3

[tasks.paint]
modules = ["language", "diffusion"]
backbone = "diffusion"
tokens_per_microbatch = 200
microbatches = 1
loss_weights = { language = 0.25 }
[tasks.paint.data]
type = "digits"
kind = "text-to-image"
held_out_records = 4

[tasks.match]
modules = ["vision", "words", "match"]
backbone = "match"
tokens_per_microbatch = 7
microbatches = 1
[tasks.match.data]
type = "digits"
kind = "pairs"
text = "words"
held_out_records = 9

[optimizer]
lr = 1e-2

[costs]
correct = false
"""
STEPS = 5


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return run(tmp_path_factory.mktemp("tasks") / "single", num_workers=1, text=JOB)


def figures(folder):
    """Losses of every step and every evaluation, by task and module, and gradient norms."""
    steps = read_metrics(folder / "metrics.jsonl")
    assert len(steps) == STEPS
    return [step.losses | {"norm": step.gradient_norm} for step in steps] + [e.losses for e in evaluations(folder)]


def assert_same(one, other):
    for a, b in zip(figures(one), figures(other), strict=True):
        assert a == pytest.approx(b, rel=1e-9)
    mine, others = parameters(one), parameters(other)
    for name in mine.keys() & others.keys():
        torch.testing.assert_close(mine[name], others[name], rtol=0, atol=1e-9)


def test_every_step_reports_the_losses_of_its_tasks(single):
    steps = [set(losses) - {"norm"} for losses in figures(single)[:STEPS]]
    first, second = {"caption/language", "text/language"}, {"match/match", "text/language"}
    last = {"paint/language", "paint/diffusion", "caption/language", "match/match"}
    assert steps == [first, first, second, second, last]
    assert [(e.step, e.samples) for e in evaluations(single)] == [(2, 8), (4, 12), (5, 18)]
    one = read_metrics(single / "metrics.jsonl")[4]
    weights = {"paint/language": 0.25}
    assert one.loss == pytest.approx(sum(loss * weights.get(name, 1) for name, loss in one.losses.items()))


@pytest.mark.parametrize("policy", ["wavefront-levels", "dynamic"])
def test_three_workers_train_like_one(single, tmp_path, policy):
    """The single worker moves nothing: what it computes has no seam where parameters of three workers move."""
    three = run(tmp_path / "three", "workers.pipeline=3", f"policy.name={policy}", num_workers=3, text=JOB)
    assert_same(single, three)
    switches = [step.switching_ns > 0 for step in read_metrics(three / "metrics.jsonl")]
    assert switches == [False, False, True, False, True]


def test_a_run_of_several_sets_is_replayed(single, tmp_path):
    again = run(tmp_path / "again", f"run.plans={single}/out/plans", num_workers=1, text=JOB)
    assert figures(again) == figures(single)
    assert all(torch.equal(tensor, parameters(again)[name]) for name, tensor in parameters(single).items())


def without_matching():
    """The job without its joint loss."""
    kept = [part for part in JOB.split("\n\n") if "match" not in part.split("\n")[0] and "[model.words]" not in part]
    text = "\n\n".join(kept)
    for flow in ("vision.features -> match", "words.hidden -> match"):
        text = text.replace(f', "{flow}"', "")
    return text.replace('["match", "text"]', '["text"]').replace('"caption", "match"]', '"caption"]')


def test_two_replicas_of_two_workers_train_like_one(tmp_path):
    text = without_matching()
    one = run(tmp_path / "one", num_workers=1, text=text)
    settings = ("workers.pipeline=2", "workers.replicas=2", "policy.name=dynamic")
    assert_same(one, run(tmp_path / "four", *settings, num_workers=4, text=text))
