"""The planner service: processes beside training that plan the batches to come, and what becomes of a run without them.

    with Service(planning, setup, processes=1) as service:
        service.want(7, batch)                 some steps ahead, never blocks
        plans = service.take(7)                the best so far, proven here; blocks only if there is none yet

Each batch goes to one process, or its replicas to several. Plans are data from another process, so they are proven
against the batch when they are taken, whatever that process did before: a wrong plan is never handed on. Equal batches
(`reuse.py`) are not planned again.

What may happen, and what follows:

    no plan in time          the batch is planned in place, without search; the late answer is not used
    a process dies           it is started again; plans that are needed until it is back are made in place
    it sends garbage         the same
    it hangs                 the same, after `FROZEN_S`
    it finds no plan         the batch is planned in place, which says what the matter is
    it fails again and again plans are made in place for the rest of the run
    it cannot be started     the same, at once

With a fixed number of rounds plans are waited for, and those made in place have the same rounds: what is trained on
depends on none of this.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType

import msgspec

from pipeweaver.data.items import Batch, Sample
from pipeweaver.runtime.ahead import Planning, corrected, plan_batch, predicted_ns
from pipeweaver.runtime.planner_messages import Begin, FromPlanner, Planned, Ready, Refused, Taken, Wanted, encode
from pipeweaver.runtime.planner_pool import COMMAND, Planner, Pool
from pipeweaver.runtime.recorded import shares_of
from pipeweaver.runtime.reuse import Reuse
from pipeweaver.schedule.flat import FlatPlan
from pipeweaver.schedule.groups import static_bytes
from pipeweaver.schedule.verify import verify_flat
from pipeweaver.schedule.wire import unpack
from pipeweaver.semu.correct import rounded

START_S = 120.0
"""Until a process of a new run has its first plans: libraries are loaded, kernels may have to be compiled."""
LATE_S, LATE_TIMES = 1.0, 4
"""A plan that is needed is waited for so long, or so many times as long as it took to make the last one in place."""
FROZEN_S = 30.0
"""A process that owes a plan and says nothing for so long, or twice as long as is waited for it, is ended."""
POLL_S = 0.5
IN_PLACE = "plans that are needed until then are made by the first worker, without search"


@dataclass
class _Piece:
    """Some replicas of a batch, and the process that plans them. `best` are its plans so far, not yet proven."""

    message: Wanted
    planner: Planner | None = None
    best: Planned | None = None
    finished: bool = False
    refused: bool = False


@dataclass
class _Work:
    """A batch that plans are wanted for. `known` are plans of an equal one."""

    batch: Batch
    forward_only: bool
    factors: Mapping[str, float]
    key: bytes
    known: tuple[FlatPlan, ...]
    pieces: list[_Piece]


class Service:
    """Planner processes and what they found. `want` and `take` are for one thread.

    `setup` is what a process makes `planning` of. `rounds` and `seconds` as in `Begin`. `command` starts a process,
    which keeps to `cores` if there are any. `say` is told what goes wrong.
    """

    def __init__(
        self,
        planning: Planning,
        setup: msgspec.Struct,
        *,
        processes: int = 1,
        rounds: int | None = None,
        seconds: float = 1.0,
        cores: Collection[int] = (),
        command: Sequence[str] = COMMAND,
        say: Callable[[str], None] | None = None,
    ) -> None:
        assert processes >= 1, processes
        self._planning = replace(planning, rounds=rounds or 0)
        self._static_bytes = static_bytes(planning.graph, planning.placement, planning.costs)
        self._waits_for_search = rounds is not None
        self._say = say or _say
        self._said_late = False
        self._begins = True
        self._reuse = Reuse()
        self._works: dict[int, _Work] = {}
        self._in_place_s = 0.0
        self._changed = threading.Condition()
        begin = Begin(setup=msgspec.Raw(msgspec.msgpack.encode(setup)), rounds=rounds, seconds=seconds)
        self._pool = Pool(processes, begin, command, cores, lock=self._changed, heard=self._heard, lost=self._lost)
        self._pool.start()

    def __enter__(self) -> Service:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the processes: none is left when this returns."""
        self._pool.close()

    def want(
        self, number: int, batch: Batch, *, forward_only: bool = False, factors: Mapping[str, float] | None = None
    ) -> None:
        """Plans for `batch` will be taken as `number`; smaller numbers are needed first. `factors` correct the costs."""
        # Two digits, so that equal batches under almost the same costs are equal.
        factors = rounded(factors or {})
        with _without_collector():
            key = self._reuse.key(batch, forward_only, factors)
            known, is_final = self._reuse.find(key, batch)
        ranges = [] if is_final else _split(self._planning.num_replicas, len(self._pool.planners))
        pieces = [
            _Piece(
                message=Wanted(
                    number=number, batch=batch, first=first, stop=stop, forward_only=forward_only, factors=factors
                )
            )
            for first, stop in ranges
        ]
        with self._changed, _without_collector():
            self._works[number] = _Work(batch, forward_only, factors, key, known, pieces)
            self._assign()

    def wait(self, number: int, *, for_last: bool = False) -> None:
        """Until there are plans for `number`, or the last ones, however long that takes, or no process is at it."""

        def is_there(piece: _Piece) -> bool:
            found = piece.finished if for_last else piece.best is not None
            return found or piece.refused or piece.planner is None

        with self._changed:
            pieces = self._works[number].pieces
            self._changed.wait_for(lambda: all(map(is_there, pieces)))

    def take(self, number: int) -> tuple[FlatPlan, ...]:
        """Proven plans of all replicas. Raises ValueError, as `plan_batch` does, if there are none.

        The first one is handed out when all batches told of by then have plans: once workers are busy, a process that
        has just started would be late with them.
        """
        work = self._works[number]
        with self._changed:
            for needed in sorted(self._works.items()) if self._begins else [(number, work)]:
                if not needed[1].known or self._waits_for_search:
                    self._wait(needed[1])
            self._begins = False
            del self._works[number]
            for piece in work.pieces:
                if piece.planner is not None:
                    self._pool.send(piece.planner, encode(Taken(number=number)))
        found = self._best(work)
        if found:
            self._reuse.keep(work.key, work.batch, found, is_final=all(piece.finished for piece in work.pieces))
            return found
        begun = time.monotonic()
        found = plan_batch(corrected(self._planning, work.factors), work.batch, forward_only=work.forward_only)
        self._in_place_s = time.monotonic() - begun
        return found

    # What was found.

    def _best(self, work: _Work) -> tuple[FlatPlan, ...]:
        """The better of what is known and what the processes found, if that can be proven; else nothing."""
        best = work.known
        complete = bool(work.pieces) and all(piece.best is not None for piece in work.pieces)
        if complete and not any(piece.refused for piece in work.pieces):
            try:
                with _without_collector():
                    found = tuple(plan for piece in work.pieces for plan in _unpack(piece))
                    self._prove(work, found)
            # What is no plan for the batch may break anything in the verifier.
            except Exception as error:
                planners = {id(piece.planner): piece.planner for piece in work.pieces if piece.planner is not None}
                with self._changed:
                    for planner in planners.values():
                        self._pool.fail(planner, f"sent what is no plan for step {work.batch.step} ({_line(error)})")
            else:
                for piece in work.pieces:
                    if piece.planner is not None:
                        piece.planner.failures = 0
                if not best or predicted_ns(found) < predicted_ns(best):
                    return found
        if best:
            self._prove(work, best)
        return best

    def _prove(self, work: _Work, plans: Sequence[FlatPlan]) -> None:
        """Raises ValueError if these are not plans of the whole batch, for this placement, that keep all rules."""
        planning, batch = self._planning, work.batch
        samples = {(sample.task, sample.draw): sample for sample in batch.samples}

        def sample(record: int, task: str, draw: int) -> Sample:
            found = samples.get((task, draw))
            if found is None or found.record != record:
                raise ValueError(f"sample {task}/{draw} of record {record} is not in the batch")
            return found

        heads = [plan.head for plan in plans]
        for plan, head in zip(plans, heads, strict=True):
            if head.placement != planning.placement or head.step != batch.step:
                raise ValueError(f"it is for another placement, or for step {head.step}")
            if plan.prediction is None:
                raise ValueError("nothing is predicted of it")
            if head.forward_only != work.forward_only:
                raise ValueError(f"it {'lacks' if head.forward_only else 'has'} the backward")
            if head.static_bytes != self._static_bytes:
                raise ValueError(f"its workers hold {head.static_bytes} bytes throughout, not {self._static_bytes}")
        shares = shares_of(heads, planning.graph, sample)
        if sum(len(head.records) for head in heads) != len(samples):
            raise ValueError(f"it does not have all {len(samples)} samples of the batch")
        verify_flat(plans, planning.graph, shares, dtype=planning.dtype, budget_bytes=planning.budget_bytes)

    # Waiting, with the lock held.

    def _wait(self, work: _Work) -> None:
        """Until there is a plan (with a fixed number of rounds: the last one), or it is no use to wait longer."""
        begun = time.monotonic()
        while not all(piece.finished if self._waits_for_search else piece.best for piece in work.pieces):
            if any(piece.refused for piece in work.pieces):
                return
            now = time.monotonic()
            patience = min(self._patience_s(piece) for piece in work.pieces)
            left = begun + patience - now
            if left <= 0:
                self._late(work, patience)
                return
            self._changed.wait(min(left, POLL_S))

    def _patience_s(self, piece: _Piece) -> float:
        """How long a piece that is needed is waited for."""
        if piece.best is not None and (piece.finished or not self._waits_for_search):
            return float("inf")
        if piece.planner is None or piece.planner.is_late:
            return 0.0
        if self._begins or not piece.planner.is_settled:
            return START_S if piece.planner.lives <= 1 else 0.0
        return max(LATE_S, LATE_TIMES * self._in_place_s)

    def _late(self, work: _Work, waited_s: float) -> None:
        """A plan did not come in time: its process is not waited for until it speaks again, and ended if it does not."""
        now = time.monotonic()
        for piece in work.pieces:
            planner = piece.planner
            if planner is None or piece.finished or (piece.best is not None and not self._waits_for_search):
                continue
            silent_s = now - (planner.owes_since or now)
            if waited_s or planner.is_late:
                planner.is_late = True
                if silent_s > max(FROZEN_S, 2 * LATE_TIMES * self._in_place_s):
                    self._pool.fail(planner, f"has said nothing for {silent_s:.0f} s")
        if waited_s and not self._said_late:
            self._said_late = True
            self._say(
                f"warning: the planner had no plan when it was needed, nor {waited_s:.1f} s later; whenever it is late, "
                f"the first worker makes the plan itself{'' if self._waits_for_search else ', without search'} (said once)"
            )

    # What the pool reports, with the lock held.

    def _heard(self, planner: Planner, message: FromPlanner) -> None:
        if isinstance(message, Ready):
            return
        planner.is_late = False
        work = self._works.get(message.number)
        piece = next((piece for piece in work.pieces if piece.planner is planner), None) if work is not None else None
        if work is None or piece is None:
            return  # it came too late
        if isinstance(message, Refused):
            piece.refused = True
        elif message.plans or piece.best is not None:
            piece.best = message if message.plans else piece.best
            piece.finished = message.finished
        else:
            self._pool.fail(planner, f"sent what is no plan for step {work.batch.step} (nothing)")
            return
        planner.is_settled = True
        self._changed.notify_all()

    def _lost(self, planner: Planner, why: str) -> None:
        """`planner` is gone; it has been started again if `planner.is_there`."""
        then = f"it is started again, and {IN_PLACE}"
        if not planner.is_there:
            others = any(other.is_there for other in self._pool.planners)
            then = f"it {f'failed {planner.failures} times and ' if planner.can_start else ''}is left out from here on"
            then += "" if others else ": the first worker makes all plans, without search"
        if self._waits_for_search:
            then = then.replace(", without search", "")
        self._say(f"warning: planner process {f'{planner.pid} ' if planner.pid else ''}{why}; {then}")
        for work in self._works.values():
            for piece in work.pieces:
                if piece.planner is planner:
                    piece.planner = None
        self._assign()
        self._changed.notify_all()

    def _assign(self) -> None:
        """Every piece that nobody plans to the process with the least to do."""
        load = {id(planner): 0 for planner in self._pool.planners if planner.is_there}
        if not load:
            return
        waiting = []
        for _, work in sorted(self._works.items()):
            for piece in work.pieces:
                if piece.planner is not None and id(piece.planner) in load:
                    load[id(piece.planner)] += not piece.finished
                elif not piece.finished and not piece.refused:
                    waiting.append(piece)
        by_id = {id(planner): planner for planner in self._pool.planners}
        for piece in waiting:
            chosen = min(load, key=load.__getitem__)
            load[chosen] += 1
            planner = by_id[chosen]
            piece.planner = planner
            planner.owes_since = planner.owes_since or time.monotonic()
            self._pool.send(planner, encode(piece.message))


def _unpack(piece: _Piece) -> tuple[FlatPlan, ...]:
    assert piece.best is not None
    plans = unpack(piece.best.plans)
    if [plan.head.replica for plan in plans] != list(range(piece.message.first, piece.message.stop)):
        raise ValueError("it is for other replicas")
    return plans


@contextmanager
def _without_collector() -> Iterator[None]:
    """Batches and heads of plans are large trees of records without cycles: looking for garbage among them takes longer
    than reading them."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _split(replicas: int, processes: int) -> list[tuple[int, int]]:
    """Replicas [first, stop) for each process, as even as can be."""
    count = min(replicas, processes)
    return [(i * replicas // count, (i + 1) * replicas // count) for i in range(count)]


def _line(error: Exception) -> str:
    text = (str(error) or type(error).__name__).partition("\n")[0]
    return text if len(text) <= 200 else text[:200] + "…"


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
