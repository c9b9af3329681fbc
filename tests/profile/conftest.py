"""A small vision-language model on digits documents, and its first batches."""

from functools import partial

import pytest

from pipeweaver.data.dataset import load_part
from pipeweaver.data.digits import DigitsDataset
from pipeweaver.data.loader import Loader
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
