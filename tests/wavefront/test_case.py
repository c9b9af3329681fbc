"""The reference case, and files that make no sense."""

from __future__ import annotations

import copy
import json

import pytest

from pipeweaver.wavefront.baselines import sequential
from pipeweaver.wavefront.bound import area_bound_ns
from pipeweaver.wavefront.case import case_of, read_case
from pipeweaver.wavefront.levels import plan_levels, relaxed_optimum_ns
from pipeweaver.wavefront.metagraph import check_schedule
from pipeweaver.wavefront.plan import plan_wavefront
from pipeweaver.wavefront.scaling import curve, local_times, repaired

TABLE = {
    # N: (relaxed optimum, authors' makespan, one after another, area bound, at most for `wavefront`), ms
    4: (995.30, 1048.70, 1166.86, 979.0, 1005),
    8: (562.38, 599.50, 732.61, 528.6, 565),
    16: (330.94, 357.84, 593.75, 290.5, 332),
    32: (256.96, 258.21, 593.75, 220.8, 222),
}


@pytest.fixture(scope="module")
def reference(measured_data):
    return read_case(measured_data / "spindle" / "planner_reference.json")


@pytest.mark.parametrize("workers", TABLE)
def test_reference_case(reference, workers):
    optimum, authors, one_after_another, bound, target = TABLE[workers]
    graph = reference.graph
    assert relaxed_optimum_ns(graph, workers) / 1e6 == pytest.approx(optimum, abs=0.01)
    assert sequential(graph, workers).makespan_ns / 1e6 == pytest.approx(one_after_another, abs=0.01)
    assert area_bound_ns(graph, workers) / 1e6 == pytest.approx(bound, abs=0.06)
    assert reference.published_ms[workers] == pytest.approx(authors, abs=0.01)
    levels = plan_levels(graph, workers)
    check_schedule(graph, levels)
    assert levels.makespan_ns / 1e6 <= authors + 0.01
    ours = plan_wavefront(graph, workers)
    check_schedule(graph, ours)
    assert ours.lower_bound_ns <= ours.makespan_ns <= target * 1e6


SMALL = {
    "metaops": {"text": {"batch_size": 4, "layer_num": 2}, "image": {"batch_size": 2, "layer_num": 3}},
    "profile_of": {"text": "t", "image": "v"},
    "T_points_ms_per_layer": {"t": [[1, 1.0], [2, 1.5], [4, 2.5]], "v": [[1, 3.0], [2, 5.0]]},
    "edges": [["text", "image"]],
}


def test_a_small_case():
    case = case_of(SMALL)
    assert [(op.counts, op.layer_ns) for op in case.graph.ops] == [
        ((1, 2, 4), (2_500_000, 1_500_000, 1_000_000)),
        ((1, 2), (5_000_000, 3_000_000)),
    ]
    assert case.workers == (4, 8, 16, 32)
    assert plan_wavefront(case.graph, 4).makespan_ns == 2 * 1_000_000 + 3 * 3_000_000


BAD = {
    "no batch": (("metaops", "text", "batch_size"), 0, "batch_size of text is 0"),
    "no layers": (("metaops", "text", "layer_num"), 0, "layer_num of text is 0"),
    "no such profile": (("profile_of", "text"), "u", "text uses profile u, which"),
    "negative time": (("T_points_ms_per_layer", "t"), [[1, 1.0], [2, -1.5]], "profile of t says -1.5 for 2"),
    "zero time": (("T_points_ms_per_layer", "t"), [[1, 0.0]], "profile of t says 0.0 for 1"),
    "missing time": (("T_points_ms_per_layer", "t"), [[1, 1.0], [2, None]], "profile of t lacks the time for 2"),
    "no times": (("T_points_ms_per_layer", "t"), [], "profile of t has no measured times"),
    "items below one": (("T_points_ms_per_layer", "t"), [[0, 1.0]], "profile of t has a time for 0"),
    "no such end": (("edges",), [["text", "audio"]], "edge text -> audio: there is no MetaOp audio"),
    "cycle": (("edges",), [["text", "image"], ["image", "text"]], "cycle: "),
    "huge batch": (("metaops", "text", "batch_size"), 10**30, "batch_size of text is 10+; .* from 1 to 100,000"),
    "layers yes or no": (("metaops", "text", "layer_num"), True, "layer_num of text is True"),
    "MetaOps are a number": (("metaops",), 7, r"Expected `object`, got `int` - at `\$.metaops`"),
    "MetaOp is a list": (("metaops", "text"), [1], r"Expected `object`, got `array` - at `\$.metaops\[...\]`"),
    "profile is a list": (("profile_of", "text"), ["t"], r"Expected `str`, got `array` - at `\$.profile_of"),
    "points are no pairs": (("T_points_ms_per_layer", "t"), [[1]], r"at `\$.T_points_ms_per_layer\[...\]\[0\]`"),
    "endless time": (("T_points_ms_per_layer", "t"), [[1, float("inf")]], "profile of t says inf for 1"),
    "huge time": (("T_points_ms_per_layer", "t"), [[4, 1e300]], r"take up to .* ms, more than 1,000,000,000"),
    "edge of three": (("edges",), [["text", "image", "text"]], r"at `\$.edges\[0\]`"),
    "no workers": (("results",), [{"N": 0}], r"Expected `int` >= 1 - at `\$.results\[0\].N`"),
    "no profiles": (("T_points_ms_per_layer",), None, "no 'T_points_ms_per_layer'"),
}


@pytest.mark.parametrize("name", BAD)
def test_nonsense_is_named(name):
    keys, value, message = BAD[name]
    data = copy.deepcopy(SMALL)
    at = data
    for key in keys[:-1]:
        at = at[key]
    if value is None:
        del at[keys[-1]]
    else:
        at[keys[-1]] = value
    with pytest.raises(ValueError, match=message):
        case_of(data)


def test_a_file_that_is_no_case(tmp_path):
    path = tmp_path / "case.json"
    path.write_text("{")
    with pytest.raises(ValueError, match="cannot read the case"):
        read_case(path)
    path.write_text(json.dumps(SMALL))
    assert len(read_case(path).graph.ops) == 2


def test_measured_points_are_repaired_and_joined():
    assert repaired((1, 2, 4, 8), (8, 5, 6, 2)) == ((1, 2, 8), (8, 5, 2))
    times = curve("m", {1: 9.0, 4: 3.0, 8: 2.0}, (1, 2, 4, 6, 8, 16))
    assert times == pytest.approx({1: 9.0, 2: 5.0, 4: 3.0, 6: 3.0 - 1.0 * (1 / 4 - 1 / 6) * 8, 8: 2.0, 16: 2.0})
    with pytest.raises(ValueError, match="starts at 2 workers; the time on 1"):
        curve("m", {2: 9.0}, (1, 2))
    assert local_times("m", {1: 1.0, 4: 4.0}, 4) == ((1, 2, 4), (4.0, 2.0, 1.0))
    with pytest.warns(UserWarning, match="profile of m ends at 2 items per worker; a batch of 4 is not planned on 1"):
        assert local_times("m", {1: 1.0, 2: 2.0}, 4) == ((2, 4), (2.0, 1.0))
