"""Calibration by several workers at once: measured once, kept, made anew when anything it holds for changes."""

import threading
from functools import partial

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace

from pipeweaver import calibrate
from pipeweaver.calibrate import cached_costs, calibrated_costs, conditions, fingerprint
from pipeweaver.cluster import Workers
from pipeweaver.data.dataset import load_part
from pipeweaver.data.digits import DigitsDataset
from pipeweaver.data.loader import Loader
from pipeweaver.measure.links import measure_links, tournament
from pipeweaver.runtime.exchange import Exchange
from pipeweaver.runtime.transport import Address
from pipeweaver.runtime.transport_local import Hub
from pipeweaver.semu.machine_file import machine_toml
from tests.measure.cases import make_graph

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def dataset():
    return DigitsDataset(max_tokens=64, max_images=3)


@pytest.fixture(scope="module")
def batches(dataset):
    loader = Loader(dataset, backbone="language", tokens_per_microbatch=64, microbatches=4, seed=0)
    return [next(loader)]


@pytest.fixture(scope="module")
def graph():
    return make_graph(layers=1)


def on_all(workers, function):
    """Run `function(transport)` in a thread per worker; results by address. The first error is raised."""
    hub = Hub(num_replicas=workers.replicas, num_workers=workers.pipeline)
    results, failures = {}, []

    def run(address):
        try:
            results[address] = function(hub.end(address))
        except BaseException as error:
            failures.append(error)
            hub.fail(f"{address}: {error}")

    threads = [threading.Thread(target=run, args=(address,)) for address in hub.addresses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    if failures:
        raise failures[0]
    return results


def calibrate_all(graph, batches, dataset, cache, workers=None, **options):
    workers = workers or Workers(pipeline=2)
    store, said = dist.HashStore(), []
    found = on_all(
        workers,
        lambda transport: calibrated_costs(
            graph,
            batches,
            partial(load_part, {"main": dataset}),
            widths=dataset.widths,
            transport=transport,
            exchange=Exchange(store, patience_s=60),
            conditions=conditions(workers, CPU, "float32"),
            device=CPU,
            cache=str(cache),
            say=said.append,
            **options,
        ),
    )
    return found, said


@pytest.fixture
def measured(monkeypatch):
    """Counts the measurements that are made, and makes them short."""
    counted = []
    real = calibrate.measure_layers

    def counting(*args, **options):
        counted.append(threading.current_thread().name)
        return real(*args, seconds_per_variant=0.001, **options)

    monkeypatch.setattr(calibrate, "measure_layers", counting)
    return counted


def test_all_workers_measure_once_and_the_first_one_keeps_the_machine_file(graph, batches, dataset, tmp_path, measured):
    found, said = calibrate_all(graph, batches, dataset, tmp_path)
    assert len(measured) == 2
    costs = found[Address(0, 0)]
    assert found[Address(0, 1)] is None
    assert "2 workers busy" in costs.source
    assert costs.transfer_ns(0, 1, 1 << 16) > 0 and costs.transfer_ns(1, 0, 1 << 16) > 0
    assert costs.reduce_ns(2, 1 << 16) > 0
    assert said[0].startswith("calibrating: 2 workers")
    assert "kinds of operators" in said[1]

    again, said = calibrate_all(graph, batches, dataset, tmp_path)
    assert len(measured) == 2 and said == []
    assert machine_toml(again[Address(0, 0)].machine) == machine_toml(costs.machine)
    cached = cached_costs(
        graph, batches, conditions(Workers(pipeline=2), CPU, "float32"), str(tmp_path), widths=dataset.widths
    )
    assert machine_toml(cached.machine) == machine_toml(costs.machine)

    calibrate_all(graph, batches, dataset, tmp_path, anew=True)
    assert len(measured) == 4


def test_replicas_calibrate_together(graph, batches, dataset, tmp_path, measured):
    workers = Workers(pipeline=1, replicas=2)
    found, _ = calibrate_all(graph, batches, dataset, tmp_path, workers)
    costs = found[Address(0, 0)]
    assert len(measured) == 2
    assert costs.reduce_ns(2, 1 << 20) > 0


def test_one_worker_alone_needs_no_links(graph, batches, dataset, tmp_path, measured):
    found, _ = calibrate_all(graph, batches, dataset, tmp_path, Workers(pipeline=1))
    costs = found[Address(0, 0)]
    assert costs.reduce_ns(1, 1 << 20) == 0
    assert costs.transfer_ns(0, 0, 1 << 20) == 0
    assert "1 worker busy" in costs.source


def test_a_machine_file_holds_for_its_conditions_only(graph, batches, tmp_path):
    here = conditions(Workers(pipeline=2), CPU, "float32")
    names = {
        fingerprint(graph, batches, changed)
        for changed in (
            here,
            replace(here, dtype="float64"),
            replace(here, pipeline=4),
            replace(here, threads=2),
            replace(here, device="another"),
            replace(here, torch="1.0"),
        )
    }
    assert len(names) == 6
    assert fingerprint(make_graph(layers=1, trainable=False), batches, here) not in names
    assert fingerprint(make_graph(layers=1, hidden=64), batches, here) not in names
    # With two layers and with three there are the same kinds of layers.
    assert fingerprint(make_graph(layers=3), batches, here) == fingerprint(make_graph(layers=2), batches, here)
    assert cached_costs(graph, batches, here, str(tmp_path), widths={}) is None


def test_much_larger_data_is_measured_anew(graph, batches):
    here = conditions(Workers(pipeline=2), CPU, "float32")
    large = Loader(DigitsDataset(), backbone="language", tokens_per_microbatch=512, microbatches=2, seed=0)
    assert fingerprint(graph, [next(large)], here) != fingerprint(graph, batches, here)


def test_a_busy_machine_is_told(graph, batches, dataset, tmp_path, measured, monkeypatch):
    monkeypatch.setattr(calibrate, "BUSY", 2.0)
    _, said = calibrate_all(graph, batches, dataset, tmp_path, Workers(pipeline=1))
    assert "of its cores" in said[2]
    monkeypatch.setattr(calibrate, "BUSY", 0.0)
    _, said = calibrate_all(graph, batches, dataset, tmp_path, Workers(pipeline=1), anew=True)
    assert len(said) == 2


@pytest.mark.parametrize("count", range(1, 10))
def test_every_two_workers_meet_once_and_nobody_plays_twice_in_a_round(count):
    met = []
    for pairs in tournament(count):
        players = [worker for pair in pairs for worker in pair]
        assert len(players) == len(set(players))
        met += pairs
    assert sorted(met) == [(a, b) for a in range(count) for b in range(a + 1, count)]


@pytest.mark.parametrize("queue", ["pair", "worker"])
def test_links_are_measured_on_any_transport(queue):
    hub = Hub(num_replicas=2, num_workers=3, queue=queue)
    results = {}

    def run(address):
        results[address] = measure_links(hub.end(address), num_workers=3, num_replicas=2, device=CPU)

    threads = [threading.Thread(target=run, args=(address,)) for address in hub.addresses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert hub.failure is None
    transfers, reductions = results[Address(1, 2)]
    assert {sample.ends for sample in transfers} == {(0, 2), (2, 0), (1, 2), (2, 1)}
    assert {sample.ends for sample in reductions} == {(6,)}
    assert {sample.ends for sample in results[Address(0, 0)][1]} == {(2,), (4,), (6,)}
    assert all(sample.duration_ns > 0 for sample in transfers + reductions)
