"""Every example builds, agrees with its data, and learns something: one batch in one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from pipeweaver.agreement import check_agreement, check_model
from pipeweaver.config import load
from pipeweaver.data.dataset import load_part
from pipeweaver.data.tasks import TaskBatches
from pipeweaver.model.build import materialise_all, named_parameters
from pipeweaver.model.reference import run_all
from pipeweaver.planner.assign import single_share
from pipeweaver.runtime import prepare

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="session")
def json_lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("jsonl")
    command = [sys.executable, str(EXAMPLES / "make_jsonl.py"), "--folder", str(folder / "data"), "--records", "50"]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return folder


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_example(path: Path, json_lines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    job = load(path)
    folder = json_lines if path.stem == "jsonl" else EXAMPLES
    job = msgspec.structs.replace(job, path=str(folder / path.name))
    check_model(job, prepare.job_graph(job))
    datasets = prepare.job_datasets(job)
    for of_tasks in datasets.values():
        for task, dataset in of_tasks.items():
            check_agreement(job, task, dataset)
    graph = prepare.job_graph(job)
    layers = materialise_all(graph, seed=job.run.seed)
    batch = next(TaskBatches(prepare.job_loaders(job, datasets["train"])))
    share = single_share(graph, batch)
    outcome = run_all(
        graph,
        layers,
        share.items,
        share.links,
        lambda own, names: load_part(datasets["train"], own, share.records, names),
    )
    outcome.loss.backward()
    assert outcome.loss.item() > 0
    reached = {name.split(".")[0] for name, p in named_parameters(graph, layers).items() if p.grad is not None}
    assert reached == set(job.modules)
