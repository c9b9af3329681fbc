"""Plans do what the draft says, in closed forms and for hand-checked small cases."""

import random
from itertools import pairwise, permutations

import msgspec
import numpy as np
import pytest
from cases import module, share, two_workers, vision_language

from pipeweaver.costs import FlatCosts
from pipeweaver.data.items import Item, Share
from pipeweaver.model.graph import Flow, LayerSpec, LossSpec, ModelGraph, Module, TensorSpec
from pipeweaver.schedule.bounds import jackson
from pipeweaver.schedule.compile import compile_plan
from pipeweaver.schedule.connect import connect
from pipeweaver.schedule.convert import flatten, records
from pipeweaver.schedule.emulate import emulate, stage_spans
from pipeweaver.schedule.files import load_plans, orders, save_plans, text
from pipeweaver.schedule.gradients import has_backward
from pipeweaver.schedule.groups import parameter_groups
from pipeweaver.schedule.ir import Chunk, Draft, Part, Placement, Post, Rows, Stage
from pipeweaver.schedule.memory import flat_peak_bytes, held_bytes, peak_bytes
from pipeweaver.schedule.verify import verify

FREE_LINKS = {"latency_ns": 0, "bytes_per_us": 10**12}


def chain(workers, layers_per_worker=1):
    return ModelGraph(modules=(module("language", workers * layers_per_worker, loss=LossSpec(units="supervised")),))


def texts(count, tokens=10):
    items = tuple(
        Item(task="main", draw=d, module="language", position=0, sizes={"tokens": tokens, "supervised": 1})
        for d in range(count)
    )
    return Share(
        step=0,
        replica=0,
        num_replicas=1,
        items=items,
        links=(),
        microbatches=tuple((i,) for i in range(count)),
        records={f"main/{d}": d for d in range(count)},
        normalisers={"main/language": count},
    )


def chain_draft(workers, count, order):
    chunks = tuple(Chunk(task="main", module="language", start=w, stop=w + 1, worker=w) for w in range(workers))
    parts = (tuple(Part(items=(i,), microbatch=i) for i in range(count)),) * workers
    return Draft(
        placement=Placement(workers=workers, chunks=chunks),
        parts=parts,
        order=tuple(tuple(Stage(w, p, phase) for p, phase in order(w)) for w in range(workers)),
    )


def one_f_one_b(workers, count):
    def order(worker):
        warmup = min(workers - worker, count)
        stages = [(p, "F") for p in range(warmup)]
        for p in range(count):
            stages.append((p, "B"))
            if p + warmup < count:
                stages.append((p + warmup, "F"))
        return stages

    return order


def all_forward_all_backward(workers, count):
    return lambda worker: [(p, "F") for p in range(count)] + [(p, "B") for p in range(count)]


@pytest.mark.parametrize("schedule", [one_f_one_b, all_forward_all_backward])
@pytest.mark.parametrize(("workers", "count"), [(1, 1), (2, 1), (2, 8), (4, 4), (4, 13), (5, 2)])
def test_equal_stages_take_the_closed_form(schedule, workers, count):
    costs = FlatCosts(layers={"language": workers}, row_ns={"language": 1000}, **FREE_LINKS)
    one, draft = texts(count), chain_draft(workers, count, schedule(workers, count))
    plan = compile_plan(chain(workers), one, draft, costs)
    verify([plan], chain(workers), [one])
    forward, backward = 10_000, 20_000
    assert plan.prediction.makespan_ns == (count + workers - 1) * (forward + backward)
    assert plan.prediction.useful_ns == workers * count * (forward + backward)
    assert plan.prediction.lower_bound_ns <= plan.prediction.makespan_ns
    bubble = (workers - 1) / (count + workers - 1)
    assert plan.prediction.bubble == pytest.approx(bubble)


def test_posts_take_the_time_of_both_workers():
    def plan(posting_ns):
        draft = chain_draft(2, 2, all_forward_all_backward(2, 2))
        costs = FlatCosts(layers={"language": 2}, posting_ns=posting_ns, **FREE_LINKS)
        return compile_plan(chain(2), texts(2), draft, costs)

    free, paid = plan(0), plan(300)
    for worker in range(2):
        ends = zip(paid.actions[worker], paid.prediction.spans[worker], strict=True)
        assert [span.end_ns - span.start_ns for action, span in ends if isinstance(action, Post)] == [300] * 4
    # Layers take 10 us; worker 0 posts the first tensor in between.
    starts = [stage_spans(paid, paid.prediction.spans)[Stage(0, part, "F")].start_ns for part in range(2)]
    assert starts == [0, 10_300]
    assert free.prediction.makespan_ns < paid.prediction.makespan_ns <= free.prediction.makespan_ns + 8 * 300


