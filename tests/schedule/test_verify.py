"""Broken plans are rejected with the right reason; sound ones are accepted."""

import random
from itertools import pairwise

import msgspec
import pytest
from cases import share, two_workers, vision_language

from pipeweaver.costs import FlatCosts
from pipeweaver.schedule.compile import compile_plan
from pipeweaver.schedule.ir import Allocation, Buffer, Compute, Free, Load, Norm, Post, Rows, Stage, Step, Wait
from pipeweaver.schedule.verify import PlanError, verify

COSTS = FlatCosts(layers={"vision": 4, "language": 4})
GRAPH = vision_language()
SHARE = share([3, 0, 1, 2])


def plan_of(images=(3, 0, 1, 2), graph=GRAPH, **options):
    one = share(list(images))
    return compile_plan(graph, one, two_workers(one, **options), COSTS), one


def replace(record, **fields):
    return msgspec.structs.replace(record, **fields)


def put(values, index, value):
    return (*values[:index], value, *values[index + 1 :])


def edit(plan, worker, change):
    """The plan with one worker's list of actions changed."""
    return replace(plan, actions=put(plan.actions, worker, tuple(change(list(plan.actions[worker])))))


def first(actions, kind, test=lambda action: True):
    return next(i for i, action in enumerate(actions) if isinstance(action, kind) and test(action))


def swap(i, j):
    def change(actions):
        actions[i], actions[j] = actions[j], actions[i]
        return actions

    return change


def drop(index):
    return lambda actions: actions[:index] + actions[index + 1 :]


@pytest.mark.parametrize("images", [(3, 0, 1, 2), (0,), (0, 0), (5,), (1, 16)])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_sound_plans_are_accepted(images, frozen, backward):
    graph = vision_language(frozen=frozen)
    plan, one = plan_of(images, graph, backward=backward, frozen=frozen)
    verify([plan], graph, [one], budget_bytes=max(plan.prediction.peak_bytes))


def lose_item(plan):
    part = plan.parts[0][0]
    return replace(plan, parts=put(plan.parts, 0, put(plan.parts[0], 0, replace(part, items=part.items[1:]))))


def swap_items_of_parts(plan):
    a, b = plan.parts[0][0], plan.parts[0][1]
    changed = (replace(a, items=(b.items[0], a.items[1])), replace(b, items=(a.items[0], *b.items[1:])))
    return replace(plan, parts=put(plan.parts, 0, (*changed, *plan.parts[0][2:])))


def edge_with(plan, **fields):
    number = next(i for i, edge in enumerate(plan.edges) if len(edge.rows) == 1 and edge.rows[0].length > 1)
    return replace(plan, edges=put(plan.edges, number, replace(plan.edges[number], **fields)))


def wrong_row(plan):
    number = next(i for i, edge in enumerate(plan.edges) if edge.input == "vision" and edge.rows[0].length > 1)
    rows = plan.edges[number].rows[0]
    shifted = (
        Rows(rows.source, rows.destination + 1, rows.length - 1),
        Rows(rows.source + rows.length - 1, rows.destination, 1),
    )
    return replace(plan, edges=put(plan.edges, number, replace(plan.edges[number], rows=shifted)))


def transfer_with(plan, **fields):
    return replace(plan, transfers=put(plan.transfers, 0, replace(plan.transfers[0], **fields)))


def swap_queue_of_receiver(plan):
    """Swap two adjacent receives: the other end sends in the old order."""
    actions = plan.actions[0]
    pairs = [
        (i, i + 1)
        for i in range(len(actions) - 1)
        if isinstance(actions[i], Post)
        and isinstance(actions[i + 1], Post)
        and all(plan.transfers[a.transfer].receiver == 0 for a in actions[i : i + 2])
    ]
    return edit(plan, 0, swap(*pairs[0]))


def early_wait(plan):
    """Worker 0 waits for the text features before it sends what worker 1 needs to make them."""
    actions = list(plan.actions[0])
    send = first(
        actions, Post, lambda a: plan.transfers[a.transfer].sender == 0 and plan.transfers[a.transfer].phase == "F"
    )
    wait = first(actions, Wait, lambda a: plan.transfers[a.transfer].receiver == 0)
    post = first(actions, Post, lambda a: a.transfer == actions[wait].transfer)
    moved = [actions[post], actions[wait]]
    rest = [action for i, action in enumerate(actions) if i not in (post, wait)]
    at = rest.index(actions[send])
    return replace(plan, actions=put(plan.actions, 0, (*rest[:at], *moved, *rest[at:])))


