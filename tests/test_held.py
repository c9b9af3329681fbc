"""Instances from files: planned, bounded, and refused in one line where they make no sense."""

from __future__ import annotations

import json
import random
from collections import Counter

import msgspec
import pytest

from benchmarks.held import Held, held_problem, load_held, topological_order
from benchmarks.search import held_figures, searched
from pipeweaver.planner.listing import LimitError, needed_alone

TWO = {
    "name": "two microbatches on one worker",
    "workers": 1,
    "limits": [7],
    "stages": [
        {"worker": 0, "duration": 10, "bytes": [[5, 1]]},
        {"worker": 0, "duration": 20, "after": [0]},
        {"worker": 0, "duration": 10, "bytes": [[5, 3], [2, 2]]},
        {"worker": 0, "duration": 20, "after": [[2, 4]]},
    ],
}


def written(tmp_path, content):
    path = tmp_path / "held.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def changed(stage=None, **fields):
    """The example with other fields, or other fields of one stage."""
    example = json.loads(json.dumps(TWO))
    (example if stage is None else example["stages"][stage]).update(fields)
    return [example]


def test_instances_are_planned_within_their_limits(tmp_path, capsys):
    path = written(tmp_path, [TWO, {**TWO, "limits": None, "name": "no limit"}, {"workers": 3, "stages": []}])
    found = held_figures(path)
    # Within the limit one microbatch at a time: its lag is waited for, or the other goes in between.
    assert [(one["name"], one["makespan"], one["bound"]) for one in found] == [
        (TWO["name"], 64, 60), ("no limit", 60, 60), ("", 0, 0)
    ]  # fmt: skip
    assert "makespan 64, bound 60" in capsys.readouterr().out


def test_a_limit_may_be_as_large_as_one_likes(tmp_path):
    _, limits = held_problem(*load_held(written(tmp_path, changed(limits=[2**64 - 1]))))
    assert limits.tolist() == [10**15]


