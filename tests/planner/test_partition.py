from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_cases import GRAPHS, batch_of, flat_costs, graph_of, share_of

from pipeweaver.planner.balance import balanced
from pipeweaver.planner.partition import (
    by_modality,
    contiguous,
    encoders,
    layer_costs,
    modality_cuts,
    split,
    task_modules,
    tasks_of,
)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.data())
def test_split_is_the_best_of_all(costs, data):
    slots = data.draw(st.integers(1, len(costs)))

    def sums(cuts):
        return [sum(costs[a:b]) for a, b in pairwise(cuts)]

    every = [(0, *inner, len(costs)) for inner in combinations(range(1, len(costs)), slots - 1)]
    best = min((max(sums(cuts)), sum(s * s for s in sums(cuts)), cuts) for cuts in every)
    found = split(costs, slots)
    assert (max(sums(found)), sum(s * s for s in sums(found)), found) == best


def test_split_of_the_37b_case_is_63_to_73_5_ms():
    costs = [675] * 64 + [1050] * 64
    cuts = split(costs, 16)
    sums = [sum(costs[a:b]) for a, b in pairwise(cuts)]
    assert (min(sums), max(sums)) == (6300, 7350)


def test_layer_costs_count_backward_only_where_there_is_one():
    frozen = graph_of("frozen", (2, 3))
    share = share_of(frozen, [2, 0])
    rows = {name: sum(i.sizes["tokens"] for i in share.items if i.module == name) for name in ("vision", "language")}
    found = layer_costs(frozen, flat_costs(frozen), [share])
    assert found == {"vision": [1000 * rows["vision"]] * 2, "language": [3000 * rows["language"]] * 3}


def test_layer_costs_by_parameters_include_before_and_after():
    graph = graph_of("encoder", (2, 3))
    found = layer_costs(graph, flat_costs(graph, layer_bytes=10), [share_of(graph, [1])], "parameters")
    assert found == {"vision": [80, 80], "language": [80, 40, 80]}


def test_contiguous_pieces_span_modules_in_the_order_of_the_flows():
    graph = graph_of("encoder", (4, 6))
    placement = contiguous(graph, 2, {"vision": [1] * 4, "language": [2] * 6}, {"main": ("vision", "language")})
    assert [str(chunk) for chunk in placement.chunks] == ["vision[0:4]@0", "language[0:2]@0", "language[2:6]@1"]
    placement = contiguous(
        graph, 2, {"vision": [1] * 4, "language": [2] * 6}, {"main": ("vision", "language")}, pieces_per_worker=2
    )
    assert [str(chunk) for chunk in placement.chunks] == [
        "vision[0:4]@0",
        "language[0:2]@1",
        "language[2:4]@0",
        "language[4:6]@1",
    ]


def test_encoder_first_keeps_encoders_whole():
    graph = graph_of("two encoders", (6, 2, 4))
    assert encoders(graph) == {"vision", "audio"}
    costs = {"vision": [5] * 6, "audio": [1] * 2, "language": [1] * 4}
    placement = contiguous(graph, 3, costs, {"main": ("vision", "audio", "language")}, encoder_first=True)
    assert [str(chunk) for chunk in placement.chunks] == [
        "vision[0:6]@0",
        "audio[0:2]@0",
        "language[0:2]@1",
        "language[2:4]@2",
    ]
    light = costs | {"vision": [0] * 6, "audio": [0] * 2}
    placement = contiguous(graph, 2, light, {"main": ("vision", "audio", "language")}, encoder_first=True)
    assert [str(chunk) for chunk in placement.chunks][2:] == ["language[0:2]@0", "language[2:4]@1"]


def test_too_few_layers_for_the_pieces_is_said_with_numbers():
    graph = graph_of("encoder", (1, 2))
    with pytest.raises(
        ValueError, match=r"pipeline = 4 with pieces_per_worker = 1 needs 4 layers.*only 3.*vision 1, language 2"
    ):
        contiguous(graph, 4, {"vision": [1], "language": [1] * 2}, {"main": ("vision", "language")})
    with pytest.raises(ValueError, match=r"only 3 to share out: vision 9, language 2 \(vision kept whole\)"):
        graph = graph_of("encoder", (9, 2))
        costs = {"vision": [1] * 9, "language": [1] * 2}
        contiguous(graph, 4, costs, {"main": ("vision", "language")}, encoder_first=True)


def test_by_modality_gives_every_worker_a_share_of_every_module():
    graph = graph_of("encoder", (4, 7))
    costs = {"vision": [1] * 4, "language": [1] * 6 + [3]}
    placement = by_modality(graph, 2, costs, {"main": ("vision", "language")}, {"language": 2})
    assert [str(chunk) for chunk in placement.chunks] == [
        "vision[0:2]@0",
        "vision[2:4]@1",
        "language[0:2]@0",
        "language[2:4]@1",
        "language[4:6]@0",
        "language[6:7]@1",
    ]


