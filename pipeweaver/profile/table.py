"""The table of a calibration, and costs by interpolation in it.

    table = merge(profiles, fingerprint=..., source="profile of 2026-11-29, 2 workers busy")
    costs = TableCosts(table, graph)
    costs.stage(chunk, items, links).forward_ns

A chunk costs the sum of its layers and the stage itself. The table is saved as JSON; nothing but this file
knows its form.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import msgspec
import torch

from pipeweaver.costs import LayerStrategies, StageCost, StrategyCost
from pipeweaver.data.items import Item
from pipeweaver.model.graph import ModelGraph
from pipeweaver.profile.fit import UNIT, Fit, Sizes, cover, errors, evaluate, fit, fit_or_zero
from pipeweaver.profile.measured import LayerProfile, LinkSample, Profile, StageProfile
from pipeweaver.profile.parts import sizes_of
from pipeweaver.profile.variants import Variant, variants
from pipeweaver.schedule.ir import Chunk, Strategy


class StrategyFit(msgspec.Struct, frozen=True, kw_only=True):
    """A layer under a memory strategy, fitted; fields as in `StrategyProfile`."""

    extra_ns: Fit
    saved_bytes: Fit


class LayerFit(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of one layer of a variant, fitted; fields as in `LayerProfile`. `most_rows` is the largest part measured.

    `mean_ns` is the mean of forward plus backward over the measured sizes, `error` the share of it that
    predictions are off by at sizes that were not measured: each size predicted from the others.
    """

    forward_ns: Fit
    backward_ns: Fit
    input_ns: Fit
    weight_ns: Fit
    load_ns: Fit
    loaded_bytes: Fit
    saved_bytes: Fit
    shared_bytes: Fit
    carried_bytes: Fit
    input_gradient_bytes: Fit
    forward_workspace_bytes: Fit
    backward_workspace_bytes: Fit
    weight_bytes: Fit
    weight_workspace_bytes: Fit
    strategies: dict[Strategy, StrategyFit]
    optimizer_ns: int
    most_rows: int
    mean_ns: int
    error: float


class LinkFit(msgspec.Struct, frozen=True, kw_only=True):
    """Time of a transfer or reduction of some bytes: `latency_ns` and nanoseconds per mebibyte."""

    latency_ns: int
    mebibyte_ns: int

    def at(self, num_bytes: int) -> int:
        return self.latency_ns + num_bytes * self.mebibyte_ns // (1 << 20)


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """Everything calibrated. `layers` by variant name, `transfers` by "sender-receiver", `reductions` by members;
    `host` is the way to host memory, the slower of both directions."""

    fingerprint: str
    source: str
    dtype: str
    core_share: float
    stage: StageProfile
    layers: dict[str, LayerFit]
    transfers: dict[str, LinkFit]
    reductions: dict[int, LinkFit]
    host: LinkFit | None = None


class FitError(NamedTuple):
    """Share of the time that predictions are off by, at sizes that were not measured: over all, and of the worst kind."""

    overall: float
    worst: float
    worst_kind: str


def merge(profiles: Sequence[Profile], *, fingerprint: str, source: str, dtype: str) -> Table:
    """One table of what all workers measured at the same time: means over the workers."""
    assert profiles, "nothing was measured"
    first = profiles[0]
    for other in profiles[1:]:
        assert other.layers.keys() == first.layers.keys(), "workers measured different layers"
    return Table(
        fingerprint=fingerprint,
        source=source,
        dtype=dtype,
        core_share=min(profile.core_share for profile in profiles),
        stage=StageProfile(
            forward_ns=round(fmean(p.stage.forward_ns for p in profiles)),
            backward_ns=round(fmean(p.stage.backward_ns for p in profiles)),
            input_ns=round(fmean(p.stage.input_ns for p in profiles)),
            weight_ns=round(fmean(p.stage.weight_ns for p in profiles)),
        ),
        layers={name: _fit_layer([p.layers[name] for p in profiles]) for name in first.layers},
        transfers={
            f"{ends[0]}-{ends[1]}": _fit_link(samples)
            for ends, samples in _by_ends([sample for p in profiles for sample in p.transfers]).items()
        },
        reductions={
            ends[0]: _fit_link(samples)
            for ends, samples in _by_ends([sample for p in profiles for sample in p.reductions]).items()
        },
        host=_fit_link([sample for p in profiles for sample in p.host]) if first.host else None,
    )


