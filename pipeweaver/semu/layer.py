"""One layer of a model as a graph of operators whose counts follow from the sizes of a part.

    graph = LayerGraph(spec, inputs, dtype=torch.bfloat16, widths={"pixels": 588})
    counts = graph.counts(items, links)         # traced once or a few times, then evaluated
    counts.operators[3].name, counts.table[3, FLOPS]

Structure (which operators, how they are cut over a tensor-parallel group) is that of the trace; numbers are
exact polynomials of the sums in `symbolic.py`. A layer whose counts are no such polynomials is traced at every new
size instead: right all the same, only slower; `irregular` counts those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from pipeweaver.data.items import Item
from pipeweaver.model.graph import LayerSpec, TensorSpec
from pipeweaver.model.part import PartView
from pipeweaver.schedule.ir import Strategy
from pipeweaver.semu.calls import Call, Kind, OperatorPhase, Trace, fuse_accumulation
from pipeweaver.semu.kernels import Kernels, device_kernels
from pipeweaver.semu.sharding import Cut, Divided, Role, Sharding, shard, whole_operand
from pipeweaver.semu.symbolic import Fit, Sums, measure
from pipeweaver.semu.trace import trace

Floats = NDArray[np.float64]

COUNT, FLOPS, COUNTED_FLOPS, BATCH, M, K, N = range(7)
BYTES_ROWS, BYTES_SPLIT, BYTES_WHOLE = 7, 8, 9
LIVE_ROWS, LIVE_SPLIT, LIVE_WHOLE, GATHERED = 10, 11, 12, 13
COLUMNS = 14
"""Columns of `Counts.table`. Bytes are read plus written, by how the tensor is cut; LIVE ones are held while
the operator runs; GATHERED is an operand cut by rows that a cut matmul needs in full. BATCH, M, K, N are summed
over the COUNT launches."""

SAVED, WEIGHT, SHARED = 0, 1, 2
"""Rows of `Counts.memory`: own tensors held from forward to backward, and from I to W; tensors of the part that all
its layers use (rotary angles) and that are held for backward. Columns by cut."""


@dataclass(frozen=True, kw_only=True)
class Operator:
    """What is one line of a layer's graph: launches from the same place in the code, on the same parameter."""

    name: str
    kind: Kind
    phase: OperatorPhase
    site: tuple[str, ...]
    parameter: str
    divided: Divided
    accumulates: bool
    again: bool


@dataclass(frozen=True, kw_only=True)
class Exchanged:
    """A tensor-parallel exchange, see `sharding.Exchange`."""

    kind: Literal["enter", "leave", "loss"]
    phase: OperatorPhase
    again: bool


