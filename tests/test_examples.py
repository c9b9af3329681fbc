"""Every example builds, agrees with its data, and learns something: one batch in one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from pipeweaver.agreement import check_agreement
from pipeweaver.config import load
from pipeweaver.data.config import JsonLinesData, build_dataset
from pipeweaver.data.dataset import load_part
from pipeweaver.data.loader import Loader
from pipeweaver.model.build import build_graph, materialise_all, named_parameters
from pipeweaver.model.reference import run_all

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
    job = load(path, ["task.microbatches=1"])
    folder = json_lines if isinstance(job.data, JsonLinesData) else EXAMPLES
    data = {split: build_dataset(job.data, split, folder=folder) for split in ("train", "held-out")}
    for dataset in data.values():
        check_agreement(job, dataset)
    graph = build_graph(job.modules, job.flows, job.task.loss_weights)
    layers = materialise_all(graph, seed=job.run.seed)
    packing = msgspec.structs.asdict(job.task)
    batch = next(
        Loader(
            data["train"],
            **{name: packing[name] for name in ("backbone", "tokens_per_microbatch", "microbatches", "too_long")},
        )
    )
    records = {f"{sample.task}/{sample.draw}": sample.record for sample in batch.samples}
    items = [item for sample in batch.samples for item in sample.items]
    starts = [sum(len(sample.items) for sample in batch.samples[:i]) for i in range(len(batch.samples))]
    links = [
        (start + a, start + b) for start, sample in zip(starts, batch.samples, strict=True) for a, b in sample.links
    ]
    outcome = run_all(
        graph, layers, items, links, lambda own, names: load_part({"main": data["train"]}, own, records, names)
    )
    outcome.loss.backward()
    assert outcome.loss.item() > 0
    reached = {name.split(".")[0] for name, p in named_parameters(graph, layers).items() if p.grad is not None}
    assert reached == set(job.modules)
