"""A planner process: makes plans for the batches that it is told of, the first at once, then better ones.

    python -m pipeweaver.runtime.planner_process FD        started by `planner_pool.py`, never by a user

It has a list of batches that plans are wanted for. Those without a plan come first; then the search goes on with the
one that is needed first, until its rounds are made, its time is up, or nothing more is gained. A plan of n rounds is
what the policy's `plan` gives for n rounds, however they were counted out here, so what ran can be made again. Nothing
is proven here: the first worker proves what it takes (`service.py`), so that a planner process cannot do harm.

It runs at low priority (as soon as training does), ends with the process that started it, and ignores Ctrl-C, which that one deals with.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from pipeweaver.runtime.process import tie_to_parent

LEAST_ROUNDS = 16
"""Rounds between the first plan and the second; every plan after it has about twice as many as the one before. After so
many rounds, those of all replicas counted, a batch that has no plan yet takes precedence."""
CLOSE = 1.005
"""A makespan of so many times the lower bound is not searched any further: costs are not known to half a per cent."""
LEAST_GAIN, STALE = 0.001, 2
"""Nor is one that so many doublings of the rounds in a row have not made shorter by that much: a search that has come to
its end takes time from nobody."""
NICE = 19
"""Lowest priority: workers come first, wherever they want to run."""

tie_to_parent()  # before what takes seconds to import

import msgspec  # noqa: E402

from pipeweaver import config  # noqa: E402
from pipeweaver.calibrate import unpack_costs  # noqa: E402
from pipeweaver.own_code import look_beside  # noqa: E402
from pipeweaver.policies import POLICIES  # noqa: E402
from pipeweaver.policies.policy import StepSearch  # noqa: E402
from pipeweaver.runtime import prepare  # noqa: E402
from pipeweaver.runtime.ahead import Planning, corrected, plan_shares, predicted_ns, shares_for  # noqa: E402
from pipeweaver.runtime.planner_messages import (  # noqa: E402
    Begin,
    Inbox,
    JobSetup,
    Planned,
    Ready,
    Refused,
    Taken,
    ToPlanner,
    Wanted,
    encode,
)
from pipeweaver.schedule.flat import FlatPlan  # noqa: E402
from pipeweaver.schedule.wire import pack  # noqa: E402


def main(planning_of: Callable[[Begin], Planning] | None = None) -> None:
    """Serve the socket that the command line names until its other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as end:
        try:
            serve(end, planning_of or job_planning)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            pass  # whoever wanted plans wants no more
        except ValueError as error:
            print(f"error: planner process: {error}", file=sys.stderr)
            sys.exit(2)


def job_planning(begin: Begin) -> Planning:
    """What plans of the job depend on. Raises ValueError if its file is not what it was when the run began."""
    setup = msgspec.msgpack.decode(begin.setup, type=JobSetup)
    look_beside(setup.path)
    job = config.load(setup.path, setup.overrides)
    if prepare.fingerprint(job) != setup.fingerprint:
        raise ValueError(f"{setup.path} has changed since the run began")
    graph = prepare.job_graph(job)
    costs = unpack_costs(setup.costs, graph)
    return prepare.planning(job, setup.policy, graph, setup.placement, costs, setup.budget_bytes)


def serve(end: socket.socket, planning_of: Callable[[Begin], Planning]) -> None:
    """Answer what is asked over `end`. Raises EOFError when it is closed."""
    inbox, waiting = Inbox(), list[bytes]()
    while not waiting:
        waiting = inbox.receive(end)
    begin = msgspec.msgpack.decode(waiting.pop(0), type=Begin)
    if begin.beside_training:
        _yield_to_workers()
    planning = planning_of(begin)
    # What plans are made of are trees of records, in which nothing is ever found to be garbage but much time goes into looking.
    gc.freeze()
    gc.disable()
    end.sendall(encode(Ready()))
    searches: dict[int, Search] = {}
    while True:
        for content in waiting:
            message: ToPlanner = msgspec.msgpack.decode(content, type=ToPlanner)  # type: ignore[arg-type]
            if isinstance(message, Wanted):
                searches[message.number] = Search(planning, begin, message)
            else:
                assert isinstance(message, Taken)
                searches.pop(message.number, None)
        waiting = []
        if searches:
            number = min(searches, key=lambda n: (searches[n].has_plan, n))
            answer = searches[number].step()
            if answer is not None:
                end.sendall(encode(answer))
                if isinstance(answer, Refused) or answer.finished:
                    del searches[number]
            if os.getpriority(os.PRIO_PROCESS, 0) < NICE and all(search.has_plan for search in searches.values()):
                _yield_to_workers()  # the first plans are there: training begins
        else:
            gc.collect()
        if not searches or select.select([end], [], [], 0)[0]:
            while not waiting:
                waiting = inbox.receive(end)


