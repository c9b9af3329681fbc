"""A step as a picture: one row per worker, predicted above measured on one time scale.

    worker 0   |F0|F1|F2|   |B0|F3|B1| ...        modules by colour, forward light, backward dark;
    worker 1      |F0|F1|B0|F2|B1| ...            numbers are microbatches, white is waiting

Boxes carry their number where it fits. Loads, reductions and the optimizer are grey.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from pipeweaver.report.metrics import makespan_ns
from pipeweaver.schedule.ir import Action, Compute, Load, Measurement, Norm, Plan, Prediction, Reduce, Span, Step

WIDTH = 15.0
"""Inches; at DPI pixels per inch."""
DPI = 110

# Light for forward, dark for backward, between for the weight half of a split backward. Hues differ in
# lightness too, for those who do not tell them apart.
_TONES = (
    ("#a6cee9", "#2a71ae", "#6ba3d0"),
    ("#fdd0a2", "#d95f0e", "#f7994a"),
    ("#b7e2b1", "#2d8a4b", "#72bd7c"),
    ("#d9c6e6", "#74429a", "#a582c1"),
    ("#f7c6d4", "#b8295f", "#e0799c"),
    ("#e3d9a4", "#8a7a1f", "#bbab58"),
)
_LOAD, _ENDING, _GROUND = "#9a9a9a", "#5a5a5a", "#f4f4f4"


@dataclass(frozen=True, kw_only=True)
class Box:
    """What is drawn of an action: `label` is put in where it fits."""

    span: Span
    colour: str
    label: str = ""
    hatched: bool = False


def write_picture(path: Path, plans: Sequence[Plan], measurements: Sequence[Measurement | None] = ()) -> None:
    """Write a PNG of a step: all its replicas' plans and, where there are any, their measurements in the same order."""
    figure = draw(plans, measurements)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)


def draw(plans: Sequence[Plan], measurements: Sequence[Measurement | None] = ()) -> Figure:
    """The picture as a figure. Plans without a prediction and without a measurement add nothing."""
    panels = list(_panels(plans, measurements))
    rows = [sum(plan.placement.workers for plan, _ in shown) for _, shown in panels]
    row_height = 0.34 if max(rows, default=1) <= 16 else 0.2
    heights = [row_height * count + 0.55 for count in rows]
    handles = _legend(plans)
    longest = max((len(str(patch.get_label())) for patch in handles), default=1)
    columns = max(1, int(WIDTH / (0.7 + 0.08 * longest)))
    below = 0.2 * ceil(len(handles) / columns)
    figure = Figure(figsize=(WIDTH, sum(heights) + 0.75 + below), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(_title(plans), fontsize=12, x=0.012, ha="left", fontweight="bold")
    all_axes = figure.subplots(
        max(1, len(panels)), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights or [1]}
    )[:, 0]
    end_ns = max((s.end_ns for _, shown in panels for _, spans in shown for lane in spans for s in lane), default=1)
    unit_ns, unit = (1e9, "s") if end_ns >= 2e9 else (1e6, "ms") if end_ns >= 10e6 else (1e3, "us")
    for axes, (heading, shown) in zip(all_axes, panels, strict=False):
        axes.set_title(heading, fontsize=10, loc="left")
        axes.set_xlim(0, end_ns / unit_ns)
        _draw_panel(axes, shown, unit_ns, end_ns)
    all_axes[-1].set_xlabel(f"time in {unit}; numbers are microbatches, the dashed line is the makespan", fontsize=9)
    figure.legend(
        handles=handles, loc="outside lower center", ncols=columns, fontsize=9, frameon=False, handlelength=1.4
    )
    return figure


Shown = Sequence[tuple[Plan, Sequence[Sequence[Span]]]]
"""Plans of a step with the spans of their actions, by worker."""


def boxes(shown: Shown) -> list[list[list[Box]]]:
    """What is drawn, by plan and worker. Waiting is not, at meetings neither: they begin when the last has come."""
    begins: dict[Reduce | Norm, int] = {}
    for plan, spans in shown:
        for action, span in _actions(plan, spans):
            if isinstance(action, Reduce | Norm):
                key = _meeting(action)
                begins[key] = max(begins.get(key, 0), span.start_ns)
    modules = _modules([plan for plan, _ in shown])
    return [
        [
            [
                box
                for action, span in zip(actions, lane, strict=True)
                if isinstance(action, Compute | Load | Reduce | Norm | Step)
                for box in _box(plan, action, span, modules, begins)
            ]
            for actions, lane in zip(plan.actions, spans, strict=True)
        ]
        for plan, spans in shown
    ]


