"""Reports of workers with clocks of their own become one measurement."""

import msgspec
import pytest
import torch.distributed as dist

from pipeweaver.runtime.ahead import Order
from pipeweaver.runtime.collect import Collector, WorkerReport, measurement
from pipeweaver.runtime.exchange import Exchange
from pipeweaver.schedule.convert import flatten
from pipeweaver.schedule.ir import Placement, Span, Transfer
from tests.train.plans import empty_plan


def report(turned_ns, **changes):
    values = dict(
        turned_ns=turned_ns, waiting_ns=5, end_ns=turned_ns + 100, start_ns=turned_ns + 10, spans=(), posted_ns={},
        finished_ns={}, losses={"main/language": 2.0}, gradient_norm=1.0, metrics={}, peak_bytes=None,
    )  # fmt: skip
    return WorkerReport(**(values | changes))


def test_clocks_are_aligned():
    transfer = Transfer(
        edge=0, phase="F", sender=0, receiver=1, shape=(1, 1), dtype="float32", num_bytes=4, duration_ns=1
    )
    plan = msgspec.structs.replace(
        empty_plan(0),
        placement=Placement(workers=2, chunks=()),
        transfers=(transfer,),
        actions=((), ()),
    )
    # The second worker's clock is 1000 ns ahead; it turns to the step 4 ns after the first.
    reports = [
        report(500, spans=(Span(0, 7),), posted_ns={0: 7}, finished_ns={0: 9}),
        report(1504, spans=(Span(1, 8),), posted_ns={0: 2}, finished_ns={0: 30}, end_ns=1504 + 120),
    ]
    measured = measurement(flatten(plan), reports, (0, 1000))
    assert measured.spans == ((Span(10, 17),), (Span(15, 22),))
    assert measured.transfers == (Span(17, 44),)  # the sender posted last, at 510 + 7 of the first clock
    assert measured.step_ns == 624 - 504
    assert measured.waiting_ns == (5, 5) and measured.peak_bytes == ()


def test_a_transfer_never_ends_before_it_starts():
    plan = msgspec.structs.replace(
        empty_plan(0),
        placement=Placement(workers=2, chunks=()),
        transfers=(Transfer(edge=0, phase="B", sender=1, receiver=0, shape=(1, 1), dtype="float32", num_bytes=4),),
        actions=((), ()),
    )
    reports = [report(0, posted_ns={0: 0}, finished_ns={0: 3}), report(0, posted_ns={0: 5}, finished_ns={0: 6})]
    assert measurement(flatten(plan), reports, (0, 0)).transfers == (Span(13, 13),)


def test_metrics_are_summed_over_workers_and_replicas():
    exchange, taken = Exchange(dist.HashStore(), patience_s=5), []
    collector = Collector(exchange, taken.append, ahead_ns=(0, 0), num_workers=1)
    collector.expect(4, Order(plans=(flatten(empty_plan(4, 0, 2)), flatten(empty_plan(4, 1, 2))), step=4))
    exchange.send_report(4, 1, 0, report(0, metrics={"right": (3.0, 4)}))
    exchange.send_report(4, 0, 0, report(0, metrics={"right": (1.0, 2), "read": (1.0, 1)}))
    collector.close()
    (collected,) = taken
    assert collected.number == 4 and collected.losses == {"main/language": 2.0}
    assert collected.metrics == {"right": (4.0, 6), "read": (1.0, 1)}


def test_an_error_in_the_thread_is_raised_to_the_caller():
    def fail(collected):
        raise OSError("disk full")

    exchange = Exchange(dist.HashStore(), patience_s=5)
    collector = Collector(exchange, fail, ahead_ns=(0,), num_workers=1)
    collector.expect(0, Order(plans=(flatten(empty_plan(0)),), step=0))
    exchange.send_report(0, 0, 0, report(0))
    with pytest.raises(OSError, match="disk full"):
        collector.close()
