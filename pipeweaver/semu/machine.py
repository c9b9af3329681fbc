"""Machines as files: peaks, bandwidths, links, memory, and how much of them each kind of operator reaches.

    machine = load_machine("B200")                       # a shipped file, or a path to one of your own
    collective_ns(machine, "all_reduce", num_bytes, Group(size=64, per_island=8))

A factor is the share of the peak that is reached (`factors.py`). Shapes that were measured have the measured factor;
all others follow the curve through the measurements of that machine, e / (1 + a/m + b/n + c/k): small dimensions cost
efficiency. Machines that nobody measured take curves of one that was, and say so in `calibrated`.
Units: FLOP/s, bytes/s, bytes, nanoseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
import numba
from msgspec import Meta

from pipeweaver import toml

Positive = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(gt=0, le=2)]
Latency = Annotated[float, Meta(ge=0)]
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "point_to_point"]


"""Of one tensor, or of many."""

Curve = tuple[tuple[Positive, Positive], ...]
"""Rows [size, share of the peak], sizes ascending: between them the share follows the logarithm of the size."""


class MatmulCurve(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[[matmul.curves]]: factors of matmuls with the same weight. `phase` F and I: `fixed` are k and n, rows
    [m, factor]; W: `fixed` are m and n, rows [k, factor]."""

    phase: Literal["F", "I", "W"]
    fixed: tuple[Annotated[int, Meta(ge=1)], Annotated[int, Meta(ge=1)]]
    factors: Curve

    def __post_init__(self) -> None:
        check_curve(f"matmul {self.phase} {self.fixed[0]} x {self.fixed[1]}", self.factors)