def _panels(plans: Sequence[Plan], measurements: Sequence[Measurement | None]) -> Iterator[tuple[str, Shown]]:
    """(heading, plans with spans) of the panels that there is something to show in."""
    predicted = [(plan, plan.prediction) for plan in plans if plan.prediction is not None]
    if predicted:
        bound = max(timeline.lower_bound_ns for _, timeline in predicted)
        heading = f"predicted: {_figures(predicted)}; no order of these stages takes less than {_duration(bound)}"
        yield heading, [(plan, timeline.spans) for plan, timeline in predicted]
    pairs = zip(plans, measurements, strict=False)
    measured = [(plan, measurement) for plan, measurement in pairs if measurement is not None]
    if measured:
        yield f"measured: {_figures(measured)}", [(plan, timeline.spans) for plan, timeline in measured]


def _figures(timelines: Sequence[tuple[Plan, Prediction | Measurement]]) -> str:
    makespans = [makespan_ns(plan, timeline.spans) for plan, timeline in timelines]
    text = f"makespan {_duration(max(makespans))}, step {_duration(max(timeline.step_ns for _, timeline in timelines))}"
    available = sum(plan.placement.workers * makespan for (plan, _), makespan in zip(timelines, makespans, strict=True))
    if available and all(plan.prediction is not None for plan, _ in timelines):
        useful = sum(plan.prediction.useful_ns for plan, _ in timelines if plan.prediction is not None)
        text += f", bubble {100 * (1 - useful / available):.1f} %"
    return text


def _title(plans: Sequence[Plan]) -> str:
    if not plans:
        return "nothing to show"
    first = plans[0]
    microbatches = sum(len({part.microbatch for parts in plan.parts for part in parts}) for plan in plans)
    workers = _count(first.placement.workers, "worker")
    if len(plans) > 1:
        workers = f"{_count(len(plans), 'replica')} of {workers}"
    kind = "evaluation" if first.forward_only else f"step {first.step}"
    return f"{kind}, policy {first.policy or '(unnamed)'}: {workers}, {_count(microbatches, 'microbatch')}"


def _count(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("ch") else "s")
    return f"{number} {noun if number == 1 else plural}"


