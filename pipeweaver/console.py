"""What a person sees: the plan of a step as tables, and a training run as a bar or, in a log, as lines.

    step 120/600  loss 0.312  0.41 s (predicted 0.39)  bubble 9 %  imbalance vision 1.04 language 1.02

Shares are in percent, times in seconds or milliseconds; the files that a run writes have the exact figures.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from pipeweaver.cluster import format_bytes
from pipeweaver.report.explain import Bubble, Explanation, busiest, longest_ns
from pipeweaver.report.metrics import StepMetrics
from pipeweaver.runtime.evaluate import Evaluation
from pipeweaver.runtime.train import StepReport
from pipeweaver.schedule.ir import Plan, Prediction

LINES_PER_RUN = 20
"""In a log, not on a terminal."""


class Follow:
    """Shows a run of `steps` steps as it goes, and sums it up. An observer of `train`, and a context.

    `paths` are the files that the run leaves, to be named at the end.
    """

    def __init__(self, steps: int, paths: Sequence[Path]) -> None:
        self._steps = steps
        self._paths = paths
        self._every = max(1, steps // LINES_PER_RUN)
        self._metrics: list[StepMetrics] = []
        self._evaluation: Evaluation | None = None
        self._start = time.monotonic()
        self._bar: Progress | None = None

    def __enter__(self) -> Follow:
        if sys.stdout.isatty():
            columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
            self._bar = Progress(*columns)
            self._bar.add_task("planning the first step", total=self._steps)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if kind is None:
            for line in self._summary():
                print(line, flush=True)

    def __call__(self, report: StepReport | Evaluation) -> None:
        if isinstance(report, Evaluation):
            self._evaluation = report
            self._say(f"held-out after step {report.step}: {evaluation_line(report)}")
            return
        self._metrics.append(report.metrics)
        line = f"step {report.metrics.step + 1}/{self._steps}  {step_line(report.metrics)}"
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=report.metrics.step + 1, description=line)
        elif (report.metrics.step + 1) % self._every == 0 or report.metrics.step == 0:
            print(line, flush=True)

    def _say(self, line: str) -> None:
        if self._bar is not None:
            self._bar.console.print(line, highlight=False)
        else:
            print(line, flush=True)

    def _summary(self) -> list[str]:
        lines = []
        if self._metrics:
            seconds = time.monotonic() - self._start
            # In the first step libraries warm up, and nothing has corrected the costs yet.
            steady = self._metrics[1:] or self._metrics
            measured = statistics.median(metrics.step_ns for metrics in steady)
            line = f"{len(self._metrics)} steps in {seconds:.0f} s: step time {duration(measured)} (median)"
            errors = [abs(m.prediction_error) for m in steady if m.prediction_error is not None]
            if errors:
                predicted = statistics.median(m.predicted_step_ns for m in steady if m.predicted_step_ns)
                line += f", predicted {duration(predicted)}, off by {percent(statistics.median(errors))} (median)"
            lines.append(line)
            bubbles = [metrics.bubble for metrics in self._metrics if metrics.bubble is not None]
            figures = [f"bubble {percent(statistics.median(bubbles))}"] if bubbles else []
            modules = dict.fromkeys(module for metrics in self._metrics for module in metrics.imbalance)
            for module in modules:
                values = [m.imbalance[module] for m in self._metrics if module in m.imbalance]
                figures.append(f"imbalance of {module} {statistics.median(values):.2f}")
            figures.append(f"padding {percent(max(metrics.padding_share for metrics in self._metrics))}")
            lines.append(", ".join(figures) + " (medians)")
        if self._evaluation is not None:
            lines.append(f"held-out: {evaluation_line(self._evaluation)}")
        lines += [f"wrote {path}{_hint(path)}" for path in self._paths if path.exists()]
        return lines


def step_line(metrics: StepMetrics) -> str:
    """The figures of a step that are worth a look while it trains."""
    parts = [f"loss {metrics.loss:.4g}" if metrics.loss is not None else "no loss", duration(metrics.step_ns)]
    if metrics.predicted_step_ns is not None:
        parts[-1] += f" (predicted {duration(metrics.predicted_step_ns)})"
    if metrics.bubble is not None:
        parts.append(f"bubble {percent(metrics.bubble)}")
    if metrics.imbalance:
        parts.append("imbalance " + " ".join(f"{name} {value:.2f}" for name, value in metrics.imbalance.items()))
    return "  ".join(parts)


def evaluation_line(evaluation: Evaluation) -> str:
    """`256 samples, loss 0.082, language/answers 94.2 %`, or, where there are several tasks, after the loss
    `; caption: language 0.31, language/answers 94.2 %; text: language 0.12`: each one's losses and what it reports."""
    start = f"{evaluation.samples} samples, loss {evaluation.loss:.4g}"
    tasks = sorted({name.partition("/")[0] for name in evaluation.losses})
    figures = {task: [f"{name} {percent(value)}" for name, value in _of(task, evaluation.reported)] for task in tasks}
    if len(tasks) == 1:
        return ", ".join([start, *figures[tasks[0]]])
    lines = [start]
    for task in tasks:
        losses = [f"{name} {value:.4g}" for name, value in _of(task, evaluation.losses)]
        lines.append(f"{task}: {', '.join([*losses, *figures[task]])}")
    return "; ".join(lines)


