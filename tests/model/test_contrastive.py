"""The contrastive module against its formula, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch

from pipeweaver.data.items import Item
from pipeweaver.model.build import build_graph, materialise_all
from pipeweaver.model.contrastive import ContrastiveConfig
from pipeweaver.model.graph import Flow
from pipeweaver.model.language import LanguageConfig
from pipeweaver.model.part import PartView

TOWER = LanguageConfig(layers=1, hidden=8, heads=2, vocab=9, head=False, sends_hidden=True)
FLOWS = [Flow(source=name, tensor="hidden", destination="match", name=name) for name in ("a", "b")]


def graph():
    return build_graph({"a": TOWER, "b": TOWER, "match": ContrastiveConfig(width=4)}, FLOWS)


def part_of(rows, classes):
    """`rows[tower][pair]` rows are linked to each pair."""

    def item(module, draw, tokens, **sizes):
        return Item(task="t", draw=draw, module=module, position=0, sizes={"tokens": tokens, **sizes})

    pairs = range(len(classes))
    return PartView(
        items=[item("match", pair, 1, pairs=1) for pair in pairs],
        links=[[item(tower, pair, rows[tower][pair]) for tower in rows] for pair in pairs],
        loaded={"classes": torch.tensor(classes)},
        step=0,
        seed=0,
        device=torch.device("cpu"),
        dtype=torch.float64,
    )


def forward(rows, classes, states):
    layers = materialise_all(graph(), seed=0, dtype=torch.float64)
    part = part_of(rows, classes)
    pairs = layers["match.layers.0"](states, part)
    return layers, part, layers["match.after"](pairs, part)["loss"]


def test_the_loss_is_the_formula():
    rows = {"a": [2, 1, 3], "b": [1, 4, 2]}
    torch.manual_seed(0)
    states = {tower: torch.randn(sum(counts), 8, dtype=torch.float64) for tower, counts in rows.items()}
    layers, part, loss = forward(rows, [3, 7, 3], states)
    sides = []
    for tower, projection in zip(rows, layers["match.layers.0"].projections, strict=True):
        means = torch.stack([piece.mean(0) for piece in states[tower].split(rows[tower])])
        side = means @ projection.weight.T
        sides.append(side / side.norm(dim=1, keepdim=True))
    logits = (sides[0] @ sides[1].T / 0.07).detach()
    expected = 0.0
    for table in (logits, logits.T):
        logs = table.log_softmax(1)
        # Pairs 0 and 2 are of one class: each is to choose both, half and half.
        expected -= (logs[0, 0] + logs[0, 2]) / 2 + logs[1, 1] + (logs[2, 0] + logs[2, 2]) / 2
    assert loss.item() == pytest.approx(float(expected) / 2, rel=1e-6)
    best = logits.argmax(1).tolist()
    right = (best[0] in (0, 2)) + (best[1] == 1) + (best[2] in (0, 2))
    assert part.metrics == {"matched": (float(right), 3)}


def test_pairs_that_agree_have_the_least_loss():
    rows = {"a": [1, 1], "b": [1, 1]}
    layers = materialise_all(graph(), seed=0, dtype=torch.float64)
    one = torch.eye(4, dtype=torch.float64)[:2]
    part = part_of(rows, [0, 1])
    loss = layers["match.after"]({"pairs": torch.cat([one, one], dim=1)}, part)["loss"]
    assert loss.item() == pytest.approx(2 * math.log1p(math.exp(-1 / 0.07)), rel=1e-5)
    assert part.metrics["matched"] == (2.0, 2)


def test_a_pair_needs_both_towers():
    rows = {"a": [1, 0], "b": [1, 1]}
    states = {"a": torch.zeros(1, 8, dtype=torch.float64), "b": torch.zeros(2, 8, dtype=torch.float64)}
    with pytest.raises(
        ValueError, match="t/1/match/0: no a item is linked to it, but pairs are compared by two towers"
    ):
        forward(rows, [0, 1], states)


@pytest.mark.parametrize("flows", [[], FLOWS[:1]])
def test_two_flows_lead_to_it(flows):
    with pytest.raises(ValueError, match=rf"match compares two towers, so two flows must lead to it, not {len(flows)}"):
        build_graph({"a": TOWER, "b": TOWER, "match": ContrastiveConfig(width=4)}, flows)