def move_backward_up(plan):
    i = first(plan.actions[0], Compute, lambda a: a.stage.phase == "B")
    order = list(plan.order[0])
    stage = plan.actions[0][i].stage
    order.insert(0, order.pop(order.index(stage)))
    changed = edit(plan, 0, lambda actions: [actions[i], *actions[:i], *actions[i + 1 :]])
    return replace(changed, order=put(plan.order, 0, tuple(order)))


def load_with(plan, **fields):
    return edit(plan, 0, lambda a: put(a, first(a, Load), replace(a[first(a, Load)], **fields)))


def compute_twice(plan):
    i = first(plan.actions[0], Compute)
    changed = edit(plan, 0, lambda actions: [*actions[: i + 1], replace(actions[i], allocations=()), *actions[i + 1 :]])
    return replace(changed, order=put(plan.order, 0, (plan.order[0][0], *plan.order[0])))


def drop_stage(plan, phase):
    i = first(plan.actions[1], Compute, lambda a: a.stage.phase == phase)
    stage = plan.actions[1][i].stage
    order = tuple(s for s in plan.order[1] if s != stage)
    return replace(edit(plan, 1, drop(i)), order=put(plan.order, 1, order))


def add_buffer(plan):
    i = first(plan.actions[0], Compute)

    def change(actions):
        extra = Allocation(Buffer("saved", 0, 99), 5)
        actions[i] = replace(actions[i], allocations=(*actions[i].allocations, extra))
        return actions

    return edit(plan, 0, change)


def with_result(plan, kind, change):
    """The first buffer of a kind that a stage leaves behind for others, changed where it is allocated; None: left out,
    and never freed."""
    found = (
        (worker, i, k)
        for worker, actions in enumerate(plan.actions)
        for i, action in enumerate(actions)
        if isinstance(action, Compute)
        for k, allocation in enumerate(action.allocations)
        if allocation.buffer.kind == kind
    )
    worker, i, k = next(found)
    action = plan.actions[worker][i]
    buffer, changed = action.allocations[k].buffer, change(action.allocations[k])
    kept = (*action.allocations[:k], *((changed,) if changed else ()), *action.allocations[k + 1 :])
    actions = put(plan.actions[worker], i, replace(action, allocations=kept))
    if changed is None:
        actions = tuple(
            replace(a, buffers=tuple(b for b in a.buffers if b != buffer)) if isinstance(a, Free) else a
            for a in actions
        )
    return replace(plan, actions=put(plan.actions, worker, actions))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("change", [lambda one: None, lambda one: one._replace(num_bytes=3)])
def test_what_a_stage_leaves_behind_for_others_is_held_in_full(backward, change):
    plan, one = plan_of(backward=backward)
    with pytest.raises(
        PlanError, match=r"must allocate what it leaves behind for others, [\d,]+ bytes or more"
    ) as caught:
        verify([with_result(plan, "gradient" if backward else "output", change)], GRAPH, [one])
    assert caught.value.rule == "actions"


def free_early(plan):
    i = first(plan.actions[0], Free)
    saved = first(plan.actions[0], Compute, lambda a: a.allocations and a.allocations[0][0].kind == "saved")
    buffer = plan.actions[0][saved].allocations[0][0]
    holder = first(plan.actions[0], Free, lambda a: buffer in a.buffers)
    assert holder > i

    def change(actions):
        kept = tuple(b for b in actions[holder].buffers if b != buffer)
        actions[holder] = replace(actions[holder], buffers=kept)
        return [*actions[: saved + 1], Free(buffers=(buffer,)), *actions[saved + 1 :]]

    return edit(plan, 0, change)


