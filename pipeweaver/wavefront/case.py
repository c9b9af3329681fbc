"""Read a case from a file in the format of the reference case: MetaOps with measured profiles.

    {"metaops": {"text": {"batch_size": 8, "layer_num": 24, "level": 0}, ...},
     "profile_of": {"text": "t5enc", ...},
     "T_points_ms_per_layer": {"t5enc": [[items per worker, ms], ...], ...},
     "edges": [["text", "imu"], ...]}

Valid counts are those that divide the batch. Levels follow from the edges. If the file has "results", their `N` say
for how many workers the case is to be planned.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeweaver.wavefront.metagraph import DataFlow, MetaGraph, MetaOp
from pipeweaver.wavefront.scaling import local_times, repaired

DEFAULT_WORKERS = (4, 8, 16, 32)


@dataclass(frozen=True, kw_only=True)
class WavefrontCase:
    """A MetaGraph, for how many workers to plan it, and the makespans in ms that its file reports, by workers."""

    graph: MetaGraph
    workers: tuple[int, ...]
    published_ms: dict[int, float]


def read_case(path: Path) -> WavefrontCase:
    """The case in a file. Raises ValueError, naming MetaOp or profile, for anything that makes no sense in it."""
    try:
        data = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"cannot read the case in {path}: {error}") from None
    return case_of(data)


def case_of(data: Mapping[str, Any]) -> WavefrontCase:
    """The case in decoded JSON. Raises ValueError like `read_case`."""
    for key in ("metaops", "profile_of", "T_points_ms_per_layer"):
        if key not in data:
            raise ValueError(f"the case has no {key!r}; it needs metaops, profile_of and T_points_ms_per_layer")
    profiles = data["T_points_ms_per_layer"]
    ops = tuple(_meta_op(name, op, data["profile_of"], profiles) for name, op in data["metaops"].items())
    positions = {op.name: i for i, op in enumerate(ops)}
    flows = []
    for edge in data.get("edges", ()):
        for end in edge:
            if end not in positions:
                raise ValueError(f"edge {' -> '.join(map(str, edge))}: there is no MetaOp {end}")
        flows.append(DataFlow(positions[edge[0]], positions[edge[1]]))
    results = data.get("results", ())
    published: dict[int, float] = {}
    for row in results:
        if "makespan_ms" in row:
            published[int(row["N"])] = min(float(row["makespan_ms"]), published.get(int(row["N"]), float("inf")))
    workers = tuple(dict.fromkeys(int(row["N"]) for row in results)) or DEFAULT_WORKERS
    return WavefrontCase(graph=MetaGraph(ops=ops, flows=tuple(flows)), workers=workers, published_ms=published)


def _meta_op(name: str, op: Mapping[str, Any], profile_of: Mapping[str, str], profiles: Mapping[str, Any]) -> MetaOp:
    for key in ("batch_size", "layer_num"):
        if not isinstance(op.get(key), int) or op[key] < 1:
            raise ValueError(f"{key} of {name} is {op.get(key)}; it must be a whole number of at least 1")
    if name not in profile_of:
        raise ValueError(f"{name} has no profile in profile_of")
    profile = profile_of[name]
    if profile not in profiles:
        raise ValueError(f"{name} uses profile {profile}, which T_points_ms_per_layer does not hold")
    points = {int(items): time for items, time in profiles[profile]}
    counts, times = local_times(profile, points, op["batch_size"])
    counts, layer_ns = repaired(counts, [round(time * 1e6) for time in times])
    return MetaOp(name=name, num_layers=op["layer_num"], counts=counts, layer_ns=layer_ns)
