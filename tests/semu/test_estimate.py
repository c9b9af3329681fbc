"""Estimates of jobs and the two commands: consistent with the plans they rest on, mistakes told in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipeweaver.cli import app
from pipeweaver.config import load
from pipeweaver.schedule.ir import Offload
from pipeweaver.semu.estimate import estimate, peak, render

DIGITS = Path(__file__).parents[2] / "examples" / "digits.toml"
SMALL = [
    "model.vision.layers=2",
    "model.language.layers=2",
    "tasks.main.microbatches=2",
    "tasks.main.tokens_per_microbatch=512",
    "policy.name=1f1b",
]
SHORT_OF_MEMORY = ["tasks.main.microbatches=2", 'workers.memory="40MiB"', 'policy.strategies=["offload"]']


def test_an_estimate_adds_up() -> None:
    found = estimate(load(DIGITS, SMALL), "cpu")
    (plan,) = found.plans
    assert plan.prediction is not None
    assert found.step_ns == plan.prediction.step_ns > 0
    assert tuple(peak(plan, worker).num_bytes for worker in range(2)) == plan.prediction.peak_bytes
    rows = sum(item.sizes["tokens"] for item in plan.items if item.module == "vision")
    block = 4 * 128**2 + 2 * 128 * 512
    # Forward once and backward twice through two blocks, patches and projector; attention on top.
    assert 3 * 2 * rows * 2 * block < found.flops["vision"] < 1.5 * 3 * 2 * rows * 2 * block
    assert found.mfu == pytest.approx(sum(found.flops.values()) / (2 * 8e10 * found.step_ns / 1e9))
    lines = render(found)
    assert lines[0].startswith("step time") and "not calibrated; 100" in lines[-1]
    assert sum(line.startswith("worker") for line in lines) == 2


def test_what_is_on_the_host_is_not_in_the_peak() -> None:
    found = estimate(load(DIGITS, SHORT_OF_MEMORY), "H800")
    (plan,) = found.plans
    assert plan.prediction is not None
    assert any(isinstance(action, Offload) for lane in plan.actions for action in lane)
    assert tuple(peak(plan, worker).num_bytes for worker in range(2)) == plan.prediction.peak_bytes
    assert not any("host 0" in line for line in render(found))


def test_devices_of_a_worker_share_its_work() -> None:
    job = load(DIGITS, [*SMALL, 'run.dtype="bfloat16"'])
    one, two = (estimate(job, "H800", tensor_parallel=degree) for degree in (1, 2))
    assert (one.num_devices, two.num_devices) == (2, 4)
    assert one.flops == two.flops


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["estimate", str(DIGITS), "--machine", "H900"], "no machine 'H900'"),
        (["estimate", str(DIGITS), "--machine", "H800", "--set", "run.dtype=float64"], "peak_flops for float64"),
        (["estimate", str(DIGITS), "--step", "1150"], "no step 1150: run.steps = 1150"),
        (["estimate", str(DIGITS), "--tensor-parallel", "3"], "vision has 4 heads"),
        (["validate", "nowhere.csv", "--machine", "B200"], "nowhere.csv: cannot be read"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert message in result.stderr and result.stderr.count("\n") == 1


def test_validate_prints_rows_and_one_object(measured_data: Path) -> None:
    path = measured_data / "simumax" / "b200_llama3_70b_measured.csv"
    result = CliRunner().invoke(app, ["validate", str(path), "--machine", "B200"])
    assert result.exit_code == 0
    figures = json.loads(result.stdout.splitlines()[-1])
    assert set(figures) == {"rows", "time_mape", "time_worst", "memory_mape", "memory_worst", "rank_correlation"}
    assert result.stdout.count("llama3_70b") >= 12
