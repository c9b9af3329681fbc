"""From a model's description to its layers with parameters, wherever they live.

    graph = build_graph({"vision": VitConfig(...), "language": LanguageConfig(...)}, flows)
    layers = materialise(graph, chunks_of_this_worker, seed=0)      # {"vision.before": ..., "vision.layers.0": ...}
    parameters = named_parameters(graph, layers)                    # {"vision.layers.0.attention.q.weight": ...}

Initial values are a function of seed and layer name alone: however the model is cut, they are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn

from pipeweaver.model.contrastive import ContrastiveConfig, contrastive
from pipeweaver.model.diffusion import DiffusionConfig, diffusion
from pipeweaver.model.graph import Flow, LayerSpec, ModelGraph, Module, Reading, positions
from pipeweaver.model.language import LanguageConfig, language
from pipeweaver.model.part import seed_of
from pipeweaver.model.refused import check_layer, global_generator
from pipeweaver.model.vit import VitConfig, vit
from pipeweaver.own_code import call_own
from pipeweaver.schedule.ir import Chunk


class CustomConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="custom"):
    """[model.NAME] with type = "custom": `build` = "package.module:function" names a user's function, called as
    function(name, **options), that returns a Module."""

    build: str
    options: dict[str, Any] = {}
    trainable: bool = True


ModuleConfig = VitConfig | LanguageConfig | DiffusionConfig | ContrastiveConfig | CustomConfig

CONFIGS: dict[str, type[msgspec.Struct]] = {
    "vit": VitConfig,
    "language": LanguageConfig,
    "diffusion": DiffusionConfig,
    "contrastive": ContrastiveConfig,
    "custom": CustomConfig,
}
"""Record of each module type, by the name it has in a config file."""


class Activation(NamedTuple):
    """What a task activates, all modules if none is named, and what its losses weigh: all of them, and those of single
    modules in addition."""

    modules: tuple[str, ...] = ()
    weight: float = 1.0
    loss_weights: Mapping[str, float] = {}


def build_graph(
    modules: Mapping[str, ModuleConfig],
    flows: Sequence[Flow] = (),
    tasks: Mapping[str, Activation] | None = None,
) -> ModelGraph:
    """The model graph of configured modules, in their order, and what each of the `tasks` makes of it.

    Raises ValueError, naming the module, for what does not fit together.
    """
    built: dict[str, Module] = {}
    for name in _sources_first(modules, flows):
        readings = tuple(_reading(built, flow) for flow in flows if flow.destination == name and flow.source != name)
        built[name] = _build(name, modules[name], readings)
    for task in (tasks or {}).values():
        for name in task.loss_weights:
            if name not in built or built[name].loss is None:
                able = ", ".join(module.name for module in built.values() if module.loss) or "none"
                raise ValueError(f"loss weight for {name}, which has no loss; modules with one: {able}")
    for name, module in built.items():
        if module.loss is not None and tasks:
            weights = {label: task.weight * task.loss_weights.get(name, 1.0) for label, task in tasks.items()}
            built[name] = replace(module, loss=replace(module.loss, weights=weights))
    return ModelGraph(
        modules=tuple(built[name] for name in modules),
        flows=tuple(flows),
        activated={label: task.modules or tuple(modules) for label, task in (tasks or {}).items()},
    )


def materialise(
    graph: ModelGraph,
    chunks: Iterable[Chunk],
    *,
    seed: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    kept: Mapping[str, nn.Module] | None = None,
) -> dict[str, nn.Module]:
    """The layers of `chunks` with initial parameters, by name; layers of several chunks are built once.

    Those among `kept` are taken as they are.

    Values are drawn on the CPU in float32 under a generator seeded by (seed, layer name), then moved and
    cast. Tied parameters are one tensor where both ends are here; otherwise the one here starts with the
    values of the other. Frozen layers need no gradients.
    """
    wanted: dict[str, LayerSpec] = {}
    for chunk in chunks:
        wanted.update(graph.by_name[chunk.module].range(chunk.start, chunk.stop))
    kept = kept or {}
    layers = {
        name: kept[name] if name in kept else _initialised(name, spec, seed).to(device=device, dtype=dtype)
        for name, spec in wanted.items()
    }
    for alias, canonical in tied_parameters(graph).items():
        alias_layer, alias_parameter = split_name(alias)
        if alias_layer not in layers:
            continue
        layer, parameter = split_name(canonical)
        if layer in layers:
            source = layers[layer]
        elif alias_layer in kept:
            continue
        else:
            source = _initialised(layer, _spec(graph, layer), seed).to(device=device, dtype=dtype)
        _share(layers[alias_layer], alias_parameter, _parameter(source, parameter, canonical), alias)
    return layers


def materialise_all(
    graph: ModelGraph, *, seed: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> dict[str, nn.Module]:
    """The whole model in one place."""
    whole = [Chunk(task="", module=m.name, start=0, stop=len(m.layers), worker=0) for m in graph.modules]
    return materialise(graph, whole, seed=seed, device=device, dtype=dtype)


def named_parameters(graph: ModelGraph, layers: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    """All parameters of `layers` by layout-free names; tied ones once, under the name of the one they share."""
    tied = tied_parameters(graph)
    found: dict[str, nn.Parameter] = {}
    for layer, module in layers.items():
        for name, parameter in module.named_parameters(remove_duplicate=False):
            full = f"{layer}.{name}"
            found.setdefault(tied.get(full, full), parameter)
    return found


def parameter_shapes(graph: ModelGraph) -> dict[str, torch.Size]:
    """Shape of every parameter of the model by its layout-free name, tied ones once; allocates nothing."""
    with torch.device("meta"):
        layers = {name: spec.build() for module in graph.modules for name, spec in _layers(module)}
    return {name: parameter.shape for name, parameter in named_parameters(graph, layers).items()}


def num_parameters(graph: ModelGraph) -> dict[str, int]:
    """Number of parameters of each module."""
    counts = dict.fromkeys((module.name for module in graph.modules), 0)
    for name, shape in parameter_shapes(graph).items():
        counts[split_name(name)[0].rsplit(".layers.", 1)[0].removesuffix(".before").removesuffix(".after")] += (
            shape.numel()
        )
    return counts


def tied_parameters(graph: ModelGraph) -> dict[str, str]:
    """Full name of each tied parameter -> full name of the one it shares."""
    return {
        f"{module.name}.{alias}": f"{module.name}.{canonical}"
        for module in graph.modules
        for alias, canonical in module.tied.items()
    }


def split_name(parameter: str) -> tuple[str, str]:
    """("language.layers.3", "mlp.up.weight") of "language.layers.3.mlp.up.weight"."""
    module, position, rest = parameter.split(".", 2)
    if position == "layers":
        index, rest = rest.split(".", 1)
        position = f"layers.{index}"
    return f"{module}.{position}", rest


def _build(name: str, config: ModuleConfig, readings: tuple[Reading, ...]) -> Module:
    if "." in name or "/" in name:
        raise ValueError(f"module name {name!r} must not contain dots or slashes: parameters are named after it")
    if isinstance(config, VitConfig):
        return vit(name, config)
    if isinstance(config, LanguageConfig):
        return language(name, config, readings)
    if isinstance(config, DiffusionConfig):
        return diffusion(name, config, readings)
    if isinstance(config, ContrastiveConfig):
        return contrastive(name, config, readings)
    module = _custom(name, config)
    if config.trainable:
        return module
    return replace(
        module,
        before=module.before and replace(module.before, trainable=False),
        layers=tuple(replace(layer, trainable=False) for layer in module.layers),
        after=module.after and replace(module.after, trainable=False),
    )


def _custom(name: str, config: CustomConfig) -> Module:
    try:
        module = call_own(config.build, name, **config.options)
    except ValueError as error:
        raise ValueError(f"model.{name}: {error}") from error
    if not isinstance(module, Module):
        raise ValueError(f'model.{name}: build = "{config.build}" returned {type(module).__name__}, not a Module')
    return module


def _sources_first(modules: Mapping[str, ModuleConfig], flows: Sequence[Flow]) -> list[str]:
    """Names in an order in which a module comes after those it reads."""
    for flow in flows:
        for end in (flow.source, flow.destination):
            if end not in modules:
                raise ValueError(f"flow {flow.source}.{flow.tensor} -> {flow.destination}: there is no module {end}")
    left, order = list(modules), []
    while left:
        ready = [n for n in left if not any(f.destination == n and f.source in left and f.source != n for f in flows)]
        if not ready:
            raise ValueError(f"the flows between {', '.join(left)} form a cycle")
        order += ready
        left = [name for name in left if name not in ready]
    return order


def _reading(built: Mapping[str, Module], flow: Flow) -> Reading:
    sent = {spec.name: spec for _, layer in positions(built[flow.source]) for spec in layer.sends}
    if flow.tensor not in sent:
        raise ValueError(f"{flow.source} does not send {flow.tensor}; it sends {', '.join(sent) or 'nothing'}")
    return Reading(name=flow.name, source=flow.source, spec=sent[flow.tensor])


def _layers(module: Module) -> Iterator[tuple[str, LayerSpec]]:
    return module.range(0, len(module.layers))


def _spec(graph: ModelGraph, layer: str) -> LayerSpec:
    return dict(_layers(graph.by_name[layer.split(".")[0]]))[layer]


def _initialised(name: str, spec: LayerSpec, seed: int) -> nn.Module:
    """A layer on the CPU in float32, its values drawn under a generator of its own."""
    # torch.nn draws from the process's global generator.
    with global_generator, torch.random.fork_rng(devices=[]), _default_dtype(torch.float32), torch.device("cpu"):
        torch.manual_seed(seed_of(seed, name))
        layer = spec.build()
    check_layer(name, layer)
    if not spec.trainable:
        layer.requires_grad_(False)
    return layer


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _parameter(layer: nn.Module, name: str, full_name: str) -> nn.Parameter:
    found = dict(layer.named_parameters(remove_duplicate=False)).get(name)
    if found is None:
        raise ValueError(f"tied parameter {full_name} does not exist")
    return found


def _share(layer: nn.Module, name: str, parameter: nn.Parameter, full_name: str) -> None:
    """Let `layer` use `parameter` under `name`."""
    own = _parameter(layer, name, full_name)
    if own.shape != parameter.shape:
        raise ValueError(f"{full_name} of shape {list(own.shape)} is tied to one of shape {list(parameter.shape)}")
    path, _, last = name.rpartition(".")
    setattr(layer.get_submodule(path), last, parameter)
