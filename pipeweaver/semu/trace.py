"""Trace one layer, forward and backward, without data: operators, bytes, tensors kept for backward.

The layer really runs, on the meta device, under a dispatch mode that sees every call below autograd. What
it allocates and lets go of is watched too, so what stays alive between forward and backward and the
temporary peak are observations, not formulas. FLOPs are those of `torch.utils.flop_counter`.

Example: `y = linear(x)` of a 4 -> 8 layer on 3 rows is three operators,

    F  aten.addmm  1 x (3, 4, 8)   weight
    I  aten.mm     1 x (3, 8, 4)   weight        the gradient of x
    W  aten.mm     1 x (8, 3, 4)   weight        the gradient of the weight (and a sum for the bias)

and saves nothing but x, which belongs to whoever called. PipeWeaver section 4 calls this graph SEMU's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

Kind = Literal["matmul", "attention", "memory"]
"""What bounds an operator: matrix units, a fused attention kernel, or moving bytes."""

Owner = Literal["input", "parameter", "gradient", "own", "shared"]

OperatorPhase = Literal["F", "I", "W"]
"""Forward, or a part of backward: what input gradients need (I), what only parameter gradients need (W)."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One kernel launch. Tensors are named by their storage's number in `Trace.storages`.

    `shape` is (batch, m, k, n) of a matmul, zeros elsewhere. `flops` are torch's count,
    `counted_flops` leave out what a causal kernel skips. `reads` and `writes` pair a storage with the
    bytes touched in it. `live_bytes` is what the layer holds while the call runs: neither parameters
    and their gradients, nor inputs. `site` is where in the layer's code its forward call stands.
    """

    name: str
    kind: Kind
    phase: OperatorPhase
    site: tuple[str, ...]
    visit: int
    parameter: str
    shape: tuple[int, int, int, int]
    operands: tuple[int, ...]
    flops: int
    counted_flops: int
    reads: tuple[tuple[int, int], ...]
    writes: tuple[tuple[int, int], ...]
    live: tuple[int, ...]
    accumulates: bool = False
    again: bool = False


@dataclass(frozen=True, kw_only=True)
class Storage:
    """`role` says whose it is: an input of that name, a parameter, a parameter's gradient, the layer's own, or
    shared: there before the layer ran, made for all layers of a part.

    `length` is the first dimension of the tensor that it was first seen under.
    """

    num_bytes: int
    length: int
    role: Owner
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Calls in order, forward then backward; what was saved; what came out.

    `saved` are storages held for backward; `outputs`, the gradients that came in for them and those that
    went out for inputs map names to storages. `parameter_bytes` maps parameters that took part to their bytes.
    """

    calls: tuple[Call, ...]
    storages: tuple[Storage, ...]
    saved: frozenset[int]
    outputs: dict[str, int]
    output_gradients: dict[str, int]
    input_gradients: dict[str, int]
    parameter_bytes: dict[str, int]

    @property
    def saved_bytes(self) -> int:
        """Bytes held for backward, each storage once, parameters and inputs not counted."""
        return sum(self.storages[s].num_bytes for s in self.saved if self.storages[s].role == "own")


def trace(
    run: Callable[[], Mapping[str, Tensor]],
    *,
    inputs: Mapping[str, Tensor],
    parameters: Mapping[str, nn.Parameter],
    kernels: AbstractContextManager[Any] | None = None,
) -> Trace:
    """Run `run` on meta tensors and backward from all it returns that needs a gradient.

    `inputs` are the tensors that `run` uses and its caller owns; those that require a gradient get one.
    `kernels` is a context in which `run` is called, to put device kernels in place of torch functions.
    Parameters get their gradients added to, as from the second microbatch on.
    Raises ValueError if a tensor is not on the meta device.
    """
    for name, tensor in [*inputs.items(), *parameters.items()]:
        if tensor.device.type != "meta":
            raise ValueError(f"{name} is on {tensor.device}; trace on the meta device (torch.device('meta'))")
    recorder = _Recorder(inputs, parameters)
    token = _recorder.set(recorder)
    try:
        with recorder, kernels or nullcontext():
            with torch.autograd.graph.saved_tensors_hooks(recorder.pack, recorder.unpack):
                outputs = dict(run())
            roots = {name: tensor for name, tensor in outputs.items() if tensor.requires_grad}
            recorder.end_forward(outputs)
            del outputs
            gradients = {name: torch.empty_like(root) for name, root in roots.items()}
            recorder.output_gradients = {name: recorder.storage(tensor) for name, tensor in gradients.items()}
            if roots:
                recorder.phase = "I"
                _backward(roots, gradients)
            del roots, gradients
    finally:
        _recorder.reset(token)
    return recorder.trace()


