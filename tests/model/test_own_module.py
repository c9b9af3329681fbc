"""The example of a user's own module keeps the contract of docs/own-module.md."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

from pipeweaver.model.build import build_graph, materialise_all
from pipeweaver.model.graph import Flow, ModelGraph
from pipeweaver.model.reference import count_units, run_all
from tests.model.examples import LANGUAGE, VISION, batch, document, loader

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_module.py"


@pytest.fixture
def own_module(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    yield importlib.import_module("own_module")
    sys.modules.pop("own_module")


def test_items_do_not_mix_and_the_loss_is_a_sum(own_module):
    encoder = own_module.convolutions("vision", layers=2, hidden=8, output=24, patch_values=VISION.patch_values)
    flow = Flow(source="vision", tensor="features", destination="language", name="vision")
    reading = build_graph({"vision": VISION, "language": LANGUAGE}, [flow]).by_name["language"]
    graph = ModelGraph(modules=(encoder, reading), flows=(flow,))
    layers = materialise_all(graph, seed=0, dtype=torch.float64)
    documents = [document(0, [(4, 4), (2, 4), (2, 4)], 5), document(1, [], 4), document(2, [(4, 4)], 6)]
    items, links = batch(*documents)
    units, load = count_units(graph, items), loader(items, links)
    whole = run_all(graph, layers, items, links, load, dtype=torch.float64).loss.item()
    alone = [
        run_all(graph, layers, *one, load, normalisers=units, dtype=torch.float64).loss.item() for one in documents
    ]
    assert sum(alone) == pytest.approx(whole, rel=1e-12)