@dataclass(frozen=True, kw_only=True)
class Structure:
    """What does not change with the sizes of a part.

    `saved_inputs` and `saved_outputs` name what crosses the layer's boundary and is held for backward,
    `loaded` the inputs that come from the data set, `tensors` all inputs, then outputs as "out.NAME".
    """

    operators: tuple[Operator, ...]
    exchanges: tuple[Exchanged, ...]
    saved_inputs: frozenset[str]
    saved_outputs: frozenset[str]
    loaded: tuple[str, ...]
    tensors: tuple[str, ...]

    @cached_property
    def boundary(self) -> dict[str, int]:
        """Place of each tensor of the boundary in `Counts.tensor_sizes`."""
        return {name: place for place, name in enumerate(self.tensors)}

    def __hash__(self) -> int:
        return id(self)


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Numbers of a layer on one part, before it is cut over devices.

    `table` [operators, COLUMNS], `exchanged_bytes` [exchanges], `memory` [3, 3] (SAVED, WEIGHT, SHARED;
    rows, split, whole), `tensor_sizes` [tensors] in bytes.
    """

    structure: Structure
    table: Floats
    exchanged_bytes: Floats
    memory: Floats
    tensor_sizes: Floats

    @property
    def operators(self) -> tuple[Operator, ...]:
        return self.structure.operators

    def tensor_bytes(self, name: str) -> int:
        """Bytes of a tensor of the boundary; 0 if there is none of that name."""
        place = self.structure.boundary.get(name)
        return 0 if place is None else int(self.tensor_sizes[place])


@dataclass(frozen=True, kw_only=True)
class Input:
    """A tensor that enters a layer: its spec, the module whose linked items count its rows (None: the part's
    own items), and whether a gradient flows back."""

    spec: TensorSpec
    name: str
    source: str | None = None
    grad: bool = True


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """`num_bytes` of one layer's parameters by role of the matmul they are in, and their number."""

    by_role: dict[Role, int]
    trainable: bool
    number: int

    @property
    def num_bytes(self) -> int:
        return sum(self.by_role.values())

    def on_device(self, tensor_parallel: int) -> int:
        """Bytes that one device of a tensor-parallel group holds."""
        cut = {"column", "row", "vocabulary"}
        return sum(-(-size // tensor_parallel) if role in cut else size for role, size in self.by_role.items())


class LayerGraph:
    """Traces of one layer and what they determine. Equal questions have equal answers, whatever was asked before."""

    def __init__(
        self,
        spec: LayerSpec,
        inputs: Sequence[Input],
        *,
        dtype: torch.dtype,
        widths: Mapping[str, int] | None = None,
        kernels: Kernels = "cuda",
        fused_accumulation: bool = False,
        strategy: Strategy = "keep",
    ) -> None:
        self.spec = spec
        self.inputs = tuple(inputs)
        self.dtype = dtype
        self.widths = dict(widths or {})
        self.kernels = kernels
        self.fused_accumulation = fused_accumulation
        self.strategy = strategy
        self.by_length = kernels == "cpu"
        self.num_traces = 0
        self.irregular = 0
        with torch.device("meta"), _WithoutValues():
            self.module: nn.Module = spec.build().to(dtype).requires_grad_(spec.trainable)
        self._fits: dict[tuple[tuple[str, ...], tuple[bool, bool]], _Family] = {}
        self.roles: dict[str, Role] = {}
        self._traced_parameters: Parameters | None = None

    def counts(
        self, items: Sequence[Item], links: Sequence[Sequence[Item]], copies: int = 1, sums: Sums | None = None
    ) -> Counts:
        """Counts of forward and backward on a part, or on one with so many copies of its items.

        `sums`: what `measure` says of the part, where it is known already.
        """
        sums = measure(items, links, copies, by_length=self.by_length) if sums is None else sums
        names = tuple(sorted(sums, key=_order))
        family = self._fits.setdefault((names, _alike(items, links)), _Family(fit=Fit(names)))
        if copies > 2 and not family.irregular and not family.fit.spans(sums):
            # Two parts of the same items, once and twice, determine any number of copies.
            self.counts(items, links)
            self.counts(items, links, 2)
        if family.irregular or not family.fit.spans(sums):
            return self._traced([*items] * copies, [*links] * copies, sums, family)
        if copies == 1 and not family.checked and [sums[name] for name in names] not in family.fit.rows:
            family.checked = True
            structure, values = self._sample([*items] * copies, [*links] * copies)
            if structure != family.structure or not np.array_equal(values, family.fit(sums)):
                family.irregular = True
                return self._traced([*items] * copies, [*links] * copies, sums, family)
        assert family.structure is not None
        return _unpack(family.structure, family.fit(sums))

    def _traced(self, items: Sequence[Item], links: Sequence[Sequence[Item]], sums: Sums, family: _Family) -> Counts:
        """Counts from a trace of this very part, which then helps to determine others if they can be."""
        key = sizes_key(items, links)
        if key not in family.seen:
            self.irregular += family.irregular
            structure, values = self._sample(items, links)
            family.irregular = family.irregular or family.structure not in (None, structure)
            if not family.irregular:
                family.structure = structure
                family.fit.add(sums, [int(v) for v in values])
                return _unpack(structure, values)
            family.seen[key] = (structure, values)
        return _unpack(*family.seen[key])

    def parameters(self, name: str = "") -> Parameters:
        """The layer's parameters, or the one of that name: matrices cut over a tensor-parallel group, vectors whole,
        traced or not."""
        by_role: dict[Role, int] = {}
        chosen = [self.module.get_parameter(name)] if name else list(self.module.parameters())
        for parameter in chosen:
            role: Role = "column" if parameter.dim() > 1 else "whole"
            by_role[role] = by_role.get(role, 0) + parameter.numel() * parameter.element_size()
        return Parameters(by_role=by_role, trainable=self.spec.trainable, number=len(chosen))

    def traced_parameters(self) -> Parameters:
        """The same by the roles that traces found: a patch embedding's matrix is whole. Only after a trace."""
        if self._traced_parameters is not None:
            return self._traced_parameters
        by_role: dict[Role, int] = {}
        for name, parameter in self.module.named_parameters():
            role = self.roles.get(name, "whole")
            by_role[role] = by_role.get(role, 0) + parameter.numel() * parameter.element_size()
        number = len(list(self.module.parameters()))
        self._traced_parameters = Parameters(by_role=by_role, trainable=self.spec.trainable, number=number)
        return self._traced_parameters

    def trace(self, items: Sequence[Item], links: Sequence[Sequence[Item]]) -> Trace:
        """Trace the layer on a part."""
        part = _Unreported(
            items=items,
            links=links,
            loaded=self._loaded(items),
            step=0,
            seed=0,
            device=torch.device("meta"),
            dtype=self.dtype,
            recompute_attention=self.strategy == "recompute-attention",
        )
        state = {given.name: self._input(given, items, links) for given in self.inputs}
        with torch.no_grad():
            self.module(dict(state), part)  # what all layers of a chunk share is made before the trace

        loaded = {name: tensor for name, tensor in part.loaded.items() if isinstance(tensor, Tensor)}
        return trace(
            lambda: self._run(dict(state), part),
            inputs={**state, **loaded},
            parameters=dict(self.module.named_parameters()),
            kernels=device_kernels(self.kernels),
        )

    def _run(self, state: dict[str, Tensor], part: PartView) -> dict[str, Tensor]:
        if self.strategy == "recompute":
            found: dict[str, Tensor] = checkpoint(
                self.module, state, part, use_reentrant=False, preserve_rng_state=False
            )
            return found
        outputs: dict[str, Tensor] = self.module(state, part)
        return outputs

    def _sample(self, items: Sequence[Item], links: Sequence[Sequence[Item]]) -> tuple[Structure, Floats]:
        self.num_traces += 1
        traced = self.trace(items, links)
        if self.fused_accumulation:
            traced = fuse_accumulation(traced)
        whole = {given.name for given in self.inputs if _one_row_per_item(given, items)}
        sharding = shard(traced, whole_inputs=whole)
        self.roles |= sharding.roles
        return _pack(traced, sharding, self.spec.loads)

    def _input(self, given: Input, items: Sequence[Item], links: Sequence[Sequence[Item]]) -> Tensor:
        if given.source is None:
            rows = sum(item.sizes[given.spec.rows] for item in items)
        else:
            rows = sum(s.sizes[given.spec.rows] for sources in links for s in sources if s.module == given.source)
        dtype = self.dtype if given.spec.dtype == "model" else getattr(torch, given.spec.dtype)
        return torch.empty(rows, given.spec.width, dtype=dtype, device="meta", requires_grad=given.grad)

    def _loaded(self, items: Sequence[Item]) -> dict[str, Tensor]:
        rows = sum(item.sizes["tokens"] for item in items)
        loaded = {}
        for name in self.spec.loads:
            if name in _PER_TOKEN:
                loaded[name] = torch.empty(rows, dtype=torch.int64, device="meta")
            elif name in self.widths:
                loaded[name] = torch.empty(rows, self.widths[name], device="meta")
            else:
                raise ValueError(
                    f"layer {self.spec.kind} loads {name!r}, whose number of columns is not known: the data set has to "
                    "say it in its widths"
                )
        return loaded


_PER_TOKEN = ("tokens", "labels", "spans", "classes")
_FIRST = ("parts", "items", "tokens", "squares")
_CUTS: tuple[Cut, Cut, Cut] = ("rows", "split", "whole")


class _Unreported(PartView):
    """A part that lets go of what layers report: a step's metrics are not held for its backward."""

    def report(self, name: str, total: float | Tensor, count: int | Tensor) -> None:
        pass


class _WithoutValues(TorchFunctionMode):
    """Skips drawing initial values on the meta device: there are none, and torch loads its compiler to draw them."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in ("normal_", "uniform_", "trunc_normal_"):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


class _Family:
    """Parts in which the same sums are not zero, items alike or not: they run the same operators."""

    def __init__(self, *, fit: Fit) -> None:
        self.fit = fit
        self.structure: Structure | None = None
        self.checked = False
        self.irregular = False
        self.seen: dict[tuple[object, ...], tuple[Structure, Floats]] = {}


def _pack(traced: Trace, sharding: Sharding, loaded: tuple[str, ...]) -> tuple[Structure, Floats]:
    """Structure and one flat vector of all numbers of a trace."""
    lines: dict[tuple[object, ...], tuple[Operator, Floats]] = {}
    live: dict[tuple[object, ...], set[int]] = {}
    for call, divided in zip(traced.calls, sharding.divided, strict=True):
        operator = Operator(
            name=call.name,
            kind=call.kind,
            phase=call.phase,
            site=call.site,
            parameter=call.parameter,
            divided=divided,
            accumulates=call.accumulates,
            again=call.again,
        )
        key = (call.name, call.phase, call.again, call.site, call.visit, call.parameter, divided)
        numbers = _numbers(call, sharding, traced)
        if key in lines:
            before = lines[key][1]
            before[:LIVE_ROWS] += numbers[:LIVE_ROWS]
            # Launches of a loop: what any of them holds, since which one holds most is no function of sums.
            live[key].update(call.live)
            before[LIVE_ROWS : LIVE_WHOLE + 1] = _by_cut(live[key], sharding, traced)
            before[GATHERED] = max(before[GATHERED], numbers[GATHERED])
        else:
            lines[key], live[key] = (operator, numbers), set(call.live)
    storages = traced.storages
    # A loss goes nowhere: it waits for its backward with what else is saved.
    leaving = {number for name, number in traced.outputs.items() if name != "loss"}
    own_saved = {s for s in traced.saved if storages[s].role == "own"} - leaving
    own_saved |= {number for name, number in traced.outputs.items() if name == "loss"}
    produced = {number for call in traced.calls if call.phase == "W" for number, _ in call.writes}
    keeps = ("own", "input")  # a linear map's input waits for W, wherever it comes from
    held = {n for call in traced.calls if call.phase == "W" for n, _ in call.reads if storages[n].role in keeps}
    shared = {s for s in traced.saved if storages[s].role == "shared"}
    memory = np.array([_by_cut(numbers, sharding, traced) for numbers in (own_saved, held - produced, shared)])
    inputs = {storage.name: n for n, storage in enumerate(storages) if storage.role == "input"}
    again = any(call.again for call in traced.calls)  # what runs again keeps its inputs
    tensors = {**inputs, **{f"out.{name}": n for name, n in traced.outputs.items()}}
    structure = Structure(
        operators=tuple(operator for operator, _ in lines.values()),
        exchanges=tuple(Exchanged(kind=e.kind, phase=e.phase, again=e.again) for e in sharding.exchanges),
        saved_inputs=frozenset(
            name for name, n in inputs.items() if n in traced.saved or (again and name not in loaded)
        ),
        saved_outputs=frozenset(name for name, n in traced.outputs.items() if n in traced.saved),
        loaded=loaded,
        tensors=tuple(tensors),
    )
    values = [
        *(numbers for _, numbers in lines.values()),
        np.array([_exchanged_bytes(e.kind, storages[e.storage].num_bytes, traced) for e in sharding.exchanges]),
        memory.reshape(-1),
        np.array([storages[n].num_bytes for n in tensors.values()]),
    ]
    return structure, np.concatenate([np.asarray(v, np.float64) for v in values])


def _unpack(structure: Structure, values: Floats) -> Counts:
    operators, exchanges = len(structure.operators), len(structure.exchanges)
    rest = values[operators * COLUMNS :]
    return Counts(
        structure=structure,
        table=values[: operators * COLUMNS].reshape(operators, COLUMNS),
        exchanged_bytes=rest[:exchanges],
        memory=rest[exchanges : exchanges + 9].reshape(3, 3),
        tensor_sizes=rest[exchanges + 9 :],
    )


def _numbers(call: Call, sharding: Sharding, traced: Trace) -> Floats:
    numbers = np.zeros(COLUMNS)
    numbers[[COUNT, FLOPS, COUNTED_FLOPS]] = 1, call.flops, call.counted_flops
    numbers[[BATCH, M, K, N]] = call.shape
    position = whole_operand(call, sharding.cuts, sharding.roles, traced)
    whole = None if position is None else call.operands[position]
    cut_matmul = sharding.roles.get(call.parameter) in ("column", "row") and call.kind == "matmul"
    for number, touched in (*call.reads, *call.writes):
        if number == whole:
            column = BYTES_WHOLE
        else:
            column = BYTES_SPLIT if cut_matmul else BYTES_ROWS + _CUTS.index(sharding.cuts[number])
        numbers[column] += touched
    numbers[LIVE_ROWS : LIVE_WHOLE + 1] = _by_cut(call.live, sharding, traced)
    if cut_matmul and whole is not None:
        numbers[GATHERED] = traced.storages[whole].num_bytes
    return numbers


def _by_cut(numbers: set[int] | tuple[int, ...], sharding: Sharding, traced: Trace) -> list[int]:
    sums = {cut: 0 for cut in _CUTS}
    for number in numbers:
        sums[sharding.cuts[number]] += traced.storages[number].num_bytes
    return [sums[cut] for cut in _CUTS]


def _exchanged_bytes(kind: str, num_bytes: int, traced: Trace) -> int:
    if kind != "loss":
        return num_bytes
    # Per row three float32 numbers: the largest logit, the sum of exponentials, the target's logit.
    rows = max((s.length for s in traced.storages if s.role == "input"), default=0)
    return 3 * 4 * rows


def _one_row_per_item(given: Input, items: Sequence[Item]) -> bool:
    return (
        given.source is None and all(item.sizes[given.spec.rows] == 1 for item in items) and given.spec.rows != "tokens"
    )


def _alike(items: Sequence[Item], links: Sequence[Sequence[Item]]) -> tuple[bool, bool]:
    """Whether all items have equally many tokens, and also equally many to attend to: some layers take them at once."""
    if len(items) < 2:
        return True, True
    first = items[0].sizes["tokens"]
    if any(item.sizes["tokens"] != first for item in items):
        return False, False
    return True, len({sum([source.sizes["tokens"] for source in sources]) for sources in links}) <= 1


def _order(name: str) -> tuple[int, str]:
    """Sums that counts mostly depend on come first, so that they carry the coefficients."""
    return (_FIRST.index(name) if name in _FIRST else len(_FIRST), name)


def sizes_key(items: Sequence[Item], links: Sequence[Sequence[Item]]) -> tuple[object, ...]:
    """All that the cost of a part may depend on."""
    return tuple(
        (tuple(sorted(item.sizes.items())), tuple((s.module, tuple(sorted(s.sizes.items()))) for s in sources))
        for item, sources in zip(items, links, strict=True)
    )
