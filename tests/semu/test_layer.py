"""Counts of layers: exact for sizes never traced, cut over devices as Megatron cuts them, saved as hooks see it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from pipeweaver.data.items import Item
from pipeweaver.model.graph import LayerSpec, TensorSpec, positions
from pipeweaver.model.part import PartView
from pipeweaver.schedule.ir import Strategy
from pipeweaver.semu.costs import SemuCosts
from pipeweaver.semu.counts import COUNTED_FLOPS, FLOPS, Counts
from pipeweaver.semu.layer import Input, LayerGraph
from pipeweaver.semu.machine import load_machine
from tests.semu.layers import WIDTHS, clip, image, text, tiny_video, tiny_vlm


def graphs() -> dict[str, LayerGraph]:
    found = {}
    for graph in (tiny_video(), tiny_vlm()):  # of the two language models the one that reads images stays
        costs = SemuCosts(graph, load_machine("H100"), widths=WIDTHS)
        for module in graph.modules:
            for position, _ in positions(module):
                found[f"{module.name}.{position}"] = costs._modules[module.name][position][0]
    return found


def part(module: str, seed: int) -> tuple[list[Item], list[list[Item]]]:
    draw = random.Random(seed)
    images = [image(i, 2 * draw.randint(1, 5), 2 * draw.randint(1, 5)) for i in range(draw.randint(1, 4))]
    if module == "vision":
        return images, [[] for _ in images]
    if module == "diffusion":
        clips = [clip(i, draw.randint(1, 3), draw.randint(2, 4), draw.randint(2, 4)) for i in range(len(images))]
        return clips, [[text(i, draw.randint(3, 9))] for i in range(len(clips))]
    texts = [text(i, draw.randint(8, 40)) for i in range(draw.randint(1, 3))]
    return texts, [images if i == 0 else [] for i in range(len(texts))]


LAYERS = [f"{module}.{position}" for module in ("vision", "language", "diffusion") for position in (-1, 0, 2)]


@pytest.mark.parametrize("name", LAYERS)
def test_counts_of_sizes_never_traced_are_those_of_a_trace(name: str) -> None:
    symbolic = graphs()[name]
    module = name.split(".")[0]
    for seed in range(80):
        symbolic.counts(*part(module, seed))
    assert symbolic.irregular == 0
    traced = symbolic.num_traces
    for seed in range(100, 106):
        items, links = part(module, seed)
        found, fresh = symbolic.counts(items, links), graphs()[name].counts(items, links)
        assert [o.name for o in found.operators] == [o.name for o in fresh.operators]
        assert np.array_equal(found.table, fresh.table)
        assert np.array_equal(found.memory, fresh.memory)
        assert np.array_equal(found.exchanged_bytes, fresh.exchanged_bytes)
        assert np.array_equal(found.tensor_sizes, fresh.tensor_sizes)
    assert symbolic.num_traces == traced


def test_answers_do_not_depend_on_what_was_asked_before() -> None:
    items, links = part("language", 7)
    warm = graphs()["language.0"]
    for seed in range(12):
        warm.counts(*part("language", seed))
    assert np.array_equal(warm.counts(items, links).table, graphs()["language.0"].counts(items, links).table)


def test_a_layer_that_is_no_polynomial_is_traced_every_time() -> None:
    class Longest(torch.nn.Module):
        """Pads to the longest item: its cost is no function of sums."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)

        def forward(self, state: dict[str, torch.Tensor], part: PartView) -> dict[str, torch.Tensor]:
            padded = torch.zeros(len(part.items), max(part.sizes()), 8, device=part.device, dtype=part.dtype)
            return {"x": state["x"] + self.linear(padded).sum()}

    spec = LayerSpec(kind="longest", build=Longest, carries=(TensorSpec(name="x", width=8),))
    given = [Input(spec=spec.carries[0], name="x")]
    layer = LayerGraph(spec, given, dtype=torch.float32)
    for seed in range(30):
        draw = random.Random(seed)
        items = [text(i, draw.randint(2, 30)) for i in range(draw.randint(1, 5))]
        found = layer.counts(items, [[] for _ in items])
        longest = max(item.sizes["tokens"] for item in items)
        assert found.table[:, FLOPS].sum() == 2 * 2 * len(items) * longest * 8 * 8
    assert layer.irregular > 0


def test_matmuls_alternate_between_column_and_row_parallel() -> None:
    found = graphs()
    roles = {}
    for name, layer in found.items():
        layer.counts(*part(name.split(".")[0], 3))
        roles[name] = layer.roles
    assert roles["vision.-1"] == {"patch.weight": "sequence"}
    block = {"attention.q": "column", "attention.k": "column", "attention.v": "column", "attention.out": "row"}
    vision = {**block, "mlp.up": "column", "mlp.down": "row"}
    language = {**block, "mlp.gate": "column", "mlp.up": "column", "mlp.down": "row"}
    assert roles["vision.0"] == {f"{name}.weight": role for name, role in vision.items()}
    assert roles["language.0"] == {f"{name}.weight": role for name, role in language.items()}
    assert roles["vision.2"] == {"projector.0.weight": "column", "projector.2.weight": "row"}
    assert roles["language.-1"] == {"embedding.weight": "vocabulary"}
    assert roles["language.2"] == {"head.weight": "column"}
    assert roles["diffusion.-1"] == {"latents.weight": "sequence"}
    modulation = {"modulation.down": "whole", "modulation.up": "whole"}
    cross = {f"cross_{name}": role for name, role in block.items()}
    diffusion = {**modulation, **block, **cross, "mlp.gate": "column", "mlp.up": "column", "mlp.down": "row"}
    assert roles["diffusion.0"] == {f"{name}.weight": role for name, role in diffusion.items()}


