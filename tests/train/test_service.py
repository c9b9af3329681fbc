"""The planner service: plans before they are needed, and a run that goes on whatever becomes of the processes."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from pipeweaver.config import load
from pipeweaver.runtime import planner_process
from pipeweaver.runtime import service as service_module
from pipeweaver.runtime.ahead import plan_batch
from pipeweaver.runtime.planner_messages import Begin, JobSetup, Planned, Taken, Wanted, encode
from pipeweaver.runtime.planner_process import Search, job_planning
from pipeweaver.runtime.prepare import fingerprint
from pipeweaver.runtime.reuse import Reuse
from pipeweaver.runtime.service import Service
from pipeweaver.schedule.convert import flatten, records
from pipeweaver.schedule.wire import pack
from tests.train import service_cases
from tests.train.processes import alive, environment, wait_for
from tests.train.service_cases import batch, planning

pytestmark = pytest.mark.timeout(120)


class Nothing(msgspec.Struct):
    """What the planner process of these tests needs to be told."""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Start a service whose processes are broken by `code`; what it says is in its `said`."""
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    started = []

    def begin(code="", *, replicas=1, **settings):
        (tmp_path / "replicas").write_text(str(replicas))
        (tmp_path / "break.py").write_text(code)
        said = []
        service = Service(
            planning(replicas=replicas),
            Nothing(),
            say=said.append,
            **{"command": (sys.executable, service_cases.__file__, str(tmp_path)), **settings},
        )
        service.said = said
        started.append(service)
        return service

    yield begin
    for service in started:
        pids = [planner.pid for planner in service._pool.planners]
        service.close()
        assert not any(map(alive, pids))
        assert not any(thread.name == "planner pool" for thread in threading.enumerate())


def taken(service, steps):
    """Plans of some steps, each told of two steps ahead."""
    wanted, found = list(steps), []
    for i, step in enumerate(wanted):
        for ahead in wanted[i : i + 3] if i == 0 else wanted[i + 2 : i + 3]:
            service.want(ahead, batch(ahead, tokens=8 + ahead))
        found.append(service.take(step))
    return found


def as_records(plans):
    return tuple(map(records, plans))


def assert_right(found, steps, **settings):
    """The plans are of these steps' samples, each sample once. They were proven by the service."""
    for step, plans in zip(steps, found, strict=True):
        wanted = {(sample.task, sample.draw) for sample in batch(step).samples}
        names = [tuple(name.split("/")) for plan in plans for name in plan.head.records]
        assert sorted((task, int(draw)) for task, draw in names) == sorted(wanted)
        assert all(plan.head.step == step for plan in plans)


@pytest.mark.parametrize(("processes", "replicas"), [(1, 1), (2, 3)])
def test_with_fixed_rounds_the_plans_are_those_made_in_place(start, processes, replicas):
    service = start(replicas=replicas, processes=processes, rounds=5)
    found = taken(service, range(4))
    here = planning(replicas=replicas, rounds=5)
    made = [plan_batch(here, batch(step, tokens=8 + step)) for step in range(4)]
    assert list(map(as_records, found)) == list(map(as_records, made))


def test_a_search_that_has_come_to_its_end_stops_before_its_time_is_up():
    search = Search(
        planning(),
        Begin(setup=msgspec.Raw(b""), seconds=1e9),
        Wanted(number=0, batch=batch(0, images=(3, 0, 2, 5)), first=0, stop=1),
    )
    answers = []
    while not answers or not answers[-1].finished:
        answer = search.step()
        if answer is not None:
            assert isinstance(answer, Planned)
            answers.append(answer)
    assert len(answers) >= planner_process.STALE


def test_more_rounds_are_made_as_long_as_nobody_needs_the_plan_and_each_can_be_made_again(start):
    service = start(seconds=0.5)
    service.want(0, batch(0))
    assert service.take(0)  # whatever is there
    for step in (1, 2):
        service.want(step, batch(step, tokens=8 + step))
    for step in (1, 2):
        service.wait(step, for_last=True)
        assert all(piece.finished for piece in service._works[step].pieces)
    for step in (1, 2):
        (plan,) = as_records(service.take(step))
        assert (plan,) == as_records(plan_batch(planning(rounds=plan.rounds), batch(step, tokens=8 + step)))


