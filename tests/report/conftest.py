"""A small plan written by hand: two images on worker 0, the text that they belong to on worker 1."""

import msgspec
import pytest

from pipeweaver.data.items import Item
from pipeweaver.schedule.ir import (
    Allocation,
    Buffer,
    Chunk,
    Compute,
    Edge,
    Free,
    Load,
    Measurement,
    Norm,
    ParameterGroup,
    Part,
    Placement,
    Plan,
    Post,
    Prediction,
    Reduce,
    Rows,
    Span,
    Stage,
    Step,
    Transfer,
    Wait,
)

US = 1_000


@pytest.fixture
def plan() -> Plan:
    """Worker 0: 0F0 0F1 . . 0B0 0B1; worker 1: . 1F0 1B0. Makespan 100 us, step 120 us, useful work 120 us."""
    items = (
        Item(task="main", draw=3, module="vision", position=0, sizes={"tokens": 4, "features": 1}),
        Item(task="main", draw=3, module="vision", position=1, sizes={"tokens": 8, "features": 2}),
        Item(task="main", draw=3, module="language", position=0, sizes={"tokens": 20, "supervised": 9}),
    )
    edges = tuple(
        Edge(
            source=(0, part),
            destination=(1, 0),
            output="features",
            input="vision",
            dtype="float32",
            width=16,
            rows=(Rows(0, part, part + 1),),
            grad=True,
        )
        for part in (0, 1)
    )
    transfers = tuple(
        Transfer(
            edge=edge,
            phase=phase,
            sender=0 if phase == "F" else 1,
            receiver=1 if phase == "F" else 0,
            shape=(edge + 1, 16),
            dtype="float32",
            num_bytes=64 * (edge + 1),
            duration_ns=5 * US,
        )
        for phase in ("F", "B")
        for edge in (0, 1)
    )

    def saved(chunk: int, part: int) -> Buffer:
        return Buffer("saved", chunk, part)

    def received(transfer: int) -> Buffer:
        return Buffer("received", transfer)

    worker0 = (
        (Load(chunk=0, part=0, names=("pixels",), allocations=(Allocation(Buffer("loaded", 0, 0), 100),)), 0, 5),
        (Compute(stage=Stage(0, 0, "F"), allocations=(Allocation(saved(0, 0), 1000),), workspace_bytes=50), 5, 15),
        (Post(transfer=0), 15, 15),
        (Compute(stage=Stage(0, 1, "F"), allocations=(Allocation(saved(0, 1), 2000),), workspace_bytes=50), 15, 25),
        (Post(transfer=1), 25, 25),
        (Post(transfer=2, allocations=(Allocation(received(2), 64),)), 25, 25),
        (Wait(transfer=2), 25, 65),
        (Compute(stage=Stage(0, 0, "B"), workspace_bytes=70), 65, 80),
        (Free(buffers=(saved(0, 0), received(2), Buffer("loaded", 0, 0))), 80, 80),
        (Post(transfer=3, allocations=(Allocation(received(3), 128),)), 80, 80),
        (Wait(transfer=3), 80, 85),
        (Compute(stage=Stage(0, 1, "B"), workspace_bytes=70), 85, 100),
        (Free(buffers=(saved(0, 1), received(3))), 100, 100),
        (Reduce(group=0), 100, 110),
        (Norm(), 110, 112),
        (Step(), 112, 120),
    )
    worker1 = (
        (Post(transfer=0, allocations=(Allocation(received(0), 64),)), 0, 0),
        (Post(transfer=1, allocations=(Allocation(received(1), 128),)), 0, 0),
        (Wait(transfer=0), 0, 20),
        (Wait(transfer=1), 20, 30),
        (Compute(stage=Stage(1, 0, "F"), allocations=(Allocation(saved(1, 0), 4000),)), 30, 45),
        (Compute(stage=Stage(1, 0, "B"), allocations=(Allocation(Buffer("gradient", 1, 0), 192),)), 45, 60),
        (Free(buffers=(saved(1, 0), received(0), received(1))), 60, 60),
        (Post(transfer=2), 60, 60),
        (Post(transfer=3), 60, 60),
        (Reduce(group=0), 100, 110),
        (Norm(), 110, 112),
        (Step(), 112, 118),
        (Free(buffers=(Buffer("gradient", 1, 0),)), 118, 118),
    )
    spans = tuple(tuple(Span(start * US, end * US) for _, start, end in lane) for lane in (worker0, worker1))
    return Plan(
        step=7,
        replica=0,
        num_replicas=1,
        policy="by hand",
        seed=0,
        rounds=0,
        forward_only=False,
        items=items,
        links=((0, 2), (1, 2)),
        records={"main/3": 0},
        placement=Placement(
            workers=2,
            chunks=(
                Chunk(task="main", module="vision", start=0, stop=2, worker=0),
                Chunk(task="main", module="language", start=0, stop=3, worker=1),
            ),
        ),
        parts=((Part(items=(0,), microbatch=0), Part(items=(1,), microbatch=0)), (Part(items=(2,), microbatch=0),)),
        order=(
            (Stage(0, 0, "F"), Stage(0, 1, "F"), Stage(0, 0, "B"), Stage(0, 1, "B")),
            (Stage(1, 0, "F"), Stage(1, 0, "B")),
        ),
        edges=edges,
        transfers=transfers,
        groups=(ParameterGroup(parameters=("language.before",), holders=(0, 1), num_bytes=640),),
        normalisers={"main/language": 9},
        actions=(tuple(action for action, _, _ in worker0), tuple(action for action, _, _ in worker1)),
        static_bytes=(10_000, 20_000),
        prediction=Prediction(
            spans=spans,
            transfers=tuple(Span(a * US, b * US) for a, b in ((15, 20), (25, 30), (60, 65), (80, 85))),
            makespan_ns=100 * US,
            step_ns=120 * US,
            peak_bytes=(13_234, 24_384),
            useful_ns=120 * US,
            lower_bound_ns=80 * US,
        ),
    )


@pytest.fixture
def measurement(plan: Plan) -> Measurement:
    """Everything took a tenth longer than predicted."""
    assert plan.prediction is not None

    def longer(span: Span) -> Span:
        return Span(span.start_ns * 11 // 10, span.end_ns * 11 // 10)

    return Measurement(
        spans=tuple(tuple(longer(span) for span in lane) for lane in plan.prediction.spans),
        transfers=tuple(longer(span) for span in plan.prediction.transfers),
        step_ns=132 * US,
        peak_bytes=(13_000, 24_000),
        waiting_ns=(500, 800),
    )


@pytest.fixture
def unpredicted(plan: Plan) -> Plan:
    return msgspec.structs.replace(plan, prediction=None)