def test_one_f_one_b_holds_fewer_activations_than_all_forward_first():
    costs = FlatCosts(layers={"language": 2}, **FREE_LINKS)
    peaks = []
    for schedule in (one_f_one_b, all_forward_all_backward):
        plan = compile_plan(chain(2), texts(8), chain_draft(2, 8, schedule(2, 8)), costs)
        held = [max(held_bytes(plan, worker)[1]) - plan.static_bytes[worker] for worker in range(2)]
        assert [held_bytes(plan, worker)[0][-1] for worker in range(2)] == list(plan.static_bytes)
        peaks.append(held)
    saved, output = 64 * 10, 10 * 8 * 4
    assert peaks[1][0] >= 8 * (saved + output)
    assert peaks[0][0] <= 3 * (saved + output) + 2 * output


def test_a_circle_of_waiting_is_said():
    order = ([(0, "F"), (0, "B"), (1, "F"), (1, "B")], [(1, "F"), (0, "F"), (0, "B"), (1, "B")])
    draft = chain_draft(2, 2, order.__getitem__)
    with pytest.raises(ValueError, match="circle of waiting: worker 0 at 0B0, worker 1 at 1F1"):
        compile_plan(chain(2), texts(2), draft, FlatCosts(layers={"language": 2}))


def test_missing_stages_are_said():
    draft = chain_draft(2, 2, lambda worker: [(0, "F"), (1, "F"), (0, "B")])
    with pytest.raises(ValueError, match=r"lacks stages \[0B1 1B1\]"):
        compile_plan(chain(2), texts(2), draft, FlatCosts(layers={"language": 2}))


def test_edges_of_the_example():
    one = share([3])
    draft = two_workers(one)
    edges = connect(vision_language(), draft.placement, one.items, one.links, draft.parts)
    into_language = {(edge.source, edge.destination): edge.rows for edge in edges if edge.input == "vision"}
    assert into_language == {((1, 0), (2, 0)): (Rows(0, 0, 3),), ((1, 1), (2, 0)): (Rows(0, 3, 3),)}
    carried = [edge for edge in edges if edge.input == "x"]
    assert [(edge.source, edge.destination, edge.num_rows) for edge in carried[:2]] == [
        ((0, 0), (1, 0), 12),
        ((0, 1), (1, 1), 12),
    ]
    assert all(edge.grad for edge in edges)


def test_parts_cut_anew_in_the_middle_of_a_module():
    """The wavefront example of the design: the same layers on two workers, each with its share of the rows."""
    graph = chain(1, layers_per_worker=3)
    one = texts(4)
    chunks = (
        Chunk(task="main", module="language", start=0, stop=1, worker=2),
        Chunk(task="main", module="language", start=1, stop=3, worker=0),
        Chunk(task="main", module="language", start=1, stop=3, worker=1),
    )
    parts = (
        (Part(items=(0, 1, 2, 3), microbatch=0),),
        (Part(items=(0, 1, 2), microbatch=0),),
        (Part(items=(3,), microbatch=0),),
    )
    order = tuple((Stage(c, 0, "F"), Stage(c, 0, "B")) for c in (1, 2, 0))
    draft = Draft(placement=Placement(workers=3, chunks=chunks), parts=parts, order=order)
    plan = compile_plan(graph, one, draft, FlatCosts(layers={"language": 3}))
    verify([plan], graph, [one])
    assert [(edge.destination, edge.rows) for edge in plan.edges] == [
        ((1, 0), (Rows(0, 0, 30),)),
        ((2, 0), (Rows(30, 0, 10),)),
    ]
    assert {(group.parameters, group.holders) for group in plan.groups} == {
        (("language.after", "language.layers.1", "language.layers.2"), (0, 1)),
        (("language.before", "language.layers.0"), (2,)),
    }


