"""One layer of a model as a graph of operators whose counts follow from the sizes of a part.

    graph = LayerGraph(spec, inputs, dtype=torch.bfloat16, widths={"pixels": 588})
    counts = graph.counts(items, links)         # traced once or a few times, then evaluated
    counts.operators[3].name, counts.table[3, FLOPS]

Structure (which operators, how they are cut over a tensor-parallel group) is that of the trace; numbers are
exact polynomials of the sums in `symbolic.py`. A layer whose counts are no such polynomials is traced at every new
size instead: right all the same, only slower; `irregular` counts those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from pipeweaver.data.items import Item
from pipeweaver.data.table import ItemTable
from pipeweaver.model.graph import LayerSpec, TensorSpec
from pipeweaver.model.part import PartView
from pipeweaver.schedule.ir import Strategy
from pipeweaver.semu.calls import Trace, fuse_accumulation
from pipeweaver.semu.counts import Counts, Floats, Structure, pack, unpack
from pipeweaver.semu.kernels import Kernels, device_kernels
from pipeweaver.semu.shapes import ShapesOnly
from pipeweaver.semu.sharding import Role, shard
from pipeweaver.semu.symbolic import Family, Fit, Sums, measure
from pipeweaver.semu.trace import trace


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


Records = Callable[[int], tuple[Sequence[Item], Sequence[Sequence[Item]]]]


class Block(NamedTuple):
    """Counts of parts with one structure: `values` [parts, numbers] as packed, `parts` which of those asked for."""

    structure: Structure
    values: Floats
    parts: list[int]


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
        self.by_length = counts_by_length(kernels)
        self.num_traces = 0
        self.irregular = 0
        with torch.device("meta"), _WithoutValues():
            self.module: nn.Module = spec.build().to(dtype).requires_grad_(spec.trainable)
        self._fits: dict[Family, _Traces] = {}
        self.roles: dict[str, Role] = {}
        self._traced_parameters: Parameters | None = None

    def counts(self, items: Sequence[Item], links: Sequence[Sequence[Item]], copies: int = 1) -> Counts:
        """Counts of forward and backward on a part, or on one with so many copies of its items."""
        sums = measure(ItemTable.of_part(items, links), [range(len(items))], copies, by_length=self.by_length)
        (block,) = self.counts_of(sums, lambda _: (items, links), copies)
        return unpack(block.structure, block.values[0])

    def is_irregular(self, family: Family) -> bool:
        """Whether counts on these parts are known to be no function of their sums."""
        found = self._fits.get(family)
        return found is not None and found.irregular

    def needed(self, part: Sums) -> object:
        """All that counts on a part depend on, as a key: the sums that they are a form in, where traces have shown which,
        else all. A text layer's do not depend on the images that only the layer before it takes in."""
        found = self._fits.get(part.family)
        if found is None or found.irregular or not found.checked:
            return part
        sums = found.fit.needed(part.values)
        return part if sums is None else (part.family, sums)

    def counts_of(self, parts: Sequence[Sums], records: Records, copies: int = 1) -> list[Block]:
        """Counts on many parts of one family, as blocks of parts that have one structure.

        `records(i)` are items and links of the i-th part, asked for where it has to be traced; `parts` are sums of them
        `copies` times.
        """
        values = [part.values for part in parts]
        if parts[0].family not in self._fits:
            self._fits[parts[0].family] = self._like_another(parts[0].family, values, records, copies) or _Traces()
        family = self._fits[parts[0].family]
        while not family.irregular:
            unknown = [i for i, spanned in enumerate(family.fit.spans(values)) if not spanned]
            if not unknown:
                break
            if copies > 2:
                # Two parts of the same items, once and twice, determine any number of copies.
                self.counts(*records(unknown[0]))
                self.counts(*records(unknown[0]), 2)
                if family.irregular or family.fit.spans(values)[unknown[0]]:
                    continue
            self._join(family, values[unknown[0]], *_copied(records(unknown[0]), copies))
        if copies == 1 and not family.irregular and not family.checked:
            other = next((i for i, sums in enumerate(values) if sums not in family.fit.rows), None)
            if other is not None:
                family.checked = True
                structure, found = self._sample(*records(other))
                same = structure == family.structure and np.array_equal(found, family.fit([values[other]])[0])
                family.irregular = not same
        if family.irregular:
            return [self._traced(family, i, *_copied(records(i), copies)) for i in range(len(parts))]
        assert family.structure is not None
        return [Block(family.structure, family.fit(values), list(range(len(parts))))]

    def _like_another(
        self, family: Family, parts: Sequence[tuple[int, ...]], records: Records, copies: int
    ) -> _Traces | None:
        """Traces of a family with the same sums, if they tell what a trace of a part of this one says: most layers do
        not mind whether items are alike."""
        for other, traces in self._fits.items():
            known = other.names == family.names and not traces.irregular
            part = next((i for i, spanned in enumerate(traces.fit.spans(parts)) if spanned), None) if known else None
            if part is not None:
                structure, values = self._sample(*_copied(records(part), copies))
                if structure == traces.structure and np.array_equal(values, traces.fit([parts[part]])[0]):
                    return traces
        return None

    def _join(
        self, family: _Traces, sums: tuple[int, ...], items: Sequence[Item], links: Sequence[Sequence[Item]]
    ) -> None:
        """A trace of this very part helps to determine others, if it can."""
        structure, values = self._sample(items, links)
        if family.structure not in (None, structure):
            family.irregular = True
            return
        family.structure = structure
        family.fit.add(sums, [int(v) for v in values])

    def _traced(self, family: _Traces, number: int, items: Sequence[Item], links: Sequence[Sequence[Item]]) -> Block:
        """Counts from a trace of this very part, which determines no other."""
        key = sizes_key(items, links)
        if key not in family.seen:
            self.irregular += 1
            family.seen[key] = self._sample(items, links)
        structure, values = family.seen[key]
        return Block(structure, values[None], [number])

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
        with ShapesOnly():
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
        return pack(traced, sharding, self.spec.loads)

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


class _Traces:
    """What is known of the parts of one family."""

    def __init__(self) -> None:
        self.fit = Fit()
        self.structure: Structure | None = None
        self.checked = False
        self.irregular = False
        self.seen: dict[tuple[object, ...], tuple[Structure, Floats]] = {}


def _one_row_per_item(given: Input, items: Sequence[Item]) -> bool:
    return (
        given.source is None and all(item.sizes[given.spec.rows] == 1 for item in items) and given.spec.rows != "tokens"
    )


def _copied(
    records: tuple[Sequence[Item], Sequence[Sequence[Item]]], copies: int
) -> tuple[Sequence[Item], Sequence[Sequence[Item]]]:
    items, links = records
    return [*items] * copies, [*links] * copies


def counts_by_length(kernels: Kernels) -> bool:
    """Whether attention makes a call for every run of sequences of equal length."""
    return kernels == "cpu"


def sizes_key(items: Sequence[Item], links: Sequence[Sequence[Item]]) -> tuple[object, ...]:
    """All that the cost of a part may depend on."""
    return tuple(
        (tuple(sorted(item.sizes.items())), tuple((s.module, tuple(sorted(s.sizes.items()))) for s in sources))
        for item, sources in zip(items, links, strict=True)
    )