def test_equal_batches_are_not_planned_again(start):
    service = start(rounds=3)
    service.want(0, batch(0))
    first = as_records(service.take(0))
    for step in range(1, 4):
        service.want(step, batch(step))
        assert not service._works[step].pieces
        (plan,) = as_records(service.take(step))
        assert (plan,) == as_records(plan_batch(planning(rounds=3), batch(step)))
        assert plan.order == first[0].order
    service.want(4, batch(4, tokens=9))  # one token more
    assert service._works[4].pieces
    service.take(4)


def test_a_process_killed_in_the_middle_is_told_once_and_started_again(start, monkeypatch):
    monkeypatch.setattr(service_module, "LATE_S", 30.0)  # a busy machine does not make it late
    service = start()
    assert_right(taken(service, range(3)), range(3))
    (planner,) = service._pool.planners
    killed = planner.pid
    service.want(3, batch(3, tokens=20))
    os.kill(killed, signal.SIGKILL)
    found = [service.take(3)]
    service.want(4, batch(4, tokens=21))
    found.append(service.take(4))  # in place, or by the new process, if that was quick
    assert_right(found, [3, 4])
    wait_for(lambda: service.said)
    (words,) = service.said
    assert words.startswith(f"warning: planner process {killed} was ended by SIGKILL; it is started again")
    service.want(5, batch(5, tokens=22))
    wait_for(lambda: planner.pid != killed and planner.is_settled)
    service.take(5)
    assert len(service.said) == 1


LATE = """
import time
step = planner_process.Search.step
def late(self):
    if self._wanted.number >= 1:
        time.sleep(SECONDS)
    return step(self)
planner_process.Search.step = late
"""


def test_a_late_process_is_not_waited_for(start, monkeypatch):
    monkeypatch.setattr(service_module, "LATE_S", 0.2)
    service = start(LATE.replace("SECONDS", "4"))
    service.want(0, batch(0))
    service.take(0)
    begun = time.monotonic()
    for step in range(1, 6):
        service.want(step, batch(step, tokens=8 + step))
        assert_right([service.take(step)], [step])
    assert time.monotonic() - begun < 3
    (words,) = service.said
    assert words.startswith("warning: the planner had no plan when it was needed, nor 0.2 s later")


def test_a_run_begins_when_the_first_batches_have_plans(start, monkeypatch):
    monkeypatch.setattr(service_module, "LATE_S", 0.0)
    service = start(LATE.replace("SECONDS", "0.5"))
    for step in range(3):
        service.want(step, batch(step, tokens=8 + step))
    pieces = [piece for work in service._works.values() for piece in work.pieces]
    found = [service.take(0)]
    assert all(piece.best for piece in pieces)
    found += [service.take(step) for step in (1, 2)]
    assert_right(found, range(3))
    assert service.said == []


def test_a_process_makes_way_for_workers_once_all_batches_have_plans(start):
    service = start(seconds=0.0)
    service.want(0, batch(0))
    service.take(0)
    (planner,) = service._pool.planners
    wait_for(lambda: os.getpriority(os.PRIO_PROCESS, planner.pid) == 19)
    if hasattr(os, "SCHED_BATCH"):
        wait_for(lambda: os.sched_getscheduler(planner.pid) == os.SCHED_BATCH)


def test_a_search_can_be_left_after_a_few_rounds():
    begin = Begin(setup=msgspec.Raw(b""), seconds=60.0)
    search = Search(planning(), begin, Wanted(number=0, batch=batch(0), first=0, stop=1))
    # The first plan, then 16 rounds, 16 more, 32 more, 64 more: 16 at a time.
    has_answer = [search.step() is not None for _ in range(9)]
    assert has_answer == [True, True, True, False, True, False, False, False, True]


