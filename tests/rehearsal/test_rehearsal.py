"""Rehearsals: nothing ends before it was emulated to end, links take one transfer at a time, hangs end with words.

Times of a test machine have no upper bounds, so all bounds here are lower ones, and those hold exactly.
"""

from __future__ import annotations

import sys
import threading
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from pipeweaver.cli import app
from pipeweaver.model.graph import ModelGraph
from pipeweaver.rehearsal import rehearse as module
from pipeweaver.rehearsal.device import Device
from pipeweaver.rehearsal.links import marks_for
from pipeweaver.rehearsal.play import play
from pipeweaver.rehearsal.rehearse import Case, RehearsedStep, put_together, rehearse
from pipeweaver.rehearsal.report import render
from pipeweaver.rehearsal.script import Report, Script, scene, write_script
from pipeweaver.rehearsal.stretch import stretch, stretched
from pipeweaver.runtime.launch import launch
from pipeweaver.runtime.process import RunError
from pipeweaver.runtime.transport_local import Hub
from pipeweaver.runtime.watchdog import EXIT_CODE
from pipeweaver.schedule.ir import Compute, Offload, Plan, Post, Reload, Settle, Stage, Wait
from tests.runtime.cases import Case as PlanCase
from tests.runtime.cases import make_batch, make_graph, make_plans

DIGITS = Path(__file__).parents[2] / "examples" / "digits.toml"
LEAST_STAGE_NS = 1_000_000


def plans_of(case: PlanCase, num_steps: int = 2) -> tuple[ModelGraph, list[list[Plan]]]:
    graph = make_graph(case)
    return graph, make_plans(case, graph, [make_batch(case, graph, step) for step in range(num_steps)])