BROKEN = {
    "negative memory of a worker": (lambda p: replace(p, static_bytes=(-1, *p.static_bytes[1:])), "memory"),
    "lost item": (lose_item, "stages"),
    "items of two parts swapped": (swap_items_of_parts, "edges"),
    "links changed": (lambda p: replace(p, links=p.links[1:]), "items"),
    "items of another batch": (lambda p: replace(p, items=p.items[:-1]), "items"),
    "wrong replica": (lambda p: replace(p, replica=1), "items"),
    "wrong step": (lambda p: replace(p, step=7), "items"),
    "normaliser": (lambda p: replace(p, normalisers={"main/language": 1}), "normaliser"),
    "no such layers": (
        lambda p: replace(
            p, placement=replace(p.placement, chunks=put(p.placement.chunks, 0, replace(p.placement.chunks[0], stop=9)))
        ),
        "stages",
    ),
    "layer owned twice": (
        lambda p: replace(
            p, placement=replace(p.placement, chunks=put(p.placement.chunks, 0, replace(p.placement.chunks[0], stop=3)))
        ),
        "stages",
    ),
    "forward missing": (lambda p: drop_stage(p, "F"), "stages"),
    "backward missing": (lambda p: drop_stage(p, "B"), "stages"),
    "forward twice": (compute_twice, "stages"),
    "order differs from actions": (lambda p: replace(p, order=put(p.order, 0, p.order[0][::-1])), "stages"),
    "edge dtype": (lambda p: edge_with(p, dtype="bfloat16"), "edges"),
    "edge width": (lambda p: edge_with(p, width=9), "edges"),
    "edge gradient": (lambda p: edge_with(p, grad=False), "edges"),
    "edge of another tensor": (lambda p: edge_with(p, output="y"), "edges"),
    "edge to nowhere": (lambda p: edge_with(p, input="y"), "edges"),
    "edge rows out of range": (lambda p: edge_with(p, rows=(Rows(0, 0, 999),)), "edges"),
    "edge rows missing": (lambda p: edge_with(p, rows=(Rows(0, 0, 1),)), "edges"),
    "edge missing": (lambda p: replace(p, edges=p.edges[1:]), "edges"),
    "wrong row": (wrong_row, "edges"),
    "transfer shape": (lambda p: transfer_with(p, shape=(1, 8)), "transfers"),
    "transfer dtype": (lambda p: transfer_with(p, dtype="float64"), "transfers"),
    "transfer direction": (lambda p: transfer_with(p, sender=1, receiver=0), "transfers"),
    "transfer missing": (lambda p: replace(p, transfers=p.transfers[:-1]), "transfers"),
    "transfer twice": (lambda p: replace(p, transfers=(*p.transfers, p.transfers[0])), "transfers"),
    "backward before forward": (move_backward_up, "actions"),
    "load missing": (lambda p: edit(p, 0, drop(first(p.actions[0], Load))), "actions"),
    "loads something else": (
        lambda p: edit(p, 0, lambda a: put(a, first(a, Load), replace(a[first(a, Load)], names=("labels",)))),
        "actions",
    ),
    "loads for no part": (lambda p: load_with(p, part=10**6), "actions"),
    "loads for part -1": (lambda p: load_with(p, part=-1), "actions"),
    "loads for another part": (lambda p: load_with(p, part=1), "actions"),
    "last edge without rows": (
        lambda p: replace(p, edges=put(p.edges, len(p.edges) - 1, replace(p.edges[-1], rows=()))),
        "edges",
    ),
    "order of a worker missing": (lambda p: replace(p, order=p.order[:1]), "stages"),
    "actions of a worker missing": (lambda p: replace(p, actions=p.actions[:1]), "stages"),
    "memory of a worker missing": (lambda p: replace(p, static_bytes=p.static_bytes[:1]), "stages"),
    "parts of a chunk missing": (lambda p: replace(p, parts=p.parts[:-1]), "stages"),
    "prediction of another plan": (
        lambda p: replace(p, prediction=replace(p.prediction, spans=p.prediction.spans[:1])),
        "prediction",
    ),
    "wait missing": (lambda p: edit(p, 0, drop(first(p.actions[0], Wait))), "actions"),
    "post missing": (lambda p: edit(p, 0, drop(first(p.actions[0], Post))), "actions"),
    "post too early": (lambda p: edit(p, 0, lambda a: [a[first(a, Post)], *drop(first(a, Post))(a)]), "actions"),
    "free missing": (lambda p: edit(p, 0, drop(first(p.actions[0], Free))), "actions"),
    "freed before its use": (free_early, "actions"),
    "foreign buffer": (add_buffer, "actions"),
    "receiver's posts swapped": (swap_queue_of_receiver, "progress"),
    "wait before send": (early_wait, "progress"),
    "norm missing": (lambda p: edit(p, 0, drop(first(p.actions[0], Norm))), "groups"),
    "step before norm": (lambda p: edit(p, 0, swap(first(p.actions[0], Norm), first(p.actions[0], Step))), "groups"),
    "step before the last stage": (lambda p: edit(p, 0, lambda a: [a[-1], *a[:-1]]), "actions"),
    "holder missing": (lambda p: replace(p, groups=put(p.groups, 0, replace(p.groups[0], holders=(1,)))), "groups"),
    "parameter in no group": (
        lambda p: replace(p, groups=put(p.groups, 0, replace(p.groups[0], parameters=p.groups[0].parameters[1:]))),
        "groups",
    ),
    "parameter in two groups": (lambda p: replace(p, groups=(*p.groups, p.groups[0])), "groups"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_plans_are_rejected_by_the_right_rule(name):
    change, rule = BROKEN[name]
    plan, one = plan_of()
    with pytest.raises(PlanError) as caught:
        verify([change(plan)], GRAPH, [one])
    assert caught.value.rule == rule, caught.value


def test_memory_budget_names_worker_and_missing_bytes():
    plan, one = plan_of()
    peak = max(plan.prediction.peak_bytes)
    with pytest.raises(PlanError, match=r"worker 0 peaks at .* 1 over its budget") as caught:
        verify([plan], GRAPH, [one], budget_bytes=peak - 1)
    assert caught.value.rule == "memory"


def two_replicas():
    shares = [share([1, 0], replica=0, num_replicas=2), share([2], replica=1, num_replicas=2)]
    shares[1] = replace(
        shares[1],
        items=tuple(replace(item, draw=item.draw + 2) for item in shares[1].items),
        normalisers=shares[0].normalisers,
        records={"main/2": 2},
    )
    return [compile_plan(GRAPH, one, two_workers(one), COSTS) for one in shares], shares


def test_replicas_are_accepted_and_their_reductions_checked():
    plans, shares = two_replicas()
    verify(plans, GRAPH, shares)
    reductions = [i for i, action in enumerate(plans[1].actions[0]) if type(action).__name__ == "Reduce"]
    with pytest.raises(PlanError) as caught:
        verify([plans[0], edit(plans[1], 0, drop(reductions[0]))], GRAPH, shares)
    assert caught.value.rule == "groups"


def test_an_item_in_two_shares_is_rejected():
    plans, shares = two_replicas()
    with pytest.raises(PlanError) as caught:
        verify([plans[0], replace(plans[0], replica=1)], GRAPH, [shares[0], replace(shares[0], replica=1)])
    assert caught.value.rule == "items"


def test_random_mutations_never_pass_unless_harmless():
    """Drop, repeat or swap random actions. Whatever is still accepted must run to the end in the emulator."""
    from pipeweaver.schedule.emulate import emulate

    plan, one = plan_of()
    rng = random.Random(0)
    rejected = 0
    for _ in range(400):
        worker = rng.randrange(2)
        actions = list(plan.actions[worker])
        i, j = rng.randrange(len(actions)), rng.randrange(len(actions))
        match rng.choice(["drop", "repeat", "swap", "move"]):
            case "drop":
                del actions[i]
            case "repeat":
                actions.insert(j, actions[i])
            case "swap":
                actions[i], actions[j] = actions[j], actions[i]
            case "move":
                actions.insert(j, actions.pop(i))
        stages = tuple(action.stage for action in actions if isinstance(action, Compute))
        mutated = replace(
            plan, actions=put(plan.actions, worker, tuple(actions)), order=put(plan.order, worker, stages)
        )
        try:
            verify([mutated], GRAPH, [one])
        except PlanError:
            rejected += 1
        else:
            for queue in ("pair", "worker", "none"):
                emulate([mutated], queue)
            assert sorted(map(str, stages)) == sorted(map(str, plan.order[worker]))
    assert rejected > 200


def test_rows_may_come_in_any_pieces_and_order_but_must_be_the_right_ones():
    plan, one = plan_of()
    draw = random.Random(1)
    for _ in range(40):
        edges = []
        for edge in plan.edges:
            pieces = []
            for run in edge.rows:
                cuts = sorted({0, run.length, *(draw.randrange(run.length + 1) for _ in range(2))})
                pieces += [Rows(run.source + a, run.destination + a, b - a) for a, b in pairwise(cuts)]
            draw.shuffle(pieces)
            edges.append(replace(edge, rows=tuple(pieces)))
        verify([replace(plan, edges=tuple(edges))], GRAPH, [one])
        number = draw.choice([e for e, edge in enumerate(edges) if edge.rows])
        rows = edges[number].rows
        place, field = draw.randrange(len(rows)), draw.choice(("source", "destination", "length"))
        wrong = rows[place]._replace(**{field: getattr(rows[place], field) + draw.choice((-1, 1))})
        edges[number] = replace(edges[number], rows=put(rows, place, wrong))
        with pytest.raises(PlanError, match=r"^edges: "):
            verify([replace(plan, edges=tuple(edges))], GRAPH, [one])


def test_split_backward_is_accepted_and_needs_both_halves():
    one = share([2, 1])
    draft = two_workers(one)
    split = replace(
        draft,
        order=tuple(
            tuple(
                s
                for stage in order
                for s in ([stage] if stage.phase == "F" else [stage._replace(phase="I"), stage._replace(phase="W")])
            )
            for order in draft.order
        ),
    )
    plan = compile_plan(GRAPH, one, split, COSTS)
    verify([plan], GRAPH, [one])
    assert Stage(0, 0, "W") in plan.order[0]
    i = first(plan.actions[0], Compute, lambda a: a.stage.phase == "W")
    broken = replace(
        edit(plan, 0, drop(i)),
        order=put(plan.order, 0, tuple(s for s in plan.order[0] if s != plan.actions[0][i].stage)),
    )
    with pytest.raises(PlanError) as caught:
        verify([broken], GRAPH, [one])
    assert caught.value.rule == "stages"
