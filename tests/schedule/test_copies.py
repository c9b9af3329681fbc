"""Offloading in plans: copies beside compute, memory in between, and plans that get it wrong."""

from __future__ import annotations

import random

import msgspec
import pytest
from cases import share, two_workers, vision_language

from pipeweaver.costs import FlatCosts
from pipeweaver.schedule.compile import compile_plan
from pipeweaver.schedule.convert import flatten, records
from pipeweaver.schedule.emulate import emulate
from pipeweaver.schedule.ir import (
    Allocation,
    Buffer,
    Chunk,
    Compute,
    Draft,
    Free,
    Offload,
    Part,
    Placement,
    Reload,
    Settle,
    Stage,
)
from pipeweaver.schedule.memory import held_bytes, peak_bytes
from pipeweaver.schedule.verify import PlanError, verify

GRAPH = vision_language()
COSTS = FlatCosts(layers={"vision": 4, "language": 4})


def offloading(draft: Draft, choose=lambda chunk, part: True) -> Draft:
    strategies = []
    for number, (chunk, parts) in enumerate(zip(draft.placement.chunks, draft.parts, strict=True)):
        layers = len(list(GRAPH.by_name[chunk.module].range(chunk.start, chunk.stop)))
        strategies.append(tuple(("offload",) * layers if choose(number, p) else () for p in range(len(parts))))
    return msgspec.structs.replace(draft, strategies=tuple(strategies))


def one_worker(order: str, microbatches: int):
    """The language module alone on one worker, its parts in an order such as "F0 F1 B1 B0"."""
    one = share([0] * microbatches)
    chunk = Chunk(task="main", module="language", start=0, stop=4, worker=0)
    empty = Chunk(task="main", module="vision", start=0, stop=4, worker=0)
    draft = Draft(
        placement=Placement(workers=1, chunks=(empty, chunk)),
        parts=((), tuple(Part(items=(i,), microbatch=i) for i in range(microbatches))),
        order=(tuple(Stage(1, int(stage[1:]), stage[0]) for stage in order.split()),),
    )
    return one, offloading(draft)


def starts_of(plan, worker=0):
    spans = zip(plan.actions[worker], plan.prediction.spans[worker], strict=True)
    return {str(action.stage): span.start_ns for action, span in spans if isinstance(action, Compute)}


# A part has 10 rows: its forward takes 4 layers x 10 us, its backward twice that; 2560 bytes travel.
FORWARD, BACKWARD, NUM_BYTES = 40_000, 80_000, 2_560


