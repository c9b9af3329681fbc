"""Corrections find the true factor when plans follow them a step behind, and one bad step does little."""

import pytest
from msgspec.structs import replace

from pipeweaver.data.items import Item
from pipeweaver.schedule.ir import Chunk, Compute, Free, Measurement, Part, Placement, Plan, Post, Span, Stage, Wait
from pipeweaver.semu.correct import GAIN, gain, uncorrected_ns, updated


def plan_of(durations):
    """One stage per module, of the given durations, on one worker."""
    chunks = [Chunk(task="main", module=name, start=0, stop=1, worker=0) for name in durations]
    items = [Item(task="main", draw=0, module=name, position=0, sizes={"tokens": 1}) for name in durations]
    actions = [Compute(stage=Stage(i, 0, "F"), duration_ns=ns) for i, ns in enumerate(durations.values())]
    return Plan(
        step=0,
        replica=0,
        num_replicas=1,
        policy="by hand",
        seed=0,
        rounds=0,
        forward_only=False,
        items=tuple(items),
        links=(),
        records={},
        placement=Placement(workers=1, chunks=tuple(chunks)),
        parts=tuple((Part(items=(i,), microbatch=0),) for i in range(len(chunks))),
        order=((),),
        edges=(),
        transfers=(),
        groups=(),
        normalisers={},
        actions=(tuple(actions),),
        static_bytes=(0,),
    )


def measurement_of(durations):
    spans, now = [], 0
    for ns in durations.values():
        spans.append(Span(now, now + ns))
        now += ns
    return Measurement(spans=(tuple(spans),), transfers=(), step_ns=now)


@pytest.mark.parametrize("ahead", [1, 5])
def test_factors_find_the_truth_with_plans_made_steps_ahead_and_never_pass_it(ahead):
    true, known = {"vision": 130_000, "language": 80_000}, {"vision": 100_000, "language": 100_000}
    factors = [{}] * ahead
    for step in range(60):
        used = factors[-ahead]
        planned = {name: round(ns * used.get(f"{name}/0", 1.0)) for name, ns in known.items()}
        factors.append(updated(factors[-1], used, [plan_of(planned)], [measurement_of(true)], gain(step)))
        assert 1 < factors[-1]["vision/0"] < 1.3001 and 0.7999 < factors[-1]["language/0"] < 1
    assert factors[-1]["vision/0"] == pytest.approx(1.3, rel=0.001)
    assert factors[-1]["language/0"] == pytest.approx(0.8, rel=0.001)
    assert factors[ahead + 4]["vision/0"] == pytest.approx(1.3, rel=0.06)  # five sixths of the way after five steps


def test_one_disturbed_step_does_little():
    plan = plan_of({"vision": 1_000})
    assert updated({}, {}, [plan], [measurement_of({"vision": 1_000_000})])["vision/0"] < 1.25


def test_modules_without_stages_keep_their_factor():
    plan = plan_of({"vision": 1_000})
    assert updated({"language/0": 1.1}, {}, [plan], [measurement_of({"vision": 1_000})]) == {
        "language/0": 1.1,
        "vision/0": 1.0,
    }


def test_replicas_count_together():
    plans = [plan_of({"vision": 1_000}), replace(plan_of({"vision": 3_000}), replica=1)]
    measured = [measurement_of({"vision": 2_000}), measurement_of({"vision": 2_000})]
    assert updated({}, {}, plans, measured)["vision/0"] == pytest.approx(1.0)


def test_workers_are_corrected_each_for_itself():
    plan = plan_of({"vision": 1_000})
    chunks = (*plan.placement.chunks, replace(plan.placement.chunks[0], worker=1))
    other = Compute(stage=Stage(1, 0, "F"), duration_ns=1_000)
    plan = replace(plan, placement=Placement(workers=2, chunks=chunks), actions=(*plan.actions, (other,)))
    measured = Measurement(spans=((Span(0, 1_000),), (Span(0, 1_500),)), transfers=(), step_ns=1_500)
    factors = updated({}, {}, [plan], [measured])
    assert factors["vision/0"] == 1.0 and factors["vision/1"] > 1.05
    corrected = replace(plan, actions=(plan.actions[0], (replace(other, duration_ns=1_100),)))
    assert uncorrected_ns([corrected], {"vision/1": 1.1}) == 1_000
    assert uncorrected_ns([corrected], {}) == 1_100


def test_posts_and_frees_behind_a_stage_are_its_time_and_waits_are_not():
    plan = plan_of({"vision": 1_000})
    (stage,) = plan.actions[0]
    actions = (Post(transfer=0), stage, Post(transfer=1), Free(buffers=()), Wait(transfer=0), Post(transfer=2))
    plan = replace(plan, actions=(actions,))
    ends = [400, 1_400, 1_450, 1_500, 9_000, 9_900]
    spans = tuple(Span(start, end) for start, end in zip([0, *ends], ends, strict=False))
    measured = Measurement(spans=(spans,), transfers=(), step_ns=ends[-1])
    assert updated({}, {}, [plan], [measured])["vision/0"] == pytest.approx(1.1**GAIN)


def test_posts_count_as_planned():
    plan = plan_of({"vision": 1_000})
    (stage,) = plan.actions[0]
    actions = (stage, Post(transfer=0, duration_ns=100))
    plan = replace(plan, actions=(actions,))
    measured = Measurement(spans=((Span(0, 1_000), Span(1_000, 1_100)),), transfers=(), step_ns=1_100)
    assert updated({}, {}, [plan], [measured])["vision/0"] == pytest.approx(1.0)
