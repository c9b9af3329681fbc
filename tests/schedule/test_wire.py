"""Plans travel as bytes without loss, and whatever else comes in their place is refused, or is no worse than records."""

from __future__ import annotations

import random
from functools import cache

import msgspec
import numpy as np
import pytest
from cases import share, two_workers, vision_language

from pipeweaver.costs import FlatCosts
from pipeweaver.schedule.compile import compile_flat
from pipeweaver.schedule.convert import flatten, records
from pipeweaver.schedule.flat import FlatActions, FlatEdges, FlatPlan, FlatStages, FlatTransfers
from pipeweaver.schedule.ir import Stage
from pipeweaver.schedule.stages import StepStages
from pipeweaver.schedule.verify import verify, verify_flat
from pipeweaver.schedule.wire import pack, unpack

COSTS = FlatCosts(layers={"vision": 4, "language": 4}, bytes_per_us=100)
ARRAYS = [
    f"{name}.{field}"
    for name, group in (
        ("order", FlatStages),
        ("edges", FlatEdges),
        ("transfers", FlatTransfers),
        ("actions", FlatActions),
        ("prediction", ("start_ns", "end_ns", "moved_ns", "arrived_ns")),
    )
    for field in getattr(group, "_fields", group)
]
INSTANCES = range(6)


@cache
def instance(seed):
    """(plan, model, share) of random documents: with and without a backward, offloaded, recomputed and split stages."""
    draw = random.Random(seed)
    graph = vision_language(frozen=seed == 1)
    one = share([draw.randrange(4) for _ in range(draw.randint(1, 4))])
    draft = two_workers(one, backward=seed != 2, frozen=seed == 1)
    if seed >= 3:
        chunks = zip(draft.placement.chunks, draft.parts, strict=True)
        layers = [
            (len(list(graph.by_name[chunk.module].range(chunk.start, chunk.stop))), parts) for chunk, parts in chunks
        ]
        strategies = tuple(
            tuple((draw.choice(("keep", "recompute", "offload")),) * count for _ in parts) for count, parts in layers
        )
        draft = msgspec.structs.replace(draft, strategies=strategies)
    if seed == 4:
        halves = {"F": "F", "B": "IW"}
        order = tuple(
            tuple(Stage(s.chunk, s.part, phase) for s in stages for phase in halves[s.phase]) for stages in draft.order
        )
        draft = msgspec.structs.replace(draft, order=order)
    step = StepStages(graph, draft.placement, one, draft.parts, COSTS, dtype="float32", forward_only=draft.forward_only)
    return compile_flat(step, draft), graph, one


@pytest.mark.parametrize("seed", INSTANCES)
def test_nothing_is_lost_on_the_way(seed):
    plan, graph, one = instance(seed)
    bare = flatten(msgspec.structs.replace(records(plan), prediction=None))
    found, without = unpack(pack([plan, bare]))
    assert records(found) == records(plan) and without.prediction is None
    verify_flat([found], graph, [one])
    # What chunks of a module share, they share again.
    assert [[a is b for b in plan.head.parts] for a in plan.head.parts] == [
        [a is b for b in found.head.parts] for a in found.head.parts
    ]
    assert all(values.flags.writeable and values.flags.c_contiguous for values in found.actions)


def test_numbers_of_any_size_come_back():
    plan, _, _ = instance(0)
    for value in (0, -1, 127, 128, -129, 2**31, -(2**31) - 1, 2**63 - 1, -(2**63)):
        duration_ns = plan.transfers.duration_ns.copy()
        duration_ns[0] = value
        sent = FlatPlan(**{**vars(plan), "transfers": plan.transfers._replace(duration_ns=duration_ns)})
        (found,) = unpack(pack([sent]))
        assert found.transfers.duration_ns[0] == value
    assert len(pack([plan])) * 2 < len(msgspec.msgpack.encode(records(plan)))


def corrupted(content, number, change):
    """A packed plan with one of its arrays changed."""
    (fields,) = msgspec.msgpack.decode(content)
    width, values = fields[6][number]
    fields[6][number] = changed = change(np.frombuffer(values, f"<i{width}").astype(np.int64))
    fields[6][number] = [8, changed.astype("<i8").tobytes()]
    return msgspec.msgpack.encode([fields])


def changes(draw):
    """Ways to spoil an array."""

    def put(value):
        def change(values):
            if len(values):
                values[draw.randrange(len(values))] = value
            return values

        return change

    def exchange(values):
        if len(values):
            a, b = draw.randrange(len(values)), draw.randrange(len(values))
            values[[a, b]] = values[[b, a]]
        return values

    yield from map(put, (-1, 0, 1, 2, 5, 100, 2**31, 2**62, 2**63 - 1, -(2**63)))
    yield exchange
    yield lambda values: values[:-1]
    yield lambda values: np.append(values, 0)
    yield lambda values: values[::-1]
    yield lambda values: values[:0]
    yield lambda values: values + 1


def outcome(prove):
    """None if nothing is raised, else the words. Nothing is looked up where there is nothing: no IndexError."""
    try:
        prove()
    except (ValueError, OverflowError) as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("seed", INSTANCES)
