"""The nouns of a step: placement, parts, stages, edges, transfers, actions, plan.

One plan is verified, emulated, drawn, saved and executed; nothing re-implements it. Plans hold plain
integers, strings and tuples, so that they travel as typed messages. Times are nanoseconds, memory is bytes.

Example (2 workers; vision of 4 layers, language of 4; microbatch m with images in parts a, b):

    chunks      0 vision[0:2]@0   1 vision[2:4]@1   2..5 language[i:i+1]@0,1,0,1
    edge        1Fa -> 2Fm carries the rows of a's images into m's sequence
    worker 0    0Fa 0Fb 2Fm 4Fm 4Bm 2Bm 0Bb 0Ba

In text, parts are numbered per chunk: `2F0` is the forward of part 0 of chunk 2.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Literal, NamedTuple

import msgspec

from pipeweaver.data.items import Item

Phase = Literal["F", "B", "I", "W"]
"""Forward; backward; or the backward split into input gradient and weight gradient."""

Strategy = Literal["keep", "recompute", "recompute-attention", "offload"]
"""What becomes of a layer's saved tensors until its backward."""


ITEM_SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1, "bool": 1}
"""Bytes of one element, by torch dtype name."""


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """Layers [start, stop) of a module, for one task, on one worker.

    `before` and `after` of the module belong to the chunks with start 0 and stop = number of layers.
    """

    task: str
    module: str
    start: int
    stop: int
    worker: int

    def __str__(self) -> str:
        return f"{self.module}[{self.start}:{self.stop}]@{self.worker}"


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Which chunks live on which of the workers 0..workers-1 of a replica.

    A wavefront plan lists chunks in the order in which they run. Where it goes forward and backward several times,
    `passes` has the number of the first chunk of every pass but the first.
    """

    workers: int
    chunks: tuple[Chunk, ...]
    passes: tuple[int, ...] = ()

    def on(self, worker: int) -> tuple[int, ...]:
        """Numbers of the chunks on a worker."""
        return tuple(i for i, chunk in enumerate(self.chunks) if chunk.worker == worker)


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """The items that one chunk takes at a time: positions in `Plan.items`, in packed order."""

    items: tuple[int, ...]
    microbatch: int


class Stage(NamedTuple):
    """(chunk, part, phase): the unit of scheduling. `part` counts the parts of this chunk."""

    chunk: int
    part: int
    phase: Phase

    def __str__(self) -> str:
        return f"{self.chunk}{self.phase}{self.part}"


class Rows(NamedTuple):
    """`length` rows from row `source` of the source's packed tensor to row `destination` of the destination's."""

    source: int
    destination: int
    length: int


class Edge(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor from the forward of one (chunk, part) to the forward of another.

    `output` names the tensor among the source's outputs, `input` among the destination's inputs. The
    tensor that travels has shape [sum of lengths, width], its rows in the order of `rows`. If `grad`,
    the same rows flow back from the destination's backward; a source's gradient is the sum over its edges.
    """

    source: tuple[int, int]
    destination: tuple[int, int]
    output: str
    input: str
    dtype: str
    width: int
    rows: tuple[Rows, ...]
    grad: bool

    @property
    def num_rows(self) -> int:
        return sum(rows.length for rows in self.rows)


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """One event: an edge's tensor ("F") or its gradient ("B") moves from worker `sender` to `receiver`."""

    edge: int
    phase: Literal["F", "B"]
    sender: int
    receiver: int
    shape: tuple[int, int]
    dtype: str
    num_bytes: int
    duration_ns: int = 0


class ParameterGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters with the same holders: their gradients are reduced over exactly these, in every replica.

    `parameters` are layer names ("language.layers.3") or, for tied ones, full parameter names, which
    take precedence over the layer that they are in. `holders` are workers of one replica.
    """

    parameters: tuple[str, ...]
    holders: tuple[int, ...]
    num_bytes: int = 0


BufferKind = Literal["loaded", "saved", "output", "gradient", "received", "weight", "leaving", "host", "returned"]


class Buffer(NamedTuple):
    """Memory that one action allocates and a later one frees, on one worker.

    "loaded": data of a (chunk, part); "saved": what its backward needs, its outputs included;
    "output": outputs of a (chunk, part) without a backward; "gradient": input gradients of a (chunk, part),
    until sent; "received": the tensor of transfer `first` (`second` is 0); "weight": what a split
    backward keeps for W. Of what layers offload: "leaving" from the forward on, until it is copied to the host;
    "host", there; "returned" from its reload on.
    """

    kind: BufferKind
    first: int
    second: int = 0


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy decides for one replica and one step; the compiler makes the plan of it.

    `parts[c]` are the parts of chunk c, `order[w]` the stages of worker w. Every part of every chunk has
    exactly one F and, where a gradient is needed, one B (or one I and one W) in the order of its chunk's worker.
    `strategies[c][p]` are the memory strategies of part p of chunk c, one per layer (`Compute.strategies`); empty
    means that every layer keeps what it saves.
    """

    placement: Placement
    parts: tuple[tuple[Part, ...], ...]
    order: tuple[tuple[Stage, ...], ...]
    strategies: tuple[tuple[tuple[Strategy, ...], ...], ...] = ()
    forward_only: bool = False
    policy: str = ""
    seed: int = 0
    rounds: int = 0


class Allocation(NamedTuple):
    buffer: Buffer
    num_bytes: int