def record(
    name: str,
    *,
    kind: Kind,
    reads: Sequence[Tensor],
    writes: Sequence[Tensor],
    flops: int = 0,
    counted_flops: int | None = None,
    forward: bool = False,
) -> None:
    """Report a device kernel that stands in for torch's operators, from inside its `forward` or backward.

    Outside a trace nobody listens.
    """
    assert all(tensor.is_meta for tensor in reads), f"kernel {name} has no arithmetic: it runs on the meta device only"
    recorder = _recorder.get()
    if recorder is not None:
        counted = flops if counted_flops is None else counted_flops
        recorder.add(name, kind, reads, writes, flops=flops, counted_flops=counted, forward=forward)


def fuse_accumulation(traced: Trace) -> Trace:
    """The trace of a framework whose weight-gradient matmuls add to the gradient themselves: no tensor between."""
    made = {number: call for call in traced.calls if call.kind == "matmul" for number, _ in call.writes}
    gone: dict[int, int] = {}  # a matmul's result -> the gradient that it was added to
    for call in traced.calls:
        if call.accumulates:
            source = next((number for number, _ in call.reads if number in made), None)
            target = next((number for number, _ in call.writes), None)
            if source is not None and target is not None:
                gone[source] = target
    calls = []
    for call in traced.calls:
        if call.accumulates and any(number in gone for number, _ in call.reads):
            continue
        writes = tuple((gone.get(number, number), touched) for number, touched in call.writes)
        operands = tuple(gone.get(number, number) for number in call.operands)
        live = tuple(number for number in call.live if number not in gone)
        calls.append(replace(call, writes=writes, operands=operands, live=live))
    return replace(traced, calls=tuple(calls))


_recorder: ContextVar[_Recorder | None] = ContextVar("recorder", default=None)

_NOT_THE_LAYER = ("torch.", "pipeweaver.semu.trace", "pipeweaver.semu.kernels")
_NO_KERNEL = {"aten.empty", "aten.empty_like", "aten.new_empty", "aten.empty_strided", "aten.new_empty_strided"}
_ROWS_OF_FIRST = {"aten.embedding", "aten.index_select", "aten.index", "aten.gather"}
_MATMULS = {
    "aten.mm": (0, 1),
    "aten.addmm": (1, 2),
    "aten.bmm": (0, 1),
    "aten.baddbmm": (1, 2),
}


@dataclass(kw_only=True)
class _Entry:
    """A call as recorded, before its place in backward is known."""

    name: str
    kind: Kind
    forward: bool
    site: tuple[str, ...]
    visit: int
    parameter: str
    shape: tuple[int, int, int, int]
    operands: tuple[int, ...]
    flops: int
    counted_flops: int
    reads: dict[int, int]
    writes: dict[int, int]
    live: tuple[int, ...]
    accumulates: bool
    again: bool


@dataclass(kw_only=True)
class _Known:
    reference: StorageWeakRef
    num_bytes: int
    length: int
    role: Owner
    name: str = ""


