"""Recorded plans are replayed as they were executed, and refused once anything about them has changed."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from functools import partial

import pytest

from pipeweaver.runtime.ahead import Order, plan_batch
from pipeweaver.runtime.recorded import Recorder, read_index, replay
from pipeweaver.schedule.convert import records
from tests.train.service_cases import batch, planning

PLANNING = planning("1f1b")
STEPS = 3


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Three steps of training and an evaluation between the second and the third."""
    folder = tmp_path_factory.mktemp("plans")
    recorder = Recorder(folder)
    orders = [Order(plans=plan_batch(PLANNING, batch(step)), step=step) for step in range(STEPS)]
    evaluated = plan_batch(PLANNING, batch(9), forward_only=True)
    orders.insert(2, Order(plans=evaluated, step=2, data="held-out"))
    for number, order in enumerate(orders, start=1):
        recorder.write(number, order)
    recorder.close()
    return folder


@pytest.fixture
def folder(recorded, tmp_path):
    return shutil.copytree(recorded, tmp_path / "plans")


def sample(data, record, task, draw):
    step = draw // 4
    assert (step == 9) == (data == "held-out")
    return next(sample for sample in batch(step).samples if sample.draw == draw)


def replayed(folder, **settings):
    arguments = {"num_replicas": 1, "num_workers": 2, "dtype": "float32", "budget_bytes": None} | settings
    found = replay(folder, read_index(folder), PLANNING.graph, sample=sample, task_set_at=lambda step: 0, **arguments)
    return [(order.data, order.step, order.records) for order in found]


def test_what_was_recorded_comes_back(folder):
    found = replayed(folder)
    assert [at[:2] for at in found] == [("train", 0), ("train", 1), ("held-out", 2), ("train", 2)]
    assert [plans for _, _, plans in found] == [
        tuple(map(records, plan_batch(PLANNING, batch(step), forward_only=step == 9))) for step in (0, 1, 9, 2)
    ]


def edit_index(change, folder):
    """`change` takes and gives lines as dicts."""
    path = folder / "index.jsonl"
    lines = change([json.loads(line) for line in path.read_text().splitlines()])
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))


def edit_plan(change, folder):
    """Of the second step, fingerprint and all, as somebody who wants it to run would."""
    path = folder / "000002.json.gz"
    plans = json.loads(gzip.decompress(path.read_bytes()))
    change(plans[0])
    path.write_bytes(gzip.compress(json.dumps(plans).encode()))


def swap_files(lines):
    """The step runs the evaluation's plan and the other way round."""
    lines[1]["file"], lines[2]["file"] = lines[2]["file"], lines[1]["file"]
    lines[1]["fingerprints"], lines[2]["fingerprints"] = lines[2]["fingerprints"], lines[1]["fingerprints"]
    return lines


def of_other_step(lines):
    return [lines[0], lines[1] | {"file": lines[3]["file"], "fingerprints": lines[3]["fingerprints"]}, *lines[2:]]


NESTED = '{"number": 1, "x": ' + "[" * 100_000 + "]" * 100_000 + "}\n"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (partial(edit_index, lambda lines: lines[1:]), "goes on with step 1 where step 0 should be"),
        (partial(edit_index, lambda lines: [lines[0], *lines]), "goes on with step 0 where step 1 should be"),
        (partial(edit_index, lambda lines: [lines[1], lines[0]]), "goes on with step 1 where step 0 should be"),
        (partial(edit_index, lambda lines: []), "is empty: no order was executed"),
        (partial(edit_index, lambda lines: ["{\n"]), "index.jsonl, line 1: "),
        (partial(edit_index, lambda lines: [NESTED]), "index.jsonl, line 1: "),
        (partial(edit_index, swap_files), "is not a plan of step 1, as the index"),
        (partial(edit_index, of_other_step), "is not a plan of step 1, as the index"),
        (partial(edit_index, lambda lines: [lines[0] | {"file": "nowhere.json.gz"}]), "cannot be read: No such file"),
        (partial(edit_plan, lambda plan: plan.update(seed=7)), "the file was changed"),
        (partial(edit_plan, lambda plan: plan.update(seed=10**20)), "not a plan file"),
        (partial(edit_plan, lambda plan: plan["order"].reverse()), "the file was changed"),
        (partial(edit_plan, lambda plan: plan.pop("order")), "not a plan file"),
        (lambda folder: (folder / "000001.json.gz").write_bytes(b"\x1f\x8b"), "not a plan file"),
        (lambda folder: (folder / "000001.json.gz").write_bytes(b""), "not a plan file"),
    ],
)
def test_what_was_changed_is_refused_in_a_line_that_names_the_file(folder, change, words):
    change(folder)
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        replayed(folder)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_workers": 3}, "was recorded with 1 replicas of 2 workers; this job has 1 of 3"),
        ({"num_replicas": 2}, "was recorded with 1 replicas of 2 workers; this job has 2 of 2"),
        ({"dtype": "bfloat16"}, "is no plan for this job: edges"),
        ({"budget_bytes": 1000}, "is no plan for this job: memory"),
    ],
)
def test_plans_for_other_workers_are_refused(folder, settings, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        replayed(folder, **settings)
