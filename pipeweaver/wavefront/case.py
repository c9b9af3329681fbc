"""Read a case from a file in the format of the reference case: MetaOps with measured profiles.

    {"metaops": {"text": {"batch_size": 8, "layer_num": 24, "level": 0}, ...},
     "profile_of": {"text": "t5enc", ...},
     "T_points_ms_per_layer": {"t5enc": [[items per worker, ms], ...], ...},
     "edges": [["text", "imu"], ...]}

Valid counts are those that divide the batch. Levels follow from the edges. If the file has "results", their `N` say
for how many workers the case is to be planned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from pipeweaver.wavefront.metagraph import DataFlow, MetaGraph, MetaOp
from pipeweaver.wavefront.scaling import local_times, repaired

DEFAULT_WORKERS = (4, 8, 16, 32)
MOST = 100_000
"""Layers and items of a MetaOp, and workers."""
MOST_MS = 10**9
"""All MetaOps one after another, each at its slowest: far from where 64 bits of ns end."""


class _Result(msgspec.Struct, frozen=True, kw_only=True):
    N: Annotated[int, Meta(ge=1, le=MOST)]
    makespan_ms: float | None = None


class _File(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a file; what its numbers mean is checked by name."""

    metaops: dict[str, dict[str, Any]]
    profile_of: dict[str, str]
    T_points_ms_per_layer: dict[str, tuple[tuple[int, float | None], ...]]
    edges: tuple[tuple[str, str], ...] = ()
    results: tuple[_Result, ...] = ()


@dataclass(frozen=True, kw_only=True)
class WavefrontCase:
    """A MetaGraph, for how many workers to plan it, and the makespans in ms that its file reports, by workers."""

    graph: MetaGraph
    workers: tuple[int, ...]
    published_ms: dict[int, float]


def read_case(path: Path) -> WavefrontCase:
    """The case in a file. Raises ValueError, naming MetaOp or profile, for anything that makes no sense in it."""
    try:
        return case_of(msgspec.json.decode(path.read_bytes()))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # what is no JSON too
        raise ValueError(f"cannot read the case in {path}: {error}") from None


def case_of(data: Mapping[str, Any]) -> WavefrontCase:
    """The case in decoded JSON. Raises ValueError like `read_case`."""
    for key in ("metaops", "profile_of", "T_points_ms_per_layer"):
        if isinstance(data, Mapping) and key not in data:
            raise ValueError(f"the case has no {key!r}; it needs metaops, profile_of and T_points_ms_per_layer")
    try:
        file = msgspec.convert(data, _File)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    ops = tuple(_meta_op(name, op, file) for name, op in file.metaops.items())
    slowest_ms = sum(op.num_layers * max(op.layer_ns) for op in ops) / 1e6
    if slowest_ms > MOST_MS:
        raise ValueError(f"the MetaOps one after another take up to {slowest_ms:.3g} ms, more than {MOST_MS:,}")
    positions = {op.name: i for i, op in enumerate(ops)}
    flows = []
    for source, destination in file.edges:
        for end in (source, destination):
            if end not in positions:
                raise ValueError(f"edge {source} -> {destination}: there is no MetaOp {end}")
        flows.append(DataFlow(positions[source], positions[destination]))
    published: dict[int, float] = {}
    for row in file.results:
        if row.makespan_ms is not None:
            published[row.N] = min(row.makespan_ms, published.get(row.N, float("inf")))
    workers = tuple(dict.fromkeys(row.N for row in file.results)) or DEFAULT_WORKERS
    return WavefrontCase(graph=MetaGraph(ops=ops, flows=tuple(flows)), workers=workers, published_ms=published)


def _meta_op(name: str, op: Mapping[str, Any], file: _File) -> MetaOp:
    for key in ("batch_size", "layer_num"):
        if type(op.get(key)) is not int or not 1 <= op[key] <= MOST:
            raise ValueError(f"{key} of {name} is {op.get(key)}; it must be a whole number from 1 to {MOST:,}")
    if name not in file.profile_of:
        raise ValueError(f"{name} has no profile in profile_of")
    profile = file.profile_of[name]
    if profile not in file.T_points_ms_per_layer:
        raise ValueError(f"{name} uses profile {profile}, which T_points_ms_per_layer does not hold")
    points: Sequence[tuple[int, float | None]] = file.T_points_ms_per_layer[profile]
    counts, times = local_times(profile, dict(points), op["batch_size"])
    counts, layer_ns = repaired(counts, [max(1, round(time * 1e6)) for time in times])
    if not counts:
        raise ValueError(f"profile of {profile} has no times for a batch of {op['batch_size']}")
    return MetaOp(name=name, num_layers=op["layer_num"], counts=counts, layer_ns=layer_ns)
