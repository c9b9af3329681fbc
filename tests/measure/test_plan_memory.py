"""What a plan says of memory, action by action, is what a worker holds while it runs the plan: two real workers."""

from __future__ import annotations

import random

import pytest
import torch
from msgspec.structs import replace

from pipeweaver.data.items import linked
from pipeweaver.planner.assign import share_out
from pipeweaver.policies import POLICIES
from pipeweaver.runtime.execution import Execution
from pipeweaver.runtime.transport_local import Hub
from pipeweaver.schedule.compile import compile_plan
from pipeweaver.schedule.ir import Compute
from pipeweaver.schedule.memory import held_bytes
from pipeweaver.schedule.verify import verify
from pipeweaver.semu.costs import SemuCosts
from pipeweaver.semu.machine import load_machine
from pipeweaver.semu.optimizer import plain_optimizer
from tests.live import LiveBytes
from tests.runtime.cases import splitting
from tests.runtime.threads import in_threads, make_worker

NUMBERS = 2_000
"""Losses, counts and what layers report: a few numbers per stage that no plan speaks of."""


@pytest.fixture(scope="module")
def emulated(graph, dataset):
    """Costs from traces alone: bytes do not depend on what was measured."""
    return SemuCosts(
        graph, load_machine("cpu"), dtype="float32", widths=dataset.widths, optimizer=plain_optimizer("float32")
    )


def strategies_of(draft, share, costs, choose):
    sources = linked(share.items, share.links)
    found = []
    for chunk, parts in zip(draft.placement.chunks, draft.parts, strict=True):
        of_chunk = []
        for part in parts:
            items, links = [share.items[i] for i in part.items], [sources[i] for i in part.items]
            of_chunk.append(tuple(choose(known) for known in costs.strategies(chunk, items, links)))
        found.append(tuple(of_chunk))
    return tuple(found)


def run_counted(graph, plan, load, monkeypatch):
    """Per worker, bytes held after each action and the most during it, beside what was there before the first."""
    counted = {}
    perform = Execution.perform

    def counting(self, action):
        live, base, after, peaks = counted[self.address.worker]
        if not after:
            counted[self.address.worker] = live, live.now, after, peaks
            base = live.now
        live.reset_peak()
        perform(self, action)
        after.append(live.now - base)
        peaks.append(live.peak - base)

    monkeypatch.setattr(Execution, "perform", counting)

    def copied(items, records, names):
        # What comes from the data set's own memory is not seen to be made.
        return {name: tensor.clone() for name, tensor in load(items, records, names).items()}

    hub = Hub(1, plan.placement.workers)
    workers = {
        address: make_worker(graph, plan.placement, hub.end(address), dtype=torch.float32, load=copied)
        for address in hub.addresses
    }

    def task(worker):
        with LiveBytes() as live:
            counted[worker.transport.address.worker] = live, 0, [], []
            worker.run(plan)

    in_threads(workers, task)
    return {number: (after, peaks) for number, (_, _, after, peaks) in counted.items()}


def compare(graph, plan, load, monkeypatch):
    """(planned, held, planned at most, held at most) of every action up to the last stage."""
    for worker, (after, peaks) in run_counted(graph, plan, load, monkeypatch).items():
        planned_after, planned_during = held_bytes(plan, worker)
        static = plan.static_bytes[worker]
        last = max(i for i, action in enumerate(plan.actions[worker]) if isinstance(action, Compute))
        for i, action in enumerate(plan.actions[worker][: last + 1]):
            # A backward has let go of what was saved before the plan frees it.
            done = isinstance(action, Compute) and action.stage.phase != "F"
            yield planned_after[i] - static, None if done else after[i], planned_during[i] - static, peaks[i]


@pytest.mark.parametrize("policy", ["interleaved-1f1b", "gpipe"])
def test_kept_tensors_take_what_is_planned(graph, batches, load, emulated, policy, monkeypatch):
    (share,) = share_out(graph, batches[0], 1)
    placement = POLICIES[policy].place(graph, 2, emulated, [share])
    draft = POLICIES[policy].plan(graph, placement, share, emulated, budget_bytes=None, seed=0, rounds=1)
    plan = compile_plan(graph, share, draft, emulated)
    verify([plan], graph, [share])
    for planned, held, planned_peak, peak in compare(graph, plan, load, monkeypatch):
        assert held is None or abs(planned - held) <= 0.02 * planned + NUMBERS
        assert peak <= 1.02 * planned_peak + NUMBERS


@pytest.mark.parametrize("seed", range(3))
def test_no_more_is_held_than_planned_under_any_strategies(graph, batches, load, emulated, seed, monkeypatch):
    draw = random.Random(seed)
    (share,) = share_out(graph, batches[seed % 2], 1)
    policy = POLICIES[draw.choice(["interleaved-1f1b", "gpipe"])]
    placement = policy.place(graph, 2, emulated, [share])
    draft = splitting(policy.plan(graph, placement, share, emulated, budget_bytes=None, seed=0, rounds=1), draw)
    draft = replace(draft, strategies=strategies_of(draft, share, emulated, lambda known: draw.choice(list(known))))
    plan = compile_plan(graph, share, draft, emulated)
    verify([plan], graph, [share])
    most = {"planned": 0, "held": 0}
    for planned, held, planned_peak, peak in compare(graph, plan, load, monkeypatch):
        assert held is None or held <= 1.02 * planned + NUMBERS
        assert peak <= 1.02 * planned_peak + NUMBERS
        most = {"planned": max(most["planned"], planned_peak), "held": max(most["held"], peak)}
    # Nor is the plan afraid of nothing.
    assert most["planned"] <= 1.5 * most["held"] + NUMBERS
