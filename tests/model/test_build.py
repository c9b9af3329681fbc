"""Initial parameters are a function of name and seed; the same model comes together however it is cut."""

import threading
from dataclasses import replace

import msgspec
import pytest
import torch
from torch import nn

from pipeweaver.model.build import (
    Activation,
    CustomConfig,
    build_graph,
    materialise,
    materialise_all,
    named_parameters,
    num_parameters,
    parameter_shapes,
)
from pipeweaver.model.diffusion import DiffusionConfig
from pipeweaver.model.graph import Flow, ModelGraph
from pipeweaver.model.language import LanguageConfig
from pipeweaver.model.vit import VitConfig
from pipeweaver.schedule.ir import Chunk
from tests.model.examples import DIFFUSION, LANGUAGE, VISION, WRITER, vision_language


def chunk(module: str, start: int, stop: int, worker: int = 0) -> Chunk:
    return Chunk(task="main", module=module, start=start, stop=stop, worker=worker)


def changed(config, **changes):
    return type(config)(**{f: getattr(config, f) for f in config.__struct_fields__} | changes)


def test_initial_parameters_do_not_depend_on_placement_or_order():
    graph = vision_language()
    whole = named_parameters(graph, materialise_all(graph, seed=3))
    torch.manual_seed(99)
    cut = {}
    for piece in [chunk("language", 1, 2), chunk("vision", 1, 2), chunk("language", 0, 1), chunk("vision", 0, 1)]:
        cut |= named_parameters(graph, materialise(graph, [piece], seed=3))
    assert set(cut) == set(whole)
    assert all(torch.equal(cut[name], whole[name]) for name in whole)


def test_another_seed_or_layer_gives_other_values():
    graph = vision_language()
    first, second = (named_parameters(graph, materialise_all(graph, seed=seed)) for seed in (3, 4))
    name = "vision.layers.0.attention.q.weight"
    assert not torch.equal(first[name], second[name])
    assert not torch.equal(first[name], first[name.replace("layers.0", "layers.1")])


