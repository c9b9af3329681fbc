"""Counts of a layer on a part: a line per operator, what its tensor-parallel group exchanges, what it holds.

    structure, values = pack(traced, sharding, loaded=("tokens",))     # all numbers of a trace in one vector
    counts = unpack(structure, values)
    counts.operators[3].name, counts.table[3, FLOPS]

The structure does not change with the sizes of a part, the vector is a polynomial in them (`symbolic.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pipeweaver.semu.calls import Call, Kind, OperatorPhase, Trace
from pipeweaver.semu.sharding import Cut, Divided, Sharding, whole_operand

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


def pack(traced: Trace, sharding: Sharding, loaded: tuple[str, ...]) -> tuple[Structure, Floats]:
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


def unpack(structure: Structure, values: Floats) -> Counts:
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


_CUTS: tuple[Cut, Cut, Cut] = ("rows", "split", "whole")