class _Recorder(TorchDispatchMode):
    """Sees every operator, tells views from kernels, and watches storages come and go."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled, and torch's compiler takes seconds to load

    def __init__(self, inputs: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self.phase: Literal["F", "I"] = "F"
        self.entries: list[_Entry] = []
        self.known: list[_Known] = []
        self.number: dict[int, int] = {}
        self.live: set[int] = set()
        self.saved: set[int] = set()
        self.outputs: dict[str, int] = {}
        self.output_gradients: dict[str, int] = {}
        self.inputs = dict(inputs)
        self.parameters = dict(parameters)
        self.visits: dict[tuple[int, str], int] = {}
        self.sites: dict[int, tuple[tuple[str, ...], str]] = {}
        self.base = sys._getframe(1)
        for name, tensor in inputs.items():
            self.storage(tensor, role="input", name=name)
        for name, parameter in parameters.items():
            self.storage(parameter, role="parameter", name=name)
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
                self.storage(parameter.grad, role="gradient", name=name)

    def storage(self, tensor: Tensor | None, role: Owner = "own", name: str = "") -> int:
        """The number of a tensor's storage; a new one if it was never seen."""
        assert tensor is not None
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        number = self.number.get(reference.cdata)
        if number is None:
            number = self.number[reference.cdata] = len(self.known)
            length = tensor.shape[0] if tensor.dim() else 1
            self.known.append(
                _Known(reference=reference, num_bytes=storage.nbytes(), length=length, role=role, name=name)
            )
            if role == "own":
                self.live.add(number)
        return number

    def pack(self, tensor: Tensor) -> Tensor:
        self.saved.add(self.storage(tensor, "shared"))
        return tensor.detach()  # an output that holds itself through its graph would never go away

    def unpack(self, tensor: Tensor) -> Tensor:
        return tensor

    def end_forward(self, outputs: Mapping[str, Tensor]) -> None:
        self.outputs = {name: self.storage(tensor) for name, tensor in outputs.items()}
        self.prune()
        # Saved is what still lives, whoever holds it for backward: autograd, or a checkpoint to run it again.
        others = {number for number in self.saved if self.known[number].role != "own"}
        outputs_saved = self.saved & set(self.outputs.values())
        self.saved = others | outputs_saved | (self.live - set(self.outputs.values()))

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace != "aten":
            return result
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.is_meta]
        written = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.is_meta]
        name = str(func._overloadpacket)
        known = {self.storage(tensor, "shared") for tensor in read}
        fresh = [tensor for tensor in written if self.storage(tensor) not in known]
        mutates = func._schema.is_mutable
        if name in _NO_KERNEL or not (fresh or mutates):
            return result
        flops = 0
        if func._overloadpacket in flop_registry:
            flops = int(flop_registry[func._overloadpacket](*args, **kwargs, out_val=result))
        kind: Kind = "matmul" if flops else "memory"
        shape, operands = _matmul(name, args, result, flops)
        self.add(
            name,
            kind,
            read,
            written if mutates else fresh,
            flops=flops,
            counted_flops=flops,
            shape=shape,
            operands=tuple(self.storage(operand) for operand in operands),
        )
        return result

    def add(
        self,
        name: str,
        kind: Kind,
        read: Sequence[Tensor],
        written: Sequence[Tensor],
        *,
        flops: int,
        counted_flops: int,
        shape: tuple[int, int, int, int] = (0, 0, 0, 0),
        operands: tuple[int, ...] = (),
        forward: bool = False,
    ) -> None:
        reads = _bytes(self, read, "shared")
        writes = _bytes(self, written, "own")
        if name in _ROWS_OF_FIRST:
            # Only the rows that are asked for are read, not the whole table.
            reads[self.storage(read[0])] = sum(writes.values())
        parameter = next(
            (self.known[s].name for s in [*operands, *reads] if self.known[s].role == "parameter"),
            "",
        )
        node = torch._C._current_autograd_node() if self.phase != "F" else None
        accumulates, visit = False, 0
        # Backward runs without gradients; what a checkpoint runs again does not.
        again = self.phase != "F" and (forward or torch.is_grad_enabled())
        if self.phase == "F":
            site = _site(sys._getframe(2), self.base)
            sequence = torch._C._autograd._get_sequence_nr() - 1
            self.sites.setdefault(sequence, (site, parameter))
        elif node is not None and type(node).__name__ == "AccumulateGrad":
            summed = [self.known[s].name for s in [*writes, *reads] if self.known[s].role == "gradient"]
            accumulates = bool(summed)
            parameter = summed[0] if summed else parameter
            site = ("accumulate",)
        else:
            sequence = node._sequence_nr() if node is not None else -1
            site, forward_parameter = self.sites.get(sequence, (("backward",), ""))
            parameter = parameter or forward_parameter
            visit = self.visits.get((sequence, name), 0)
            self.visits[sequence, name] = visit + 1
        self.prune()
        self.entries.append(
            _Entry(
                name=name,
                kind=kind,
                forward=self.phase == "F",
                site=site,
                visit=visit,
                parameter=parameter,
                shape=shape,
                operands=operands,
                flops=flops,
                counted_flops=counted_flops,
                reads=reads,
                writes=writes,
                live=tuple(sorted(self.live)),
                accumulates=accumulates,
                again=again,
            )
        )

    def prune(self) -> None:
        self.live = {number for number in self.live if not self.known[number].reference.expired()}

    def trace(self) -> Trace:
        gradients = {name: self.storage(tensor.grad) for name, tensor in self.inputs.items() if tensor.grad is not None}
        for name, tensor in self.inputs.items():
            if tensor.grad is not None:
                self.inputs[name].grad = None
        phases = _phases(self.entries, set(gradients.values()))
        used = {entry.parameter for entry in self.entries if entry.parameter}
        calls = tuple(
            Call(
                name=entry.name,
                kind=entry.kind,
                phase=phase,
                site=entry.site,
                visit=entry.visit,
                parameter=entry.parameter,
                shape=entry.shape,
                operands=entry.operands,
                flops=entry.flops,
                counted_flops=entry.counted_flops,
                reads=tuple(entry.reads.items()),
                writes=tuple(entry.writes.items()),
                live=entry.live,
                accumulates=entry.accumulates,
                again=entry.again,
            )
            for entry, phase in zip(self.entries, phases, strict=True)
        )
        return Trace(
            calls=calls,
            storages=tuple(
                Storage(num_bytes=k.num_bytes, length=k.length, role=k.role, name=k.name) for k in self.known
            ),
            saved=frozenset(self.saved),
            outputs=self.outputs,
            output_gradients=self.output_gradients,
            input_gradients=gradients,
            parameter_bytes={
                name: parameter.untyped_storage().nbytes()
                for name, parameter in self.parameters.items()
                if name in used
            },
        )


