"""The picture of a step: every stage is drawn once, at its time, and nothing on top of it."""

from itertools import pairwise

import matplotlib.image
import pytest
from msgspec.structs import replace

from pipeweaver.report.picture import boxes, draw, write_picture
from pipeweaver.schedule.ir import Compute, Measurement, Norm, Post, Reduce, Span, Stage


def test_the_picture_is_a_png_of_both_timelines(plan, measurement, tmp_path):
    path = tmp_path / "deep" / "timeline.png"
    write_picture(path, [plan], [measurement])
    pixels = matplotlib.image.imread(path)
    assert pixels.shape[1] == 1650
    colours = {tuple(round(float(c) * 255) for c in pixel[:3]) for pixel in pixels.reshape(-1, pixels.shape[2])[::7]}
    # Forward and backward of vision and language.
    assert {(0xA6, 0xCE, 0xE9), (0x2A, 0x71, 0xAE), (0xFD, 0xD0, 0xA2), (0xD9, 0x5F, 0x0E)} <= colours


def test_headings_say_makespan_and_bubble(plan, measurement):
    figure = draw([plan], [measurement])
    predicted, measured = [axes.get_title(loc="left") for axes in figure.axes]
    assert predicted == (
        "predicted: makespan 0.1 ms, step 0.1 ms, bubble 40.0 %; no order of these stages takes less than 0.1 ms"
    )
    assert measured == "measured: makespan 0.1 ms, step 0.1 ms, bubble 45.5 %"
    assert figure.get_suptitle() == "step 7, policy by hand: 2 workers, 1 microbatch"
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["worker 0", "worker 1"]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == [
        "vision forward",
        "vision backward",
        "language forward",
        "language backward",
        "load",
        "reduce, optimizer",
    ]


def test_replicas_stand_below_each_other(plan, measurement):
    figure = draw([plan, replace(plan, replica=1)], [measurement, measurement])
    names = [label.get_text() for label in figure.axes[1].get_yticklabels()]
    assert names == [f"replica {r} worker {w}" for r in (0, 1) for w in (0, 1)]
    assert "2 replicas of 2 workers, 2 microbatches" in figure.get_suptitle()


def test_only_what_there_is_is_shown(plan, unpredicted, measurement):
    assert len(draw([plan]).axes) == 1
    assert len(draw([unpredicted], [measurement]).axes) == 1
    assert "bubble" not in draw([unpredicted], [measurement]).axes[0].get_title(loc="left")
    draw([unpredicted])
    draw([])


def test_every_stage_is_a_box_and_boxes_do_not_overlap(plan):
    (by_worker,) = boxes([(plan, plan.prediction.spans)])
    for drawn, actions, spans in zip(by_worker, plan.actions, plan.prediction.spans, strict=True):
        assert all(a.span.end_ns <= b.span.start_ns for a, b in pairwise(drawn))
        stages = {span for action, span in zip(actions, spans, strict=True) if isinstance(action, Compute)}
        assert stages <= {box.span for box in drawn}
        waits = {span for action, span in zip(actions, spans, strict=True) if isinstance(action, Post)}
        assert not waits & {box.span for box in drawn}


def test_waiting_for_the_others_at_a_meeting_is_not_work(plan):
    first, second = plan.prediction.spans
    at = next(i for i, action in enumerate(plan.actions[1]) if isinstance(action, Reduce))
    early = (*second[:at], Span(60_000, 110_000), *second[at + 1 :])
    (by_worker,) = boxes([(plan, (first, early))])
    assert Span(100_000, 110_000) in {box.span for box in by_worker[1]}
    assert Span(60_000, 110_000) not in {box.span for box in by_worker[1]}


def test_meetings_are_the_same_whatever_each_member_takes_them_to_last(plan):
    def other_norm(action):
        return Norm(duration_ns=99) if isinstance(action, Norm) else action

    actions = (plan.actions[0], tuple(other_norm(action) for action in plan.actions[1]))
    spans = (plan.prediction.spans[0], tuple(Span(s.start_ns - 5, s.end_ns) for s in plan.prediction.spans[1]))
    changed = replace(plan, actions=actions)
    by_worker = boxes([(changed, spans)])[0]
    assert Span(110_000, 112_000) in {box.span for box in by_worker[1]}


def test_a_split_backward_has_its_own_look(plan):
    def split(action):
        if isinstance(action, Compute) and action.stage == Stage(0, 1, "B"):
            return replace(action, stage=Stage(0, 1, "W"))
        return action

    changed = replace(plan, actions=(tuple(split(action) for action in plan.actions[0]), plan.actions[1]))
    (hatched,) = [box for box in boxes([(changed, plan.prediction.spans)])[0][0] if box.hatched]
    assert hatched.span == Span(85_000, 100_000)
    legend = [text.get_text() for text in draw([changed]).legends[0].get_texts()]
    assert "vision weight gradient" in legend


@pytest.mark.parametrize("scale, unit", [(1, "us"), (1_000, "ms"), (100_000, "s")])
def test_the_scale_has_a_readable_unit(plan, scale, unit):
    spans = tuple(tuple(Span(s.start_ns * scale, s.end_ns * scale) for s in lane) for lane in plan.prediction.spans)
    figure = draw([plan], [Measurement(spans=spans, transfers=(), step_ns=120_000 * scale)])
    assert figure.axes[-1].get_xlabel().startswith(f"time in {unit};")


@pytest.mark.parametrize("letters", [1, 12])
def test_the_legend_of_many_modules_fits_into_the_picture(plan, letters):
    chunk = plan.placement.chunks[0]
    more = tuple(replace(chunk, module=f"module{number}" * letters) for number in range(9))
    figure = draw([replace(plan, placement=replace(plan.placement, chunks=plan.placement.chunks + more))])
    figure.canvas.draw()
    legend = figure.legends[0].get_window_extent()
    assert figure.bbox.x0 <= legend.x0 and legend.x1 <= figure.bbox.x1
    assert figure.bbox.y0 <= legend.y0 and legend.y1 < figure.axes[0].get_window_extent().y0
