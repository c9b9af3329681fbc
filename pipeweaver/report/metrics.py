"""What is reported of every step: one record, one line of JSON, and TensorBoard for those who want it.

    {"step": 7, "loss": 2.31, "step_ns": 812000000, "predicted_step_ns": 790000000, "prediction_error": 0.0278,
     "bubble": 0.093, "imbalance": {"vision": 1.04, "language": 1.01}, "padding_share": 0.0, ...}

Figures are defined in one place, here: makespan and bubble from measured spans, imbalance of a module, padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from pipeweaver.schedule.ir import Compute, Measurement, Plan, Span


class StepMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one optimizer step over all replicas. `None` where there was no prediction to compare with.

    `prediction_error` is measured over predicted step time, minus 1. `imbalance`, `tokens` and
    `tokens_per_second` are by module; tokens are rows inside the module. `peak_bytes` has one list of workers
    per replica, as measured (empty where it was not). `waiting_ns` is the longest that a worker waited
    for its plan, `switching_ns` how long parameters moved before the step, where its task set is new. `losses` are by "task/module", without their weights; `loss` is their weighted sum. `reported` holds
    averages of what layers report, `learning_rate` and `gradient_norm` are those of the step. `corrections` are
    the factors, by module and worker, that measured steps put on the costs of this one's plan;
    `uncorrected_prediction_error` is what the error would have been without them.
    """

    step: int
    policy: str
    loss: float | None
    learning_rate: float
    gradient_norm: float | None
    step_ns: int
    predicted_step_ns: int | None
    prediction_error: float | None
    makespan_ns: int
    predicted_makespan_ns: int | None
    bubble: float | None
    predicted_bubble: float | None
    imbalance: dict[str, float]
    tokens: dict[str, int]
    tokens_per_second: dict[str, float]
    padding_share: float
    peak_bytes: tuple[tuple[int, ...], ...]
    predicted_peak_bytes: tuple[tuple[int, ...], ...]
    waiting_ns: int
    switching_ns: int
    losses: dict[str, float]
    reported: dict[str, float]
    uncorrected_prediction_error: float | None = None
    corrections: dict[str, float] = {}


def step_metrics(
    plans: Sequence[Plan],
    measurements: Sequence[Measurement],
    *,
    loss: float,
    learning_rate: float,
    gradient_norm: float | None,
    switching_ns: int = 0,
    losses: Mapping[str, float] | None = None,
    reported: Mapping[str, float] | None = None,
    uncorrected_step_ns: int | None = None,
    corrections: Mapping[str, float] | None = None,
) -> StepMetrics:
    """Figures of a step from the plans of all its replicas and what was measured of each, in the same order.

    `uncorrected_step_ns` is the prediction without the `corrections`, if those are on. A step takes as long as its slowest replica. The bubble is taken over the workers of all replicas.
    """
    assert plans, "a step has at least one plan"
    step_ns = max(measured.step_ns for measured in measurements)
    makespans = [makespan_ns(plan, measured.spans) for plan, measured in zip(plans, measurements, strict=True)]
    predictions = [plan.prediction for plan in plans if plan.prediction is not None]
    known = len(predictions) == len(plans)
    predicted_step_ns = max(prediction.step_ns for prediction in predictions) if known else None
    useful_ns = sum(prediction.useful_ns for prediction in predictions)
    workers = [plan.placement.workers for plan in plans]
    tokens = _tokens(plans)
    return StepMetrics(
        step=plans[0].step,
        policy=plans[0].policy,
        loss=loss,
        learning_rate=learning_rate,
        gradient_norm=gradient_norm,
        step_ns=step_ns,
        predicted_step_ns=predicted_step_ns,
        prediction_error=step_ns / predicted_step_ns - 1 if predicted_step_ns else None,
        makespan_ns=max(makespans),
        predicted_makespan_ns=max(prediction.makespan_ns for prediction in predictions) if known else None,
        bubble=_bubble(useful_ns, workers, makespans) if known else None,
        predicted_bubble=_bubble(useful_ns, workers, [p.makespan_ns for p in predictions]) if known else None,
        imbalance=_worst([imbalance(p, measured.spans) for p, measured in zip(plans, measurements, strict=True)]),
        tokens=tokens,
        tokens_per_second={module: count * 1e9 / step_ns for module, count in tokens.items()} if step_ns else {},
        padding_share=padding_share(plans),
        peak_bytes=tuple(measured.peak_bytes for measured in measurements),
        predicted_peak_bytes=tuple(prediction.peak_bytes for prediction in predictions),
        waiting_ns=max((waited for measured in measurements for waited in measured.waiting_ns), default=0),
        switching_ns=switching_ns,
        losses=dict(losses or {}),
        reported=dict(reported or {}),
        uncorrected_prediction_error=step_ns / uncorrected_step_ns - 1 if uncorrected_step_ns else None,
        corrections=dict(corrections or {}),
    )