class Search:
    """The search for the plans of one batch, for some replicas: the first plans, then better ones."""

    def __init__(self, planning: Planning, begin: Begin, wanted: Wanted) -> None:
        self._planning = corrected(planning, wanted.factors)
        self._wanted = wanted
        self._fixed_rounds, self._seconds = begin.rounds, begin.seconds
        self._rounds, self._rounds_left = 0, 0  # made, and still to be made for the next plans
        self._used, self._turn = 0.0, 0.0  # seconds: in all, and for the next plans
        self._stale = 0  # doublings since the last gain
        self._searches: list[StepSearch] = []
        self._best: tuple[FlatPlan, ...] = ()

    @property
    def has_plan(self) -> bool:
        return bool(self._best)

    def step(self) -> Planned | Refused | None:
        """The next plans, or why there are none; None as long as rounds are missing for the next ones."""
        begun = time.process_time()
        try:
            plans = self._improved() if self._best else self._first()
        except ValueError as error:
            return Refused(number=self._wanted.number, error=str(error))
        self._turn += time.process_time() - begun
        if not plans:
            return None
        took, self._turn = self._turn, 0.0
        self._used += took
        # More rounds are not always better in the end: the compiler knows more than the search.
        better = not self._best or predicted_ns(plans) < predicted_ns(self._best)
        gained = not self._best or predicted_ns(plans) < predicted_ns(self._best) * (1 - LEAST_GAIN)
        self._stale = 0 if gained else self._stale + 1
        if better:
            self._best = plans
        # The next plans take about twice as long as these did; the first ones say nothing of that.
        next_s = 2 * took if self._rounds else 0.0
        is_last = (
            not self._searches or self._used + next_s > self._seconds or self._stale >= STALE or _is_proven_best(plans)
        )
        return Planned(number=self._wanted.number, finished=is_last, plans=pack(plans) if better else b"")

    def _first(self) -> tuple[FlatPlan, ...]:
        wanted, planning = self._wanted, self._planning
        shares = shares_for(planning, wanted.batch)[wanted.first : wanted.stop]
        start = POLICIES[planning.policy].search
        if start is None or self._fixed_rounds is not None:
            rounds = self._fixed_rounds or 0
            return plan_shares(replace(planning, rounds=rounds), shares, forward_only=wanted.forward_only)
        self._searches = [
            start(
                planning.graph,
                planning.placement,
                share,
                planning.costs,
                budget_bytes=planning.budget_bytes,
                seed=planning.seed,
                forward_only=wanted.forward_only,
                options=planning.options,
                dtype=planning.dtype,
            )
            for share in shares
        ]
        return self._found()

    def _improved(self) -> tuple[FlatPlan, ...]:
        """Plans of about twice as many rounds, or of as many as there was time for; nothing as long as they are not made."""
        begun = time.process_time()
        self._rounds_left = self._rounds_left or max(LEAST_ROUNDS, self._rounds)
        # Whoever else is waiting waits for no more rounds of many replicas than of one.
        rounds = min(self._rounds_left, max(1, LEAST_ROUNDS // len(self._searches)))
        self._rounds += rounds
        self._rounds_left -= rounds
        for search in self._searches:
            search.run(rounds)
            if self._used + self._turn + time.process_time() - begun > self._seconds:
                self._rounds_left = 0
                break
        return () if self._rounds_left else self._found()

    def _found(self) -> tuple[FlatPlan, ...]:
        return tuple(search.plan() for search in self._searches)


def _yield_to_workers() -> None:
    """From here on a process for the gaps: it takes the core from nobody when it wakes up, where the system can.

    SCHED_IDLE would be too much of it: on a machine that others keep busy such a process cannot even end."""
    os.nice(NICE)
    if hasattr(os, "SCHED_BATCH"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _is_proven_best(plans: Sequence[FlatPlan]) -> bool:
    """No schedule of the same stages is shorter by more than `CLOSE`."""
    predictions = [plan.prediction for plan in plans if plan.prediction is not None]
    return all(found.makespan_ns <= CLOSE * found.lower_bound_ns for found in predictions)


if __name__ == "__main__":
    main()
