"""Workers for slices: disjoint at any time, inside islands, within memory; data that stays takes no time."""

from __future__ import annotations

import itertools
import random

import pytest

from pipeweaver.wavefront.baselines import sequential
from pipeweaver.wavefront.metagraph import DataFlow, Links, MetaGraph, Schedule, Slice, check_schedule
from pipeweaver.wavefront.place import Cluster, MemoryShortage, add_held, place
from pipeweaver.wavefront.plan import plan_wavefront
from tests.wavefront.graphs import meta_op, random_graph

LINKS = {"inside": Links(latency_ns=100, bytes_per_us=1_000), "across": Links(latency_ns=1_000, bytes_per_us=100)}


@pytest.mark.parametrize("seed", range(30))
def test_no_worker_does_two_things_at_once(seed):
    graph, draw = random_graph(seed, workers=8), random.Random(seed)
    workers = draw.choice([3, 8, 16])
    cluster = Cluster(workers=workers, island=draw.choice([2, 4, 16]), **LINKS)
    for by_flow in (True, False):
        plan = plan_wavefront(graph, workers, cluster.inside, effort=20_000)
        placed = place(graph, plan, cluster, by_flow=by_flow)
        check_schedule(graph, placed)
        for worker in range(workers):
            mine = sorted(
                (piece.start_ns, piece.end_ns)
                for piece, devices in zip(placed.slices, placed.devices, strict=True)
                if worker in devices
            )
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(mine))
        for piece, devices in zip(placed.slices, placed.devices, strict=True):
            assert len(set(devices)) == len(devices) == piece.workers


def slices(*rows):
    return Schedule(workers=4, slices=tuple(Slice(*row) for row in rows), policy="test")


def test_language_goes_where_most_of_its_data_is():
    """The example of the module: two islands of two, the larger flow comes from vision."""
    ops = tuple(meta_op(name, 1, {2: 1_000}) for name in ("audio", "vision", "language"))
    graph = MetaGraph(ops=ops, flows=(DataFlow(0, 2, 1_000), DataFlow(1, 2, 5_000)))
    plan = slices((0, 0, 1, 2, 0, 1_000), (1, 0, 1, 2, 0, 1_000), (2, 0, 1, 2, 2_000, 3_000))
    placed = place(graph, plan, Cluster(workers=4, island=2, **LINKS))
    audio, vision, language = placed.devices
    assert language == vision and not set(audio) & set(vision)
    # Vision's rows stay; audio's cross islands, forward and back: 2 * 1000 latency, 2 * 1000 bytes over two links.
    assert placed.slices[2].start_ns == 1_000 + 2_000 + 2 * 1_000 * 1_000 // (100 * 2)
    blind = place(graph, plan, Cluster(workers=4, island=2, **LINKS), by_flow=False)
    assert blind.devices[2] == (0, 1)


def test_halving_the_workers_keeps_half_of_the_rows():
    graph = MetaGraph(ops=(meta_op("a", 2, {2: 2_000, 4: 1_000}, carried_bytes=4_000),))
    plan = slices((0, 0, 1, 4, 0, 1_000), (0, 1, 2, 2, 1_000, 3_000))
    placed = place(graph, plan, Cluster(workers=4, island=4, **LINKS))
    assert placed.devices == ((0, 1, 2, 3), (0, 2))
    assert placed.slices[1].start_ns == 1_000 + 200 + 2 * 2_000 * 1_000 // (1_000 * 2)


def test_shared_parameters_go_to_the_same_workers_where_time_allows():
    shared = {"module": "language", "static_bytes": (100, 100)}
    ops = (
        meta_op("x", 2, {1: 1_000}, task="x", **shared),
        meta_op("other", 2, {1: 1_000}, task="o", module="vision", static_bytes=(100, 100)),
        meta_op("y", 2, {1: 1_000}, task="y", **shared),
    )
    plan = slices((0, 0, 2, 1, 0, 2_000), (1, 0, 2, 1, 0, 2_000), (2, 0, 2, 1, 2_000, 4_000))
    placed = place(MetaGraph(ops=ops), plan, Cluster(workers=4, island=4, **LINKS))
    assert placed.devices[0] == placed.devices[2] != placed.devices[1]


def test_memory_decides_between_workers_and_is_said_when_short():
    ops = (
        meta_op("a", 1, {1: 1_000}, module="a", static_bytes=(70,), saved_bytes=10),
        meta_op("b", 1, {1: 1_000}, module="b", static_bytes=(70,), saved_bytes=10),
    )
    graph = MetaGraph(ops=ops, flows=(DataFlow(0, 1, 8),))
    plan = sequential(graph, 2)
    roomy = place(graph, plan, Cluster(workers=2, island=2, memory_bytes=160))
    assert roomy.devices[0] == roomy.devices[1]
    tight = place(graph, plan, Cluster(workers=2, island=2, memory_bytes=100))
    assert tight.devices[0] != tight.devices[1]
    with pytest.raises(MemoryShortage, match=r"a on 1 of 2 workers does not fit: .* 80 bytes, 20 more than its 60"):
        place(graph, plan, Cluster(workers=2, island=2, memory_bytes=60))


def test_backtracking_moves_an_earlier_slice():
    # c needs 60 on all three workers. Next to its data, a would leave 30 of 110 on one of them, so it must go elsewhere.
    ops = (
        meta_op("first", 1, {2: 1_000}, module="first", static_bytes=(30,)),
        meta_op("a", 1, {1: 1_000}, module="a", static_bytes=(50,)),
        meta_op("c", 1, {3: 1_000}, module="c", static_bytes=(60,)),
    )
    graph = MetaGraph(ops=ops, flows=(DataFlow(0, 1, 100), DataFlow(1, 2, 1)))
    plan = Schedule(
        workers=3,
        slices=(Slice(0, 0, 1, 2, 0, 1_000), Slice(1, 0, 1, 1, 1_000, 2_000), Slice(2, 0, 1, 3, 2_000, 3_000)),
        policy="test",
    )
    placed = place(graph, plan, Cluster(workers=3, island=3, memory_bytes=110))
    held = add_held(graph, placed, {})
    totals = [sum(size for size, devices in held.values() if worker in devices) for worker in range(3)]
    assert max(totals) <= 110
    assert placed.devices[1] == (2,)


def test_what_other_passes_hold_is_there_already():
    op = meta_op("a", 2, {1: 1_000}, module="a", static_bytes=(40, 40))
    graph = MetaGraph(ops=(op,))
    cluster = Cluster(workers=2, island=2, memory_bytes=100)
    held = {("a", 0): (40, frozenset({1})), ("a", 1): (40, frozenset({1}))}
    placed = place(graph, sequential(graph, 2), cluster, held=held)
    assert placed.devices == ((1,),)
    assert add_held(graph, placed, held) == held
