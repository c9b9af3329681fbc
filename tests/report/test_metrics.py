"""Figures of a step, by hand; the metrics file and TensorBoard."""

import builtins
import math

import pytest
from msgspec.structs import replace

from pipeweaver.data.items import Item
from pipeweaver.report.memory import memory_over_time
from pipeweaver.report.metrics import (
    MetricsWriter,
    imbalance,
    makespan_ns,
    padding_share,
    read_metrics,
    scalars,
    step_metrics,
)
from pipeweaver.schedule.ir import Compute, Part, Span


def metrics_of(plans, measurements, **changes):
    values = {"loss": 2.5, "learning_rate": 1e-3, "gradient_norm": 0.7, "reported": {"accuracy": 0.5}}
    return step_metrics(plans, measurements, **(values | changes))


def test_figures_of_a_step(plan, measurement):
    metrics = metrics_of([plan], [measurement])
    assert metrics.step_ns == 132_000
    assert metrics.predicted_step_ns == 120_000
    assert metrics.prediction_error == pytest.approx(0.1)
    assert metrics.makespan_ns == 110_000
    assert metrics.bubble == pytest.approx(1 - 120 / (2 * 110))
    assert metrics.predicted_bubble == pytest.approx(1 - 120 / (2 * 100))
    assert metrics.predicted_bubble == plan.prediction.bubble
    assert metrics.imbalance == {"vision": 2.0, "language": 2.0}
    assert metrics.tokens == {"vision": 12, "language": 20}
    assert metrics.tokens_per_second["language"] == pytest.approx(20 / 132e-6)
    assert metrics.waiting_ns == 800
    assert metrics.padding_share == 0


def test_replicas_share_a_bubble_and_the_slowest_makes_the_step(plan, measurement):
    doubled = tuple(tuple(Span(2 * s.start_ns, 2 * s.end_ns) for s in lane) for lane in measurement.spans)
    slow = replace(measurement, step_ns=300_000, spans=doubled)
    metrics = metrics_of([plan, plan], [measurement, slow])
    assert metrics.step_ns == 300_000
    assert metrics.makespan_ns == 220_000
    assert metrics.bubble == pytest.approx(1 - 240 / (2 * 110 + 2 * 220))
    assert metrics.tokens == {"vision": 24, "language": 40}
    assert len(metrics.peak_bytes) == 2


def test_without_prediction_nothing_is_compared(unpredicted, measurement):
    metrics = metrics_of([unpredicted], [measurement])
    assert metrics.bubble is None and metrics.prediction_error is None and metrics.predicted_step_ns is None
    assert metrics.makespan_ns == 110_000


def test_makespan_starts_with_the_first_action(plan):
    spans = tuple(tuple(Span(s.start_ns + 40, s.end_ns + 40) for s in lane) for lane in plan.prediction.spans)
    assert makespan_ns(plan, spans) == plan.prediction.makespan_ns


def test_makespan_of_a_forward_only_plan_ends_with_the_last_forward(plan):
    def stays(action):
        return not (isinstance(action, Compute) and action.stage.phase != "F")

    kept = [
        [(action, span) for action, span in zip(actions, lane, strict=True) if stays(action)]
        for actions, lane in zip(plan.actions, plan.prediction.spans, strict=True)
    ]
    forward_only = replace(plan, forward_only=True, actions=tuple(tuple(a for a, _ in lane) for lane in kept))
    assert makespan_ns(forward_only, [[span for _, span in lane] for lane in kept]) == 45_000


def test_imbalance_is_one_when_workers_share_evenly(plan):
    vision, language = plan.placement.chunks
    shared = replace(plan.placement, chunks=(vision, replace(language, module="vision")))
    first, second = plan.prediction.spans
    # Worker 0 computes 50 us; stretch worker 1's forward from 15 to 35 us.
    second = tuple(Span(10_000, 45_000) if span == Span(30_000, 45_000) else span for span in second)
    assert imbalance(replace(plan, placement=shared), (first, second)) == {"vision": 1.0}


def test_padding_counts_dummy_items_items_taken_twice_and_wide_transfers(plan):
    needed = (4 + 8) * 2 + 20 * 3
    twice = replace(plan, parts=((*plan.parts[0], Part(items=(1,), microbatch=0)), plan.parts[1]))
    assert padding_share([twice]) == pytest.approx(1 - needed / (needed + 8 * 2))
    wide = replace(plan.transfers[0], shape=(5, 16))
    padded = replace(plan, transfers=(wide, *plan.transfers[1:]))
    assert padding_share([padded]) == pytest.approx(1 - needed / (needed + 4))


def test_absent_modules_are_no_padding(plan):
    text = Item(task="main", draw=4, module="language", position=0, sizes={"tokens": 5})
    bare = replace(plan, items=(text,), parts=((), (Part(items=(0,), microbatch=0),)), edges=(), transfers=())
    assert padding_share([bare]) == 0


def test_metrics_file_holds_one_line_per_step_and_survives_a_restart(plan, measurement, tmp_path):
    metrics = metrics_of([plan], [measurement])
    for step in (1, 2):
        with MetricsWriter(tmp_path / "run") as writer:
            writer.write(replace(metrics, step=step))
    found = read_metrics(writer.path)
    assert found == [replace(metrics, step=1), replace(metrics, step=2)]


def test_a_loss_that_is_not_a_number_is_null(plan, measurement, tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(metrics_of([plan], [measurement], loss=math.nan))
    assert b'"loss":null' in writer.path.read_bytes()
    assert read_metrics(writer.path)[0].loss is None


def test_a_broken_metrics_file_names_its_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{")
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 1"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_scalars_are_flat_numbers(plan, measurement):
    flat = scalars(metrics_of([plan], [measurement]))
    assert flat["imbalance/vision"] == 2.0
    assert flat["peak_bytes/0/1"] == 24_000
    assert flat["reported/accuracy"] == 0.5
    assert "step" not in flat and "policy" not in flat


def test_tensorboard_gets_the_same_numbers(plan, measurement, tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with MetricsWriter(tmp_path, tensorboard=True) as writer:
        writer.write(metrics_of([plan], [measurement]))
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = events.Scalars("bubble")
    assert found[0].step == 7
    assert found[0].value == pytest.approx(1 - 120 / 220)


def test_missing_tensorboard_is_an_error_that_says_what_to_do(monkeypatch, tmp_path):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if "tensorboard" in name:
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match="pip install tensorboard"):
        MetricsWriter(tmp_path, tensorboard=True)


def test_memory_changes_where_actions_allocate_and_free(plan):
    for worker in (0, 1):
        points = memory_over_time(plan, worker, plan.prediction.spans[worker])
        assert points[0] == (0, plan.static_bytes[worker])
        assert max(num_bytes for _, num_bytes in points) == plan.prediction.peak_bytes[worker]
        assert [time for time, _ in points] == sorted(time for time, _ in points)
        assert points[-1][1] == plan.static_bytes[worker]
