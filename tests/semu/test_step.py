"""Reuse: whatever changed since the step before, the result is that of computing everything anew, bit for bit."""

from __future__ import annotations

import random

import numpy as np
import pytest
from msgspec.structs import replace

from pipeweaver.data.items import Item, Share
from pipeweaver.policies import POLICIES
from pipeweaver.schedule.compile import Emulated, compile_plan
from pipeweaver.schedule.ir import Draft
from pipeweaver.schedule.stages import StepStages, orders_of
from pipeweaver.semu.costs import SemuCosts
from pipeweaver.semu.machine import load_machine
from pipeweaver.semu.step import StepEmulator
from tests.semu.layers import WIDTHS, image, text, tiny_vlm

GRAPH = tiny_vlm(2)


def costs() -> SemuCosts:
    return SemuCosts(GRAPH, load_machine("H800"), widths=WIDTHS, workers=2)


def share(draw: random.Random, microbatches: int = 3) -> Share:
    items: list[Item] = []
    links: list[tuple[int, int]] = []
    groups = []
    for number in range(microbatches):
        images = [
            replace(image(number, 2 * draw.randint(1, 4), 2 * draw.randint(1, 4)), position=i)
            for i in range(draw.randint(0, 3))
        ]
        first = len(items)
        items += [*images, text(number, draw.randint(40, 90))]
        links += [(i, len(items) - 1) for i in range(first, len(items) - 1)]
        groups.append(tuple(range(first, len(items))))
    records = {f"main/{number}": number for number in range(microbatches)}
    return Share(
        step=0,
        replica=0,
        num_replicas=1,
        items=tuple(items),
        links=tuple(links),
        microbatches=tuple(groups),
        records=records,
        normalisers={"language": 100},
    )


def draft(one: Share, policy: str = "interleaved-1f1b") -> Draft:
    chosen = POLICIES[policy]
    placement = chosen.place(GRAPH, 2, costs(), [one], dtype="bfloat16")
    return chosen.plan(GRAPH, placement, one, costs(), budget_bytes=None, seed=0, rounds=0, dtype="bfloat16")


def equal(a: Emulated, b: Emulated) -> bool:
    same = all(np.array_equal(x, y) for x, y in zip(a.timeline, b.timeline, strict=True))
    return same and a[:3] == b[:3]


def other_sizes(draw: random.Random, one: Share) -> Share:
    """The same items, some images of other sizes."""
    items = [
        replace(item, sizes=image(0, 2 * draw.randint(1, 4), 2 * draw.randint(1, 4)).sizes)
        if item.module == "vision" and draw.random() < 0.3
        else item
        for item in one.items
    ]
    return replace(one, items=tuple(items))


@pytest.mark.parametrize("policy", ["interleaved-1f1b", "gpipe"])
def test_emulating_again_is_emulating_anew(policy: str) -> None:
    draw = random.Random(policy)
    one = share(draw)
    made = draft(one, policy)
    again = StepEmulator(GRAPH, made.placement, costs(), dtype="bfloat16")
    anew = StepEmulator(GRAPH, made.placement, costs(), dtype="bfloat16", reuse=False)
    for _ in range(3):
        step = StepStages(GRAPH, made.placement, one, made.parts, costs(), dtype="bfloat16")
        orders = orders_of(step, made)
        found = again.emulate(one, made.parts, orders)
        assert equal(found, anew.emulate(one, made.parts, orders))
        prediction = compile_plan(GRAPH, one, made, costs(), dtype="bfloat16").prediction
        assert prediction is not None
        assert (found.step_ns, found.makespan_ns, found.peak_bytes) == (
            prediction.step_ns,
            prediction.makespan_ns,
            prediction.peak_bytes,
        )
        one = other_sizes(draw, one)
    assert again.resized > 0
    assert anew.resized == 0


def test_a_step_made_from_the_one_before_is_that_step() -> None:
    draw = random.Random(5)
    one = share(draw)
    made = draft(one)
    again, known = StepEmulator(GRAPH, made.placement, costs(), dtype="bfloat16"), costs()
    for _ in range(30):
        found = again.stages(one, made.parts)
        fresh = StepStages(GRAPH, made.placement, one, made.parts, known, dtype="bfloat16")
        assert found.stage_costs == fresh.stage_costs
        for name in ("edge_bytes", "lag_ns", "output_bytes", "is_whole", "grad"):
            assert np.array_equal(getattr(found, name), getattr(fresh, name)), name
        for field, column in fresh.costs._asdict().items():
            assert np.array_equal(getattr(found.costs, field), column), field
        assert np.array_equal(found.edges.num_rows, fresh.edges.num_rows)
        one = other_sizes(draw, one)
    assert again.resized == 29


def test_another_order_keeps_the_stages() -> None:
    one = share(random.Random(1))
    first, second = draft(one, "1f1b"), draft(one, "gpipe")
    again = StepEmulator(GRAPH, first.placement, costs(), dtype="bfloat16")
    for made in (first, replace(first, order=second.order)):
        step = again.stages(one, first.parts)
        assert step is again.stages(one, first.parts)
        anew = StepEmulator(GRAPH, first.placement, costs(), dtype="bfloat16", reuse=False)
        orders = orders_of(step, made)
        assert equal(again.emulate(one, first.parts, orders), anew.emulate(one, first.parts, orders))


def test_costs_without_reuse_are_the_same() -> None:
    kept = costs()
    one = share(random.Random(2))
    made = draft(one)
    for _ in range(2):
        reused = StepStages(GRAPH, made.placement, one, made.parts, kept, dtype="bfloat16")
        fresh = StepStages(GRAPH, made.placement, one, made.parts, kept.anew(), dtype="bfloat16")
        assert reused.stage_costs == fresh.stage_costs
