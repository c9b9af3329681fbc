"""The oracle itself: packed batches give what documents one by one give."""

import torch

from pipeweaver.model.build import materialise_all, named_parameters
from pipeweaver.model.reference import count_units, run_all
from tests.model.examples import batch, document, loader, vision_language


def gradients(graph, layers):
    return {name: p.grad.clone() for name, p in named_parameters(graph, layers).items() if p.grad is not None}


def test_a_batch_is_the_sum_of_its_documents():
    graph = vision_language()
    documents = [
        document(0, [(4, 4), (2, 4)], 6),
        document(1, [], 5),
        document(2, [(2, 2)], 7),
        document(3, [(4, 4)], 0),
    ]
    items, links = batch(*documents)
    load, units = loader(items, links), count_units(graph, items)
    layers = materialise_all(graph, seed=0, dtype=torch.float64)
    whole = run_all(graph, layers, items, links, load, dtype=torch.float64)
    whole.loss.backward()
    expected = gradients(graph, layers)
    for layer in layers.values():
        layer.zero_grad()
    total = 0.0
    for own, own_links in documents:
        one = run_all(graph, layers, own, own_links, load, normalisers=units, dtype=torch.float64)
        if one.loss.requires_grad:
            one.loss.backward()
        total += one.loss.item()
    assert abs(total - whole.loss.item()) < 1e-12
    found = gradients(graph, layers)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-14)


def test_without_images_the_vision_module_does_not_run():
    graph = vision_language()
    items, links = document(0, [], 6)
    layers = materialise_all(graph, seed=0)
    outcome = run_all(graph, layers, items, links, loader(items, links))
    outcome.loss.backward()
    assert set(outcome.losses) == {"main/language"}
    assert all(p.grad is None for name, p in named_parameters(graph, layers).items() if name.startswith("vision"))
    assert outcome.metrics["main/language/accuracy"][1] == items[0].sizes["supervised"]