def test_where_gradients_flow():
    placement = two_workers(share([1])).placement
    assert has_backward(vision_language(), placement) == (True,) * 6
    assert has_backward(vision_language(frozen=True), placement) == (False, False, True, True, True, True)
    graph = vision_language(frozen=True)
    vision = graph.modules[0]
    projector = Module(
        name="vision", layers=vision.layers, before=vision.before,
        after=LayerSpec(kind="projector", build=vision.after.build, sends=vision.after.sends),
    )  # fmt: skip
    only_projector = ModelGraph(modules=(projector, graph.modules[1]), flows=graph.flows)
    assert has_backward(only_projector, placement) == (False, True, True, True, True, True)
    edges = connect(only_projector, placement, share([1]).items, share([1]).links, two_workers(share([1])).parts)
    assert {(edge.input, edge.grad) for edge in edges if edge.destination[0] in (1, 2)} == {
        ("x", False),
        ("vision", True),
    }


def test_a_module_without_a_loss_behind_it_has_no_backward():
    graph = ModelGraph(modules=(module("language", 2, loss=LossSpec(units="supervised")), module("idle", 2)))
    chunks = tuple(Chunk(task="main", module=name, start=0, stop=2, worker=0) for name in ("language", "idle"))
    assert has_backward(graph, Placement(workers=1, chunks=chunks)) == (True, False)


def test_tied_parameters_are_a_group_of_both_holders():
    language = module("language", 2, loss=LossSpec(units="supervised"))
    tied = Module(
        name="language", layers=language.layers, before=language.before, after=language.after,
        tied={"after.weight": "before.weight"}, loss=language.loss,
    )  # fmt: skip
    placement = chain_draft(2, 1, one_f_one_b(2, 1)).placement
    groups = parameter_groups(ModelGraph(modules=(tied,)), placement, FlatCosts(layers={"language": 2}))
    assert [(group.parameters, group.holders) for group in groups] == [
        (("language.before", "language.layers.0"), (0,)),
        (("language.before.weight",), (0, 1)),
        (("language.after", "language.layers.1"), (1,)),
    ]


def test_skip_within_a_module_passes_a_chunk():
    skip = TensorSpec(name="early", width=3)
    x = TensorSpec(name="x", width=8)
    base = chain(3).modules[0]
    layers = (
        LayerSpec(kind="a", build=base.layers[0].build, carries=(x,), sends=(skip,)),
        LayerSpec(kind="b", build=base.layers[0].build, carries=(x,)),
        LayerSpec(kind="c", build=base.layers[0].build, carries=(x,), reads=("shortcut",)),
    )
    graph = ModelGraph(
        modules=(Module(name="language", layers=layers, before=base.before, after=base.after, loss=base.loss),),
        flows=(Flow(source="language", tensor="early", destination="language", name="shortcut"),),
    )
    draft = chain_draft(3, 2, one_f_one_b(3, 2))
    plan = compile_plan(graph, texts(2), draft, FlatCosts(layers={"language": 3}))
    verify([plan], graph, [texts(2)])
    assert {(edge.source[0], edge.destination[0], edge.input, edge.width) for edge in plan.edges} == {
        (0, 1, "x", 8), (1, 2, "x", 8), (0, 2, "shortcut", 3),
    }  # fmt: skip


@pytest.mark.parametrize("queue", ["pair", "worker", "none"])
def test_timelines_keep_their_order(queue):
    one = share([3, 0, 1, 2, 5])
    plan = compile_plan(vision_language(), one, two_workers(one), FlatCosts(layers={"vision": 4, "language": 4}))
    (timeline,) = emulate([plan], queue)
    for spans in timeline.spans:
        assert all(a.end_ns <= b.start_ns for a, b in pairwise(spans))
        assert all(span.start_ns <= span.end_ns for span in spans)
    stages = stage_spans(plan, timeline.spans)
    for transfer, span in zip(plan.transfers, timeline.transfers, strict=True):
        edge = plan.edges[transfer.edge]
        source, destination = Stage(*edge.source, transfer.phase), Stage(*edge.destination, transfer.phase)
        if transfer.phase == "B":
            source, destination = destination, source
        assert stages[source].end_ns <= span.start_ns
        assert span.end_ns - span.start_ns == transfer.duration_ns
        assert span.end_ns <= stages[destination].start_ns
    assert emulate([plan], queue)[0].spans == timeline.spans