def makespan_ns(plan: Plan, spans: Sequence[Sequence[Span]]) -> int:
    """From the first action of the step to the end of its last backward (last forward of a forward-only plan)."""
    starts = [lane[0].start_ns for lane in spans if lane]
    ends = [
        span.end_ns
        for lane, actions in zip(spans, plan.actions, strict=True)
        for span, action in zip(lane, actions, strict=True)
        if isinstance(action, Compute) and (plan.forward_only or action.stage.phase != "F")
    ]
    return max(ends) - min(starts) if ends else 0


def imbalance(plan: Plan, spans: Sequence[Sequence[Span]]) -> dict[str, float]:
    """Per module, largest over mean time that a worker computes on it; the mean is over all workers. 1.0 is even.

    Modules without work in this step are absent.
    """
    busy: dict[str, list[int]] = {}
    for worker, (lane, actions) in enumerate(zip(spans, plan.actions, strict=True)):
        for span, action in zip(lane, actions, strict=True):
            if isinstance(action, Compute):
                module = plan.placement.chunks[action.stage.chunk].module
                by_worker = busy.setdefault(module, [0] * plan.placement.workers)
                by_worker[worker] += span.end_ns - span.start_ns
    return {module: max(times) * len(times) / sum(times) for module, times in busy.items() if sum(times)}


def padding_share(plans: Sequence[Plan]) -> float:
    """Share of rows times layers that are not a row of an item passing its layers once.

    Dummy items, items that take a layer twice, and transfers wider than the rows that they carry all count.
    """
    processed = needed = 0
    for plan in plans:
        passes: dict[tuple[str, str], int] = {}
        seen: dict[tuple[str, str], set[int]] = {}
        for chunk, parts in zip(plan.placement.chunks, plan.parts, strict=True):
            key = chunk.task, chunk.module
            passes[key] = max(passes.get(key, 0), chunk.stop)
            for part in parts:
                processed += sum(plan.items[i].sizes["tokens"] for i in part.items) * (chunk.stop - chunk.start)
                seen.setdefault(key, set()).update(part.items)
        for key, items in seen.items():
            needed += sum(plan.items[i].sizes["tokens"] for i in items) * passes[key]
        processed += sum(t.shape[0] - plan.edges[t.edge].num_rows for t in plan.transfers)
    return 1.0 - needed / processed if processed else 0.0


class MetricsWriter:
    """Appends steps to `folder/metrics.jsonl` and, if asked, to TensorBoard events in `folder/tensorboard`.

    Every line is flushed, so that a run can be followed and a crash loses nothing. Raises ValueError
    if TensorBoard is asked for and not installed.
    """

    def __init__(self, folder: Path, *, tensorboard: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "metrics.jsonl"
        self._board = _summary_writer(folder / "tensorboard") if tensorboard else None
        self._file = self.path.open("ab")

    def write(self, metrics: StepMetrics) -> None:
        self._file.write(msgspec.json.encode(metrics) + b"\n")
        self._file.flush()
        if self._board is not None:
            for name, value in scalars(metrics).items():
                self._board.add_scalar(name, value, metrics.step)

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: Path) -> list[StepMetrics]:
    """The steps of a metrics file, in the order written. Raises ValueError with the line that does not parse."""
    steps = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            steps.append(msgspec.json.decode(line, type=StepMetrics))
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    return steps


def scalars(metrics: StepMetrics) -> dict[str, float]:
    """The numbers of a step by flat name: `imbalance/vision`, `peak_bytes/0/1` (replica, worker)."""
    return dict(_flat("", msgspec.structs.asdict(metrics)))


def _flat(prefix: str, value: object) -> list[tuple[str, float]]:
    if isinstance(value, Mapping):
        return [found for key, inner in value.items() for found in _flat(f"{prefix}/{key}" if prefix else key, inner)]
    if isinstance(value, tuple):
        return [found for i, inner in enumerate(value) for found in _flat(f"{prefix}/{i}", inner)]
    return [(prefix, value)] if isinstance(value, int | float) and prefix != "step" else []


def _bubble(useful_ns: int, workers: Sequence[int], makespans: Sequence[int]) -> float | None:
    available = sum(count * makespan for count, makespan in zip(workers, makespans, strict=True))
    return 1.0 - useful_ns / available if available else None


def _worst(replicas: Sequence[Mapping[str, float]]) -> dict[str, float]:
    worst: dict[str, float] = {}
    for by_module in replicas:
        for module, value in by_module.items():
            worst[module] = max(worst.get(module, 0.0), value)
    return worst


def _tokens(plans: Sequence[Plan]) -> dict[str, int]:
    tokens: dict[str, int] = {}
    for plan in plans:
        for item in plan.items:
            tokens[item.module] = tokens.get(item.module, 0) + item.sizes["tokens"]
    return tokens


def _summary_writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError(
            "TensorBoard is asked for but not installed: pip install tensorboard, or turn it off; "
            "metrics.jsonl is written in any case"
        ) from None
    return SummaryWriter(log_dir=str(folder))