def _draw_panel(axes: Axes, shown: Shown, unit_ns: float, end_ns: int) -> None:
    names: list[str] = []
    pixel_ns = end_ns / (WIDTH * DPI * 0.93)
    all_boxes = boxes(shown)
    label_size = _label_size([box for by_worker in all_boxes for row in by_worker for box in row], pixel_ns)
    for (plan, spans), by_worker in zip(shown, all_boxes, strict=True):
        first_row = len(names)
        for worker, drawn in enumerate(by_worker):
            row = len(names)
            names.append(f"replica {plan.replica} worker {worker}" if len(shown) > 1 else f"worker {worker}")
            axes.axhspan(row - 0.42, row + 0.42, color=_GROUND, zorder=0, linewidth=0)
            _draw_row(axes, row, drawn, unit_ns, pixel_ns, label_size)
        end = (min((lane[0].start_ns for lane in spans if lane), default=0) + makespan_ns(plan, spans)) / unit_ns
        axes.plot([end, end], [first_row - 0.5, len(names) - 0.5], color="#202020", linewidth=1, linestyle=(0, (4, 3)))
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.set_yticks(range(len(names)), names, fontsize=9 if len(names) <= 16 else 6)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _draw_row(
    axes: Axes, row: int, drawn: Sequence[Box], unit_ns: float, pixel_ns: float, label_size: float | None
) -> None:
    by_look: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    for box in drawn:
        extent = (box.span.start_ns / unit_ns, (box.span.end_ns - box.span.start_ns) / unit_ns)
        by_look.setdefault((box.colour, box.hatched), []).append(extent)
    for (colour, hatched), extents in by_look.items():
        narrow = sorted(width for _, width in extents)[len(extents) // 2] * unit_ns / pixel_ns < 5
        axes.broken_barh(
            extents,
            (row - 0.42, 0.84),
            facecolors=colour,
            # A line between neighbours, unless it would hide them.
            edgecolors="white",
            linewidth=0.15 if narrow else 0.6,
            hatch="////" if hatched else None,
            zorder=2,
        )
    for box in drawn:
        if label_size is not None and _fits(box, label_size, pixel_ns):
            axes.text(
                (box.span.start_ns + box.span.end_ns) / 2 / unit_ns,
                row + 0.02,
                box.label,
                ha="center",
                va="center",
                fontsize=label_size,
                color=_ink(box.colour),
                zorder=3,
                clip_on=True,
            )


def _label_size(drawn: Sequence[Box], pixel_ns: float) -> float | None:
    """The largest size at which most numbers fit; a few numbers among many boxes would only be noise."""
    numbered = [box for box in drawn if box.label]
    for size in (7.5, 6.0):
        if sum(_fits(box, size, pixel_ns) for box in numbered) > 0.6 * len(numbered):
            return size
    return None


def _fits(box: Box, size: float, pixel_ns: float) -> bool:
    pixels = (box.span.end_ns - box.span.start_ns) / pixel_ns
    return bool(box.label) and pixels >= size * DPI / 72 * 0.58 * len(box.label) + 3


def _box(
    plan: Plan, action: Action, span: Span, modules: Sequence[str], begins: Mapping[Reduce | Norm, int]
) -> Iterator[Box]:
    """The box of an action, none if it takes no time."""
    colour, label, hatched = _ENDING, "", False
    match action:
        case Compute(stage=stage):
            forward, backward, weight = _tones(modules, plan.placement.chunks[stage.chunk].module)
            colour = {"F": forward, "W": weight}.get(stage.phase, backward)
            label = str(plan.parts[stage.chunk][stage.part].microbatch)
            hatched = stage.phase == "W"
        case Load():
            colour = _LOAD
        case Reduce() | Norm():
            span = Span(max(span.start_ns, begins[_meeting(action)]), span.end_ns)
    if span.end_ns > span.start_ns:
        yield Box(span=span, colour=colour, label=label, hatched=hatched)


def _meeting(action: Reduce | Norm) -> Reduce | Norm:
    """The same for all members of a meeting, whatever each takes it to last."""
    return Reduce(group=action.group) if isinstance(action, Reduce) else Norm()


def _actions(plan: Plan, spans: Sequence[Sequence[Span]]) -> Iterator[tuple[Action, Span]]:
    for actions, lane in zip(plan.actions, spans, strict=True):
        yield from zip(actions, lane, strict=True)


def _legend(plans: Sequence[Plan]) -> list[Patch]:
    modules = _modules(plans)
    actions = [action for plan in plans for lane in plan.actions for action in lane]
    phases = {
        (plan.placement.chunks[action.stage.chunk].module, action.stage.phase)
        for plan in plans
        for lane in plan.actions
        for action in lane
        if isinstance(action, Compute)
    }
    handles = []
    for module in modules:
        forward, backward, weight = _tones(modules, module)
        handles.append(Patch(color=forward, label=f"{module} forward"))
        if phases & {(module, "B"), (module, "I")}:
            handles.append(Patch(color=backward, label=f"{module} backward"))
        if (module, "W") in phases:
            handles.append(Patch(facecolor=weight, edgecolor="white", hatch="////", label=f"{module} weight gradient"))
    if any(isinstance(action, Load) for action in actions):
        handles.append(Patch(color=_LOAD, label="load"))
    if any(isinstance(action, Reduce | Norm | Step) for action in actions):
        handles.append(Patch(color=_ENDING, label="reduce, optimizer"))
    return handles


def _modules(plans: Sequence[Plan]) -> list[str]:
    return list(dict.fromkeys(chunk.module for plan in plans for chunk in plan.placement.chunks))


def _tones(modules: Sequence[str], module: str) -> tuple[str, str, str]:
    return _TONES[modules.index(module) % len(_TONES)]


def _ink(colour: str) -> str:
    """Black on light, white on dark (relative luminance of the box)."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return "#202020" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.55 else "white"


def _duration(ns: int) -> str:
    if ns >= 2e9:
        return f"{ns / 1e9:.2f} s"
    return f"{ns / 1e6:.0f} ms" if ns >= 100e6 else f"{ns / 1e6:.1f} ms"
