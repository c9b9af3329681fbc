"""When the task set changes: parameters and optimizer state go to their new places, bit for bit.

    homes = homes_of(graph, first_placement)             parameter -> workers that hold its current value
    homes, moves = relocation(graph, homes, placement)   the same on every worker: nobody asks anybody
    relocate(worker, moves, placement)                   send, receive, build, drop

What the new placement has and nobody held is new: drawn from seed and name. What it does not have stays, on the host, with
the first of its holders, neither trained nor decayed, until a later set wants it. Example, vision on workers 0 and 1:

    set of text only         vision waits on worker 0, worker 1 drops its copy
    set with vision on 1, 2  worker 0 sends it to 1 and to 2, and drops it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from pipeweaver.model.build import materialise, named_parameters, parameter_shapes, split_name, tied_parameters
from pipeweaver.model.graph import ModelGraph
from pipeweaver.schedule.groups import layers_on
from pipeweaver.schedule.ir import Placement, Transfer

if TYPE_CHECKING:
    from pipeweaver.runtime.worker import Worker

Homes = dict[str, tuple[int, ...]]
"""Workers of a replica that hold the current value of a parameter, by its layout-free name."""


class Move(NamedTuple):
    """Parameters with their optimizer state, from one worker to another, as one message."""

    sender: int
    receiver: int
    names: tuple[str, ...]


def homes_of(graph: ModelGraph, placement: Placement) -> Homes:
    """The workers of every trained parameter that a placement holds, sorted."""
    specs = {name: layer for module in graph.modules for name, layer in module.range(0, len(module.layers))}
    of_layer: dict[str, list[str]] = {}
    for name in parameter_shapes(graph):
        of_layer.setdefault(split_name(name)[0], []).append(name)
    for alias, canonical in tied_parameters(graph).items():
        of_layer.setdefault(split_name(alias)[0], []).append(canonical)
    homes: dict[str, set[int]] = {}
    for worker in range(placement.workers):
        for layer in layers_on(graph, placement, worker):
            for name in of_layer.get(layer, ()) if specs[layer].trainable else ():
                homes.setdefault(name, set()).add(worker)
    return {name: tuple(sorted(workers)) for name, workers in sorted(homes.items())}


def relocation(graph: ModelGraph, homes: Homes, placement: Placement) -> tuple[Homes, tuple[Move, ...]]:
    """Where parameters are under the next placement, and the messages that bring them there, in an order for all."""
    after = homes_of(graph, placement)
    names: dict[tuple[int, int], list[str]] = {}
    for name, workers in after.items():
        held = homes.get(name, ())
        for position, receiver in enumerate(worker for worker in workers if held and worker not in held):
            # Holders take turns, so that one does not send everything.
            names.setdefault((held[position % len(held)], receiver), []).append(name)
    waiting = {name: workers[:1] for name, workers in homes.items() if name not in after}
    return after | waiting, tuple(Move(*ends, tuple(found)) for ends, found in sorted(names.items()))


def relocate(worker: Worker, homes: Homes, moves: Sequence[Move], placement: Placement) -> None:
    """Take part in the moves and hold what the placement has on this worker. All workers of the replica call this, between
    steps, with the same arguments; `homes` are those after the moves."""
    mine = worker.transport.address.worker
    kept = dict(worker.parameters)
    packed = dict(worker.waiting)

    def content(name: str) -> Tensor:
        if name not in packed:
            packed[name] = pack(kept[name], _state(worker, kept[name]))
        return packed[name].to(worker.device)

    # 1. All messages are on their way before one is waited for; both ends have them in one order.
    shapes = parameter_shapes(worker.graph)
    buffers: dict[int, Tensor] = {}
    for number, move in enumerate(moves):
        if mine not in (move.sender, move.receiver):
            continue
        sizes = [packed_bytes(shapes[name].numel(), worker.dtype) for name in move.names]
        if mine == move.sender:
            buffers[number] = torch.cat([content(name) for name in move.names])
        else:
            buffers[number] = torch.empty(sum(sizes), dtype=torch.uint8, device=worker.device)
        transfer = Transfer(
            edge=0,
            phase="F",
            sender=move.sender,
            receiver=move.receiver,
            shape=(1, sum(sizes)),
            dtype="uint8",
            num_bytes=sum(sizes),
        )
        buffers[number] = buffers[number].view(1, -1)
        worker.transport.post(number, transfer, buffers[number])
    for number, buffer in buffers.items():
        worker.transport.wait(number)
        if mine == moves[number].receiver:
            names = moves[number].names
            pieces = buffer.view(-1).split([packed_bytes(shapes[name].numel(), worker.dtype) for name in names])
            packed.update(zip(names, pieces, strict=True))

    # 2. What stays without a place is packed before its layer goes.
    placed = homes_of(worker.graph, placement)
    worker.waiting = {
        name: content(name).cpu() for name, workers in homes.items() if name not in placed and mine in workers
    }

    # 3. Layers that stay are the same objects; others are built, and filled if anyone had them.
    chunks = [placement.chunks[number] for number in placement.on(mine)]
    modules = materialise(
        worker.graph, chunks, seed=worker.seed, device=worker.device, dtype=worker.dtype, kept=worker.modules
    )
    parameters = named_parameters(worker.graph, modules)
    states: dict[str, dict[str, Tensor]] = {}
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            continue
        if kept.get(name) is parameter:
            states[name] = _state(worker, parameter)
        elif name in packed or name in kept:
            states[name] = unpack(content(name), parameter)
    worker.hold(modules, parameters, states)


def pack(parameter: nn.Parameter, state: Mapping[str, Tensor]) -> Tensor:
    """A parameter and AdamW's state of it as bytes; a parameter that was never stepped has zeros there."""
    zeros = torch.zeros_like(parameter)
    step = state.get("step", torch.zeros(()))
    tensors = [parameter.detach(), state.get("exp_avg", zeros), state.get("exp_avg_sq", zeros)]
    tensors.append(step.to(parameter.device, torch.float32).reshape(1))
    return torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])


def unpack(content: Tensor, parameter: nn.Parameter) -> dict[str, Tensor]:
    """The inverse: fills the parameter, returns the optimizer's state of it."""
    size = parameter.numel() * parameter.element_size()
    value, first, second, step = content.split([size, size, size, 4])

    def tensor(piece: Tensor) -> Tensor:
        # A copy of its own: pieces of a message do not lie where numbers of their kind may begin.
        return piece.clone().view(parameter.dtype).view(parameter.shape)

    with torch.no_grad():
        parameter.copy_(tensor(value))
    return {"step": step.clone().view(torch.float32)[0], "exp_avg": tensor(first), "exp_avg_sq": tensor(second)}


def packed_bytes(elements: int, dtype: torch.dtype) -> int:
    return 3 * elements * dtype.itemsize + 4


def _state(worker: Worker, parameter: nn.Parameter) -> dict[str, Tensor]:
    return dict(worker.optimizer.state.get(parameter, {})) if worker.optimizer is not None else {}
