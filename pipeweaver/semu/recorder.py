"""The dispatch mode behind a trace: sees every operator, tells views from kernels, watches storages come and go.

    recorder = Recorder(inputs, parameters)
    with recorder: ...forward and backward...
    recorder.trace()

Kernels that stand in for several of torch's operators (`kernels.py`) report themselves by `record`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from pipeweaver.semu.aten import MATMULS, attention_of, matmul_of
from pipeweaver.semu.calls import Call, Kind, OperatorPhase, Owner, Storage, Trace

Stopwatch = Callable[[Callable[[], Any]], tuple[Any, float]]
"""Makes a call and says what it returned and how many nanoseconds it took."""


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
    recorder = CURRENT.get()
    if recorder is not None:
        counted = flops if counted_flops is None else counted_flops
        recorder.add(name, kind, reads, writes, flops=flops, counted_flops=counted, forward=forward)


class Recorder(TorchDispatchMode):
    """Sees every operator, tells views from kernels, and watches storages come and go."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled, and torch's compiler takes seconds to load

    def __init__(
        self,
        inputs: Mapping[str, Tensor],
        parameters: Mapping[str, nn.Parameter],
        stopwatch: Stopwatch | None = None,
    ) -> None:
        super().__init__()
        self.stopwatch = stopwatch
        self.is_away = False
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
                parameter.grad = torch.zeros_like(parameter)
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
        if self.is_away or func.namespace not in _NAMESPACES:
            return func(*args, **kwargs)
        # What is read is known before the call, which may let go of it or write into it.
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and self.sees(leaf)]
        duration_ns = 0.0
        if self.stopwatch is None:
            result = func(*args, **kwargs)
        else:
            result, duration_ns = self.stopwatch(lambda: func(*args, **kwargs))
        written = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and self.sees(leaf)]
        name = str(func._overloadpacket)
        known = {self.storage(tensor, "shared") for tensor in read}
        fresh = [tensor for tensor in written if self.storage(tensor) not in known]
        mutates = func._schema.is_mutable
        if name in _NO_KERNEL or not (fresh or mutates):
            return result
        attention = attention_of(func, args, kwargs)
        if attention is not None:
            name, flops, counted = attention
            self.add(name, "attention", read, fresh, flops=flops, counted_flops=counted, duration_ns=duration_ns)
            return result
        flops = 0
        if func._overloadpacket in flop_registry:
            flops = int(flop_registry[func._overloadpacket](*args, **kwargs, out_val=result))
        kind: Kind = "matmul" if flops else "memory"
        shape, operands = matmul_of(name, args, result, flops)
        self.add(
            _NAMES.get(name, name),
            kind,
            read,
            written if mutates else fresh,
            flops=flops,
            counted_flops=flops,
            shape=shape,
            operands=tuple(self.storage(operand) for operand in operands),
            duration_ns=duration_ns,
        )
        return result

    def sees(self, tensor: Tensor) -> bool:
        """With a stopwatch, tensors of any device; else those without data."""
        return tensor.is_meta or self.stopwatch is not None

    @contextmanager
    def looking_away(self) -> Iterator[None]:
        """What is called inside is not the layer's."""
        self.is_away = True
        try:
            yield
        finally:
            self.is_away = False

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
        duration_ns: float = 0.0,
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
                duration_ns=duration_ns,
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
                duration_ns=entry.duration_ns,
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


CURRENT: ContextVar[Recorder | None] = ContextVar("recorder", default=None)
"""Who listens to `record`."""

_NOT_THE_LAYER = ("torch.", "pipeweaver.semu.trace", "pipeweaver.semu.recorder", "pipeweaver.semu.kernels")
_NAMESPACES = ("aten", "torch_attn")
_NAMES = {"aten._fused_rms_norm": "rms_norm", "aten._fused_rms_norm_backward": "rms_norm_backward"}
"""Kernels under the names that `kernels.py` gives them."""
_NO_KERNEL = {"aten.empty", "aten.empty_like", "aten.new_empty", "aten.empty_strided", "aten.new_empty_strided"}
_ROWS_OF_FIRST = {"aten.embedding", "aten.index_select", "aten.index", "aten.gather"}


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
    duration_ns: float


@dataclass(kw_only=True)
class _Known:
    reference: StorageWeakRef
    num_bytes: int
    length: int
    role: Owner
    name: str = ""


def _phases(entries: Sequence[_Entry], input_gradients: set[int]) -> list[OperatorPhase]:
    """W for the calls that weights and biases of linear maps alone need, I for all others of the backward.

    As the runtime splits it (`runtime/split.py`): what norms, embeddings and convolutions need of a backward is done
    in I.
    """
    needed = set(input_gradients)
    waits: list[bool] = []
    for entry in reversed(entries):
        waits.append(not entry.forward and not needed & entry.writes.keys())
        if not entry.forward and not waits[-1]:
            needed |= entry.reads.keys()
    waits.reverse()
    pairs = list(zip(entries, waits, strict=True))
    linear = {entry.parameter for entry, wait in pairs if wait and entry.name in MATMULS}
    maps = {name.rpartition(".")[0] for name in linear}
    return [
        "F" if entry.forward else "W" if wait and (entry.parameter.rpartition(".")[0] in maps) else "I"
        for entry, wait in pairs
    ]


def _bytes(recorder: Recorder, tensors: Sequence[Tensor], role: Owner) -> dict[int, int]:
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


def _site(frame: FrameType | None, base: FrameType) -> tuple[str, ...]:
    """The lines of code that led here from the traced call, outermost first."""
    lines: list[str] = []
    while frame is not None and frame is not base:
        if not frame.f_globals.get("__name__", "").startswith(_NOT_THE_LAYER):
            lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        frame = frame.f_back
    return tuple(reversed(lines))
