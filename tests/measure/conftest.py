"""A small vision-language model on digits documents, and its first batches."""

from functools import partial

import pytest
import torch

from pipeweaver.data.dataset import load_part
from pipeweaver.data.digits import DigitsDataset
from pipeweaver.data.loader import Loader
from pipeweaver.measure.fit import Named, fit_machine
from pipeweaver.measure.grid import measure_grid
from pipeweaver.measure.layers import measure_layers
from pipeweaver.measure.records import LinkSample, Measured
from pipeweaver.semu.costs import SemuCosts
from pipeweaver.semu.optimizer import plain_optimizer
from tests.measure.cases import make_graph

NAMED = Named(
    name="here",
    source="a test",
    calibrated="today, one worker busy",
    memory_bytes=1 << 32,
    devices_per_island=64,
    kernels="cpu",
    dtype="float32",
)


@pytest.fixture(scope="session")
def graph():
    return make_graph()


@pytest.fixture(scope="session")
def dataset():
    return DigitsDataset(max_tokens=128, max_images=6)


@pytest.fixture(scope="session")
def batches(dataset):
    loader = Loader(dataset, backbone="language", tokens_per_microbatch=128, microbatches=4, seed=0)
    return [next(loader) for _ in range(2)]


@pytest.fixture(scope="session")
def load(dataset):
    return partial(load_part, {"main": dataset})


@pytest.fixture(scope="session")
def measured(graph, batches, load):
    torch.set_num_threads(1)
    cpu, dtype = torch.device("cpu"), torch.float32
    found = measure_layers(
        graph,
        batches,
        load,
        device=cpu,
        dtype=dtype,
        barrier=lambda: None,
        seconds_per_variant=0.05,
        core_time=True,
    )
    grid, floor_ns = measure_grid(cpu, dtype, lambda: None, core_time=True)
    links = [
        LinkSample(ends=ends, num_bytes=size, duration_ns=1000 + size // 8)
        for ends in ((0, 1), (1, 0))
        for size in (1 << 10, 1 << 20)
    ]
    reductions = [LinkSample(ends=(2,), num_bytes=size, duration_ns=5000 + size) for size in (8, 1 << 20)]
    return Measured(
        **found._asdict(), grid=grid, floor_ns=floor_ns, transfers=tuple(links), reductions=tuple(reductions)
    )


@pytest.fixture(scope="session")
def machine(measured):
    return fit_machine([measured, measured], NAMED)


@pytest.fixture(scope="session")
def costs(graph, dataset, machine):
    return SemuCosts(
        graph, machine, dtype="float32", widths=dataset.widths, optimizer=plain_optimizer("float32"), workers=2
    )