def test_stages_that_share_memory_are_a_group(tmp_path):
    problem, limits = held_problem(*load_held(written(tmp_path, [TWO])))
    assert problem.num_groups == 2 and limits.tolist() == [7]
    assert needed_alone(problem).tolist() == [[5], [7]]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "not a file of instances"),
        ("[", "not a file of instances"),
        ("\x00\xff", "not a file of instances"),
        ("{}", "not a file of instances: Expected `array`"),
        ([{"workers": 1}], "missing required field `stages`"),
        (changed(workers=0), "Expected `int` >= 1"),
        (changed(workers=10**6), "Expected `int` <= 10000"),
        (changed(limits=[1, 2]), "2 limits for 1 workers"),
        (changed(limits=[-1]), "Expected `int` >= 0"),
        (changed(speed=3), "unknown field `speed`"),
        (changed(0, worker=1), "stage 0 is on worker 1 of 1"),
        (changed(0, worker=-1), "Expected `int` >= 0"),
        (changed(0, duration=-5), "Expected `int` >= 0"),
        (changed(0, duration=1.5), "Expected `int`"),
        (changed(0, duration="10"), "Expected `int`"),
        (changed(0, duration=None), "Expected `int`"),
        (changed(0, duration=10**17), "add up to"),
        (changed(0, bytes=[[10**18, 1]]), "add up to"),
        (changed(0, after=[9]), "stage 0 names stage 9 of 4"),
        (changed(0, after=[0]), "circle"),
        (changed(0, after=[1]), "circle"),
        (changed(0, bytes=[[5, 9]]), "stage 0 names stage 9 of 4"),
        (changed(1, bytes=[[5, 0]]), "circle"),
        (changed(0, bytes=[[5]]), "not a file of instances"),
        (changed(0, bytes=[[5, -1]]), "stage 0 names stage -1 of 4"),
        (changed(0, bytes=[[-5, 1]]), "negative number"),
        (changed(3, after=[[2, -4]]), "negative number"),
        (changed(3, after=[[2, 4, 1]]), "not a file of instances"),
        (changed(0, after=["a"]), "not a file of instances"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(tmp_path, content, words):
    path = written(tmp_path, content)
    with pytest.raises(ValueError, match=r".") as caught:
        held_figures(path)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_an_instance_that_nothing_fits_is_told_and_the_others_are_planned(tmp_path, capsys):
    found = held_figures(written(tmp_path, [*changed(limits=[6]), TWO]))
    words = "no order was found that keeps to the limits: worker 0 needs 7 bytes even with one microbatch at a time"
    assert found[0]["makespan"] is None and found[0]["error"].startswith(words)
    assert found[1]["makespan"] == 64 and "error" not in found[1]
    assert capsys.readouterr().err == f"{TWO['name']}: {found[0]['error']}\n"


def random_dag(seed):
    """Stages in any dependence, whose bytes are freed anywhere behind, and limits between the least and all of it."""
    draw = random.Random(seed)
    workers, count = draw.randint(1, 3), draw.randint(3, 10)
    at = [draw.randrange(workers) for _ in range(count)]
    stages = []
    for i in range(count):
        later = [j for j in range(i, count) if at[j] == at[i]]
        taken = [[draw.randint(1, 6), draw.choice(later)]] if draw.random() < 0.7 else []
        after = [j for j in range(i) if draw.random() < 0.2]
        stages.append({"worker": at[i], "duration": draw.randint(1, 9), "after": after, "bytes": taken})
    sums = [[sum(n for n, _ in s["bytes"]) for s, w in zip(stages, at, strict=True) if w == v] for v in range(workers)]
    limits = [draw.randint(max(of, default=0), max(sum(of), 1) + 1) for of in sums]
    return msgspec.convert({"workers": workers, "limits": limits, "stages": stages}, type=Held)


def some_order_fits(held):
    """By looking at every set of stages that can be done before the others."""
    count, limits = len(held.stages), held.limits
    needs = [{other for other, _ in stage.lags} for stage in held.stages]
    for number, stage in enumerate(held.stages):
        for _, last in stage.bytes:
            needs[last] |= {number} - {last}
    reached = {frozenset()}
    for _ in range(count):
        following = set()
        for done in reached:
            used = [0] * held.workers
            for number in done:
                used[held.stages[number].worker] += sum(n for n, last in held.stages[number].bytes if last not in done)
            for i, stage in enumerate(held.stages):
                fits = used[stage.worker] + sum(n for n, _ in stage.bytes) <= limits[stage.worker]
                if fits and i not in done and needs[i] <= done:
                    following.add(done | {i})
        reached = following
    return bool(reached)


def test_whatever_has_an_order_within_its_limits_gets_one_and_keeps_to_it():
    outcomes = Counter()
    for seed in range(80):
        held = random_dag(seed)
        try:
            start = searched(*held_problem(held), seconds=0).best.start_ns.tolist()
        except LimitError:
            assert not some_order_fits(held), seed
            outcomes["none fits"] += 1
            continue
        outcomes["fits"] += 1
        end = [begun + stage.duration for begun, stage in zip(start, held.stages, strict=True)]
        for i, stage in enumerate(held.stages):
            assert all(start[i] >= end[other] + lag for other, lag in stage.lags)
            assert all(last == i or start[last] >= end[i] for _, last in stage.bytes)
            inside = [
                amount
                for j, other in enumerate(held.stages)
                for amount, last in other.bytes
                if other.worker == stage.worker and start[j] <= start[i] < end[last]
            ]
            assert sum(inside) <= held.limits[stage.worker], seed
    assert min(outcomes.values()) >= 10


def test_stages_that_fit_as_they_are_numbered_are_taken_so():
    """However many: a search would not find the way. Each stage holds one byte until the second next is done."""
    count = 20_000
    stages = [
        {"worker": 0, "duration": 1, "bytes": [[1, min(i + 2, count - 1)]], "after": [i - 7] if i > 6 else []}
        for i in range(count)
    ]
    held = msgspec.convert({"workers": 1, "limits": [3], "stages": stages}, type=Held)
    searched(*held_problem(held), seconds=0)


def test_a_hundred_thousand_stages_that_wait_for_nothing_are_read_at_once():
    stages = [{"worker": i % 4, "duration": 1 + i % 7} for i in range(100_000)]
    held = msgspec.convert({"workers": 4, "stages": stages}, type=Held)  # quadratic, this takes minutes
    assert topological_order(held) == list(range(100_000))


def test_bytes_are_freed_on_their_own_worker(tmp_path):
    stages = [{"worker": 0, "duration": 1, "bytes": [[1, 1]]}, {"worker": 1, "duration": 1}]
    with pytest.raises(ValueError, match="bytes of stage 0 are freed by stage 1, which is on another worker"):
        held_figures(written(tmp_path, [{"workers": 2, "stages": stages}]))


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere.json: cannot be read: No such file"):
        load_held(tmp_path / "nowhere.json")
