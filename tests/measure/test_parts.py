"""Sizes that costs depend on, and the parts that are measured."""

import pytest
from msgspec.structs import replace

from pipeweaver.data.items import Item
from pipeweaver.measure.parts import Sizes, choose_parts, largest, sizes_of


def item(module, tokens, **sizes):
    return Item(task="main", draw=0, module=module, position=0, sizes={"tokens": tokens, **sizes})


def test_sizes_count_rows_squares_units_and_what_flows_in(graph):
    images = [item("vision", 36, features=9), item("vision", 100, features=25)]
    texts = [item("language", 50, supervised=20), item("language", 7, supervised=0)]
    links = [(images[0], images[1]), ()]
    module = graph.by_name["language"]
    assert sizes_of(graph, module, ("vision",), texts, links) == Sizes(1, 2, 57, 2549, 57, 20, 34, 50 * 34)
    assert sizes_of(graph, module, (), texts, links) == Sizes(1, 2, 57, 2549, 57, 20, 0, 0)
    assert sizes_of(graph, graph.by_name["vision"], (), images, [(), ()]) == Sizes(1, 2, 136, 11296, 136)
    assert sizes_of(graph, module, (), [texts[0]] * 2, [(), ()]).mixed == 0


@pytest.mark.parametrize("name", ["vision", "language"])
def test_parts_span_what_the_data_shows(graph, batches, name):
    parts = choose_parts(graph, graph.by_name[name], batches, 8)
    rows = [sum(i.sizes["tokens"] for i in part.items) for part in parts]
    assert len(parts) == 8 and rows == sorted(rows, reverse=True)
    most = max(
        sum(i.sizes["tokens"] for s in microbatch for i in batch.samples[s].items if i.module == name)
        for batch in batches
        for microbatch in batch.microbatches
    )
    least = min(i.sizes["tokens"] for batch in batches for s in batch.samples for i in s.items if i.module == name)
    assert rows[0] == most
    assert rows[-1] == least
    assert all(len(part.items) == len(part.links) for part in parts)
    assert parts == choose_parts(graph, graph.by_name[name], batches, 8)


def test_a_module_without_items_has_no_parts(graph, batches):
    bare = [
        replace(batch, samples=tuple(replace(s, items=s.items[-1:], links=()) for s in batch.samples))
        for batch in batches
    ]
    assert choose_parts(graph, graph.by_name["vision"], bare, 8) == []
    assert largest(graph, graph.by_name["vision"], bare) == Sizes()
