"""Samples change replicas: the same set, within the limits as drawn, never less even than before."""

from collections import Counter

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from planner_cases import GRAPHS, batch_of, flat_costs, graph_of

from pipeweaver.data.items import Batch, Item, Sample
from pipeweaver.data.table import ItemTable
from pipeweaver.planner.assign import share_out
from pipeweaver.planner.exchange import exchanged, sample_costs


def texts(sizes, per_microbatch, task="main"):
    """A batch of texts of so many tokens."""
    samples = tuple(
        Sample(
            task=task, draw=i, record=i,
            items=(Item(task=task, draw=i, module="language", position=0, sizes={"tokens": n, "supervised": 1}),),
        )
        for i, n in enumerate(sizes)
    )  # fmt: skip
    bounds = range(0, len(sizes), per_microbatch)
    return Batch(
        step=0,
        samples=samples,
        microbatches=tuple(tuple(range(i, min(i + per_microbatch, len(sizes)))) for i in bounds),
    )


def loads(groups, cost):
    return [sum(cost[i] for members in bins for i in members) for bins in groups]


def test_the_example_of_the_docstring():
    batch = texts([9, 4, 5, 2, 8, 2, 5, 1], 2)
    cost = sample_costs(batch, None)
    found = exchanged(batch, [[[0, 1], [2, 3]], [[4, 5], [6, 7]]], cost)
    assert loads(found, cost) == [18, 18]
    assert [len(bins) for bins in found] == [2, 2]


def test_what_has_no_room_does_not_move():
    """The exchange that evens out the work needs a microbatch of 6 and 5 tokens, where none drawn has more than 10."""
    start, cost = [[[0], [1, 2]], [[3]]], [0, 9, 1, 4]
    for last, found in ((5, start), (4, [[[0], [2, 3]], [[1]]])):
        batch = msgspec.structs.replace(texts([10, 4, 6, last], 2), microbatches=((0,), (1, 2), (3,)))
        assert exchanged(batch, start, cost) == found


@given(
    st.sampled_from(GRAPHS),
    st.lists(st.integers(0, 5), min_size=2, max_size=24),
    st.integers(1, 4),
    st.integers(2, 5),
    st.integers(0, 99),
)
def test_same_samples_within_what_was_drawn_and_never_less_even(name, counts, per_microbatch, replicas, seed):
    graph = graph_of(name)
    batch = batch_of(graph, counts, seed=seed, per_microbatch=per_microbatch)
    costs = flat_costs(graph)
    cost = sample_costs(batch, costs)
    before = share_out(graph, batch, replicas, costs)
    after = share_out(graph, batch, replicas, costs, exchange=True)

    def load(share):
        return sum(cost[int(name.rpartition("/")[2])] for name in share.records)

    def names(shares):
        return Counter(item.name for share in shares for item in share.items)

    assert names(after) == names(before) and max(names(after).values()) == 1
    assert max(map(load, after)) <= max(map(load, before))
    assert sum(len(s.microbatches) for s in after) == len(batch.microbatches)
    for module in graph.by_name:
        for what in (lambda item: item.sizes["tokens"], lambda item: 1):

            def most(shares, what=what, module=module):
                return max(
                    sum(what(share.items[i]) for i in group if share.items[i].module == module)
                    for share in shares
                    for group in share.microbatches
                )

            assert most(after) <= most(before)
    for share in after:
        assert all(share.microbatches)
        drawn = {
            (sample.items[a].name, sample.items[b].name)
            for sample in batch.samples
            for a, b in sample.links
            if f"main/{sample.draw}" in share.records
        }
        assert {(share.items[a].name, share.items[b].name) for a, b in share.links} == drawn


def test_samples_stay_in_microbatches_of_their_task():
    one, other = texts([9, 1, 1, 1], 2, "one"), texts([1, 1, 1, 1], 2, "other")
    batch = Batch(
        step=0,
        samples=one.samples + other.samples,
        microbatches=(*one.microbatches, *(tuple(4 + i for i in group) for group in other.microbatches)),
    )
    cost = [10, 1, 4, 1, 1, 1, 1, 1]
    found = exchanged(batch, [[[0, 1], [2, 3]], [[4, 5], [6, 7]]], cost)
    assert found == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]  # the other replica has no microbatch of the first task


def test_a_step_of_many_replicas_asks_for_few_costs():
    graph = graph_of("encoder")
    batch = batch_of(graph, [i % 5 for i in range(128 * 32)], per_microbatch=1)
    asked = Counter()
    costs = flat_costs(graph)

    class Counted:
        def useful_ns(self, *arguments):
            asked["useful"] += 1
            return costs.useful_ns(*arguments)

    cost = sample_costs(batch, Counted())
    assert asked["useful"] < 1000  # of 12 000 items
    exact = [
        sum(costs.useful_ns(item.module, ItemTable([item], ()), [0]) for item in sample.items)
        for sample in batch.samples
    ]
    assert cost == exact  # flat costs are in proportion to tokens
    shares = share_out(graph, batch, 128, costs, exchange=True)
    sums = [sum(cost[int(name.rpartition("/")[2])] for name in share.records) for share in shares]
    assert max(sums) * 128 <= 1.002 * sum(sums)
