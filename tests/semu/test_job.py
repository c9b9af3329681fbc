"""Published runs: pipelines by their closed form, memory by its parts, rows and profiles refused by name."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from pipeweaver.semu.compose import compose
from pipeweaver.semu.fit import EXPECTED, cross_fit, predict
from pipeweaver.semu.job import Job, balanced_pipeline_ns, estimate_job, pipeline_ns
from pipeweaver.semu.machine import load_machine
from pipeweaver.semu.measured import MEGATRON_CORE, read_layer_profile, read_measured
from pipeweaver.semu.published import gpt, llama
from pipeweaver.semu.validate import mean_absolute, rank_correlation, render, summary, time_errors, validate


def small(**changes: object) -> Job:
    job = Job(
        layers=llama(hidden=1024, heads=8, key_heads=2, ffn=2048, vocabulary=8192),
        num_layers=8,
        sequence=512,
        microbatch=2,
        num_microbatches=8,
        tensor_parallel=1,
        pipeline_parallel=1,
        data_parallel=1,
        dtype="bfloat16",
        framework=MEGATRON_CORE,
    )
    return replace(job, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("workers", "microbatches"), [(1, 3), (2, 2), (4, 9), (8, 3)])
def test_equal_stages_take_m_plus_p_minus_1_of_both(workers: int, microbatches: int) -> None:
    makespan = pipeline_ns([100] * workers, [200] * workers, 0, microbatches)
    assert makespan == (microbatches + workers - 1) * 300
    assert balanced_pipeline_ns([100] * workers, [200] * workers, 0, microbatches) == makespan


def test_the_slowest_stage_sets_the_pace() -> None:
    forward, backward = [100, 100, 100, 170], [200, 200, 200, 340]
    assert pipeline_ns(forward, backward, 0, 12) == balanced_pipeline_ns(forward, backward, 0, 12)
    assert pipeline_ns(forward, backward, 50, 12) > pipeline_ns(forward, backward, 0, 12)


def test_memory_falls_with_the_stage_and_names_its_parts() -> None:
    step = estimate_job(small(pipeline_parallel=4), load_machine("B200"))
    activations = [parts["activations"] for parts in step.memory]
    assert activations[1] == 3 * activations[2] // 2 == 3 * (activations[2] // 2)
    assert activations[0] == pytest.approx(
        4 * activations[2] / 2, rel=0.05
    )  # the first stage saves no input of its own
    for parts in step.memory:
        assert min(parts.values()) >= 0
    count = step.stages[1].parameter_bytes // 2
    assert (step.memory[1]["gradients"], step.memory[1]["optimizer"]) == (4 * count, 12 * count)


def test_recomputation_trades_memory_for_a_forward() -> None:
    keep = estimate_job(small(), load_machine("B200"))
    recompute = estimate_job(small(framework=replace(MEGATRON_CORE, recompute=True)), load_machine("B200"))
    assert recompute.memory[0]["activations"] < keep.memory[0]["activations"] / 3
    assert recompute.stages[0].forward_ns == keep.stages[0].forward_ns
    extra = recompute.stages[0].backward_ns - keep.stages[0].backward_ns
    assert 0.5 * keep.stages[0].forward_ns < extra < keep.stages[0].forward_ns


def test_replicas_share_out_the_optimizer_and_reduce_gradients() -> None:
    one, four = (estimate_job(small(data_parallel=d), load_machine("B200")) for d in (1, 4))
    assert one.reduce_ns == 0 < four.reduce_ns
    assert four.memory[0]["optimizer"] * 4 == one.memory[0]["optimizer"]
    assert four.optimizer_ns < one.optimizer_ns


def test_layers_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="8 layers do not divide over 3"):
        estimate_job(small(pipeline_parallel=3), load_machine("B200"))


def test_equal_models_are_traced_once() -> None:
    assert gpt(hidden=64, heads=2, vocabulary=128, sequence=8) is gpt(hidden=64, heads=2, vocabulary=128, sequence=8)


def test_b200_rows_with_nothing_fitted(measured_data: Path) -> None:
    found = validate(measured_data / "simumax" / "b200_llama3_70b_measured.csv", "B200")
    figures = summary(found)
    assert figures["rows"] == 12 and len(found.memory_errors) == 12 * 8
    assert figures["time_mape"] <= 0.05  # type: ignore[operator]
    assert figures["memory_mape"] <= 0.02  # type: ignore[operator]
    lines = render(found)
    assert lines[-1].startswith('{"rows": 12, "time_mape"')
    assert any("gradients" in line for line in lines)


def test_multi_node_rows_by_constants_of_the_other_half(measured_data: Path) -> None:
    rows = read_measured(measured_data / "vtrain_a100" / "multi_node.csv")
    crossed = cross_fit(
        rows,
        load_machine("A100"),
        group=lambda row: (row.job.layers.block.carries[0].width, row.job.num_layers),
        exact=False,
    )
    assert len(rows) == 78
    assert mean_absolute(time_errors(rows, crossed.estimates)) <= 0.08


def test_pipelines_follow_from_layer_times(measured_data: Path) -> None:
    rows = read_measured(measured_data / "vtrain_a100" / "single_node.csv")
    predicted = compose(rows, load_machine("A100"))
    assert len(predicted) == sum(row.job.pipeline_parallel > 1 for row in rows) == 373
    assert mean_absolute([predicted[i] / rows[i].iteration_ms - 1 for i in predicted]) <= 0.01


def test_closed_form_and_emulator_agree_on_published_rows(measured_data: Path) -> None:
    rows = read_measured(measured_data / "vtrain_a100" / "multi_node.csv")[5:60:9]
    exact, closed = (predict(rows, load_machine("A100"), EXPECTED, exact=e) for e in (True, False))
    for one, other in zip(exact, closed, strict=True):
        assert one.step_ns == pytest.approx(other.step_ns, rel=1e-6)


HEADER = "num_gpus,global_batch,micro_batch,hidden,heads,layers,seq_len,tp,dp,pp,iteration_ms"
ROW = "8,32,4,1024,16,24,1024,2,2,2,219.7"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "neither set"),
        (HEADER + "\n", "no rows"),
        (f"{HEADER}\n{ROW.replace('219.7', '-3')}\n", ":2: iteration_ms = '-3'"),
        (f"{HEADER}\n{ROW}\n{ROW.replace('219.7', '')}\n", ":3: iteration_ms = ''"),
        (f"{HEADER}\n{ROW.replace('1024,16', 'wide,16')}\n", "hidden = 'wide'"),
        (f"{HEADER}\n{ROW.replace('8,32', '4,32')}\n", "num_gpus = 4"),
        (f"{HEADER}\n{ROW.replace('8,32', '8,31')}\n", "31 samples"),
        (f"{HEADER}\n{ROW.replace(',24,', ',1e30,')}\n", "layers = '1e30': expected a whole number of at most"),
        (f"{HEADER}\n{ROW.replace('1024,16', '1024,17')}\n", "hidden = 1024 does not divide into heads = 17"),
    ],
)
def test_rows_that_are_no_measurements_are_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        read_measured(path)
    assert message in str(error.value) and "rows.csv" in str(error.value)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [("ep", "2", "expert"), ("model", "llama9", "llama3-8b"), ("peak_alloc_gib_by_rank", "1.0 2.0", "2 values")],
)
def test_layouts_that_are_not_emulated_are_refused(
    measured_data: Path, tmp_path: Path, column: str, value: str, message: str
) -> None:
    with (measured_data / "simumax" / "b200_llama3_70b_measured.csv").open() as file:
        rows = list(csv.DictReader(file))
    rows[0][column] = value
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    with pytest.raises(ValueError, match=r"rows\.csv:2") as error:
        read_measured(tmp_path / "rows.csv")
    assert message in str(error.value)


def test_a_profile_with_negative_times_is_refused_by_name(measured_data: Path) -> None:
    folder = measured_data / "spindle" / "galvatron_profiles" / "AFDWang" / "models"
    bad = folder / "llama_fa" / "configs" / "computation_profiling_bf16_hidden4096_head32_seqlen2048.json"
    with pytest.raises(ValueError, match=r"layertype_0_bsz1 = '-2\.36"):
        read_layer_profile(bad)
    good = folder / "T5" / "configs" / "computation_profiling_bf16_t5-3B.json"
    assert all(ms > 0 for ms in read_layer_profile(good).values())


def test_rank_correlation() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 50]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 1, 2], [5, 5, 9]) == pytest.approx(1)