class Load(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Bring pixels, tokens or labels of a (chunk, part) to the device."""

    chunk: int
    part: int
    names: tuple[str, ...]
    allocations: tuple[Allocation, ...] = ()
    duration_ns: int = 0


class Compute(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Run a stage. `strategies` holds one memory strategy per layer of the chunk, `before` and `after`
    included; empty means keep throughout. `workspace_bytes` are needed only while it runs."""

    stage: Stage
    strategies: tuple[Strategy, ...] = ()
    allocations: tuple[Allocation, ...] = ()
    workspace_bytes: int = 0
    duration_ns: int = 0


class Offload(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Begin to copy what a (chunk, part) has "leaving" to the host, beside compute. Never blocks."""

    chunk: int
    part: int
    allocations: tuple[Allocation, ...] = ()
    duration_ns: int = 0


class Reload(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Begin to copy back, beside compute, what a (chunk, part) has on the "host". Never blocks."""

    chunk: int
    part: int
    allocations: tuple[Allocation, ...] = ()
    duration_ns: int = 0


class Settle(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Block until the copy of a (chunk, part) that began last, to the host or back, is complete."""

    chunk: int
    part: int


class Post(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Enqueue transfer number `transfer`; its receiver allocates the buffer here. Never blocks, but on a CPU takes the
    worker `duration_ns` of its core: posting, and moving the bytes meanwhile."""

    transfer: int
    allocations: tuple[Allocation, ...] = ()
    duration_ns: int = 0


class Wait(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Block until transfer number `transfer` is complete on this end."""

    transfer: int


class Free(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Let go of buffers."""

    buffers: tuple[Buffer, ...]


class Reduce(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Sum the gradients of parameter group `group` over its holders in all replicas: a meeting."""

    group: int
    duration_ns: int = 0


class Norm(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Sum squared gradients over all workers of all replicas, each parameter once: a meeting."""

    duration_ns: int = 0


class Step(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Clip and step the optimizer on this worker's parameters."""

    duration_ns: int = 0


Action = Load | Compute | Offload | Reload | Settle | Post | Wait | Free | Reduce | Norm | Step


class Span(NamedTuple):
    """Predicted start and end of an action, nanoseconds from the start of the step."""

    start_ns: int
    end_ns: int


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """What the emulator says of a plan.

    `spans[w][i]` belongs to `actions[w][i]`; `transfers[t]` to transfer t, from the later post to its
    end. `makespan_ns` ends with the last backward, `step_ns` includes reductions and the optimizer.
    `useful_ns` is W, `lower_bound_ns` holds for any schedule of the same stages, whatever is kept in memory.
    """

    spans: tuple[tuple[Span, ...], ...]
    transfers: tuple[Span, ...]
    makespan_ns: int
    step_ns: int
    peak_bytes: tuple[int, ...]
    useful_ns: int
    lower_bound_ns: int

    @property
    def bubble(self) -> float:
        """Share of the workers' time up to the makespan that is not useful work."""
        return 1.0 - self.useful_ns / (len(self.spans) * self.makespan_ns) if self.makespan_ns else 0.0


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """What the workers of one replica measured while they ran a plan: the shape of `Prediction`, clocks aligned.

    `spans[w][i]` belongs to `actions[w][i]`; `transfers[t]` to transfer t, from the later post to its end as the
    receiver saw it. Times are nanoseconds from the start of the step. `step_ns` is from optimizer end to
    optimizer end, loading and the receipt of the plan included; `waiting_ns[w]` is the part of it that worker w
    waited for its plan.
    """

    spans: tuple[tuple[Span, ...], ...]
    transfers: tuple[Span, ...]
    step_ns: int
    peak_bytes: tuple[int, ...] = ()
    waiting_ns: tuple[int, ...] = ()


class Plan(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """All that the workers of one replica need for one step, or for a forward-only pass.

    `items` are this replica's share of the batch, `links` pairs (source, destination) of positions in it, `records` maps "task/draw" of
    each sample to its position in the data set. `parts[c]` are the parts of chunk c, `order[w]` the stages of worker w. `normalisers` maps
    "task/module" of each loss to the units it is divided by, over all replicas. `static_bytes[w]` is what
    worker w holds throughout: parameters, gradients, optimizer state. `costs` says where durations are from.
    """

    step: int
    replica: int
    num_replicas: int
    policy: str
    seed: int
    rounds: int
    forward_only: bool
    items: tuple[Item, ...]
    links: tuple[tuple[int, int], ...]
    records: dict[str, int]
    placement: Placement
    parts: tuple[tuple[Part, ...], ...]
    order: tuple[tuple[Stage, ...], ...]
    edges: tuple[Edge, ...]
    transfers: tuple[Transfer, ...]
    groups: tuple[ParameterGroup, ...]
    normalisers: dict[str, int]
    actions: tuple[tuple[Action, ...], ...]
    static_bytes: tuple[int, ...]
    prediction: Prediction | None = None
    costs: str = ""

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything but the prediction: equal on all workers, or they do not start the step."""
        bare = msgspec.structs.replace(self, prediction=None)
        return hashlib.sha256(msgspec.msgpack.encode(bare)).hexdigest()[:16]

    def stage_items(self, chunk: int, part: int) -> tuple[Item, ...]:
        return tuple(self.items[i] for i in self.parts[chunk][part].items)