def test_building_leaves_global_state_alone_and_ignores_it():
    graph = vision_language()
    expected = named_parameters(graph, materialise_all(graph, seed=0))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        layers = materialise_all(graph, seed=0)
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), before)
    found = named_parameters(graph, layers)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_workers_in_threads_build_the_same():
    graph = vision_language()
    expected = named_parameters(graph, materialise_all(graph, seed=0))
    found: list[dict[str, nn.Parameter]] = []
    threads = [
        threading.Thread(target=lambda: found.append(named_parameters(graph, materialise_all(graph, seed=0))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(torch.equal(one[name], expected[name]) for one in found for name in expected)


def test_dtypes_are_roundings_of_the_same_values():
    graph = vision_language()
    double, single, half = (
        named_parameters(graph, materialise_all(graph, seed=0, dtype=dtype))
        for dtype in (torch.float64, torch.float32, torch.bfloat16)
    )
    for name in double:
        assert torch.equal(double[name].float(), single[name])
        assert torch.equal(single[name].bfloat16(), half[name])


def test_only_the_layers_of_the_chunks_are_built_and_shared_ones_once():
    built: list[str] = []
    graph = vision_language()
    language = graph.by_name["language"]

    def counting(index):
        layer = language.layers[index]
        return replace(layer, build=lambda: (built.append(f"layer {index}"), layer.build())[1])

    graph = replace(graph, modules=(graph.modules[0], replace(language, layers=(counting(0), counting(1)))))
    layers = materialise(graph, [chunk("language", 1, 2), chunk("language", 1, 2)], seed=0)
    assert sorted(layers) == ["language.after", "language.layers.1"]
    assert built == ["layer 1"]


def test_tied_parameters_are_one_tensor_or_start_equal():
    graph = vision_language(language=changed(LANGUAGE, tied=True))
    layers = materialise_all(graph, seed=0)
    assert layers["language.after"].head.weight is layers["language.before"].embedding.weight
    names = set(named_parameters(graph, layers))
    assert "language.before.embedding.weight" in names and "language.after.head.weight" not in names
    assert set(parameter_shapes(graph)) == names

    last = materialise(graph, [chunk("language", 1, 2)], seed=0)
    assert torch.equal(last["language.after"].head.weight, layers["language.before"].embedding.weight)
    assert "language.before.embedding.weight" in named_parameters(graph, last)


def test_frozen_layers_need_no_gradient():
    graph = vision_language(vision=changed(VISION, trainable="projector"))
    parameters = named_parameters(graph, materialise_all(graph, seed=0))
    learning = {name for name, parameter in parameters.items() if parameter.requires_grad}
    assert learning == {n for n in parameters if n.startswith(("vision.after", "language"))}
    frozen = vision_language(vision=changed(VISION, trainable=False))
    parameters = named_parameters(frozen, materialise_all(frozen, seed=0))
    assert not any(p.requires_grad for n, p in parameters.items() if n.startswith("vision"))


def test_shapes_are_those_of_the_real_parameters():
    graph = vision_language()
    real = {name: p.shape for name, p in named_parameters(graph, materialise_all(graph, seed=0)).items()}
    assert parameter_shapes(graph) == real
    assert sum(num_parameters(graph).values()) == sum(shape.numel() for shape in real.values())


@pytest.mark.parametrize(
    ("record", "changes", "message"),
    [
        (VISION, dict(heads=3), "heads = 3 do not divide hidden = 16"),
        (VISION, dict(hidden=14, heads=2), "heads of dimension 7 cannot turn"),
        (VISION, dict(hidden=4, heads=2), "at least 4"),
        (VISION, dict(output=None), "output is missing"),
        (VISION, dict(projector="none"), "without a projector features are"),
        (LANGUAGE, dict(heads=5), "heads = 5 do not divide hidden = 24"),
        (LANGUAGE, dict(kv_heads=3), "kv_heads = 3 do not divide heads = 4"),
        (LANGUAGE, dict(head_dim=5), "heads of dimension 5 cannot turn"),
        (LANGUAGE, dict(head=False), "nothing to train for"),
        (LANGUAGE, dict(head=False, sends_hidden=True), "answers = true needs head = true"),
        (LANGUAGE, dict(placeholders={"vision": 20}), "placeholders.vision = 20 is not below vocab = 20"),
        (DIFFUSION, dict(heads=5), "heads = 5 do not divide hidden = 24"),
        (DIFFUSION, dict(heads=8), "heads of dimension 3 cannot turn"),
        (DIFFUSION, dict(heads=6, positions="grid"), "on 3 axes need an even dimension of at least 6"),
        (DIFFUSION, dict(cross_kv_heads=3), "cross_kv_heads = 3 do not divide heads = 2"),
    ],
)
def test_configurations_that_cannot_be(record, changes, message):
    with pytest.raises(ValueError, match=message):
        changed(record, **changes)


def graph_error(modules, flows=(), **options) -> str:
    with pytest.raises(ValueError) as error:
        build_graph(modules, flows, **options)
    return str(error.value)


def test_modules_that_do_not_fit_together():
    flow = Flow(source="vision", tensor="features", destination="language", name="vision")
    both = {"vision": VISION, "language": LANGUAGE}
    assert "width 32" in graph_error(both | {"vision": changed(VISION, output=32)}, [flow])
    assert "placeholders has no token" in graph_error(both | {"language": changed(LANGUAGE, placeholders={})}, [flow])
    assert "does not send pixels; it sends features" in graph_error(both, [replace(flow, tensor="pixels")])
    assert "there is no module audio" in graph_error(both, [replace(flow, source="audio")])
    assert "must not contain dots" in graph_error({"a.b": VISION})
    assert "loss weight for vision, which has no loss" in graph_error(
        both, [flow], tasks={"main": Activation(loss_weights={"vision": 1.0})}
    )
    assert "cycle" in graph_error(both, [flow, replace(flow, source="language", destination="vision", tensor="x")])


def test_custom_modules_are_named_in_errors():
    def error(build, **options):
        return graph_error({"audio": CustomConfig(build=build, options=options)})

    assert 'expected "package.module:function"' in error("os.path")
    assert "No module named 'nowhere'" in error("nowhere:build")
    assert "no attribute 'nothing'" in error("os:nothing")
    assert "does not take the arguments" in error("tests.model.test_build:some_module", colour="red")
    assert "returned int, not a Module" in error("tests.model.test_build:no_module")


def some_module(name: str):
    return vision_language(names=(name, "language")).by_name[name]


def no_module(name: str) -> int:
    return 3


def test_custom_modules_can_be_frozen():
    config = CustomConfig(build="tests.model.test_build:some_module", trainable=False)
    graph = build_graph({"audio": config})
    assert not any(p.requires_grad for p in named_parameters(graph, materialise_all(graph, seed=0)).values())


def test_loss_weights_reach_the_graph():
    graph = build_graph(
        {"language": changed(LANGUAGE, placeholders={})},
        tasks={"a": Activation((), 2.0, {"language": 0.25}), "b": Activation((), 3.0)},
    )
    loss = graph.modules[0].loss
    assert (loss.weight_in("a"), loss.weight_in("b"), loss.weight_in("c")) == (0.5, 3.0, 1.0)
    assert isinstance(graph, ModelGraph)


def test_equal_kinds_mean_equal_structure():
    """Whatever changes a parameter's shape changes the kind, or costs of one layer would be taken for another's."""
    shapes: dict[str, list] = {}
    for config in (VISION, LANGUAGE, DIFFUSION):
        for change in [{}, *CHANGES[type(config)]]:
            for module in modules_of(changed(config, **change)):
                for name, spec in module.range(0, len(module.layers)):
                    with torch.device("meta"):
                        found = [(key, p.shape) for key, p in spec.build().named_parameters()]
                    assert shapes.setdefault(spec.kind, found) == found, f"{name} of {config} with {change}"


def modules_of(config):
    """Alone, and where it can be with something that flows in."""
    if isinstance(config, LanguageConfig):
        return build_graph({"m": changed(config, placeholders={})}).modules
    if isinstance(config, VitConfig):
        return build_graph({"m": config}).modules
    flow = Flow(source="language", tensor="hidden", destination="m", name="text")
    return [
        build_graph({"m": config}).by_name["m"],
        build_graph({"m": config, "language": WRITER}, [flow]).by_name["m"],
        build_graph({"m": config, "language": changed(WRITER, hidden=24)}, [flow]).by_name["m"],
    ]


CHANGES = {
    VitConfig: [
        dict(hidden=32),
        dict(heads=4),
        dict(ffn=20),
        dict(bias=False),
        dict(patch_bias=False),
        dict(patch=4),
        dict(positions="rotary"),
        dict(grid=5),
        dict(merge=1),
        dict(output=8),
        dict(projector="linear"),
        dict(projector_hidden=7),
        dict(projector="none", output=None),
    ],
    LanguageConfig: [
        dict(hidden=32, heads=4),
        dict(kv_heads=4),
        dict(head_dim=4),
        dict(ffn=20),
        dict(gated=False),
        dict(qkv_bias=True),
        dict(vocab=30),
        dict(head=False, answers=False, sends_hidden=True),
    ],
    DiffusionConfig: [
        dict(hidden=32),
        dict(heads=4),
        dict(heads=4, kv_heads=2),
        dict(heads=4, cross_kv_heads=2),
        dict(ffn=20),
        dict(gated=False),
        dict(bias=True),
        dict(channels=5),
        dict(time_rank=6),
    ],
}


def test_configs_come_from_tables():
    table = {"layers": 2, "hidden": 16, "heads": 2, "patch": 2, "output": 24, "trainable": "projector"}
    assert msgspec.convert(table, VitConfig).trainable == "projector"
    with pytest.raises(msgspec.ValidationError, match="unknown field `colour`"):
        msgspec.convert(table | {"colour": 3}, VitConfig)