def test_a_short_module_goes_to_the_least_loaded_workers_in_its_own_order():
    graph = graph_of("encoder", (2, 6))
    costs = {"vision": [4, 4], "language": [2, 1, 3, 2, 1, 1]}
    placement = by_modality(graph, 4, costs, {"main": ("vision", "language")}, {})
    language = [sum(costs["language"][c.start : c.stop]) for c in placement.chunks if c.module == "language"]
    homes = [c.worker for c in placement.chunks if c.module == "vision"]
    assert homes == sorted(sorted(range(4), key=lambda w: (language[w], w))[:2])


def test_too_many_chunks_are_lowered():
    graph = graph_of("encoder", (5, 8))
    cuts = modality_cuts(graph, 2, {"vision": [1] * 5, "language": [1] * 8}, {"vision": 3, "language": 3})
    assert {name: len(found) - 1 for name, found in cuts.items()} == {"vision": 4, "language": 6}


@given(
    st.sampled_from(GRAPHS),
    st.integers(1, 5),
    st.tuples(*[st.integers(1, 7)] * 3),
    st.lists(st.integers(0, 3), min_size=1, max_size=3),
    st.integers(1, 3),
)
def test_every_layer_is_placed_once(name, workers, layers, counts, chunks):
    graph = graph_of(name, layers)
    shares = [share_of(graph, counts)]
    costs = layer_costs(graph, flat_costs(graph), shares)
    tasks = task_modules(graph, shares)
    placements = [by_modality(graph, workers, costs, tasks, {m: chunks for m in graph.by_name})]
    if sum(len(m.layers) for m in graph.modules) >= workers * chunks:
        placements.append(contiguous(graph, workers, costs, tasks, pieces_per_worker=chunks))
        assert {c.worker for c in placements[-1].chunks} == set(range(workers))
    for placement in placements:
        for module in graph.modules:
            found = [(c.start, c.stop) for c in placement.chunks if c.module == module.name]
            assert [i for start, stop in found for i in range(start, stop)] == list(range(len(module.layers)))


def test_tasks_have_chunks_of_the_modules_they_use():
    graph = graph_of("two encoders")
    share = share_of(graph, [1])
    assert task_modules(graph, [share]) == {"main": ("vision", "audio", "language")}
    other = tuple(
        type(item)(task="text", draw=item.draw, module=item.module, position=item.position, sizes=item.sizes)
        for item in share_of(graph, [0]).items
    )
    both = [share, type(share)(**{f: getattr(share, f) for f in share.__struct_fields__} | {"items": other})]
    assert task_modules(graph, both) == {"main": ("vision", "audio", "language"), "text": ("language",)}
    with pytest.raises(ValueError, match=r"at least one item"):
        tasks_of([])
    assert batch_of(graph, [1]).samples[0].task == "main"


def test_workers_that_the_first_part_reaches_late_have_less_to_do():
    """20 layers on 4 workers; the last one waits for two layers' time: 6, 5.67, 6.33 and 6 until all are done."""
    graph = graph_of("one", (20,))
    (name,) = graph.by_name

    def counts(fill):
        placement = balanced(graph, 4, [{name: [10] * 20}], {"main": (name,)}, {name: 1}, fill)
        return [chunk.stop - chunk.start for chunk in placement.chunks]

    assert counts(0.0) == [5, 5, 5, 5]
    assert counts(0.4) == [6, 5, 5, 4]


def test_work_can_begin_with_small_chunks():
    graph = graph_of("encoder", (16, 16))
    costs, tasks = [{name: [10] * 16 for name in graph.by_name}], {"main": tuple(graph.by_name)}

    def sizes(early, vision=2):
        placement = balanced(graph, 2, costs, tasks, {"vision": vision, "language": 2}, early=early)
        assert [chunk.worker for chunk in placement.chunks if chunk.module == "vision"] == [0, 1] * vision
        loads = [sum(chunk.stop - chunk.start for chunk in placement.chunks if chunk.worker == w) for w in (0, 1)]
        assert loads == [16, 16]
        return [[chunk.stop - chunk.start for chunk in placement.chunks if chunk.module == m] for m in graph.by_name]

    assert sizes(1.0) == [[4, 4, 4, 4], [4, 4, 4, 4]]
    assert sizes(0.5) == [[2, 4, 6, 4], [4, 4, 4, 4]]
    assert sizes(0.1) == [[1, 4, 7, 4], [4, 4, 4, 4]]
    assert sizes(0.5, vision=1) == [[8, 8], [4, 4, 4, 4]]


def test_modules_of_fewer_layers_than_workers_have_no_fill_to_share_out():
    graph = graph_of("one", (2,))
    (name,) = graph.by_name
    placements = [balanced(graph, 4, [{name: [10, 20]}], {"main": (name,)}, {name: 1}, fill) for fill in (0.0, 0.4)]
    assert placements[0] == placements[1]
    assert [(chunk.start, chunk.worker) for chunk in placements[0].chunks] == [(0, 0), (1, 1)]
