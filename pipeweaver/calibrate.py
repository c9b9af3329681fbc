"""Calibration: this machine measured on the job's own layers, kept as a machine file for later runs.

All workers measure the same layers at the same time, so that every core is as busy as in a step; the first
rank puts the results together and keeps the machine file in a cache, under a name that says what it holds for:

    costs = calibrated_costs(graph, batches, load, widths=..., transport=..., exchange=..., conditions=..., cache="")
    costs.stage(chunk, items, links)        # on the first rank; the others get None

Measuring is `measure/`, costs on a machine are `semu/`; this file only decides whether to measure.
"""

from __future__ import annotations

import datetime
import errno
import hashlib
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import torch

from pipeweaver.cluster import Workers
from pipeweaver.data.items import Batch
from pipeweaver.measure.cases import Load
from pipeweaver.measure.fit import Named, fit_machine
from pipeweaver.measure.grid import measure_grid
from pipeweaver.measure.layers import measure_layers
from pipeweaver.measure.links import measure_host, measure_links
from pipeweaver.measure.parts import largest
from pipeweaver.measure.records import Measured
from pipeweaver.measure.variants import variants
from pipeweaver.model.graph import ModelGraph
from pipeweaver.runtime.exchange import Exchange
from pipeweaver.runtime.transport import Transport
from pipeweaver.semu.costs import SemuCosts
from pipeweaver.semu.kernels import Kernels
from pipeweaver.semu.machine import Machine, load_machine
from pipeweaver.semu.machine_file import save_machine
from pipeweaver.semu.optimizer import plain_optimizer

FORM = 4
"""Raised when what is measured changes, so that older files are not read."""

BUSY = 0.9
"""Below this share of a core the machine was busy with other things while it was measured."""

GRID_SCALE = 8
"""Matmuls of the generic grid are so many times wider on a GPU."""

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
    graph: ModelGraph,
    batches: Sequence[Batch],
    conditions: Conditions,
    cache: str = "",
    *,
    widths: Mapping[str, int],
) -> SemuCosts | None:
    """Costs from an earlier calibration that holds here, or None. `cache` is a folder, by default the user's; `widths`
    are the columns of loaded tensors."""
    path = cache_path(cache, fingerprint(graph, batches, conditions))
    return _costs(graph, load_machine(str(path)), conditions, widths) if path.exists() else None


def calibrated_costs(
    graph: ModelGraph,
    batches: Sequence[Batch],
    load: Load,
    *,
    widths: Mapping[str, int],
    transport: Transport,
    exchange: Exchange,
    conditions: Conditions,
    device: torch.device,
    cache: str = "",
    anew: bool = False,
    say: Callable[[str], None] = print,
) -> SemuCosts | None:
    """Costs on the first worker, None on the others; from the cache, or measured if they are not there.

    All workers call this at the same time with the same arguments. `load` brings content of the items of
    `batches`, `anew` measures in any case, `say` is told on the first worker what takes time.
    """
    path = cache_path(cache, fingerprint(graph, batches, conditions))
    first = transport.address == (0, 0)
    found = load_machine(str(path)) if first and not anew and path.exists() else None
    missing = transport.all_sum([1.0 if first and found is None else 0.0])[0] > 0
    if not missing:
        return _costs(graph, found, conditions, widths) if found is not None else None
    num_workers = conditions.pipeline * conditions.replicas
    if first:
        _make_cache(path.parent)  # before minutes of measuring, not after them
        who = "1 worker measures" if num_workers == 1 else f"{num_workers} workers measure"
        say(
            f"calibrating: {who} the model's layers, once for this model on this machine: half a minute to some minutes"
        )
    measured = measure_worker(graph, batches, load, transport=transport, conditions=conditions, device=device)
    if not first:
        exchange.send_report(_REPORT, *transport.address, measured)
        return None
    others = [
        exchange.take_report(_REPORT, replica, worker, Measured)
        for replica in range(conditions.replicas)
        for worker in range(conditions.pipeline)
        if (replica, worker) != (0, 0)
    ]
    machine = fit_machine([measured, *others], _named(conditions, device))
    save_machine(path, machine)
    load_machine.cache_clear()  # the file may be there for the second time
    costs = _costs(graph, machine, conditions, widths)
    for line in describe(machine, [measured, *others], path):
        say(line)
    return costs


def machine_costs(
    graph: ModelGraph, machine: Machine, *, dtype: str, widths: Mapping[str, int], workers: int
) -> SemuCosts:
    """Costs of this runtime's training on a machine: one device per worker, optimizer states unsharded."""
    return SemuCosts(graph, machine, dtype=dtype, widths=widths, optimizer=plain_optimizer(dtype), workers=workers)


