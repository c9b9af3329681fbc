"""A small vision-language model on digits documents, and its first batches."""

from functools import partial

import pytest
import torch

from pipeweaver.data.dataset import load_part
from pipeweaver.data.digits import DigitsDataset
from pipeweaver.data.loader import Loader
from pipeweaver.profile.layers import profile_layers
from pipeweaver.profile.measured import LinkSample, Profile
from pipeweaver.profile.table import TableCosts, merge
from tests.profile.cases import make_graph


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
def profile(graph, batches, load):
    torch.set_num_threads(1)
    layers, stage = profile_layers(
        graph,
        batches,
        load,
        device=torch.device("cpu"),
        dtype=torch.float32,
        barrier=lambda: None,
        seconds_per_variant=0.05,
    )
    links = [
        LinkSample(ends=ends, num_bytes=size, duration_ns=1000 + size // 8)
        for ends in ((0, 1), (1, 0))
        for size in (1 << 10, 1 << 20)
    ]
    reductions = [LinkSample(ends=(2,), num_bytes=size, duration_ns=5000 + size) for size in (8, 1 << 20)]
    return Profile(layers=layers, stage=stage, transfers=tuple(links), reductions=tuple(reductions))


@pytest.fixture(scope="session")
def costs(graph, profile):
    return TableCosts(merge([profile, profile], fingerprint="f", source="a profile", dtype="float32"), graph)
