"""What the workers report of an order, put together on the first rank while the next order runs.

Every worker sends its marks in its own clock; here they become one measurement per replica, from the start of
the step (the earliest that a worker turned to it), and what layers report is summed.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import msgspec

from pipeweaver.runtime.ahead import Order
from pipeweaver.runtime.exchange import Exchange
from pipeweaver.runtime.process import use_cores
from pipeweaver.schedule.flat import FlatPlan
from pipeweaver.schedule.ir import Measurement, Span


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker saw of one order. Times are nanoseconds of its own clock.

    `turned_ns` is when it turned to this order, `waiting_ns` how long the plan then let it wait, `end_ns` when it
    was through, `switching_ns` how long parameters moved for a new task set, before `turned_ns`. The rest is its `StepResult`; times in there count from `start_ns`.
    """

    turned_ns: int
    waiting_ns: int
    switching_ns: int = 0
    end_ns: int
    start_ns: int
    spans: tuple[Span, ...]
    posted_ns: dict[int, int]
    finished_ns: dict[int, int]
    losses: dict[str, float]
    gradient_norm: float | None
    metrics: dict[str, tuple[float, int]]
    peak_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Collected:
    """An order with all that was reported of it: a measurement per replica, and sums over all; the longest switch."""

    number: int
    order: Order
    measurements: tuple[Measurement, ...]
    losses: dict[str, float]
    gradient_norm: float | None
    metrics: dict[str, tuple[float, int]]
    switching_ns: int = 0


class Collector:
    """A thread that waits for the reports of one order after the other and hands the sum to `take`.

    `cores` are what it may run on, where that is not what the process may. What `take` or the collection raises
    comes out of the next `expect`, or of `close`.
    """

    def __init__(
        self,
        exchange: Exchange,
        take: Callable[[Collected], None],
        ahead_ns: Sequence[int],
        num_workers: int,
        cores: Collection[int] = (),
    ) -> None:
        self._exchange = exchange.clone()
        self._take = take
        self._ahead_ns = ahead_ns
        self._num_workers = num_workers
        self._cores = cores
        self._expected: queue.SimpleQueue[tuple[int, Order] | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="collector", daemon=True)
        self._thread.start()

    def expect(self, number: int, order: Order) -> None:
        """The workers run this order now."""
        self._raise()
        self._expected.put((number, order))

    def close(self) -> None:
        """Wait until everything expected has been taken."""
        self._expected.put(None)
        self._thread.join()
        self._raise()

    def _run(self) -> None:
        use_cores(self._cores)
        try:
            while (expected := self._expected.get()) is not None:
                number, order = expected
                reports = [
                    [
                        self._exchange.take_report(number, plan.head.replica, worker, WorkerReport)
                        for worker in range(self._num_workers)
                    ]
                    for plan in order.plans
                ]
                self._take(put_together(number, order, reports, self._ahead_ns))
        except Exception as error:
            self._error = error

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


def put_together(
    number: int, order: Order, reports: Sequence[Sequence[WorkerReport]], ahead_ns: Sequence[int]
) -> Collected:
    """`reports[r][w]` of worker w of replica r; `ahead_ns` of the clocks of all workers, replica by replica."""
    num_workers = len(reports[0])
    metrics: dict[str, tuple[float, int]] = {}
    # Replica by replica and worker by worker, so that equal steps report equal bits.
    for report in (report for replica in reports for report in replica):
        for name, (total, count) in report.metrics.items():
            before_total, before_count = metrics.get(name, (0.0, 0))
            metrics[name] = (before_total + total, before_count + count)
    return Collected(
        number=number,
        order=order,
        measurements=tuple(
            measurement(plan, replica, ahead_ns[r * num_workers : (r + 1) * num_workers])
            for r, (plan, replica) in enumerate(zip(order.plans, reports, strict=True))
        ),
        losses=reports[0][0].losses,
        gradient_norm=reports[0][0].gradient_norm,
        metrics=metrics,
        switching_ns=max(report.switching_ns for replica in reports for report in replica),
    )


def measurement(plan: FlatPlan, reports: Sequence[WorkerReport], ahead_ns: Sequence[int]) -> Measurement:
    """One replica's measurement: clocks aligned, time zero where the first worker turned to the step.

    A step takes from one order's end to the next one's, by the worker that is last. A transfer lasts from the
    later of its two posts to the end of the receiver's wait.
    """
    turned = [report.turned_ns - ahead for report, ahead in zip(reports, ahead_ns, strict=True)]
    ends = [report.end_ns - ahead for report, ahead in zip(reports, ahead_ns, strict=True)]
    zero = min(turned)
    shifts = [report.start_ns - ahead - zero for report, ahead in zip(reports, ahead_ns, strict=True)]
    transfers = []
    ends_of = zip(plan.transfers.sender.tolist(), plan.transfers.receiver.tolist(), strict=True)
    for number, (sender, receiver) in enumerate(ends_of):
        posted = max(reports[end].posted_ns[number] + shifts[end] for end in (sender, receiver))
        finished = reports[receiver].finished_ns[number] + shifts[receiver]
        # Clocks of two hosts agree within microseconds only, and time does not run backwards.
        transfers.append(Span(min(posted, finished), finished))
    peaks = [report.peak_bytes for report in reports]
    return Measurement(
        spans=tuple(
            tuple(Span(span.start_ns + shift, span.end_ns + shift) for span in report.spans)
            for report, shift in zip(reports, shifts, strict=True)
        ),
        transfers=tuple(transfers),
        step_ns=max(ends) - max(turned),
        peak_bytes=tuple(peak for peak in peaks if peak is not None),
        waiting_ns=tuple(report.waiting_ns for report in reports),
    )