def in_threads(graph: ModelGraph, steps: list[list[Plan]]) -> list[RehearsedStep]:
    """A rehearsal whose workers are threads on a strict transport."""
    slow = [stretched(plans, stretch(steps, LEAST_STAGE_NS)) for plans in steps]
    script = Script(scenes=(scene(graph, slow, dtype="float64"),), watchdog_s=60.0)
    hub, marks = Hub(script.num_replicas, script.num_workers), marks_for(script.steps)
    reports: dict[object, Report] = {}

    def run(address):
        try:
            reports[address] = play(script, hub.end(address), marks)
        except BaseException as error:
            hub.fail(str(error))

    threads = [threading.Thread(target=run, args=(address,), daemon=True) for address in hub.addresses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert hub.failure is None, hub.failure
    return [put_together(plans, i, [reports[a] for a in hub.addresses]) for i, plans in enumerate(slow)]


def check(steps: list[RehearsedStep] | tuple[RehearsedStep, ...]) -> None:
    """What must hold of every rehearsal: lower bounds that are exact, and order."""
    for step in steps:
        for plan, measured in zip(step.plans, step.measurements, strict=True):
            assert plan.prediction is not None
            for lane, emulated in zip(measured.spans, plan.prediction.spans, strict=True):
                assert all(a.end_ns == b.start_ns for a, b in pairwise(lane))
                for found, least in zip(lane, emulated, strict=True):
                    assert found.end_ns >= least.end_ns
            check_links(plan, measured.spans, measured.transfers)
        assert step.error >= 0
        assert step.median <= abs(step.worst.share)


def check_links(plan: Plan, spans, transfers) -> None:
    for transfer, moved in zip(plan.transfers, transfers, strict=True):
        assert moved.end_ns - moved.start_ns == transfer.duration_ns
    for actions, lane in zip(plan.actions, spans, strict=True):
        for action, span in zip(actions, lane, strict=True):
            if isinstance(action, Wait):
                assert span.end_ns >= transfers[action.transfer].end_ns
    pairs = {tuple(sorted((t.sender, t.receiver))) for t in plan.transfers}
    for pair in pairs:
        mine = [m for t, m in zip(plan.transfers, transfers, strict=True) if {t.sender, t.receiver} == set(pair)]
        for one, other in combinations(sorted(mine), 2):
            assert one.end_ns <= other.start_ns


CASES = [
    PlanCase(graph=graph, policy=policy, workers=workers, num_replicas=replicas, batch=batch, seed=seed)
    for graph, policy, workers, replicas, batch, seed in (
        ("encoder", "1f1b", 2, 2, "uneven", 529),
        ("diffusion", "interleaved-1f1b", 4, 1, "few microbatches", 165),
        ("tied", "gpipe", 2, 2, "no images", 385),
        ("detached", "dynamic", 2, 1, "mixed", 880),
        ("encoder", "sequential", 2, 1, "one microbatch", 367),
    )
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_nothing_ends_before_it_was_emulated_to(case: PlanCase) -> None:
    """Policies, replicas, split backwards, memory strategies with their copies, batches without images."""
    check(in_threads(*plans_of(case)))


def test_the_cases_have_everything() -> None:
    plans = [plan for case in CASES for step in plans_of(case)[1] for plan in step]
    actions = [action for plan in plans for lane in plan.actions for action in lane]
    assert {a.stage.phase for a in actions if isinstance(a, Compute)} == set("FBIW")
    assert any(isinstance(a, Offload) for a in actions) and any(isinstance(a, Reload) for a in actions)
    assert {"recompute", "recompute-attention"} <= {s for a in actions if isinstance(a, Compute) for s in a.strategies}
    assert any(plan.num_replicas == 2 for plan in plans)


def test_a_device_ends_at_deadlines_and_does_not_count_what_it_overslept(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1_000]
    monkeypatch.setattr("time.perf_counter_ns", lambda: now[0])

    def sleep(seconds: float) -> None:
        now[0] += round(seconds * 1e9) + 70

    monkeypatch.setattr("time.sleep", sleep)
    device = Device()
    device.begin(2_000)
    assert (now[0], device.now_ns()) == (2_070, 2_000)
    for end in (3_000, 4_000):
        device.until(device.now_ns() + 1_000)
        assert (now[0], device.now_ns()) == (end + 70, end)
    now[0] += 500  # the runtime's own time counts
    assert device.now_ns() == 4_500
    device.until(4_400)
    assert device.now_ns() == 4_500
    device.until(4_550)  # past for the host, not for the device
    assert (now[0], device.now_ns()) == (4_570, 4_550)


def test_copies_run_beside_compute_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0]
    monkeypatch.setattr("time.perf_counter_ns", lambda: now[0])
    monkeypatch.setattr("time.sleep", lambda seconds: now.__setitem__(0, now[0] + round(seconds * 1e9)))
    device = Device()
    device.begin(0)
    ends = []
    for action in (
        Offload(chunk=0, part=0, duration_ns=100),
        Offload(chunk=0, part=1, duration_ns=100),
        Reload(chunk=0, part=2, duration_ns=40),
        Compute(stage=Stage(0, 3, "F"), duration_ns=50),
        Settle(chunk=0, part=2),
        Settle(chunk=0, part=1),
    ):
        device.after(action)
        ends.append(device.now_ns())
    assert ends == [0, 0, 0, 50, 50, 200]


def small(workers: int = 2) -> tuple[ModelGraph, list[list[Plan]]]:
    case = PlanCase(graph="encoder", policy="1f1b", workers=workers, num_replicas=1, batch="mixed", seed=3)
    return plans_of(case)


def test_processes_rehearse_several_cases(capfd: pytest.CaptureFixture[str]) -> None:
    graph, steps = small()
    cases = [Case(name=name, graph=graph, steps=steps, dtype="float64") for name in ("one", "two")]
    found = rehearse(cases, least_stage_ns=LEAST_STAGE_NS)
    assert [case.name for case in found] == ["one", "two"]
    for case in found:
        check(case.steps)
        text = "\n".join(render(case))
        assert text.count("came to its end on all workers") == 2 and "transfers" in text
    assert found[0].steps[0].plans[0].prediction == found[1].steps[0].plans[0].prediction


def test_a_hang_is_ended_by_the_watchdog_with_words(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    graph, steps = small()
    plan = without_post(steps[0][0])
    script = Script(scenes=(scene(graph, [[plan]], dtype="float64"),), watchdog_s=2.0)
    write_script(tmp_path, script)
    marks_for(script.steps, tmp_path / "marks")
    code = launch([sys.executable, "-m", "pipeweaver.rehearsal.process", str(tmp_path)], num_workers=2)
    assert code == EXIT_CODE
    assert "nothing has moved for" in (said := capfd.readouterr().err)
    assert "waits for" in said and "from worker" in said


def test_a_plan_that_gets_stuck_is_not_begun() -> None:
    graph, steps = small()
    with pytest.raises(ValueError, match="gets stuck"):
        rehearse([Case(name="stuck", graph=graph, steps=[[without_post(steps[0][0])]], dtype="float64")])


def test_a_worker_that_ends_badly_ends_the_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "launch", lambda command, num_workers: 75)
    graph, steps = small()
    with pytest.raises(RunError, match="did not come to its end") as caught:
        rehearse([Case(name="ends", graph=graph, steps=steps, dtype="float64")])
    assert caught.value.code == 75


def test_cases_of_one_rehearsal_have_the_same_workers() -> None:
    one, two = (small(workers) for workers in (1, 2))
    cases = [Case(name="case", graph=graph, steps=steps, dtype="float64") for graph, steps in (one, two)]
    with pytest.raises(ValueError, match="same number of workers"):
        rehearse(cases)
    with pytest.raises(ValueError, match="at least one step"):
        rehearse([])


def test_short_stages_are_stretched_and_long_ones_left() -> None:
    _, steps = small()
    factor = stretch(steps, 50_000_000)
    lengths = sorted(
        action.duration_ns
        for plan in stretched(steps[0], factor)
        for lane in plan.actions
        for action in lane
        if isinstance(action, Compute)
    )
    assert lengths[0] < 50_000_000 < lengths[-1]
    assert stretch([stretched(plans, 10 * factor) for plans in steps], 50_000_000) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--machine", "H900"], "no machine 'H900'"),
        (["--steps", "0"], "--steps"),
        (["--set", "run.dtype=float64", "--machine", "H800"], "peak_flops for float64"),
    ],
)
def test_mistakes_are_told(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["rehearse", str(DIGITS), *arguments])
    assert result.exit_code == 2
    assert message in result.stderr


def test_the_command_rehearses_a_job_for_devices_that_are_not_here(tmp_path: Path) -> None:
    settings = ["run.device=cuda", "model.vision.layers=2", "tasks.main.microbatches=2", "policy.name=1f1b"]
    arguments = ["rehearse", str(DIGITS), *(part for key in settings for part in ("--set", key))]
    result = CliRunner().invoke(app, [*arguments, "--machine", "H800", "--trace", str(tmp_path / "trace.json")])
    assert result.exit_code == 0, result.stderr
    assert "step 0 came to its end on all workers: emulated" in result.stdout
    assert "measured" in (tmp_path / "trace.json").read_text()


def without_post(plan: Plan) -> Plan:
    """The plan with the first post of its sender left out: whoever waits for it waits forever."""
    sender = plan.transfers[0].sender
    lane = list(plan.actions[sender])
    lane = [a for a in lane if not (isinstance(a, Post | Wait) and a.transfer == 0)]
    actions = tuple(tuple(lane) if w == sender else actions for w, actions in enumerate(plan.actions))
    return replace(plan, actions=actions)