def test_a_block_exchanges_what_megatron_does() -> None:
    counts = graphs()["language.0"].counts(*part("language", 3))
    rows = counts.tensor_bytes("x")
    kinds = [(exchange.kind, exchange.phase) for exchange in counts.structure.exchanges]
    # Forward: gather, scatter, twice. Backward: gradients gathered and scattered, saved inputs gathered again, twice.
    assert sorted(kinds) == sorted(2 * [("enter", "F"), ("leave", "F"), ("leave", "I"), ("enter", "I"), ("enter", "W")])
    assert set(counts.exchanged_bytes) == {rows}


class Held(TorchDispatchMode):
    """Follows every storage that a real forward makes."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in known:
                storage = tensor.untyped_storage()
                self.made[StorageWeakRef(storage)] = storage.nbytes()
        return result

    def num_bytes(self) -> int:
        return sum(size for reference, size in self.made.items() if not reference.expired())


@pytest.mark.parametrize("strategy", ["keep", "recompute", "recompute-attention"])
@pytest.mark.parametrize("name", LAYERS)
def test_saved_bytes_equal_those_of_a_real_forward(name: str, strategy: Strategy) -> None:
    module, position = name.split(".")
    graph = tiny_video() if module == "diffusion" else tiny_vlm()
    costs = SemuCosts(graph, load_machine("cpu"), dtype="float32", widths=WIDTHS)
    plain = costs._modules[module][int(position)][0]
    layer = LayerGraph(plain.spec, plain.inputs, dtype=torch.float32, widths=WIDTHS, kernels="cpu", strategy=strategy)
    picture = image(0, 4, 6)
    items, links = {
        "vision": ([picture, image(1, 2, 4)], [[], []]),
        "language": ([text(0, 21)], [[picture]]),
        "diffusion": ([clip(0, 2, 3, 4), clip(1, 1, 3, 4)], [[text(0, 7)], [text(0, 5)]]),
    }[module]
    found = layer.trace(items, links)

    real = layer.spec.build()
    rows = sum(item.sizes["tokens"] for item in items)
    features = sum(source.sizes.get("features", 0) for sources in links for source in sources)
    state = {}
    for given in layer.inputs:
        linked = sum(source.sizes[given.spec.rows] for sources in links for source in sources if given.source)
        count = rows if given.source is None else linked
        state[given.name] = torch.randn(count, given.spec.width, requires_grad=given.grad)
    tokens = torch.full((rows,), 5)
    tokens[:features] = 3
    loaded = {"tokens": tokens, "labels": torch.full((rows,), 5), "pixels": torch.randn(rows, 12)}
    loaded["latents"] = torch.randn(rows, 6)
    view = PartView(
        items=items,
        links=links,
        loaded={n: loaded[n] for n in layer.spec.loads},
        step=0,
        seed=0,
        device=torch.device("cpu"),
        dtype=torch.float32,
        recompute_attention=strategy == "recompute-attention",
    )
    with torch.no_grad():
        real(dict(state), view)
    view._reported.clear()
    with Held() as held:
        if strategy == "recompute":
            outputs = checkpoint(real, dict(state), view, use_reentrant=False, preserve_rng_state=False)
        else:
            outputs = real(dict(state), view)
    view._reported.clear()  # metrics wait for the end of the step, not for the backward
    gone = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in outputs.values()}
    assert held.num_bytes() - sum(gone.values()) == found.saved_bytes
    if strategy == "recompute":
        assert found.saved_bytes == 0


@pytest.mark.parametrize("strategy", ["recompute", "recompute-attention"])
def test_recomputation_runs_forward_again_and_saves_less(strategy: Strategy) -> None:
    items, links = part("language", 3)
    plain = graphs()["language.0"]
    again = LayerGraph(plain.spec, plain.inputs, dtype=torch.bfloat16, strategy=strategy)
    keep, recompute = plain.counts(items, links), again.counts(items, links)
    forward, backward = ({p: r for p, r in _rows(c, FLOPS).items()} for c in (keep, recompute))
    assert forward["F"] == backward["F"]
    repeated = backward["I"] + backward["W"] - forward["I"] - forward["W"]
    assert 0.2 * forward["F"] < repeated <= forward["F"]
    assert recompute.memory[0].sum() < 0.8 * keep.memory[0].sum()
    kinds = [(e.kind, e.phase, e.again) for e in recompute.structure.exchanges]
    assert [k for k in kinds if not k[2]] == [(e.kind, e.phase, e.again) for e in keep.structure.exchanges]
    assert ("enter", "I", True) in kinds


def _rows(counts: Counts, column: int) -> dict[str, float]:
    found = {"F": 0.0, "I": 0.0, "W": 0.0}
    for operator, row in zip(counts.operators, counts.table, strict=True):
        found[operator.phase] += row[column]
    return found


def test_causal_attention_counts_half_the_square_and_the_diagonal() -> None:
    counts = graphs()["language.0"].counts([text(0, 40)], [[]])
    rows = [i for i, operator in enumerate(counts.operators) if operator.kind == "attention"]
    full, counted = counts.table[rows, FLOPS], counts.table[rows, COUNTED_FLOPS]
    assert full.tolist() == [2 * 2 * 64 * 40 * 40, 5 * 2 * 64 * 40 * 40]
    assert (counted / full).tolist() == [pytest.approx(41 / 80)] * 2


def test_unknown_columns_of_a_loaded_tensor_are_refused() -> None:
    costs = SemuCosts(tiny_vlm(), load_machine("H100"))
    layer = costs._modules["vision"][-1][0]
    with pytest.raises(ValueError, match="pixels"):
        layer.counts([image(0, 4, 4)], [[]])