def _of(task: str, values: Mapping[str, float]) -> list[tuple[str, float]]:
    """Names and values of one task, the task left out of the names."""
    pairs = ((name.partition("/"), value) for name, value in sorted(values.items()))
    return [(rest, value) for (owner, _, rest), value in pairs if owner == task]


def print_plan(plans: Sequence[Plan], memory_bytes: int | None) -> None:
    """Chunks and memory per worker, parts per module, and what the emulator predicts, replica by replica."""
    for plan in plans:
        if len(plans) > 1:
            print(f"replica {plan.replica}")
        Console().print(_workers_table(plan, memory_bytes), _modules_table(plan))
        if plan.prediction is not None:
            print("\n".join(prediction_lines(plan, plan.prediction)))


def print_explanation(plans: Sequence[Plan], explanation: Explanation) -> None:
    """Where the bubble of each replica's plan is, what each lever brings, and what the bounds leave to be gained."""
    for plan, bubble in zip(plans, explanation.bubbles, strict=True):
        if plan.prediction is not None and plan.prediction.makespan_ns:
            title = "where the bubble is" + (f", replica {plan.replica}" if len(plans) > 1 else "")
            Console().print(_bubble_table(plan, plan.prediction, bubble, title))
    longest = longest_ns(plans)
    if explanation.without and longest:
        Console().print(_levers_table(longest, explanation.without))
        print("\n".join(_better_without(longest, explanation.without)))
    elif longest:
        print(f"policy {plans[0].policy} has no lever to switch off")
    print("\n".join(still_possible(plans)))


def _better_without(longest_ns: int, without: Sequence[tuple[str, int | None]]) -> list[str]:
    """Why a gain can be negative, and what to make of it; nothing where none is."""
    known = [(makespan_ns, name) for name, makespan_ns in without if makespan_ns is not None]
    least_ns, name = min(known, default=(longest_ns, ""))
    if percent(least_ns / longest_ns - 1) == percent(0):
        return []
    return [
        f'a gain below zero: without "{name}" this step takes {percent(1 - least_ns / longest_ns)} less. A search can end '
        "further off where it has more choices, and a placement is for many batches: see others (--step N) before you "
        "leave the lever out"
    ]


def still_possible(plans: Sequence[Plan]) -> list[str]:
    """What the bounds of the slowest replica say."""
    known = [(plan, plan.prediction) for plan in plans if plan.prediction is not None and plan.prediction.makespan_ns]
    if not known:
        return []
    plan, prediction = max(known, key=lambda one: one[1].makespan_ns)
    lines, spread = [], prediction.useful_ns // plan.placement.workers
    for least, what in (
        (prediction.lower_bound_ns, "other orders of these stages: at most"),
        (spread, "other cuts, parts and memory strategies as well: at most"),
    ):
        gained = max(0.0, 1 - least / prediction.makespan_ns)
        lines.append(f"still possible by {what} {percent(gained)}, down to {_milliseconds(least)}")
    return lines


def prediction_lines(plan: Plan, prediction: Prediction) -> list[str]:
    bound = prediction.lower_bound_ns
    over = f", {percent(prediction.makespan_ns / bound - 1)} above it" if bound else ""
    return [
        f"predicted step time {duration(prediction.step_ns)}, of which reductions and optimizer "
        f"{duration(prediction.step_ns - prediction.makespan_ns)}",
        f"makespan {_milliseconds(prediction.makespan_ns)}; no schedule of these stages takes less than "
        f"{_milliseconds(bound)}{over}",
        f"bubble {percent(prediction.bubble)}",
        f"costs: {plan.costs}",
    ]