@pytest.mark.parametrize("number", range(len(ARRAYS)), ids=ARRAYS)
def test_a_changed_array_is_refused_or_no_worse_than_records(seed, number):
    """What gets through is as if it had come as records: the same ones come of it again, and the verifier says the same."""
    plan, graph, one = instance(seed)
    content = pack([plan])
    for change in changes(random.Random(number)):
        sent = corrupted(content, number, change)
        try:
            (found,) = unpack(sent)
        except ValueError as error:
            assert str(error).startswith("not plans: ")
            continue
        made = records(found)
        again = flatten(made)
        assert records(again) == made
        for group in ("order", "edges", "transfers", "actions", "prediction"):
            for field, ours, theirs in zip(
                getattr(found, group)._fields, getattr(found, group), getattr(again, group), strict=True
            ):
                if field not in ("output", "input", "dtype", "detail"):  # these index tables, which may differ
                    np.testing.assert_array_equal(ours, theirs)
        assert outcome(lambda: verify_flat([found], graph, [one])) == outcome(lambda: verify([made], graph, [one]))  # noqa: B023


def test_a_changed_array_of_one_replica_is_no_worse_than_records_among_all():
    graph = vision_language()
    shares = [share([2, 0, 3], replica=0, num_replicas=2), share([1, 2], replica=1, num_replicas=2)]
    # Documents are numbered through all replicas, and both divide by the same.
    moved = [msgspec.structs.replace(item, draw=item.draw + 3) for item in shares[1].items]
    records_of = {f"main/{draw + 3}": draw for draw in range(2)}
    shares[1] = msgspec.structs.replace(shares[1], items=tuple(moved), records=records_of)
    shares = [msgspec.structs.replace(one, normalisers={"main/language": 25}) for one in shares]
    plans = []
    for one in shares:
        draft = two_workers(one)
        step = StepStages(graph, draft.placement, one, draft.parts, COSTS, dtype="float32", forward_only=False)
        plans.append(compile_flat(step, draft))
    verify_flat(unpack(pack(plans)), graph, shares)
    content, draw, proven = pack(plans[1:]), random.Random(0), []
    for number in range(len(ARRAYS)):
        for change in changes(draw):
            try:
                found = unpack(corrupted(content, number, change))
            except ValueError:
                continue
            ours = outcome(lambda: verify_flat([plans[0], *found], graph, shares))  # noqa: B023
            theirs = outcome(lambda: verify([records(plans[0]), *map(records, found)], graph, shares))  # noqa: B023
            assert ours == theirs
            proven.append(ours)
    assert {words and words.split(": ")[1] for words in proven} >= {None, "stages", "edges", "transfers", "actions"}


@pytest.mark.parametrize("seed", INSTANCES)
def test_flipped_bits_are_refused_or_no_worse_than_records(seed):
    plan, graph, one = instance(seed)
    content, draw, refused = pack([plan]), random.Random(seed), 0
    for _ in range(300):
        sent = bytearray(content)
        for _ in range(draw.choice((1, 1, 2, 8))):
            sent[draw.randrange(len(sent))] ^= 1 << draw.randrange(8)
        try:
            (found,) = unpack(bytes(sent))
        except ValueError:
            refused += 1
            continue
        if outcome(lambda: verify_flat([found], graph, [one])) is None:  # noqa: B023
            assert verify([records(found)], graph, [one])
    assert refused > 50


@pytest.mark.parametrize("seed", INSTANCES)
def test_what_is_cut_off_is_refused(seed):
    content = pack([instance(seed)[0]])
    for stop in range(0, len(content), 1 + len(content) // 200):
        with pytest.raises(ValueError, match="not plans"):
            unpack(content[:stop])


def test_what_only_looks_like_a_plan_is_refused():
    plan, _, _ = instance(0)

    def sent(place, value):
        (fields,) = msgspec.msgpack.decode(pack([plan]))
        fields[place] = value
        return msgspec.msgpack.encode([fields])

    (head, *_, arrays, _) = msgspec.msgpack.decode(pack([plan]))[0]
    for content, words in {
        b"\xc1": "MessagePack",
        msgspec.msgpack.encode([records(plan)]): "Expected `array`",
        sent(0, head | {"order": [[[0, 0, "F"]]]}): "kept beside the head",
        sent(0, head | {"static_bytes": [1]}): "memory of 1 workers, not 2",
        sent(0, head | {"placement": head["placement"] | {"workers": 10**15}}): "not cut into",
        sent(0, head | {"placement": head["placement"] | {"workers": -1}}): "not cut into",
        sent(2, [99] * 6): "chunks of parts",
        sent(2, [-1] * 6): "chunks of parts",
        sent(3, ["x"]): "name",
        sent(4, []): "load",
        sent(5, []): "strategy",
        sent(6, arrays[:-1]): "arrays, not",
        sent(6, [[3, b"abc"], *arrays[1:]]): "Invalid enum value 3",
        sent(6, [[8, b"abc"], *arrays[1:]]): "3 bytes for integers of 8",
        sent(7, None): "arrays, not",
        b"\x91" * 100_000: "not plans",
    }.items():
        with pytest.raises(ValueError, match=words):
            unpack(content)


def test_what_a_kind_of_action_has_not_is_refused():
    """It would be in none of its records: what is proven would not be what runs."""
    plan, _, _ = instance(3)
    content = pack([plan])
    kinds = plan.actions.kind
    for field in ("first", "second", "phase", "detail", "duration_ns", "workspace_bytes"):
        number = ARRAYS.index(f"actions.{field}")
        refused = 0
        for kind in np.unique(kinds).tolist():
            action = int(np.nonzero(kinds == kind)[0][0])

            def change(values, action=action):
                values[action] = 1
                return values

            try:
                (found,) = unpack(corrupted(content, number, change))
            except ValueError:
                refused += 1
            else:
                assert getattr(flatten(records(found)).actions, field)[action] == 1 or field == "detail"
        assert refused, field
