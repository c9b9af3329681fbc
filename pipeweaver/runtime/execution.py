"""One plan on one worker, action by action.

Tensors live in the buffers that the plan names: an action allocates them, a `Free` lets them go. Tensors
between chunks of one worker are handed over where they lie; between workers they travel as transfers.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import torch
from torch import Tensor

from pipeweaver.data.items import Item, linked
from pipeweaver.model.part import PartView
from pipeweaver.runtime.clock import make_clock
from pipeweaver.runtime.describe import describe
from pipeweaver.runtime.loading import Loaded, Loads
from pipeweaver.runtime.offload import SavedTensors
from pipeweaver.runtime.optimizer import clip_factor
from pipeweaver.runtime.rows import Piece, arriving, backwards, combine, take
from pipeweaver.runtime.split import WeightGradients
from pipeweaver.runtime.stage import StageState, run_backward, run_forward
from pipeweaver.runtime.transport import Address
from pipeweaver.schedule.ir import (
    Action,
    Allocation,
    Buffer,
    Chunk,
    Compute,
    Free,
    Load,
    Norm,
    Offload,
    Plan,
    Post,
    Reduce,
    Reload,
    Settle,
    Step,
    Wait,
)

if TYPE_CHECKING:
    from pipeweaver.runtime.worker import Worker


_Content = Loaded | StageState | Tensor | WeightGradients | SavedTensors | None


class Loader(Protocol):
    """Brings content from the data set: packed tensors on the CPU by name, the rows of `items` in their order.

    `records` maps "task/draw" to the position of a sample in its data set: `data.dataset.load_part` with data sets bound.
    """

    def __call__(self, items: Sequence[Item], records: Mapping[str, int], names: Sequence[str]) -> Loaded: ...


class Execution:
    """The state of a run. `at` is the number of the action at hand."""

    def __init__(self, worker: Worker, plan: Plan, learning_rate: float | None) -> None:
        self.worker = worker
        self.plan = plan
        self.learning_rate = learning_rate
        self.address = worker.transport.address
        self.at = 0
        self.clock = make_clock(worker.device)
        self.clock.mark()
        self.gradient_norm: float | None = None
        self.losses: dict[str, float] = {}
        self._loss_sums: dict[str, Tensor | float] = dict.fromkeys(sorted(plan.normalisers), 0.0)
        wanted = [action for action in plan.actions[self.address.worker] if isinstance(action, Load)]
        self._loads = Loads([partial(self._content, action) for action in wanted], worker.loading, worker.loads_ahead)
        self._loaded: dict[tuple[int, int], Loaded] = {}
        self._states: dict[tuple[int, int], StageState] = {}
        self._gradients: dict[tuple[int, int], Mapping[str, Tensor]] = {}
        self._weights: dict[tuple[int, int], WeightGradients] = {}
        self._leaving: dict[tuple[int, int], SavedTensors] = {}
        self._on_host: dict[tuple[int, int], SavedTensors] = {}
        self._returned: dict[tuple[int, int], SavedTensors] = {}
        self._received: dict[tuple[int, int], Tensor] = {}
        self._stores: dict[str, dict[tuple[int, int], Any]] = {
            "loaded": self._loaded,
            "saved": self._states,
            "output": self._states,
            "gradient": self._gradients,
            "received": self._received,
            "weight": self._weights,
            "leaving": self._leaving,
            "host": self._on_host,
            "returned": self._returned,
        }
        self._reports: list[tuple[str, PartView]] = []
        self._links = linked(plan.items, plan.links)
        stages = plan.order[self.address.worker]
        self._backward = {(stage.chunk, stage.part) for stage in stages if stage.phase != "F"}
        self._split = {(stage.chunk, stage.part) for stage in stages if stage.phase == "W"}
        chunks = plan.placement.chunks
        self._incoming: dict[tuple[int, int], list[int]] = defaultdict(list)
        self._outgoing: dict[tuple[int, int], list[int]] = defaultdict(list)
        for number, edge in enumerate(plan.edges):
            if chunks[edge.destination[0]].worker == self.address.worker:
                self._incoming[edge.destination].append(number)
            if chunks[edge.source[0]].worker == self.address.worker:
                self._outgoing[edge.source].append(number)
        self._arrival: dict[tuple[int, str], int] = {
            (transfer.edge, transfer.phase): number
            for number, transfer in enumerate(plan.transfers)
            if transfer.receiver == self.address.worker
        }

    def perform(self, action: Action) -> None:
        match action:
            case Compute():
                self._compute(action)
            case Post():
                self._post(action)
            case Wait():
                self.worker.transport.wait(action.transfer)
            case Free():
                for buffer in action.buffers:
                    self._free(buffer)
            case Offload():
                saved = self._leaving[action.chunk, action.part]
                self.worker.copies.begin_out(saved)
                self._allocate(action.allocations, saved)
            case Reload():
                saved = self._on_host[action.chunk, action.part]
                self.worker.copies.begin_back(saved)
                self._allocate(action.allocations, saved)
            case Settle():
                self.worker.copies.settle(self._on_host[action.chunk, action.part])
            case Load():
                self._load(action)
            case Reduce():
                if bucket := self.worker.buckets.get(action.group):
                    self.worker.transport.reduce(bucket.members, bucket.flat)
            case Norm():
                self._norm()
            case Step():
                self._step()

    def finish(self) -> None:
        """After the last action: a forward-only plan has no norm at which the workers could compare plans."""
        if self.plan.forward_only:
            self._meet(0.0)
        left = [(kind, *at) for kind, store in self._stores.items() for at in store]
        assert not left, f"buffers {left} were never freed"

    def metrics(self) -> dict[str, tuple[float, int]]:
        """What layers on this worker reported, summed, by "task/module/name"."""
        sums: dict[str, tuple[float, int]] = {}
        for owner, view in self._reports:
            for name, (total, count) in view.metrics.items():
                before = sums.get(f"{owner}/{name}", (0.0, 0))
                sums[f"{owner}/{name}"] = (before[0] + total, before[1] + count)
        return sums

    def describe(self) -> str:
        """The action that has not ended yet, in words. Called by the watchdog's thread."""
        actions = self.plan.actions[self.address.worker]
        # On a GPU the host runs ahead: the device's marks tell where it really is.
        at = min(self.at, max(0, self.clock.reached() - 1))
        return describe(self.plan, self.address, actions[at] if at < len(actions) else None)

    def _load(self, action: Load) -> None:
        device, dtype = self.worker.device, self.worker.dtype
        content = {name: _to_device(tensor, device, dtype) for name, tensor in self._loads.take().items()}
        self._allocate(action.allocations, content)

    def _content(self, action: Load) -> Loaded:
        """What an action loads, on the host. May run in a thread, ahead of the action."""
        items = self.plan.stage_items(action.chunk, action.part)
        loaded = self.worker.load(items, self.plan.records, action.names)
        # Only pinned memory is copied to the device without holding up the host.
        pin = self.worker.device.type == "cuda"
        return {name: loaded[name].pin_memory() if pin else loaded[name] for name in action.names}

    def _post(self, action: Post) -> None:
        transfer = self.plan.transfers[action.transfer]
        edge = self.plan.edges[transfer.edge]
        if transfer.receiver == self.address.worker:
            dtype = getattr(torch, transfer.dtype)
            tensor = torch.empty(transfer.shape, dtype=dtype, device=self.worker.device)
            self._allocate(action.allocations, tensor)
        elif transfer.phase == "F":
            tensor = take(self._states[edge.source].outputs[edge.output].detach(), edge.rows)
        else:
            tensor = take(self._gradients[edge.destination][edge.input], backwards(edge.rows))
        self.worker.transport.post(action.transfer, transfer, tensor)

    def _compute(self, action: Compute) -> None:
        chunk = self.plan.placement.chunks[action.stage.chunk]
        match action.stage.phase:
            case "F":
                self._forward(chunk, action)
            case "B" | "I":
                self._backward_stage(chunk, action)
            case "W":
                self._weights[action.stage.chunk, action.stage.part].accumulate()

    def _forward(self, chunk: Chunk, action: Compute) -> None:
        at = (action.stage.chunk, action.stage.part)
        worker, plan = self.worker, self.plan
        built = worker.built(chunk)
        pieces: dict[str, list[Piece]] = {name: [] for name in built.inputs}
        needs_grad = set()
        for number in self._incoming[at]:
            edge = plan.edges[number]
            transfer = self._arrival.get((number, "F"))
            if transfer is None:
                pieces[edge.input].append((self._states[edge.source].outputs[edge.output].detach(), edge.rows))
            else:
                pieces[edge.input].append((self._received[transfer, 0], arriving(edge.rows)))
            if edge.grad:
                needs_grad.add(edge.input)
        inputs = {
            name: combine(
                pieces[name],
                sum(run.length for _, rows in pieces[name] for run in rows),
                spec.width,
                dtype=worker.dtype if spec.dtype == "model" else getattr(torch, spec.dtype),
                device=worker.device,
            )
            for name, spec in built.inputs.items()
        }
        chosen = plan.parts[at[0]][at[1]].items
        view = PartView(
            items=[plan.items[i] for i in chosen],
            links=[self._links[i] for i in chosen],
            loaded=dict(self._loaded[at]) if built.loads else {},
            step=plan.step,
            seed=worker.seed,
            device=worker.device,
            dtype=worker.dtype,
        )
        grad = at in self._backward
        state = run_forward(
            built,
            inputs,
            view,
            outputs={plan.edges[number].output for number in self._outgoing[at]},
            grad=grad,
            needs_grad=needs_grad,
            strategies=action.strategies,
            split=at in self._split,
        )
        # Reports are read when the step is over: reading waits for the device.
        self._reports.append((f"{chunk.task}/{chunk.module}", replace(view, loaded={}, _made={})))
        if state.loss is not None:
            self._loss_sums[f"{chunk.task}/{chunk.module}"] += state.loss.detach().double()
        if not grad:
            # Nothing but the outputs stays; the inputs' buffers are freed on their own.
            state = StageState(inputs={}, outputs=state.outputs, loss=None)
        for allocation in action.allocations:
            self._allocate((allocation,), state.offloaded if allocation.buffer.kind == "leaving" else state)

    def _backward_stage(self, chunk: Chunk, action: Compute) -> None:
        at = (action.stage.chunk, action.stage.part)
        state = self._states[at]
        pieces: dict[str, list[Piece]] = {}
        for number in self._outgoing[at]:
            edge = self.plan.edges[number]
            if not edge.grad:
                continue
            transfer = self._arrival.get((number, "B"))
            rows = backwards(edge.rows)
            if transfer is None:
                piece = (self._gradients[edge.destination][edge.input], rows)
            else:
                piece = (self._received[transfer, 0], arriving(rows))
            pieces.setdefault(edge.output, []).append(piece)
        gradients = {}
        for name, of_output in pieces.items():
            output = state.outputs[name]
            gradients[name] = combine(of_output, *output.shape, dtype=output.dtype, device=output.device)
        module = self.worker.graph.by_name[chunk.module]
        scale = 0.0
        if module.loss is not None:
            scale = module.loss.weight_in(chunk.task) / max(1, self.plan.normalisers[f"{chunk.task}/{chunk.module}"])
        returned = run_backward(state, gradients, loss_scale=scale)
        for allocation in action.allocations:
            self._allocate((allocation,), state.later if allocation.buffer.kind == "weight" else returned)

    def _norm(self) -> None:
        squares = sum(
            bucket.squared_norm()
            for bucket in self.worker.buckets.values()
            # Holders have equal gradients by now: the first one counts them.
            if bucket.members[0] == self.address
        )
        self.gradient_norm = math.sqrt(self._meet(squares))
        if not math.isfinite(self.gradient_norm):
            raise ValueError(
                f"step {self.plan.step}: the gradient norm is {self.gradient_norm}, the losses are {self.losses}; "
                "parameters were not changed. A lower learning rate, or a look at this step's data, may help"
            )

    def _step(self) -> None:
        worker = self.worker
        assert worker.config is not None, "a plan with an optimizer step needs an optimizer"
        assert self.gradient_norm is not None, "the norm comes before the step"
        factor = clip_factor(worker.config.clip_norm, self.gradient_norm)
        if factor < 1.0:
            for bucket in worker.buckets.values():
                bucket.flat.mul_(factor)
        if worker.optimizer is not None:
            for group in worker.optimizer.param_groups:
                group["lr"] = worker.config.lr if self.learning_rate is None else self.learning_rate
            worker.optimizer.step()

    def _meet(self, squares: float) -> float:
        """Sum squares and losses over all workers, and make sure that all of them hold the same plans."""
        plan = self.plan
        num_workers = plan.placement.workers
        mine = (self.address.replica * num_workers + self.address.worker) * 2
        fingerprints = [0.0] * (plan.num_replicas * num_workers * 2)
        fingerprints[mine : mine + 2] = [_number(plan.fingerprint), _number(_common(plan))]
        sums = self.worker.transport.all_sum(
            [squares, *(float(total) for total in self._loss_sums.values()), *fingerprints]
        )
        found = sums[1 + len(self._loss_sums) :]
        for number in range(plan.num_replicas * num_workers):
            other = Address(*divmod(number, num_workers))
            own, common = found[2 * number : 2 * number + 2]
            if common != found[mine + 1] or (other.replica == plan.replica and own != found[mine]):
                raise ValueError(
                    f"step {plan.step}: {other} ran another plan than {self.address} (fingerprint "
                    f"{plan.fingerprint}); parameters were not changed. Plans must come from one planner"
                )
        for name, total in zip(self._loss_sums, sums[1:], strict=False):
            self.losses[name] = total / max(1, plan.normalisers[name])
        return sums[0]

    def _free(self, buffer: Buffer) -> None:
        content = self._stores[buffer.kind].pop((buffer.first, buffer.second))
        if buffer.kind == "leaving":
            content.free_leaving()
        elif buffer.kind == "host":
            content.free_host()

    def _allocate(self, allocations: Sequence[Allocation], content: _Content) -> None:
        for (kind, first, second), _ in allocations:
            assert (first, second) not in self._stores[kind], f"{kind} of {first}, {second} is allocated twice"
            self._stores[kind][first, second] = content


def _to_device(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Floating-point content takes the model's dtype, everything else keeps its own."""
    moved = tensor.to(device, non_blocking=True)
    return moved.to(dtype) if tensor.is_floating_point() else moved


def _common(plan: Plan) -> str:
    """What plans of all replicas of a step have in common, hashed."""
    common = (plan.step, plan.num_replicas, plan.forward_only, plan.groups, plan.normalisers)
    return hashlib.sha256(msgspec.msgpack.encode(common)).hexdigest()


def _number(fingerprint: str) -> float:
    """The first 48 bits: whole in float64, also after zeros are added."""
    return float(int(fingerprint[:12], 16))