def duration(ns: float) -> str:
    """A time for people: "0.41 s", "12.3 ms", "85 us"."""
    if ns >= 100e6:
        return f"{ns / 1e9:.2f} s"
    return f"{ns / 1e6:.1f} ms" if ns >= 1e5 else f"{ns / 1e3:.0f} us"


def percent(share: float) -> str:
    return f"{round(100 * share, 1) + 0.0:.1f} %"  # not "-0.0 %"


def _workers_table(plan: Plan, memory_bytes: int | None) -> Table:
    table = Table("worker", "chunks", title=f"step {plan.step}, policy {plan.policy}", title_justify="left")
    for column in ("stages", "held throughout", "peak memory"):
        table.add_column(column, justify="right")
    for worker in range(plan.placement.workers):
        chunks = " ".join(_chunk(plan, chunk) for chunk in plan.placement.on(worker))
        peak = "" if plan.prediction is None else format_bytes(plan.prediction.peak_bytes[worker])
        if memory_bytes is not None:
            peak += f" of {format_bytes(memory_bytes)}"
        table.add_row(str(worker), chunks, str(len(plan.order[worker])), format_bytes(plan.static_bytes[worker]), peak)
    return table


def _chunk(plan: Plan, number: int) -> str:
    """ "vision[0:2]", and whose it is where there are several tasks: "caption.vision[0:2]"."""
    chunk = plan.placement.chunks[number]
    several = len({other.task for other in plan.placement.chunks}) > 1
    return f"{chunk.task}." * several + str(chunk).partition("@")[0]


def _modules_table(plan: Plan) -> Table:
    table = Table("module")
    for column in ("items", "rows", "chunks", "parts", "items per part"):
        table.add_column(column, justify="right")
    for module in dict.fromkeys(chunk.module for chunk in plan.placement.chunks):
        items = [item for item in plan.items if item.module == module]
        chunks = [number for number, chunk in enumerate(plan.placement.chunks) if chunk.module == module]
        # Every item is in one part of a chunk with the first layer; later chunks may be cut otherwise.
        first = [number for number in chunks if plan.placement.chunks[number].start == 0]
        sizes = [len(part.items) for number in first for part in plan.parts[number]]
        spread = f"{min(sizes)} to {max(sizes)}" if sizes and min(sizes) < max(sizes) else str(max(sizes, default=0))
        rows = sum(item.sizes["tokens"] for item in items)
        table.add_row(module, str(len(items)), str(rows), str(len(chunks)), str(len(sizes)), spread)
    return table


def _bubble_table(plan: Plan, prediction: Prediction, bubble: Bubble, title: str) -> Table:
    available = plan.placement.workers * prediction.makespan_ns
    table = Table("share", title=title, title_justify="left")
    table.add_column("of all worker time", justify="right")
    table.add_column("worker time", justify="right")
    table.add_column("what it is")
    for name, meaning in _SHARES.items():
        share = getattr(bubble, name)
        if share or name != "loading":
            meaning = meaning.format(worker=busiest(plan))
            table.add_row(name.replace("_", " "), percent(share / available), f"{share:,} ns", meaning)
    table.add_section()
    total = f"of {plan.placement.workers} workers over {_milliseconds(prediction.makespan_ns)}"
    table.add_row("bubble", percent(bubble.total_ns / available), f"{bubble.total_ns:,} ns", total)
    return table


_SHARES = {
    "fill": "worker {worker}, busy longest, idles before its first backward; so much on every worker",
    "drain": "it idles after its last forward",
    "dependency": "it waits for others and for transfers in between",
    "memory": "recomputation; it waits for copies to the host, or for memory",
    "imbalance": "the other workers have less to do than it has",
    "small_parts": "parts are smaller than the most efficient size",
    "loading": "pixels and tokens are brought to the device",
}


def _levers_table(longest_ns: int, without: Sequence[tuple[str, int | None]]) -> Table:
    table = Table("lever", title="what each lever brings on this batch", title_justify="left")
    table.add_column("makespan without", justify="right")
    table.add_column("gain", justify="right")
    for name, makespan_ns in without:
        if makespan_ns is None:
            table.add_row(name, "none", "no plan fits without")
        else:
            table.add_row(name, _milliseconds(makespan_ns), percent(makespan_ns / longest_ns - 1))
    return table


def _milliseconds(ns: int) -> str:
    """Exact enough to compare plans that differ by little."""
    return f"{ns / 1e6:,.1f} ms"


def _hint(path: Path) -> str:
    return " (open it in ui.perfetto.dev)" if path.name.endswith("trace.json") else ""