@pytest.mark.parametrize("copy_us", [0, 10, 40, 100, 300])
def test_copies_run_beside_compute_and_the_backward_waits_for_them(copy_us):
    # bytes_per_us = 2560 / copy_us: a part's copy takes copy_us.
    costs = FlatCosts(layers={"vision": 4, "language": 4}, bytes_per_us=NUM_BYTES // copy_us if copy_us else 10**9)
    copy_ns = 4 * (NUM_BYTES // 4 * 1_000 // costs.bytes_per_us)
    one, draft = one_worker("F0 F1 F2 B2 B1 B0", 3)
    plan = compile_plan(GRAPH, one, draft, costs)
    verify([plan], GRAPH, [one])
    found = starts_of(plan)
    # To the host one after the other, from the end of each forward on.
    away = 0
    on_host = {}
    for part in range(3):
        away = max(away, (part + 1) * FORWARD) + copy_ns
        on_host[part] = away
    # The last forward's tensors have to go and come back at once.
    assert found["1F2"] == 2 * FORWARD
    assert found["1B2"] == on_host[2] + copy_ns
    # The others return while backwards run, or as soon as the way back is free.
    back = on_host[2] + copy_ns
    clock = found["1B2"] + BACKWARD
    for part in (1, 0):
        latest = max(clock, back + copy_ns, on_host[part] + copy_ns)
        earliest = max(clock, on_host[part] + copy_ns)
        assert earliest <= found[f"1B{part}"] <= max(latest, clock + copy_ns)
        if copy_ns <= BACKWARD:
            assert found[f"1B{part}"] == clock, "a copy that fits beside a backward costs nothing"
        clock = found[f"1B{part}"] + BACKWARD


def test_what_is_away_takes_no_memory():
    one, draft = one_worker("F0 F1 F2 F3 B3 B2 B1 B0", 4)
    costs = FlatCosts(layers={"vision": 4, "language": 4}, bytes_per_us=NUM_BYTES)
    kept = compile_plan(GRAPH, one, msgspec.structs.replace(draft, strategies=()), costs)
    away = compile_plan(GRAPH, one, draft, costs)
    static = kept.static_bytes[0]
    assert kept.prediction.peak_bytes == (static + 4 * NUM_BYTES,)
    # Of two parts at most there is something on the device: one leaves, or comes, while another is at work.
    assert away.prediction.peak_bytes == (static + 2 * NUM_BYTES,)
    assert away.prediction.peak_bytes == peak_bytes(away)
    after, _ = held_bytes(away, 0)
    assert after[-1] == static
    assert records(flatten(away)) == away


@pytest.mark.parametrize("seed", range(6))
def test_any_choice_of_what_is_offloaded_is_sound(seed):
    draw = random.Random(seed)
    one = share([3, 0, 1, 2])
    draft = offloading(two_workers(one), lambda chunk, part: draw.random() < 0.5)
    costs = FlatCosts(layers={"vision": 4, "language": 4}, bytes_per_us=draw.choice([1, 10, 100, 1000]))
    plan = compile_plan(GRAPH, one, draft, costs)
    verify([plan], GRAPH, [one], budget_bytes=max(plan.prediction.peak_bytes))
    chosen = sum(1 for of in draft.strategies for strategies in of if strategies)
    for kind, times in ((Offload, 1), (Reload, 1), (Settle, 2)):
        assert sum(isinstance(action, kind) for of in plan.actions for action in of) == times * chosen


def test_without_backward_nothing_is_offloaded():
    one = share([1, 2])
    plan = compile_plan(GRAPH, one, offloading(two_workers(one, backward=False)), COSTS)
    verify([plan], GRAPH, [one])
    assert not any(isinstance(action, Offload) for of in plan.actions for action in of)


def place(actions, kind, number=0):
    return [i for i, action in enumerate(actions) if isinstance(action, kind)][number]


def without(kind, number=0):
    return lambda actions: [a for i, a in enumerate(actions) if i != place(actions, kind, number)]


def moved(kind, number, target):
    def change(actions):
        i = place(actions, kind, number)
        rest = [*actions[:i], *actions[i + 1 :]]
        at = next(n for n, a in enumerate(rest) if isinstance(a, Compute) and str(a.stage) == target)
        return [*rest[: at + 1], actions[i], *rest[at + 1 :]]

    return change


def resized(kind, num_bytes):
    def change(actions):
        i = place(actions, kind)
        buffer = actions[i].allocations[0].buffer
        changed = msgspec.structs.replace(actions[i], allocations=(Allocation(buffer, num_bytes),))
        return [*actions[:i], changed, *actions[i + 1 :]]

    return change


def freed_after(buffer, target):
    """The buffer is freed right after a stage, and no more where it was."""

    def change(actions):
        rest = []
        for action in actions:
            if isinstance(action, Free) and buffer in action.buffers:
                action = Free(buffers=tuple(b for b in action.buffers if b != buffer))
            rest.append(action)
            if isinstance(action, Compute) and str(action.stage) == target:
                rest.append(Free(buffers=(buffer,)))
        return rest

    return change


def no_strategy(actions):
    return [
        msgspec.structs.replace(a, strategies=()) if isinstance(a, Compute) and str(a.stage) == "1F0" else a
        for a in actions
    ]


def nothing_leaves(actions):
    def kept(action):
        if not isinstance(action, Compute) or str(action.stage) != "1F0":
            return action
        return msgspec.structs.replace(action, allocations=action.allocations[:1])

    return [kept(action) for action in actions]


BROKEN = {
    "copy out missing": (without(Offload), "frees leaving 1.0 before it is used|copy that has not begun"),
    "copy back missing": (without(Reload), "waits for a copy that has not begun"),
    "copy out not waited for": (without(Settle, 0), "not on the host|before it is used"),
    "copy back not waited for": (without(Settle, 3), "runs before what was offloaded is back"),
    "copy out before the forward": (lambda a: [a[place(a, Offload)], *without(Offload)(a)], "not there to be copied"),
    "copied out twice": (
        lambda a: [*a[: place(a, Settle)], Offload(chunk=1, part=0), *a[place(a, Settle) :]],
        "not there to be copied",
    ),
    "copy back after its backward": (moved(Reload, 1, "1B0"), "waits for a copy that has not begun"),
    "copy of another size": (resized(Offload, 1), "must allocate exactly what it copies"),
    "copy back of another size": (resized(Reload, 1), "must allocate exactly what it copies"),
    "copy of nothing": (lambda a: [Offload(chunk=1, part=9), *a], "does not exist"),
    "left early": (freed_after(Buffer("leaving", 1, 0), "1F0"), "frees leaving 1.0 before it is used"),
    "host freed early": (freed_after(Buffer("host", 1, 0), "1F1"), "frees host 1.0 before it is used"),
    "returned kept": (
        lambda a: [
            Free(buffers=tuple(b for b in x.buffers if b.kind != "returned")) if isinstance(x, Free) else x for x in a
        ],
        "never frees returned 1.0",
    ),
    "no layer is offloaded": (no_strategy, "if, and only if, a layer is offloaded"),
    "nothing leaves": (nothing_leaves, "if, and only if, a layer is offloaded"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_copies_are_rejected(name):
    change, message = BROKEN[name]
    one, draft = one_worker("F0 F1 B1 B0", 2)
    plan = compile_plan(GRAPH, one, draft, COSTS)
    verify([plan], GRAPH, [one])
    broken = msgspec.structs.replace(plan, actions=(tuple(change(list(plan.actions[0]))),))
    with pytest.raises(PlanError, match=message) as caught:
        verify([broken], GRAPH, [one])
    assert caught.value.rule == "actions"


def test_random_mutations_never_pass_unless_harmless():
    one = share([3, 0, 1])
    draw = random.Random(1)
    plan = compile_plan(GRAPH, one, offloading(two_workers(one)), COSTS)
    rejected = 0
    for _ in range(300):
        worker = draw.randrange(2)
        actions = list(plan.actions[worker])
        copies = [i for i, a in enumerate(actions) if isinstance(a, Offload | Reload | Settle)]
        i, j = draw.choice(copies), draw.randrange(len(actions))
        match draw.choice(["drop", "repeat", "move"]):
            case "drop":
                del actions[i]
            case "repeat":
                actions.insert(j, actions[i])
            case "move":
                actions.insert(j, actions.pop(i))
        mutated = tuple(tuple(actions) if w == worker else plan.actions[w] for w in range(2))
        try:
            verify([msgspec.structs.replace(plan, actions=mutated)], GRAPH, [one])
        except PlanError:
            rejected += 1
        else:
            emulate([msgspec.structs.replace(plan, actions=mutated)])
    assert rejected > 200