def fit_error(table: Table, graph: ModelGraph) -> FitError:
    """Kinds of layers weigh in with the time that all layers of the model take."""
    weights = dict.fromkeys(table.layers, 0)
    for variant in variants(graph).values():
        weights[variant.name] += table.layers[variant.name].mean_ns
    overall = sum(table.layers[name].error * weight for name, weight in weights.items()) / max(1, sum(weights.values()))
    worst_kind = max(table.layers, key=lambda name: table.layers[name].error)
    return FitError(overall, table.layers[worst_kind].error, worst_kind)


def save_table(path: Path, table: Table) -> None:
    """Written beside and moved into place, so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{id(table)}.partial")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=1))
    partial.replace(path)


def load_table(path: Path) -> Table:
    """Raises ValueError, naming the file, if it is not a table."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Table)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is not a calibration table ({error}); delete it, it is made anew") from None


class _Run(NamedTuple):
    """`repeats` consecutive layers of a chunk of the same variant."""

    variant: Variant
    fit: LayerFit
    repeats: int


class TableCosts:
    """Costs of a model by its table, integers throughout.

    Raises ValueError, by name, when asked for a layer, link or reduction that was not calibrated.
    """

    def __init__(self, table: Table, graph: ModelGraph) -> None:
        self.table = table
        self.graph = graph
        self.source = table.source
        self._variants = variants(graph)
        missing = sorted({v.name for v in self._variants.values() if v.name not in table.layers})
        if missing:
            raise ValueError(
                f"{len(missing)} kinds of layers are not in the calibration ({table.source}): "
                f"{', '.join(missing)}; calibrate this model anew"
            )
        self._permille: dict[str, int] = {}
        self._runs: dict[Chunk, tuple[_Run, ...]] = {}
        self._parameters = _parameters(graph, getattr(torch, table.dtype))

    def corrected(self, factors: Mapping[str, float]) -> TableCosts:
        """The same costs with times of stages multiplied by a factor per module (`correct.py`); 1 where there is none."""
        found = copy.copy(self)
        found._permille = {module: round(1000 * factor) for module, factor in factors.items()}
        listed = ", ".join(f"{module} by {permille / 1000:g}" for module, permille in found._permille.items())
        found.source = f"{self.table.source}, corrected: {listed}" if listed else self.table.source
        return found

    def stage(self, chunk: Chunk, items: Sequence[Item], links: Sequence[Sequence[Item]]) -> StageCost:
        """Cost of running `items` through `chunk`; `links[i]` are the source items linked to items[i]."""
        runs = self._runs_of(chunk)
        forward, backward, before, after = self.table.stage.forward_ns, 0, 0, 0
        load_ns = loaded = saved = shared = weight = 0
        forward_workspace = backward_workspace = weight_workspace = 0
        later = 0  # saved by layers behind the one at hand, free again when its backward runs
        last = runs[-1]
        known = _KnownSizes(self.graph, items, links)
        has_backward = any(run.variant.backward for run in runs)
        for number in reversed(range(len(runs))):
            run = runs[number]
            layer, sizes = run.fit, known.of(run.variant)
            forward += run.repeats * layer.forward_ns.at(sizes)
            backward += run.repeats * layer.backward_ns.at(sizes)
            before += run.repeats * layer.input_ns.at(sizes)
            after += run.repeats * layer.weight_ns.at(sizes)
            weight += run.repeats * layer.weight_bytes.at(sizes)
            weight_workspace = max(weight_workspace, layer.weight_workspace_bytes.at(sizes))
            load_ns += layer.load_ns.at(sizes)
            loaded += layer.loaded_bytes.at(sizes)
            carried = layer.carried_bytes.at(sizes)
            own = layer.saved_bytes.at(sizes)
            forward_workspace = max(forward_workspace, layer.forward_workspace_bytes.at(sizes))
            inside = 0 if run is last else carried
            handed = layer.input_gradient_bytes.at(sizes) if number or run.repeats > 1 else 0
            workspace = layer.backward_workspace_bytes.at(sizes) + inside + handed - later
            if has_backward:
                backward_workspace = max(backward_workspace, workspace)
                saved += run.repeats * own + (run.repeats if run is not last else run.repeats - 1) * carried
                shared += layer.shared_bytes.at(sizes)
                later = saved
        permille = self._permille.get(chunk.module, 1000)
        stage = self.table.stage
        return StageCost(
            forward_ns=forward * permille // 1000,
            backward_ns=(backward + stage.backward_ns) * permille // 1000 if has_backward else 0,
            input_ns=(before + stage.input_ns) * permille // 1000 if has_backward else 0,
            weight_ns=(after + stage.weight_ns) * permille // 1000 if has_backward else 0,
            load_ns=load_ns,
            loaded_bytes=loaded,
            saved_bytes=saved + shared,
            forward_workspace_bytes=forward_workspace,
            backward_workspace_bytes=backward_workspace,
            weight_bytes=weight,
            weight_workspace_bytes=weight_workspace,
        )

    def strategies(
        self, chunk: Chunk, items: Sequence[Item], links: Sequence[Sequence[Item]]
    ) -> tuple[LayerStrategies, ...]:
        """For every layer of a stage, `before` and `after` included, what each memory strategy costs."""
        known = _KnownSizes(self.graph, items, links)
        permille = self._permille.get(chunk.module, 1000)
        found: list[LayerStrategies] = []
        for run in self._runs_of(chunk):
            sizes = known.of(run.variant)
            options: dict[Strategy, StrategyCost] = {"keep": StrategyCost(saved_bytes=0, extra_ns=0)}
            if run.variant.backward:
                kept = run.fit.saved_bytes.at(sizes)
                options["keep"] = StrategyCost(saved_bytes=kept, extra_ns=0)
                for strategy, layer in run.fit.strategies.items():
                    saved = min(kept, layer.saved_bytes.at(sizes))
                    away = strategy == "offload" and self.table.host is not None
                    options[strategy] = StrategyCost(
                        saved_bytes=saved,
                        extra_ns=layer.extra_ns.at(sizes) * permille // 1000,
                        offload_ns=self.table.host.at(kept - saved) if away and self.table.host else 0,
                    )
            found += [options] * run.repeats
        return tuple(found)

    def useful_ns(self, module: str, items: Sequence[Item], links: Sequence[Sequence[Item]]) -> int:
        """Forward and backward of the items over the whole module at its most efficient size, no recomputation.

        The share of a cost that does not grow with the part is spread over the largest part that was measured.
        """
        runs = self._runs_of(self._whole(module))
        rows = sum(item.sizes["tokens"] for item in items)
        most_rows = max(run.fit.most_rows for run in runs)
        constant = growing = 0
        known = _KnownSizes(self.graph, items, links)
        for run in runs:
            sizes = known.of(run.variant)._replace(one=0)
            for cost in (run.fit.forward_ns, run.fit.backward_ns):
                constant += run.repeats * cost.coefficients[0]
                growing += run.repeats * evaluate(cost.coefficients, sizes)
        constant = constant // UNIT + self.table.stage.forward_ns
        constant += self.table.stage.backward_ns if any(run.variant.backward for run in runs) else 0
        return (growing + constant * rows // max(1, most_rows)) * self._permille.get(module, 1000) // 1000

    def transfer_ns(self, sender: int, receiver: int, num_bytes: int) -> int:
        if sender == receiver:
            return 0
        found = self.table.transfers.get(f"{sender}-{receiver}")
        if found is None:
            raise ValueError(f"the link from worker {sender} to {receiver} is not calibrated ({self.source})")
        return found.at(num_bytes)

    def reduce_ns(self, holders: int, num_bytes: int) -> int:
        """Of a number of members that was not measured: as the next larger one."""
        if holders <= 1:
            return 0
        measured = [count for count in self.table.reductions if count >= holders]
        if not measured:
            raise ValueError(f"reductions over {holders} members are not calibrated ({self.source})")
        return self.table.reductions[min(measured)].at(num_bytes)

    def parameter_bytes(self, layer: str) -> int:
        """Trainable parameters of one copy of a layer ("language.layers.3"), or of one parameter, by full name."""
        return sum(p.num_bytes for p in self._of(layer) if p.trainable)

    def static_bytes(self, layer: str) -> int:
        """Parameters, buffers, gradients and both moments of AdamW of one copy of a layer."""
        return sum(p.num_bytes * (4 if p.trainable else 1) for p in self._of(layer))

    def optimizer_ns(self, layer: str) -> int:
        return self.table.layers[self._variants[layer].name].optimizer_ns

    def _runs_of(self, chunk: Chunk) -> tuple[_Run, ...]:
        found = self._runs.get(chunk)
        if found is None:
            names = [name for name, _ in self.graph.by_name[chunk.module].range(chunk.start, chunk.stop)]
            grouped = groupby((self._variants[name] for name in names), key=lambda variant: variant.name)
            runs = [(list(same), self.table.layers[name]) for name, same in grouped]
            found = tuple(_Run(same[-1], layer, len(same)) for same, layer in runs)
            self._runs[chunk] = found
        return found

    def _whole(self, module: str) -> Chunk:
        return Chunk(task="", module=module, start=0, stop=len(self.graph.by_name[module].layers), worker=0)

    def _of(self, name: str) -> list[_Parameter]:
        """Parameters and buffers of a layer, or the one parameter of this name."""
        if name in self._parameters:
            return self._parameters[name]
        found = [p for layer, ps in self._parameters.items() if name.startswith(layer) for p in ps if p.name == name]
        assert found, f"{name} is neither a layer nor a parameter"
        return found


class _KnownSizes:
    """Sizes of one part, counted once for all layers that read the same."""

    def __init__(self, graph: ModelGraph, items: Sequence[Item], links: Sequence[Sequence[Item]]) -> None:
        self.graph, self.items, self.links = graph, items, links
        self._by_reads: dict[tuple[str, ...], Sizes] = {}

    def of(self, variant: Variant) -> Sizes:
        reads = variant.spec.reads
        if reads not in self._by_reads:
            self._by_reads[reads] = sizes_of(self.graph, variant.module, reads, self.items, self.links)
        return self._by_reads[reads]


class _Parameter(NamedTuple):
    name: str
    layer: str
    num_bytes: int
    trainable: bool


def _parameters(graph: ModelGraph, dtype: torch.dtype) -> dict[str, list[_Parameter]]:
    """Parameters and buffers by layer. Layers are built on the meta device, each kind once."""
    built: dict[str, torch.nn.Module] = {}
    found: dict[str, list[_Parameter]] = {}
    for module in graph.modules:
        for layer, spec in module.range(0, len(module.layers)):
            if spec.kind not in built:
                with torch.device("meta"):
                    built[spec.kind] = spec.build()
            trained = {name for name, p in built[spec.kind].named_parameters() if p.requires_grad and spec.trainable}
            found[layer] = [
                _Parameter(f"{layer}.{name}", layer, _num_bytes(tensor, dtype), name in trained)
                for name, tensor in built[spec.kind].state_dict(keep_vars=True).items()
            ]
    return found


def _num_bytes(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    return tensor.numel() * (dtype.itemsize if tensor.is_floating_point() else tensor.element_size())


def _fit_layer(measured: Sequence[LayerProfile]) -> LayerFit:
    sizes = measured[0].sizes
    assert all(profile.sizes == sizes for profile in measured), "workers measured different sizes"

    def mean(field: str) -> list[float]:
        return _mean([getattr(profile, field) for profile in measured])

    forward, backward = mean("forward_ns"), mean("backward_ns")
    both = [f + b for f, b in zip(forward, backward, strict=True)]
    off = [error * time for error, time in zip(errors(sizes, both), both, strict=True)] if len(both) > 1 else [0.0]
    return LayerFit(
        forward_ns=fit(sizes, forward),
        backward_ns=fit_or_zero(sizes, backward),
        input_ns=fit_or_zero(sizes, mean("input_ns")),
        weight_ns=fit_or_zero(sizes, mean("weight_ns")),
        load_ns=fit_or_zero(sizes, mean("load_ns")),
        loaded_bytes=fit_or_zero(sizes, mean("loaded_bytes")),
        saved_bytes=fit_or_zero(sizes, mean("saved_bytes")),
        shared_bytes=fit_or_zero(sizes, mean("shared_bytes")),
        carried_bytes=fit_or_zero(sizes, mean("carried_bytes")),
        input_gradient_bytes=fit_or_zero(sizes, mean("input_gradient_bytes")),
        forward_workspace_bytes=cover(sizes, mean("forward_workspace_bytes")),
        backward_workspace_bytes=cover(sizes, mean("backward_workspace_bytes")),
        weight_bytes=cover(sizes, mean("weight_bytes")),
        weight_workspace_bytes=cover(sizes, mean("weight_workspace_bytes")),
        strategies={
            strategy: StrategyFit(
                extra_ns=fit_or_zero(sizes, _mean([p.strategies[strategy].extra_ns for p in measured])),
                saved_bytes=cover(sizes, _mean([p.strategies[strategy].saved_bytes for p in measured])),
            )
            for strategy in measured[0].strategies
        },
        optimizer_ns=round(fmean(profile.optimizer_ns for profile in measured)),
        most_rows=max(size.rows for size in sizes),
        mean_ns=round(fmean(both)),
        error=sum(off) / sum(both),
    )


def _mean(columns: Sequence[Sequence[int]]) -> list[float]:
    return [fmean(values) for values in zip(*columns, strict=True)]


def _by_ends(samples: Sequence[LinkSample]) -> dict[tuple[int, ...], list[LinkSample]]:
    found: dict[tuple[int, ...], list[LinkSample]] = {}
    for sample in samples:
        found.setdefault(sample.ends, []).append(sample)
    return found


def _fit_link(samples: Sequence[LinkSample]) -> LinkFit:
    found = fit([Sizes(rows=sample.num_bytes) for sample in samples], [sample.duration_ns for sample in samples])
    return LinkFit(latency_ns=found.coefficients[0] // UNIT, mebibyte_ns=(found.coefficients[2] << 20) // UNIT)
