"""Calibration: a short profile of the model's real layers and of the links, on this machine, kept for later runs.

All workers profile the same layers at the same time, so that every core is as busy as in a step; the first
rank puts the results together and keeps the table in a cache, under a name that says what it holds for:

    costs = calibrated_costs(graph, batches, load, transport=..., exchange=..., conditions=..., cache="")
    costs.stage(chunk, items, links)        # on the first rank; the others get None

Measuring is `profile/`, this file only decides whether to.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch

from pipeweaver.cluster import Workers
from pipeweaver.data.items import Batch
from pipeweaver.model.graph import ModelGraph
from pipeweaver.profile.layers import Load, profile_layers
from pipeweaver.profile.links import profile_host, profile_links
from pipeweaver.profile.measured import Profile
from pipeweaver.profile.parts import largest
from pipeweaver.profile.table import Table, TableCosts, fit_error, load_table, merge, save_table
from pipeweaver.profile.variants import variants
from pipeweaver.runtime.exchange import Exchange
from pipeweaver.runtime.transport import Transport

FORM = 2
"""Raised when what is measured changes, so that older tables are not read."""

BUSY = 0.9
"""Below this share of a core the machine was busy with other things while it was measured."""

_REPORT = -1
"""Number of the reports in the exchange; orders count from 0."""


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """What a table holds for, beside the layers."""

    device: str
    torch: str
    dtype: str
    pipeline: int
    replicas: int
    threads: int


def conditions(workers: Workers, device: torch.device, dtype: str) -> Conditions:
    """Conditions of this process. On CPU the device is named by its model."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    return Conditions(
        device=name,
        torch=str(torch.__version__),
        dtype=dtype,
        pipeline=workers.pipeline,
        replicas=workers.replicas,
        threads=workers.threads,
    )


def fingerprint(graph: ModelGraph, batches: Sequence[Batch], conditions: Conditions) -> str:
    """Equal for equal layers under equal conditions on data of about the same size.

    Depth does not matter, nor does which data it is: layers of equal kind cost the same, and sizes between
    those measured are interpolated. The largest part of each module counts, in powers of two.
    """
    layers = sorted({variant.name for variant in variants(graph).values()})
    sizes = [[size.bit_length() for size in largest(graph, module, batches)] for module in graph.modules]
    content = msgspec.json.encode([FORM, layers, sizes, conditions])
    return hashlib.sha256(content).hexdigest()[:16]


def cached_costs(
    graph: ModelGraph, batches: Sequence[Batch], conditions: Conditions, cache: str = ""
) -> TableCosts | None:
    """Costs from an earlier calibration that holds here, or None. `cache` is a folder, by default the user's."""
    path = cache_path(cache, fingerprint(graph, batches, conditions))
    return TableCosts(load_table(path), graph) if path.exists() else None


def calibrated_costs(
    graph: ModelGraph,
    batches: Sequence[Batch],
    load: Load,
    *,
    transport: Transport,
    exchange: Exchange,
    conditions: Conditions,
    device: torch.device,
    cache: str = "",
    anew: bool = False,
    say: Callable[[str], None] = print,
) -> TableCosts | None:
    """Costs on the first worker, None on the others; from the cache, or measured if they are not there.

    All workers call this at the same time with the same arguments. `load` brings content of the items of
    `batches`, `anew` measures in any case, `say` is told on the first worker what takes time. Raises
    ValueError if a module has no item in `batches`.
    """
    path = cache_path(cache, fingerprint(graph, batches, conditions))
    first = transport.address == (0, 0)
    found = load_table(path) if first and not anew and path.exists() else None
    missing = transport.all_sum([1.0 if first and found is None else 0.0])[0] > 0
    if not missing:
        return TableCosts(found, graph) if found is not None else None
    num_workers = conditions.pipeline * conditions.replicas
    if first:
        say(f"calibrating: {num_workers} workers measure the model's layers, once for this model on this machine")
    profile = profile_worker(graph, batches, load, transport=transport, conditions=conditions, device=device)
    if not first:
        exchange.send_report(_REPORT, *transport.address, profile)
        return None
    others = [
        exchange.take_report(_REPORT, replica, worker, Profile)
        for replica in range(conditions.replicas)
        for worker in range(conditions.pipeline)
        if (replica, worker) != (0, 0)
    ]
    table = merge(
        [profile, *others],
        fingerprint=path.stem,
        source=f"profile of {datetime.date.today()}, {num_workers} {'worker' if num_workers == 1 else 'workers'} busy",
        dtype=conditions.dtype,
    )
    save_table(path, table)
    for line in describe(table, graph):
        say(line)
    return TableCosts(table, graph)


def pack_costs(costs: TableCosts) -> bytes:
    """Costs as a message for another process of this run; `unpack_costs` makes equal ones of it."""
    return msgspec.msgpack.encode(costs.table)


def unpack_costs(packed: bytes, graph: ModelGraph) -> TableCosts:
    return TableCosts(msgspec.msgpack.decode(packed, type=Table), graph)


def profile_worker(
    graph: ModelGraph,
    batches: Sequence[Batch],
    load: Load,
    *,
    transport: Transport,
    conditions: Conditions,
    device: torch.device,
) -> Profile:
    """What this worker measures. All workers call this at the same time."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", conditions.pipeline * conditions.replicas))
    own_cores = here * conditions.threads <= (os.cpu_count() or 1)
    wall, busy = time.perf_counter(), time.process_time()
    layers, stage = profile_layers(
        graph,
        batches,
        load,
        device=device,
        dtype=getattr(torch, conditions.dtype),
        barrier=transport.barrier,
        own_cores=own_cores,
    )
    # Several threads do not share all work evenly, and for a GPU the host waits: nothing can be told then.
    tells = own_cores and device.type == "cpu" and conditions.threads == 1
    share = min(1.0, (time.process_time() - busy) / (time.perf_counter() - wall)) if tells else 1.0
    transfers, reductions = profile_links(
        transport, num_workers=conditions.pipeline, num_replicas=conditions.replicas, device=device
    )
    return Profile(
        layers=layers,
        stage=stage,
        transfers=transfers,
        reductions=reductions,
        host=profile_host(device),
        core_share=share,
    )


def describe(table: Table, graph: ModelGraph) -> list[str]:
    """What a calibration is worth, in a few lines; a warning if the machine was busy with other things."""
    error = fit_error(table, graph)
    lines = [
        f"calibrated {len(table.layers)} kinds of layers; at sizes that were not measured, times are off by "
        f"{error.overall:.1%} over all ({error.worst:.1%} for {error.worst_kind.partition(' ')[0]})"
    ]
    if table.core_share < BUSY:
        lines.append(
            f"warning: the machine was busy while it was calibrated, a worker had {table.core_share:.0%} of its "
            "cores; layers are timed in core time, but links may come out too slow: calibrate again when it is idle"
        )
    return lines


def cache_path(cache: str, fingerprint: str) -> Path:
    folder = Path(cache) if cache else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pipeweaver"
    return folder / f"{fingerprint}.json"


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()
