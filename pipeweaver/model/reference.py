"""One process, the whole batch, every module once: what any schedule of the same samples must reproduce.

    outcome = run_all(graph, materialise_all(graph, seed=0), items, links, load)
    outcome.loss.backward()

The loss is the sum over tasks and modules of weight * (loss summed over the items) / (units over the batch).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeweaver.data.items import Item, linked
from pipeweaver.model.graph import Flow, ModelGraph, Module, TensorSpec, topological
from pipeweaver.model.part import PartView, check_outputs, handed_on

Loader = Callable[[Sequence[Item], Sequence[str]], Mapping[str, Tensor]]
"""(items of one module, names) -> those tensors, packed in the order of the items."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """`loss` to call backward on; `losses` by "task/module", before weights; `sent` tensors by (task, module);
    `metrics` by "task/module/name" as (total, count)."""

    loss: Tensor
    losses: dict[str, Tensor]
    sent: dict[tuple[str, str], dict[str, Tensor]]
    metrics: dict[str, tuple[float, int]]


def run_all(
    graph: ModelGraph,
    layers: Mapping[str, nn.Module],
    items: Sequence[Item],
    links: Sequence[tuple[int, int]],
    load: Loader,
    *,
    step: int = 0,
    seed: int = 0,
    normalisers: Mapping[str, int] | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Outcome:
    """Forward of all items. `links` are pairs (source, destination) of positions in `items`; `layers` are those
    of the whole model; `normalisers` map "task/module" to units, by default counted over `items`."""
    device = torch.device(device)
    normalisers = count_units(graph, items) if normalisers is None else normalisers
    sources = linked(tuple(items), tuple(links))
    loss = torch.zeros((), device=device, dtype=dtype)
    losses: dict[str, Tensor] = {}
    metrics: dict[str, tuple[float, int]] = {}
    sent: dict[tuple[str, str], dict[str, Tensor]] = {}
    for task in dict.fromkeys(item.task for item in items):
        for name in topological(graph):
            module = graph.by_name[name]
            own = [i for i, item in enumerate(items) if (item.task, item.module) == (task, name)]
            if not own:
                continue
            part = PartView(
                items=[items[i] for i in own],
                links=[sources[i] for i in own],
                loaded={},
                step=step,
                seed=seed,
                device=device,
                dtype=dtype,
            )
            reads = {
                flow.name: _gathered(graph, flow, task, items, part, sent)
                for flow in graph.flows
                if flow.destination == name and flow.source != name
            }
            outputs = _run_module(graph, module, layers, part, reads, load)
            if module.loss is not None:
                key = f"{task}/{name}"
                losses[key] = outputs.pop("loss")
                if normalisers[key]:
                    loss = loss + module.loss.weight_in(task) * losses[key] / normalisers[key]
            sent[task, name] = outputs
            metrics |= {f"{task}/{name}/{metric}": value for metric, value in part.metrics.items()}
    return Outcome(loss=loss, losses=losses, sent=sent, metrics=metrics)


def count_units(graph: ModelGraph, items: Sequence[Item]) -> dict[str, int]:
    """ "task/module" of each loss -> its units over `items`."""
    units: dict[str, int] = {}
    for item in items:
        spec = graph.by_name[item.module].loss
        if spec is not None:
            key = f"{item.task}/{item.module}"
            units[key] = units.get(key, 0) + item.sizes[spec.units]
    return units


def _run_module(
    graph: ModelGraph,
    module: Module,
    layers: Mapping[str, nn.Module],
    part: PartView,
    reads: dict[str, Tensor],
    load: Loader,
) -> dict[str, Tensor]:
    """All that the layers of a module send, and its "loss"."""
    skips = [flow for flow in graph.flows if flow.source == flow.destination == module.name]
    ordered = list(module.range(0, len(module.layers)))
    carried: dict[str, Tensor] = {}
    sent: dict[str, Tensor] = {}
    for name, spec in ordered:
        reads |= {flow.name: sent[flow.tensor] for flow in skips if flow.tensor in sent}
        if spec.loads:
            loaded = load(part.items, spec.loads)
            part.loaded = {key: loaded[key].to(part.device) for key in spec.loads}
        outputs = layers[name]({**carried, **{key: reads[key] for key in spec.reads}}, part)
        check_outputs(name, spec, outputs, part, loss=module.loss is not None and name == ordered[-1][0])
        carried = {tensor.name: handed_on(tensor, outputs) for tensor in spec.carries}
        sent |= {tensor.name: handed_on(tensor, outputs) for tensor in spec.sends}
        if "loss" in outputs:
            sent["loss"] = outputs["loss"]
    return sent


def _gathered(
    graph: ModelGraph,
    flow: Flow,
    task: str,
    items: Sequence[Item],
    part: PartView,
    sent: Mapping[tuple[str, str], Mapping[str, Tensor]],
) -> Tensor:
    """The rows that a flow brings to the items of `part`, in the order of their links."""
    _, spec = graph.sent(flow)
    if (task, flow.source) not in sent:
        return _no_rows(spec, part)
    start_of: dict[str, int] = {}
    row = 0
    for item in items:
        if (item.task, item.module) == (task, flow.source):
            start_of[item.name] = row
            row += item.sizes[spec.rows]
    index = [torch.empty(0, dtype=torch.int64)]
    for linked_items in part.links:
        for source in linked_items:
            if source.module == flow.source:
                start = start_of[source.name]
                index.append(torch.arange(start, start + source.sizes[spec.rows]))
    return sent[task, flow.source][flow.tensor].index_select(0, torch.cat(index).to(part.device))


def _no_rows(spec: TensorSpec, part: PartView) -> Tensor:
    dtype = part.dtype if spec.dtype == "model" else getattr(torch, spec.dtype)
    return torch.empty((0, spec.width), dtype=dtype, device=part.device)
