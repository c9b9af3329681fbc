"""One worker's part in a rehearsal: the runtime's own worker, on links and a device that only take their time.

play(script, transport) -> Report          in every worker, at the same time
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from pipeweaver.data.items import Item
from pipeweaver.model.graph import ModelGraph, TensorSpec
from pipeweaver.model.part import PartView
from pipeweaver.rehearsal.device import Device
from pipeweaver.rehearsal.links import Marks, RehearsedLinks
from pipeweaver.rehearsal.script import Report, Scene, Script, StepTimes
from pipeweaver.rehearsal.stand_in import Tensors, stand_in_chunk, stand_in_graph, stand_in_parameters
from pipeweaver.runtime.optimizer import OptimizerConfig
from pipeweaver.runtime.stage import BuiltChunk, run_backward, run_forward
from pipeweaver.runtime.transport import Transport
from pipeweaver.runtime.watchdog import Watchdog
from pipeweaver.runtime.worker import StepResult, Worker
from pipeweaver.schedule.ir import Chunk, Span


def play(script: Script, transport: Transport, marks: Marks, watchdog: Watchdog | None = None) -> Report:
    """Run all steps of the script as the worker whose end `transport` is; what it took.

    Blocks until all workers do. Raises WorkerError where the transport fails.
    """
    _warm_up()
    device = Device()
    links = RehearsedLinks(transport, device, marks)
    times = []
    for scene in script.scenes:
        worker = _worker(scene, links, device, watchdog)
        for plans in scene.steps:
            result = worker.run(plans[transport.address.replica])
            times.append(_times(result, links.started_ns[-1], links.moved[-1]))
    links.barrier()
    return Report(steps=tuple(times), overslept_ns=tuple(device.overslept_ns))


def _warm_up() -> None:
    """What happens once in a process, such as the start of autograd's thread, happens before the first step."""
    x = torch.zeros(1, 1)
    chunk = stand_in_chunk(Tensors(inputs=(TensorSpec(name="x", width=1),), outputs=(TensorSpec(name="y", width=1),)))
    item = Item(task="", draw=0, module="", position=0, sizes={"tokens": 1})
    view = PartView(items=[item], links=[()], loaded={}, step=0, seed=0, device=x.device, dtype=x.dtype)
    for _ in range(3):
        state = run_forward(chunk, {"x": x}, view, outputs={"y"}, grad=True, needs_grad={"x"})
        run_backward(state, {"y": x})


def _worker(scene: Scene, links: RehearsedLinks, device: Device, watchdog: Watchdog | None) -> Worker:
    plan = scene.steps[0][0]
    built = dict(zip(plan.placement.chunks, map(stand_in_chunk, scene.tensors), strict=True))

    def build(graph: ModelGraph, chunk: Chunk, modules: Mapping[str, nn.Module]) -> BuiltChunk:
        return built[chunk]

    return Worker(
        stand_in_graph(plan),
        modules={},
        parameters=stand_in_parameters(plan, links.address.worker),
        transport=links,
        load=_load,
        optimizer=OptimizerConfig(),
        dtype=getattr(torch, scene.dtype),
        watchdog=watchdog,
        build=build,
        after=device.after,
    )


def _load(items: Sequence[Item], records: Mapping[str, int], names: Sequence[str]) -> dict[str, Tensor]:
    return {name: torch.zeros(0) for name in names}


def _times(result: StepResult, started_ns: int, moved: Mapping[int, Span]) -> StepTimes:
    # The first action is measured from before the step's start.
    shift = result.start_ns - started_ns
    return StepTimes(
        spans=tuple(Span(max(0, span.start_ns + shift), span.end_ns + shift) for span in result.spans),
        moved={number: Span(span.start_ns - started_ns, span.end_ns - started_ns) for number, span in moved.items()},
    )
