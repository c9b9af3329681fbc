"""Sums over many parts at once are those that a loop over each part's items finds."""

from __future__ import annotations

import random
from collections import Counter
from itertools import groupby

import pytest

from pipeweaver.costs import one_by_one
from pipeweaver.data.items import Item
from pipeweaver.data.table import ItemTable
from pipeweaver.schedule.ir import Chunk
from pipeweaver.semu.costs import SemuCosts
from pipeweaver.semu.machine import load_machine
from pipeweaver.semu.symbolic import Fit, measure
from tests.semu.layers import WIDTHS, image, text, tiny_vlm


def summed(items: list[Item], links: list[list[Item]], *, by_length: bool) -> dict[str, int]:
    """The definition, item by item."""
    sums = Counter({"parts": 1, "items": len(items)})
    for item, sources in zip(items, links, strict=True):
        sums["squares"] += item.sizes["tokens"] ** 2
        sums.update(item.sizes)
        for source in sources:
            sums.update({f"{source.module}.{name}": size for name, size in source.sizes.items()})
            sums[f"{source.module}.cross"] += item.sizes["tokens"] * source.sizes["tokens"]
    if by_length and items:
        lengths = [(item.sizes["tokens"], sum(s.sizes["tokens"] for s in of)) for item, of in zip(items, links)]  # noqa: B905
        sums["runs"] = len(list(groupby(length for length, _ in lengths)))
        sums["linked.runs"] = len(list(groupby(lengths))) if any(links) else 0
    return {name: total for name, total in sums.items() if total}


def drawn(draw: random.Random) -> tuple[ItemTable, list[list[int]]]:
    """Images, texts with some of them, and texts and images in parts, some empty."""
    images = [image(i, 2 * draw.randint(1, 2), 2 * draw.randint(1, 2)) for i in range(draw.randint(0, 6))]
    texts = [text(i, draw.choice((7, 9, 30))) for i in range(draw.randint(1, 6))]
    links = [(i, len(images) + draw.randrange(len(texts))) for i in range(len(images))]
    draw.shuffle(links)
    parts: list[list[int]] = [[] for _ in range(6)]
    for i in range(len(images)):
        parts[draw.randrange(3)].append(i)
    for i in range(len(texts)):
        parts[3 + draw.randrange(3)].append(len(images) + i)
    return ItemTable([*images, *texts], links), parts


@pytest.mark.parametrize("by_length", [False, True])
@pytest.mark.parametrize("copies", [1, 3])
def test_sums_of_many_parts_are_those_of_each(by_length: bool, copies: int) -> None:
    for seed in range(40):
        table, parts = drawn(random.Random(seed))
        found = measure(table, parts, copies, by_length=by_length)
        for part, sums in zip(parts, found, strict=True):
            items, links = [table.items[i] for i in part], [list(table.sources[i]) for i in part]
            expected = summed(items * copies, links * copies, by_length=by_length)
            expected["parts"] = 1
            assert dict(zip(sums.family.names, sums.values, strict=True)) == expected
            lengths = [(item.sizes["tokens"], sum(s.sizes["tokens"] for s in of)) for item, of in zip(items, links)]  # noqa: B905
            assert sums.family.alike == (len({length for length, _ in lengths}) <= 1, len(set(lengths)) <= 1)


@pytest.mark.parametrize("machine", ["H800", "cpu"])
def test_stages_asked_together_cost_what_they_cost_alone(machine: str) -> None:
    graph = tiny_vlm(2)

    def costs() -> SemuCosts:
        return SemuCosts(
            graph, load_machine(machine), dtype="float32" if machine == "cpu" else "bfloat16", widths=WIDTHS
        )

    together = costs()
    for seed in range(6):
        table, parts = drawn(random.Random(seed))
        asked = [
            (Chunk(task="main", module=module, start=start, stop=start + 1, worker=0), part)
            for module, of in (("vision", parts[:3]), ("language", parts[3:]))
            for start in (0, 1)
            for part in of
        ]
        assert together.stages(table, asked) == one_by_one(costs().stage, table, asked)
        assert together.strategies_of(table, asked) == one_by_one(costs().strategies, table, asked)


def test_what_is_needed_of_the_sums_tells_values_apart() -> None:
    """Values are 2 * rows + 1; features are a quarter of the image rows, on which nothing depends. Parts 1, rows, image
    rows, features."""
    fit = Fit()
    assert fit.needed((1, 4, 8, 2)) is None
    for sums in ((1, 4, 8, 2), (1, 6, 8, 2), (1, 4, 12, 3)):
        fit.add(sums, [2 * sums[1] + 1])
    assert fit.needed((1, 50, 16, 4)) == fit.needed((1, 50, 40, 10)) == ((0, 1), (1, 50))
    assert fit.needed((1, 51, 16, 4)) == ((0, 1), (1, 51))
    assert fit.needed((1, 50, 16, 5)) is None  # outside of what three samples determine
    fit.add((1, 4, 8, 3), [10])  # features matter after all
    assert fit.needed((1, 50, 16, 4)) != fit.needed((1, 50, 40, 10))


def test_text_layers_cost_the_same_whatever_the_images_are() -> None:
    """Behind the layer that takes in the images, nothing is costed anew when they change; what comes out is equal."""
    costs = SemuCosts(tiny_vlm(), load_machine("H800"), widths=WIDTHS)
    chunk = Chunk(task="main", module="language", start=1, stop=2, worker=0)
    sides = [(2, 2), (4, 2), (2, 4), (4, 4), (6, 2), (6, 4), (8, 2), (8, 4)]
    found, known = [], []
    for i, side in enumerate(sides):
        found.append(costs.stage(chunk, [text(9, 30)], [[image(i, *side)]]))
        known.append(len(costs._known))
    assert len(set(found)) == 1
    assert known[-1] == known[len(sides) // 2]


def test_parts_that_are_known_stay_known_where_another_tells_more() -> None:
    """Each call has all parts of the ones before and one more, whose trace may change what is looked up by."""
    graph, machine, draw = tiny_vlm(), load_machine("H800"), random.Random(1)
    costs, anew = (SemuCosts(graph, machine, widths=WIDTHS, reuse=reuse) for reuse in (True, False))
    chunk = Chunk(task="main", module="vision", start=0, stop=1, worker=0)
    images = [image(i, 2 * draw.randint(1, 9), 2 * draw.randint(1, 9)) for i in range(30)]
    table = ItemTable(images, [])
    parts: list[list[int]] = []
    while len(parts) < 12:
        parts.append(sorted(draw.sample(range(30), draw.randint(1, 3))))
        asked = [(chunk, part) for part in parts]
        assert costs.stages(table, asked) == anew.stages(table, asked)