class MatmulFactors(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[matmul]: asymptotic shares of the peak for the forward, input-gradient and weight-gradient matmul of
    C[m, n] = A[m, k] B[k, n], and the dimensions at which half of it is lost. `measured_*` rows are
    [m, k, n, factor]: these very shapes. `curves` hold weights that were measured at several numbers of rows."""

    forward: Share
    input: Share
    weight: Share
    half_m: Latency = 0.0
    half_n: Latency = 0.0
    half_k: Latency = 0.0
    measured_forward: tuple[tuple[int, int, int, Share], ...] = ()
    measured_input: tuple[tuple[int, int, int, Share], ...] = ()
    measured_weight: tuple[tuple[int, int, int, Share], ...] = ()
    curves: tuple[MatmulCurve, ...] = ()


class AttentionFactors(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[attention]: share of the peak, on the FLOPs that a causal kernel does not skip.

    Rows are [FLOPs of one launch, factor], ascending; between them the factor follows the logarithm of the
    FLOPs, below the first a launch takes as long as the first, above the last it keeps its factor.
    """

    forward: Curve
    backward: Curve

    def __post_init__(self) -> None:
        check_curve("forward", self.forward)
        check_curve("backward", self.backward)


class MemoryFactors(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[memory]: share of the bandwidth that operators bound by it reach, and what each access costs at least.
    `factors` by operator name ("aten._log_softmax") where one differs. `curves` by operator name, over the bytes of a
    launch, are measured launches with all that they cost: caches may be faster than the memory behind them."""

    factor: Share
    access_ns: Latency = 0.0
    factors: dict[str, Share] = {}
    curves: dict[str, Curve] = {}

    def __post_init__(self) -> None:
        for name, rows in self.curves.items():
            check_curve(name, rows)


class Overheads(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[overheads]: what costs time beside kernels, where it does not run beside them: on a CPU, Python and autograd.

    `forward_ns` and `backward_ns` for every launch, `stage_*_ns` for every stage. A split backward costs
    `split_ns` more for every launch of the forward, which has to put weight gradients off, and its second half takes
    `split_weight` times what it takes in one; `recompute_ns` is what running a layer again costs beside its kernels.
    A transfer takes `post_ns`, and `post_byte_ns` for every byte, of the time of the worker at each of its ends.
    """

    forward_ns: Latency = 0.0
    backward_ns: Latency = 0.0
    stage_forward_ns: Latency = 0.0
    stage_backward_ns: Latency = 0.0
    split_ns: Latency = 0.0
    split_weight: Positive = 1.0
    recompute_ns: Latency = 0.0
    post_ns: Latency = 0.0
    post_byte_ns: Latency = 0.0


class OptimizerFactors(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[optimizer]: share of the memory bandwidth that norm, clipping and step reach, above 1 where what they read is still
    in a cache, and what each parameter costs beside."""

    factor: Positive
    parameter_ns: Latency = 0.0


class LoadFactors(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[loads.NAME]: time to load a tensor of a part from the data set and to bring it to the device."""

    part_ns: Latency = 0.0
    item_ns: Latency = 0.0
    byte_ns: Latency = 0.0


class CollectiveFactors(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Share of a link's bandwidth, latency of each hop of the ring, latency of the whole call."""

    factor: Share = 1.0
    hop_ns: Latency = 0.0
    fixed_ns: Latency = 0.0


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[links.island] or [links.cluster]: bytes/s of one device in one direction, and how collectives use them."""

    bandwidth: Positive
    all_reduce: CollectiveFactors = CollectiveFactors()
    all_gather: CollectiveFactors = CollectiveFactors()
    reduce_scatter: CollectiveFactors = CollectiveFactors()
    point_to_point: CollectiveFactors = CollectiveFactors()


class Links(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`island` joins the devices of one node, `cluster` nodes."""

    island: Link
    cluster: Link


class Machine(msgspec.Struct, frozen=True, eq=False, kw_only=True, forbid_unknown_fields=True):
    """A device and what joins it to others.

    `peak_flops` by dtype name. `kernels`: whose operators are one kernel (`kernels.py`). `floor_ns`: no kernel takes less. `host_bandwidth`: bytes/s to host memory, for
    offloading. `calibrated` says what the factors were measured on and when; empty if they are defaults.
    """

    name: str
    source: str
    calibrated: str = ""
    memory_bytes: Annotated[int, Meta(gt=0)]
    memory_bandwidth: Positive
    host_bandwidth: Positive
    devices_per_island: Annotated[int, Meta(ge=1)] = 8
    floor_ns: Latency = 0.0
    kernels: Literal["cuda", "cpu"] = "cuda"
    peak_flops: dict[str, Positive]
    matmul: MatmulFactors
    attention: AttentionFactors
    memory: MemoryFactors
    links: Links
    overheads: Overheads = Overheads()
    optimizer: OptimizerFactors | None = None
    loads: dict[str, LoadFactors] = {}

    def peak(self, dtype: str) -> float:
        """FLOP/s of matmuls in a dtype. Raises ValueError if the machine file does not have it."""
        if dtype not in self.peak_flops:
            raise ValueError(f"machine {self.name} has no peak_flops for {dtype}; it has {', '.join(self.peak_flops)}")
        return self.peak_flops[dtype]


@dataclass(frozen=True, kw_only=True)
class Group:
    """Devices of a collective: `size` of them, `per_island` on each island that takes part."""

    size: int
    per_island: int

    @property
    def crosses(self) -> bool:
        return self.size > self.per_island


def machine_names() -> tuple[str, ...]:
    """Names of the shipped machine files."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


@lru_cache
def load_machine(name: str) -> Machine:
    """A shipped machine by name ("H800"), or a machine file by its path.

    Raises ValueError, naming the file and the key, if it is not a complete machine file.
    """
    path = Path(name) if name.endswith(".toml") else _FOLDER / f"{name}.toml"
    if not name.endswith(".toml") and not path.exists():
        raise ValueError(
            f"no machine {name!r}; there are {', '.join(machine_names())}, or give the path of a .toml file"
        )
    return toml.convert(toml.read(path), "", Machine)


def check_curve(name: str, rows: Curve) -> None:
    """Raise ValueError unless there are rows, sizes ascending."""
    sizes = [row[0] for row in rows]
    if not rows or sizes != sorted(set(sizes)):
        raise ValueError(f"{name}: needs rows [size, factor] with ascending sizes")


class Ring(NamedTuple):
    """A collective of a group as numbers: `passes` over its `size` devices, latency in all, bytes/s."""

    passes: int
    size: int
    latency_ns: float
    bandwidth: float


def ring(machine: Machine, kind: Collective, group: Group) -> Ring:
    """How a group of several devices runs a collective.

    Between islands as many rings run side by side as there are members on an island, each through its own
    network device; the slower of the links inside and between islands sets the pace. Every hop costs latency.
    """
    island, cluster = getattr(machine.links.island, kind), getattr(machine.links.cluster, kind)
    assert kind != "point_to_point", "a transfer between two devices is transfer_ns"
    passes = 2 if kind == "all_reduce" else 1
    hops = passes * (group.size - 1)
    if not group.crosses:
        bandwidth = machine.links.island.bandwidth * island.factor
        return Ring(passes, group.size, island.fixed_ns + hops * island.hop_ns, bandwidth)
    islands = -(-group.size // group.per_island)
    bandwidth = group.per_island * machine.links.cluster.bandwidth * cluster.factor
    if group.per_island > 1:
        bandwidth = min(bandwidth, machine.links.island.bandwidth * island.factor)
    across = passes * (islands - 1)
    latency_ns = cluster.fixed_ns + across * cluster.hop_ns + (hops - across) * island.hop_ns
    return Ring(passes, group.size, latency_ns, bandwidth)


@numba.njit(cache=True)
def ring_ns(passes, size, latency_ns, bandwidth, num_bytes):  # type: ignore[no-untyped-def]
    """Time of a collective, a `Ring`. `num_bytes` is the whole tensor: what each device holds of it before or after."""
    moved = passes * num_bytes * (size - 1) / size
    return latency_ns + 1e9 * moved / bandwidth if num_bytes > 0 else 0.0


def collective_ns(machine: Machine, kind: Collective, num_bytes: float, group: Group) -> float:
    """Time of a ring over a group; none where it is one device."""
    if group.size == 1:
        return 0.0
    of = ring(machine, kind, group)
    return float(ring_ns(float(of.passes), float(of.size), of.latency_ns, of.bandwidth, float(num_bytes)))


def transfer_ns(machine: Machine, num_bytes: float, *, crosses: bool, devices: int = 1) -> float:
    """Time to hand a tensor from one worker to the next, each of its `devices` sending its share."""
    link = machine.links.cluster if crosses else machine.links.island
    factors = link.point_to_point
    return factors.fixed_ns + factors.hop_ns + 1e9 * num_bytes / devices / (link.bandwidth * factors.factor)


_FOLDER = Path(__file__).parent / "machines"