def test_stricter_queues_are_never_faster():
    one = share([3, 0, 1, 2, 5])
    plan = compile_plan(vision_language(), one, two_workers(one), FlatCosts(layers={"vision": 4, "language": 4}))
    ends = [max(s.end_ns for spans in emulate([plan], q)[0].spans for s in spans) for q in ("none", "pair", "worker")]
    assert ends == sorted(ends)


def test_replicas_meet_at_reductions():
    graph = vision_language()
    shares = [share([5, 3], replica=0, num_replicas=2), share([0], replica=1, num_replicas=2)]
    costs = FlatCosts(layers={"vision": 4, "language": 4})
    plans = [compile_plan(graph, one, two_workers(one), costs) for one in shares]
    slow, fast = emulate(plans)
    reductions = [
        [span for action, span in zip(plan.actions[0], line.spans[0], strict=True) if type(action).__name__ == "Reduce"]
        for plan, line in zip(plans, (slow, fast), strict=True)
    ]
    assert reductions[0][0].end_ns == reductions[1][0].end_ns
    assert reductions[1][0].start_ns < reductions[0][0].start_ns


def jackson_of(jobs):
    return jackson(*np.array(jobs, np.int64).T)


def test_jackson_bound_against_brute_force():
    rng = random.Random(0)
    assert jackson_of([(0, 4, 0), (2, 3, 5)]) == 10
    for _ in range(200):
        jobs = [(rng.randrange(9), rng.randrange(1, 6), rng.randrange(9)) for _ in range(rng.randrange(1, 6))]
        best = 10**9
        for order in permutations(jobs):
            clock = end = 0
            for head, duration, tail in order:
                clock = max(clock, head) + duration
                end = max(end, clock + tail)
            best = min(best, end)
        assert max(h + d + t for h, d, t in jobs) <= jackson_of(jobs) <= best


def test_plan_files_round_trip(tmp_path):
    one = share([3, 0])
    plan = compile_plan(vision_language(), one, two_workers(one), FlatCosts(layers={"vision": 4, "language": 4}))
    for name in ("plan.json", "plan.msgpack"):
        save_plans([plan], tmp_path / name)
        (loaded,) = load_plans(tmp_path / name)
        assert loaded == plan
        assert loaded.fingerprint == plan.fingerprint
    (tmp_path / "bad.json").write_text('[{"step": "x"}]')
    with pytest.raises(ValueError, match=r"bad.json: not a plan file: .*"):
        load_plans(tmp_path / "bad.json")
    with pytest.raises(ValueError, match="cannot be read"):
        load_plans(tmp_path / "absent.json")


@pytest.mark.parametrize("images", [(3, 0, 1, 2), (0,), ()])
@pytest.mark.parametrize("backward", [False, True])
def test_flat_plans_hold_all_that_records_hold(images, backward):
    one = share(list(images))
    draft = two_workers(one, backward=backward)
    plan = compile_plan(vision_language(), one, draft, FlatCosts(layers={"vision": 4, "language": 4}))
    assert records(flatten(plan)) == plan
    assert peak_bytes(plan) == flat_peak_bytes(flatten(plan)) == plan.prediction.peak_bytes


def test_fingerprint_sees_every_change():
    one = share([3, 0])
    plan = compile_plan(vision_language(), one, two_workers(one), FlatCosts(layers={"vision": 4, "language": 4}))
    other = msgspec.structs.replace(plan, normalisers={"main/language": 11})
    assert plan.fingerprint != other.fingerprint
    assert plan.fingerprint == msgspec.structs.replace(plan, prediction=None).fingerprint


def test_notation_is_that_of_torch():
    from torch.distributed.pipelining.schedules import _Action

    draft = chain_draft(2, 2, one_f_one_b(2, 2))
    plan = compile_plan(chain(2), texts(2), draft, FlatCosts(layers={"language": 2}))
    assert text(plan) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    assert orders(text(plan)) == plan.order == orders(text(plan, transfers=True))
    for cell in text(plan, transfers=True).replace("\n", ",").strip(",").split(","):
        assert str(_Action.from_str(cell)) == cell
    with pytest.raises(ValueError, match="row 1, column 2: '0X1' is not an action"):
        orders("0F0,0X1")