def _backward(roots: dict[str, Tensor], gradients: dict[str, Tensor]) -> None:
    # Not `torch.autograd.backward`, which would leave the modes that checkpoints run forward in again.
    _engine_run_backward(
        tuple(roots.values()),
        tuple(gradients.values()),
        False,
        False,
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def _phases(entries: Sequence[_Entry], input_gradients: set[int]) -> list[OperatorPhase]:
    """I for the calls that input gradients depend on, W for those that only parameter gradients do."""
    needed = set(input_gradients)
    phases: list[OperatorPhase] = []
    for entry in reversed(entries):
        if entry.forward:
            phases.append("F")
        elif needed & entry.writes.keys():
            needed |= entry.reads.keys()
            phases.append("I")
        else:
            phases.append("W")
    return phases[::-1]


def _bytes(recorder: _Recorder, tensors: Sequence[Tensor], role: Owner) -> dict[int, int]:
    """Bytes touched per storage; an expanded dimension is read once."""
    touched: dict[int, int] = {}
    for tensor in tensors:
        count = 1
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            count *= size if stride else min(size, 1)
        number = recorder.storage(tensor, role)
        num_bytes = min(count * tensor.element_size(), recorder.known[number].num_bytes)
        touched[number] = max(touched.get(number, 0), num_bytes)
    return touched


def _matmul(
    name: str, args: tuple[Any, ...], result: Any, flops: int
) -> tuple[tuple[int, int, int, int], tuple[Tensor, ...]]:
    """(batch, m, k, n) and the operands A, B and C of a matmul C[m, n] = A[m, k] B[k, n]."""
    if name in _MATMULS:
        left, right = (args[i] for i in _MATMULS[name])
        batch = left.shape[0] if left.dim() == 3 else 1
        return (batch, left.shape[-2], left.shape[-1], right.shape[-1]), (left, right, result)
    if flops and name in ("aten.convolution", "aten._convolution"):
        image, weight = args[0], args[1]
        rows = result.numel() // weight.shape[0]
        return (1, rows, weight[0].numel(), weight.shape[0]), (image, weight, result)
    if flops and name == "aten.convolution_backward":
        gradient, image, weight = args[0], args[1], args[2]
        rows = gradient.numel() // weight.shape[0]
        return (1, rows, weight.shape[0], weight[0].numel()), (gradient, weight, image)
    return (0, 0, 0, 0), ()


def _site(frame: FrameType | None, base: FrameType) -> tuple[str, ...]:
    """The lines of code that led here from the traced call, outermost first."""
    lines: list[str] = []
    while frame is not None and frame is not base:
        if not frame.f_globals.get("__name__", "").startswith(_NOT_THE_LAYER):
            lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        frame = frame.f_back
    return tuple(reversed(lines))
