"""What a person sees of a plan and of a run, as text."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from pipeweaver.commands import ReadyStep, explain_step
from pipeweaver.config import load
from pipeweaver.console import (
    Follow,
    duration,
    evaluation_line,
    percent,
    print_explanation,
    print_plan,
    step_line,
)
from pipeweaver.costs import FlatCosts
from pipeweaver.data.tasks import TaskBatches
from pipeweaver.report.metrics import StepMetrics
from pipeweaver.runtime import prepare
from pipeweaver.runtime.ahead import plan_batch
from pipeweaver.runtime.evaluate import Evaluation
from pipeweaver.runtime.train import StepReport
from pipeweaver.schedule.convert import records

DIGITS = Path(__file__).parents[1] / "examples" / "digits.toml"


def metrics(step: int = 0, predicted_ns: int | None = 400_000_000) -> StepMetrics:
    return StepMetrics(
        step=step,
        policy="1f1b",
        loss=0.5,
        learning_rate=1e-3,
        gradient_norm=1.0,
        step_ns=420_000_000,
        predicted_step_ns=predicted_ns,
        prediction_error=None if predicted_ns is None else 0.05,
        makespan_ns=410_000_000,
        predicted_makespan_ns=predicted_ns,
        bubble=None if predicted_ns is None else 0.125,
        predicted_bubble=None if predicted_ns is None else 0.1,
        imbalance={"vision": 1.1, "language": 1.0},
        tokens={},
        tokens_per_second={},
        padding_share=0.0,
        peak_bytes=((1, 2),),
        predicted_peak_bytes=((1, 2),),
        waiting_ns=0,
        switching_ns=0,
        losses={},
        reported={},
    )


EVALUATION = Evaluation(
    step=2,
    loss=0.25,
    losses={"main/language": 0.25},
    reported={"main/language/answers": 0.9412},
    samples=64,
    duration_ns=1,
)


def test_figures_of_a_step() -> None:
    expected = "loss 0.5  0.42 s (predicted 0.40 s)  bubble 12.5 %  imbalance vision 1.10 language 1.00"
    assert step_line(metrics()) == expected
    assert step_line(metrics(predicted_ns=None)) == "loss 0.5  0.42 s  imbalance vision 1.10 language 1.00"


def test_an_evaluation_leaves_out_the_only_task() -> None:
    assert evaluation_line(EVALUATION) == "64 samples, loss 0.25, language/answers 94.1 %"


def test_figures_of_an_evaluation_of_two_tasks() -> None:
    evaluation = msgspec.structs.replace(
        EVALUATION,
        losses={"text/language": 0.125, "caption/language": 0.25},
        reported={"text/language/accuracy": 0.5, "caption/language/answers": 0.25},
    )
    assert evaluation_line(evaluation) == (
        "64 samples, loss 0.25; caption: language 0.25, language/answers 25.0 %; text: language 0.125, "
        "language/accuracy 50.0 %"
    )


@pytest.mark.parametrize(
    ("ns", "text"), [(412_000_000, "0.41 s"), (12_340_000, "12.3 ms"), (85_000, "85 us"), (61e9, "61.00 s")]
)
def test_durations(ns: float, text: str) -> None:
    assert duration(ns) == text


def test_a_run_in_a_log(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    written = tmp_path / "metrics.jsonl"
    written.touch()
    with Follow(100, [written, tmp_path / "absent"]) as follow:
        for step in range(100):
            follow(StepReport(metrics=metrics(step), plans=(), measurements=()))
        follow(EVALUATION)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("step ")] == [
        "1/100",
        *(f"{step}/100" for step in range(5, 101, 5)),
    ]
    assert lines[-4].endswith("step time 0.42 s (median), predicted 0.40 s, off by 5.0 % (median)")
    assert lines[-3] == "bubble 12.5 %, imbalance of vision 1.10, imbalance of language 1.00, padding 0.0 % (medians)"
    assert lines[-2] == "held-out: 64 samples, loss 0.25, language/answers 94.1 %"
    assert lines[-1] == f"wrote {written}"


def test_the_first_step_warms_up_and_is_in_no_median_of_times(capsys: pytest.CaptureFixture[str]) -> None:
    with Follow(3, []) as follow:
        for step, times in enumerate((20, 1, 2)):
            step_ns = 420_000_000 * times
            step_metrics = msgspec.structs.replace(metrics(step), step_ns=step_ns, prediction_error=times - 0.95)
            follow(StepReport(metrics=step_metrics, plans=(), measurements=()))
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith("3 steps in ")
    assert lines[-2].endswith("step time 0.63 s (median), predicted 0.40 s, off by 55.0 % (median)")


def test_a_run_that_fails_is_not_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError), Follow(2, []) as follow:
        follow(StepReport(metrics=metrics(), plans=(), measurements=()))
        raise RuntimeError
    assert "median" not in capsys.readouterr().out


def test_a_plan_as_tables(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    job = load(DIGITS, ["policy.name=1f1b", "workers.replicas=2"])
    graph = prepare.job_graph(job)
    loaders = prepare.job_loaders(job, prepare.job_datasets(job)["train"])
    costs = FlatCosts(layers={module.name: len(module.layers) for module in graph.modules})
    planning = prepare.place(job, job.policy.name, graph, prepare.job_sample(job, loaders), costs, None)
    plans = tuple(map(records, plan_batch(planning, next(TaskBatches(loaders)))))
    print_plan(plans, 2 << 30)
    text = capsys.readouterr().out
    assert len(re.findall(r"^replica [01]$", text, flags=re.M)) == 2
    assert text.count("of 2.0 GiB") == 4
    for plan in plans:
        assert plan.prediction is not None
        assert f"bubble {percent(plan.prediction.bubble)}" in text
        for chunk in plan.placement.chunks:
            assert str(chunk).partition("@")[0] in text
    assert text.count("costs: flat costs, made up") == 2


@pytest.mark.parametrize("policy", ["1f1b", "interleaved-1f1b", "pipeweaver", "dynamic", "wavefront", "sequential"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_an_explanation_adds_up_for_every_policy(
    policy: str, replicas: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "180")
    settings = [f"policy.name={policy}", "policy.rounds=3", f"workers.replicas={replicas}", "model.language.layers=4"]
    if policy in ("pipeweaver", "dynamic"):
        settings.append("workers.memory=60MB")
    job = load(DIGITS, settings)
    graph = prepare.job_graph(job)
    loaders = prepare.job_loaders(job, prepare.job_datasets(job)["train"])
    sample = prepare.job_sample(job, loaders)
    costs = FlatCosts(layers={module.name: len(module.layers) for module in graph.modules})
    planning = prepare.place(job, job.policy.name, graph, sample, costs, job.workers.memory_bytes)
    ready = ReadyStep(job=job, planning=planning, batch=next(TaskBatches(loaders)), sample=sample)
    plans = ready.plan()
    explanation = explain_step(ready, plans)
    print_explanation(plans, explanation)
    text = capsys.readouterr().out
    tables = re.findall(r"fill.*?bubble[^\n]*", text, flags=re.S)
    assert len(tables) == replicas
    for plan, table in zip(plans, tables, strict=True):
        *shares, bubble = [int(number.replace(",", "")) for number in re.findall(r"(-?[\d,]+) ns", table)]
        assert plan.prediction is not None
        assert sum(shares) == bubble == 2 * plan.prediction.makespan_ns - plan.prediction.useful_ns
    for lever, _ in explanation.without:
        assert lever in text
    assert "-0.0 %" not in text
    assert ("a gain below zero" in text) == bool(re.search(r"│ +-[\d.]+ % │", text.partition("each lever")[2]))
    assert ("no lever to switch off" in text) == (policy in ("wavefront", "sequential"))
    assert text.count("still possible by") == 2