def test_a_search_for_many_replicas_ends_when_its_time_is_up(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(planner_process.time, "process_time", lambda: clock[0])
    begin = Begin(setup=msgspec.Raw(b""), seconds=20.0)
    large = batch(0, images=(3, 0, 2, 5) * 4)
    search = Search(planning(replicas=4), begin, Wanted(number=0, batch=large, first=0, stop=4))
    assert not search.step().finished
    before = [one.rounds for one in search._searches]
    for one in search._searches:

        def run(rounds, run=one.run):
            clock[0] += rounds
            run(rounds)

        one.run = run
    # Four rounds of each at a time, as long as 16 of one: 16 s, and then there is not enough time for 16 of each.
    assert search.step() is None
    answer = search.step()
    assert answer.finished and clock[0] == 24.0
    assert [one.rounds - first for one, first in zip(search._searches, before, strict=True)] == [8, 8, 4, 4]


def test_a_frozen_process_is_ended_and_started_again(start, monkeypatch):
    monkeypatch.setattr(service_module, "LATE_S", 0.1)
    monkeypatch.setattr(service_module, "FROZEN_S", 0.5)
    service = start()
    service.want(0, batch(0))
    service.take(0)
    (planner,) = service._pool.planners
    frozen = planner.pid
    os.kill(frozen, signal.SIGSTOP)
    step = 1
    while planner.pid == frozen:
        service.want(step, batch(step, tokens=8 + step))
        assert_right([service.take(step)], [step])
        time.sleep(0.05)
        step += 1
    assert not alive(frozen)
    assert "has said nothing for" in service.said[1]


def test_a_process_frozen_from_the_start_is_ended_once_however_many_batches_wait_for_it(start, monkeypatch):
    monkeypatch.setattr(service_module, "START_S", 0.3)
    monkeypatch.setattr(service_module, "FROZEN_S", 0.2)
    service = start(command=(sys.executable, "-c", "import time; time.sleep(1000)"))
    for step in range(4):
        service.want(step, batch(step, tokens=8 + step))
    assert_right([service.take(0)], [0])
    wait_for(lambda: len(service.said) == 2)
    (planner,) = service._pool.planners
    wait_for(lambda: planner.lives == 2)
    assert planner.failures == 1 and "has said nothing for" in service.said[1]
    assert_right([service.take(step) for step in range(1, 4)], range(1, 4))
    assert planner.failures == 1 and len(service.said) == 2


def test_processes_that_cannot_be_started_are_told_and_done_without(start):
    service = start(command=("/nowhere/python",), processes=2, replicas=2)
    assert_right(taken(service, range(3)), range(3))
    assert service.said == [
        "warning: planner process cannot be started (No such file or directory); it is left out from here on",
        "warning: planner process cannot be started (No such file or directory); it is left out from here on: "
        "the first worker makes all plans, without search",
    ]


def garbage(plans, other):
    """What a broken process may say of `plans`, by what is wrong with it: the bytes that it sends."""

    def sent(content):
        return encode(Planned(number=1, finished=True, plans=content))

    def planned(made):
        return sent(pack(list(map(flatten, made))))

    (plan,) = plans
    forward_only = as_records(plan_batch(planning(), batch(1), forward_only=True))
    part = plan.parts[0][0]
    beyond = ((replace(part, items=(10**6,)), *plan.parts[0][1:]), *plan.parts[1:])
    return {
        "no message": b"\x08\0\0\0garbage!",
        "no length": b"\xff" * 100,
        "a message of the other side": encode(Taken(number=1)),
        "nothing": sent(b""),
        "no plan": sent(msgspec.msgpack.encode([{}])),
        "a plan as records": sent(msgspec.msgpack.encode([plan])),
        "half a plan": sent(pack([flatten(plan)])[:2000]),
        "no plans": planned([]),
        "plans of another batch": planned([replace(other[0], step=plan.step)]),
        "a sample is missing": planned([replace(plan, records=dict(list(plan.records.items())[1:]))]),
        "an action is missing": planned([replace(plan, actions=(plan.actions[0][1:], *plan.actions[1:]))]),
        "orders of other workers": planned([replace(plan, order=plan.order[::-1])]),
        "nothing predicted": planned([replace(plan, prediction=None)]),
        "less memory": planned([replace(plan, static_bytes=tuple(one // 2 for one in plan.static_bytes))]),
        "the forward alone": planned(forward_only),
        "nested without end": b"\xd3\x30\0\0\x82\xa4type\xa5Ready\xa1x" + b"\x91" * 12_484 + b"\xc0",
        "links in another order": planned([replace(plan, links=plan.links[::-1])]),
        "items that do not exist": planned([replace(plan, parts=beyond)]),
        "another placement": planned([replace(plan, placement=replace(plan.placement, workers=3))]),
    }


SEND_ANSWER = """
import socket, sys
end = socket.socket(fileno=int(sys.argv[2]))
asked = b""
while more := end.recv(100_000):
    asked += more
    if b"Wanted" in asked:  # each time: an answer to what was taken meanwhile is not looked at
        asked = b""
        end.sendall(open(sys.argv[1], "rb").read())
"""


def test_garbage_beside_a_known_plan_changes_nothing(start, tmp_path):
    """A plan of an equal batch is known, and the process that should find a better one is broken."""
    right = as_records(plan_batch(planning(), batch(1)))
    (tmp_path / "answer").write_bytes(garbage(right, right)["nothing predicted"])
    (tmp_path / "send.py").write_text(SEND_ANSWER)
    service = start(command=(sys.executable, str(tmp_path / "send.py"), str(tmp_path / "answer")))
    service._reuse.keep(
        service._reuse.key(batch(0), False, {}), batch(0), plan_batch(planning(), batch(0)), is_final=False
    )
    service.want(1, batch(1))
    (piece,) = service._works[1].pieces
    wait_for(lambda: piece.best)
    assert_right([service.take(1)], [1])
    wait_for(lambda: service.said)


@pytest.mark.parametrize(
    "what",
    garbage(
        as_records(plan_batch(planning(), batch(1))), as_records(plan_batch(planning(), batch(5, tokens=9)))
    ).keys(),
)
def test_what_is_no_plan_for_the_batch_is_never_trained_on(start, tmp_path, what):
    right = as_records(plan_batch(planning(), batch(1)))
    (tmp_path / "answer").write_bytes(garbage(right, as_records(plan_batch(planning(), batch(5, tokens=9))))[what])
    (tmp_path / "send.py").write_text(SEND_ANSWER)
    service = start(command=(sys.executable, str(tmp_path / "send.py"), str(tmp_path / "answer")))
    for failures in range(4):
        service.want(1, batch(1))
        (piece,) = service._works[1].pieces
        wait_for(lambda: piece.best or len(service.said) >= min(failures + 1, 3))  # noqa: B023
        assert as_records(service.take(1)) == right
        wait_for(lambda: len(service.said) >= min(failures + 1, 3))  # noqa: B023
        service._reuse = Reuse()
    assert all("sent what is no" in words for words in service.said)
    assert service.said[2].endswith("left out from here on: the first worker makes all plans, without search")


def test_a_planner_process_finds_modules_beside_the_job(tmp_path, monkeypatch):
    examples = Path(__file__).parents[2] / "examples"
    (tmp_path / "beside_the_job.py").write_text((examples / "own_module.py").read_text())
    path = tmp_path / "job.toml"
    path.write_text((examples / "own_module.toml").read_text().replace("own_module:", "beside_the_job:"))
    setup = JobSetup(
        path=str(path),
        overrides=(),
        fingerprint=fingerprint(load(path)),
        policy="dynamic",
        placement=planning().placement,
        budget_bytes=None,
        costs=b"",
    )
    monkeypatch.setattr(sys, "path", list(sys.path))  # what is added does not stay
    monkeypatch.setattr(planner_process, "unpack_costs", lambda packed, graph: planning().costs)
    found = job_planning(Begin(setup=msgspec.Raw(msgspec.msgpack.encode(setup))))
    assert "convolution" in found.graph.by_name["vision"].layers[0].kind


def test_a_job_that_has_changed_since_the_run_began_is_not_planned_for(tmp_path):
    example = Path(__file__).parents[2] / "examples" / "digits.toml"
    setup = JobSetup(
        path=str(example),
        overrides=("run.seed=3",),
        fingerprint="of another",
        policy="dynamic",
        placement=planning().placement,
        budget_bytes=None,
        costs=b"",
    )
    with pytest.raises(ValueError, match=r"digits.toml has changed since the run began"):
        job_planning(Begin(setup=msgspec.Raw(msgspec.msgpack.encode(setup))))