def pack_costs(costs: SemuCosts) -> bytes:
    """Costs as a message for another process of this run; `unpack_costs` makes equal ones of it."""
    packed = _Packed(machine=costs.machine, dtype=costs.layout.dtype, widths=dict(costs.widths), workers=costs.workers)
    return msgspec.msgpack.encode(packed)


def unpack_costs(packed: bytes, graph: ModelGraph) -> SemuCosts:
    found = msgspec.msgpack.decode(packed, type=_Packed)
    return machine_costs(graph, found.machine, dtype=found.dtype, widths=found.widths, workers=found.workers)


class _Packed(msgspec.Struct, frozen=True, kw_only=True):
    machine: Machine
    dtype: str
    widths: dict[str, int]
    workers: int


def measure_worker(
    graph: ModelGraph,
    batches: Sequence[Batch],
    load: Load,
    *,
    transport: Transport,
    conditions: Conditions,
    device: torch.device,
) -> Measured:
    """What this worker measures. All workers call this at the same time."""
    num_workers = conditions.pipeline * conditions.replicas
    here = int(os.environ.get("LOCAL_WORLD_SIZE", num_workers))
    own_cores = here * conditions.threads <= (os.cpu_count() or 1)
    dtype = getattr(torch, conditions.dtype)
    scale = GRID_SCALE if device.type == "cuda" else 1
    # Several threads do not share all work evenly, and for a GPU the host waits: nothing can be told then.
    tells = own_cores and device.type == "cpu" and conditions.threads == 1
    wall, busy = time.perf_counter(), time.process_time()
    found = measure_layers(graph, batches, load, device=device, dtype=dtype, barrier=transport.barrier, core_time=tells)
    grid, floor_ns = measure_grid(device, dtype, transport.barrier, core_time=tells, scale=scale)
    share = min(1.0, (time.process_time() - busy) / (time.perf_counter() - wall)) if tells else 1.0
    transfers, reductions = measure_links(
        transport,
        num_workers=conditions.pipeline,
        num_replicas=conditions.replicas,
        device=device,
        per_host=0 if here == num_workers else here,
    )
    return Measured(
        layers=found.layers,
        grid=grid,
        floor_ns=floor_ns,
        stage=found.stage,
        loads=found.loads,
        optimizer=found.optimizer,
        core_share=share,
        transfers=transfers,
        reductions=reductions,
        host=measure_host(device),
    )


def describe(machine: Machine, measured: Sequence[Measured], path: Path) -> list[str]:
    """What was measured and where it is kept; a warning if the machine was busy with other things."""
    kinds = len({sample.layer for one in measured for sample in one.layers})
    curves = len(machine.matmul.curves) + len(machine.memory.curves)
    lines = [f"calibrated {kinds} kinds of layers, {curves} kinds of operators: {path}"]
    core_share = min(one.core_share for one in measured)
    if core_share < BUSY:
        lines.append(
            f"warning: the machine was busy while it was calibrated, a worker had {core_share:.0%} of its "
            "cores; layers are timed in core time, but links may come out too slow: calibrate again when it is idle"
        )
    return lines


def _costs(graph: ModelGraph, machine: Machine, conditions: Conditions, widths: Mapping[str, int]) -> SemuCosts:
    return machine_costs(graph, machine, dtype=conditions.dtype, widths=widths, workers=conditions.pipeline)


def _named(conditions: Conditions, device: torch.device) -> Named:
    num_workers = conditions.pipeline * conditions.replicas
    here = int(os.environ.get("LOCAL_WORLD_SIZE", num_workers))
    busy = f"{num_workers} {'worker' if num_workers == 1 else 'workers'} busy"
    kernels: Kernels = "cuda" if device.type == "cuda" else "cpu"
    if device.type == "cuda":
        memory_bytes = torch.cuda.get_device_properties(device).total_memory
    else:
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // here
    return Named(
        name=conditions.device,
        source=f"measured by pipeweaver calibrate, torch {conditions.torch}, {conditions.threads} threads a worker",
        calibrated=f"{datetime.date.today()} on {conditions.device}, {busy}, {conditions.dtype}",
        memory_bytes=memory_bytes,
        # Workers of one host are one island, however many of them there are.
        devices_per_island=here if here < num_workers else 1 << 20,
        kernels=kernels,
        dtype=conditions.dtype,
    )


def cache_path(cache: str, fingerprint: str) -> Path:
    folder = Path(cache) if cache else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pipeweaver"
    return folder / f"{fingerprint}.toml"


def _make_cache(folder: Path) -> None:
    """Raises ValueError if nothing can be kept there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ValueError(
            f"costs.cache: calibrations cannot be kept in {folder}: {error.strerror}; choose another folder with "
            "--set costs.cache=DIR"
        ) from None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()
