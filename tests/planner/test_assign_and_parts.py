import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_cases import GRAPHS, batch_of, flat_costs, graph_of, share_of

from pipeweaver.data.items import Batch
from pipeweaver.data.table import ItemTable
from pipeweaver.model.graph import LossSpec, ModelGraph
from pipeweaver.planner.assign import share_out, single_share
from pipeweaver.planner.choices import item_costs
from pipeweaver.planner.partition import by_modality, layer_costs, task_modules
from pipeweaver.planner.parts import cut_parts


def placed(graph, share, workers=2):
    costs = layer_costs(graph, flat_costs(graph), [share])
    return by_modality(graph, workers, costs, task_modules(graph, [share]), {})


@given(
    st.sampled_from(GRAPHS),
    st.lists(st.integers(0, 4), min_size=0, max_size=7),
    st.integers(1, 3),
    st.integers(1, 4),
    st.booleans(),
)
def test_every_item_is_in_one_share_with_its_links(name, counts, per_microbatch, replicas, by_cost):
    graph = graph_of(name)
    batch = batch_of(graph, counts, per_microbatch=per_microbatch)
    shares = share_out(graph, batch, replicas, flat_costs(graph) if by_cost else None)
    assert [share.replica for share in shares] == list(range(replicas))
    found = [item for share in shares for item in share.items]
    assert sorted(item.name for item in found) == sorted(i.name for sample in batch.samples for i in sample.items)
    drawn = {(sample.items[a].name, sample.items[b].name) for sample in batch.samples for a, b in sample.links}
    assert drawn == {(share.items[a].name, share.items[b].name) for share in shares for a, b in share.links}
    assert sum(len(share.microbatches) for share in shares) == len(batch.microbatches)
    drawn_groups = [[i.name for s in group for i in batch.samples[s].items] for group in batch.microbatches]
    for share in shares:
        groups = [[share.items[i].name for i in microbatch] for microbatch in share.microbatches]
        assert all(group in drawn_groups for group in groups)
        assert [i for microbatch in share.microbatches for i in microbatch] == list(range(len(share.items)))
        assert share.normalisers == shares[0].normalisers
        assert set(share.records) == {f"{item.task}/{item.draw}" for item in share.items}


def test_normalisers_count_units_of_the_whole_batch_and_are_never_zero():
    graph = graph_of("encoder")
    batch = batch_of(graph, [1, 2, 0], seed=3)
    units = sum(i.sizes["supervised"] for s in batch.samples for i in s.items if i.module == "language")
    for share in share_out(graph, batch, 2):
        assert share.normalisers == {"main/language": units}
    silent = Batch(
        step=0,
        samples=tuple(
            msgspec.structs.replace(
                s, items=tuple(msgspec.structs.replace(i, sizes=i.sizes | {"supervised": 0}) for i in s.items)
            )
            for s in batch.samples
        ),
        microbatches=batch.microbatches,
    )
    assert single_share(graph, silent).normalisers == {"main/language": 1}


def test_missing_units_are_said():
    graph = graph_of("one")
    batch = batch_of(graph, [0])
    (item,) = batch.samples[0].items
    bare = msgspec.structs.replace(batch.samples[0], items=(msgspec.structs.replace(item, sizes={"tokens": 3}),))
    with pytest.raises(ValueError, match=r"main/0/language/0 does not say.*'supervised' among tokens"):
        single_share(graph, Batch(step=0, samples=(bare,), microbatches=((0,),)))


def test_more_replicas_than_microbatches_leaves_some_empty():
    graph = graph_of("encoder")
    shares = share_out(graph, batch_of(graph, [1, 1]), 4)
    assert [len(share.microbatches) for share in shares] == [1, 1, 0, 0]
    assert cut_parts(graph, placed(graph, shares[0]), shares[3], {}) == ((),) * 4


def test_work_is_balanced_over_replicas():
    graph = graph_of("encoder")
    batch = batch_of(graph, [9, 0, 8, 1, 7, 2, 6, 3], seed=1)
    costs = flat_costs(graph, row_ns={"vision": 5000})
    loads = [
        sum(
            costs.stage(c, [i], [()]).forward_ns
            for c in placed(graph, share).chunks
            for i in share.items
            if i.module == c.module
        )
        for share in share_out(graph, batch, 2, costs)
    ]
    assert max(loads) <= 1.1 * min(loads)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(1, 5), st.booleans())
def test_parts_hold_every_item_of_a_microbatch_once_in_order(counts, at_most, by_cost):
    graph = graph_of("two encoders")
    share = share_of(graph, counts, per_microbatch=2)
    placement = placed(graph, share)
    costs = item_costs(graph, ItemTable(share.items, share.links), flat_costs(graph)) if by_cost else None
    parts = cut_parts(graph, placement, share, {"vision": at_most}, costs)
    for chunk, found in zip(placement.chunks, parts, strict=True):
        for number, microbatch in enumerate(share.microbatches):
            items = [i for i in microbatch if share.items[i].module == chunk.module]
            mine = [part.items for part in found if part.microbatch == number]
            assert [i for part in mine for i in part] == items
            sizes = [len(part) for part in mine]
            if chunk.module == "vision":
                assert len(mine) == -(-len(items) // at_most)
                if not by_cost and sizes:
                    assert max(sizes) <= at_most and max(sizes) - min(sizes) <= 1
            else:
                assert len(mine) == (1 if items else 0)


def test_parts_even_in_cost():
    graph = graph_of("encoder")
    share = share_of(graph, [4])
    costs = [6, 1, 1, 1, 99]
    (parts, *_) = cut_parts(graph, placed(graph, share), share, {"vision": 2}, costs)
    assert [part.items for part in parts] == [(0,), (1, 2, 3)]


def test_a_joint_loss_in_several_parts_is_refused():
    graph = graph_of("one")
    joint = ModelGraph(
        modules=(type(graph.modules[0])(**vars(graph.modules[0]) | {"loss": LossSpec(units="supervised", joint=True)}),)
    )
    share = share_of(joint, [0, 0])
    with pytest.raises(ValueError, match=r"loss of language is joint.*come in 2"):
        cut_parts(joint, placed(joint, share), share, {})
    cut_parts(joint, placed(joint, share), share_of(joint, [0, 0], per_microbatch=2), {})
    with pytest.raises(ValueError, match=r"2 replicas; use 1"):
        share_out(joint, batch_of(joint, [0, 0]), 2)


def test_items_without_a_chunk_are_refused():
    graph = graph_of("encoder")
    share = share_of(graph, [1])
    placement = placed(graph, share)
    language = msgspec.structs.replace(placement, chunks=placement.chunks[2:])
    with pytest.raises(ValueError, match=r"main/0/vision/0 belongs to module vision.*main/language"):
        cut_parts(graph, language, share, {})
