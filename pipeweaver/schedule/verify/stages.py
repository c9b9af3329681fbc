"""Rule "stages": every item passes every layer once, forward and backward, where its chunk is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pipeweaver.model.graph import ModelGraph, Module, positions
from pipeweaver.schedule.connect import Gradients
from pipeweaver.schedule.ir import (
    Chunk,
    Compute,
    Plan,
    Stage,
)
from pipeweaver.schedule.verify.words import PlanError


def check_stages(plan: Plan, graph: ModelGraph) -> None:
    gradients = Gradients(graph)
    chunks = plan.placement.chunks
    if len(plan.parts) != len(chunks) or len(plan.actions) != plan.placement.workers:
        raise PlanError(
            "stages", f"{len(plan.parts)} part lists for {len(chunks)} chunks, {len(plan.actions)} action lists"
        )
    done: Counter[tuple[int, str, int]] = Counter()  # (item, module, position)
    for number, chunk in enumerate(chunks):
        module = graph.by_name.get(chunk.module)
        if module is None or not 0 <= chunk.start < chunk.stop <= len(module.layers):
            raise PlanError("stages", f"chunk {number} {chunk} is not a range of layers of the model")
        if not 0 <= chunk.worker < plan.placement.workers:
            raise PlanError("stages", f"chunk {number} {chunk} is on a worker that does not exist")
        covered = list(inside(module, chunk))
        for part_number, part in enumerate(plan.parts[number]):
            for item in part.items:
                if not 0 <= item < len(plan.items):
                    raise PlanError(
                        "stages", f"part {part_number} of chunk {number} has item {item} of {len(plan.items)}"
                    )
                if (plan.items[item].module, plan.items[item].task) != (chunk.module, chunk.task):
                    raise PlanError("stages", f"{plan.items[item].name} is in a part of chunk {number} {chunk}")
                done.update((item, chunk.module, position) for position in covered)
    for i, one in enumerate(plan.items):
        for position, _ in positions(graph.by_name[one.module]):
            if done[i, one.module, position] != 1:
                raise PlanError(
                    "stages",
                    f"{one.name} goes {done[i, one.module, position]} times through layer {position} of {one.module}",
                )
    ran: Counter[Stage] = Counter()
    for worker, actions in enumerate(plan.actions):
        listed = [action.stage for action in actions if isinstance(action, Compute)]
        if tuple(listed) != plan.order[worker]:
            raise PlanError(
                "stages", f"worker {worker} computes other stages, or in another order, than its order says"
            )
        for stage in listed:
            if not (0 <= stage.chunk < len(chunks) and 0 <= stage.part < len(plan.parts[stage.chunk])):
                raise PlanError("stages", f"worker {worker} runs {stage}, which does not exist")
            if chunks[stage.chunk].worker != worker:
                raise PlanError(
                    "stages", f"{stage} runs on worker {worker}, but its chunk {chunks[stage.chunk]} is not there"
                )
        ran.update(listed)
    for number, chunk in enumerate(chunks):
        module = graph.by_name[chunk.module]
        backward = not plan.forward_only and any(gradients.backward[module.name, p] for p in inside(module, chunk))
        for p in range(len(plan.parts[number])):
            counts = {phase: ran.pop(Stage(number, p, phase), 0) for phase in ("F", "B", "I", "W")}
            expected = [{"F": 1, "B": 0, "I": 0, "W": 0}]
            if backward:
                expected = [{"F": 1, "B": 1, "I": 0, "W": 0}, {"F": 1, "B": 0, "I": 1, "W": 1}]
            if counts not in expected:
                text = " ".join(f"{phase} {times}x" for phase, times in counts.items())
                raise PlanError(
                    "stages",
                    f"part {p} of chunk {number} {chunk} runs {text}; it {'needs' if backward else 'has no'} backward",
                )
    assert not ran, "stages of unknown chunks were rejected above"


def inside(module: Module, chunk: Chunk) -> Iterable[int]:
    """Positions of the layers that a chunk runs, `before` (-1) and `after` (n) included."""
    for position, _ in positions(module):
        if chunk.start <= min(max(position, 0), len(module.layers) - 1) < chunk.stop:
            yield position
