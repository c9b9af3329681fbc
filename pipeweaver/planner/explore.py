"""Search for a good order: list schedules from many ranks, each round a try, the best so far always at hand.

The rank of a stage blends two extremes: *critical path*, whatever has the longest way to the end goes first, which
fills the pipeline fastest; and *in order*, microbatch by microbatch, which needs the least memory:

    rank = blend * (microbatch's place) * (mean time of a microbatch) - tail + noise

A *setting* is the blend, how microbatches are ordered, what becomes of weight halves, the rules of `listing.py` and the
amount of noise. The first rounds try settings that are good as a rule; later ones draw new settings or change one
thing about the best (half each). On problems that are not large, tabu search (`neighbours.py`) takes over the best
schedules from time to time, and beam search (`beam.py`), wider each time, looks for others.
"""

from __future__ import annotations

import numba
import numpy as np

from pipeweaver.planner.beam import beam_search
from pipeweaver.planner.listing import NEVER, Schedule, check_limits, exceeds, list_schedule
from pipeweaver.planner.listing import _run as run_list
from pipeweaver.planner.neighbours import tabu_search
from pipeweaver.planner.problem import Ints, Problem

SMALL = 200
"""Stages up to which tabu search takes part."""
TURN, TABU_MOVES = 100, 200
"""Rounds of a turn, the last two of which are, on small problems, a beam and a tabu search of so many moves."""
ISLANDS = 6
"""On small problems so many searches take turns, each with a best schedule of its own, against dead ends."""
FIRST_WIDTH, MOST_WIDTH, BEAM_WORK = 64, 2_000, 6_000_000
"""Widths of the first beam, doubled for every turn, and of the widest, which is no more than `BEAM_WORK` over the number
of stages squared."""
MIXES = (0.0, 3.0, 0.1, 1.0)
BEAM_NOISE = 0.02
"""How beams rank their nodes, in turn; at random in part once they are as wide as they get."""

BLEND, LATE, NOISE, TIE_BREAK, PATIENCE, FULL, OPEN, SHUFFLE = range(8)
"""Columns of a setting. LATE: how far weight halves are put back, in longest tails. NOISE: likewise. SHUFFLE: how many
pairs of microbatches change places."""

BLENDS = np.array([0.0, 0.1, 0.3, 1.0, 3.0, 30.0])
LATES = np.array([1e6, 1e6, 1.0, 0.3])
NOISES = np.array([0.0, 0.03, 0.1, 0.3, 1.0])
PATIENCES = np.array([0.0, 0.0, 0.3, 0.6, 1.0, 2.0])
NEAR, NEAR_NOISES = 0.33, np.array([0.02, 0.05, 0.1, 0.2])
"""Share of the later rounds that rank stages by their start in the best schedule, and the noise on that."""
FULLS = np.array([2.0, 0.9, 0.7, 0.5])


class Search:
    """The state of a search. `best` is the best schedule so far, after `rounds` rounds.

    `limits` [P]: bytes that stages may use on each worker, None for no limit. With equal arguments, the state after a
    number of rounds is always the same. `first` is a schedule of a problem with the same stages and limits, whose order
    is a start. Raises LimitError if no schedule keeps to the limits.
    """

    def __init__(
        self,
        problem: Problem,
        limits: Ints | None = None,
        *,
        seed: int = 0,
        enough_ns: int = 0,
        first: Schedule | None = None,
    ) -> None:
        self.problem, self.seed, self.enough_ns = problem, seed, enough_ns
        self.limited = limits is not None and exceeds(problem, limits)
        self.limits: Ints = limits if limits is not None and self.limited else np.zeros(problem.num_workers, np.int64)
        if self.limited:
            check_limits(problem, self.limits)
        self.tails = tails(problem)
        self.rounds = 0
        self.is_small = problem.num_stages <= SMALL and len(problem.effect_worker) == problem.num_stages
        size = problem.num_stages
        self._islands = [_Island(size) for _ in range(ISLANDS if self.is_small else 1)]
        self._all_met = False
        nothing = np.zeros(size, np.int64)
        self.best = Schedule(start_ns=nothing, sequence=nothing, makespan_ns=NEVER if size else 0)
        if first is not None:
            again = list_schedule(problem, first.start_ns.astype(np.float64), limits=limits, reference=first.sequence)
            assert again is not None, "there is no cutoff"
            self._keep(self._islands[0], again)

    def run(self, rounds: int) -> None:
        """So many rounds more, fewer where the best is good enough (`enough_ns`)."""
        last = self.rounds + rounds
        while self.rounds < last and self.best.makespan_ns > self.enough_ns:
            # Turns have the same rounds however many are asked for at a time.
            turn, done = divmod(self.rounds, TURN)
            island = self._islands[turn % len(self._islands)]
            if self.is_small and done >= TURN - 2:
                if done == TURN - 2:
                    self._beam(island, turn)
                else:
                    self._improve(island, turn)
                self.rounds += 1
                continue
            self._explore(island, min(last - self.rounds, TURN - 2 * self.is_small - done))

    def _explore(self, island: _Island, count: int) -> None:
        start, sequence, makespan, setting, tried = _explore(
            self.problem,
            self.tails,
            self.limited,
            self.limits,
            self.seed,
            self.rounds,
            count,
            island.best.makespan_ns,
            self.enough_ns,
            island.setting,
            island.best.start_ns,
            island.best.sequence,
        )
        self.rounds += tried
        if makespan < island.best.makespan_ns:
            island.setting = setting
            self._keep(island, Schedule(start_ns=start, sequence=sequence, makespan_ns=int(makespan)))

    def _beam(self, island: _Island, turn: int) -> None:
        """What a beam finds that is better than anything so far is the island's; none where one met everything."""
        if self._all_met:
            return
        most = min(MOST_WIDTH, max(1, BEAM_WORK // max(1, self.problem.num_stages) ** 2))
        wide = FIRST_WIDTH << min(turn, 30)
        found, self._all_met = beam_search(
            self.problem,
            self.tails,
            self.limits if self.limited else None,
            width=min(most, wide),
            mix=MIXES[turn % len(MIXES)],
            noise=BEAM_NOISE if wide > most else 0.0,
            seed=self.seed + turn,
            cutoff_ns=self.best.makespan_ns,
        )
        if found is not None:
            self._keep(island, found)

    def _improve(self, island: _Island, turn: int) -> None:
        """Tabu search from the island's best."""
        found = tabu_search(
            self.problem,
            island.best.orders(self.problem),
            self.limits if self.limited else None,
            seed=self.seed + turn,
            moves=TABU_MOVES,
            enough_ns=self.enough_ns,
        )
        if found.makespan_ns < island.best.makespan_ns:
            self._keep(island, found)

    def _keep(self, island: _Island, schedule: Schedule) -> None:
        island.best = schedule
        if schedule.makespan_ns < self.best.makespan_ns:
            self.best = schedule


class _Island:
    """A best schedule of its own, and the setting that found it."""

    def __init__(self, size: int) -> None:
        self.setting = np.zeros(8)
        nothing = np.zeros(size, np.int64)
        self.best = Schedule(start_ns=nothing, sequence=nothing, makespan_ns=NEVER)


def tails(problem: Problem) -> Ints:
    """[n] ns: the longest path from the start of a stage to the end of the step, transfers included."""
    found: Ints = _tails(problem)
    return found


@numba.njit(cache=True)
def _tails(problem):  # type: ignore[no-untyped-def]
    n = len(problem.worker)
    order, waiting, size = np.empty(n, np.int64), np.zeros(n, np.int64), 0
    for s in range(n):
        waiting[s] = problem.predecessor_start[s + 1] - problem.predecessor_start[s]
        if waiting[s] == 0:
            order[size] = s
            size += 1
    at = 0
    while at < size:
        s = order[at]
        at += 1
        for i in range(problem.successor_start[s], problem.successor_start[s + 1]):
            waiting[problem.successor[i]] -= 1
            if waiting[problem.successor[i]] == 0:
                order[size] = problem.successor[i]
                size += 1
    result = np.zeros(n, np.int64)
    for k in range(n - 1, -1, -1):
        s = order[k]
        for i in range(problem.successor_start[s], problem.successor_start[s + 1]):
            result[s] = max(result[s], problem.lag_ns[i] + result[problem.successor[i]])
        result[s] += problem.duration_ns[s]
    return result


@numba.njit(cache=True)
def _draw(limited, num_groups, setting):  # type: ignore[no-untyped-def]
    """A new setting, or the given one with one thing changed."""
    result = setting.copy()
    fresh = np.random.random() < 0.5
    change = np.random.randint(8)
    if fresh or change == BLEND:
        result[BLEND] = BLENDS[np.random.randint(len(BLENDS))] * (0.5 + np.random.random())
    if fresh or change == LATE:
        result[LATE] = LATES[np.random.randint(len(LATES))]
    if fresh or change == NOISE:
        result[NOISE] = NOISES[np.random.randint(len(NOISES))]
    if fresh or change == TIE_BREAK:
        result[TIE_BREAK] = np.random.randint(3)
    if fresh or change == PATIENCE:
        result[PATIENCE] = PATIENCES[np.random.randint(len(PATIENCES))]
    if fresh or change == FULL:
        result[FULL] = FULLS[np.random.randint(len(FULLS))] if limited else 2.0
    if fresh or change == OPEN:
        result[OPEN] = np.random.randint(num_groups + 1) if limited and np.random.random() < 0.5 else 0
    if fresh or change == SHUFFLE:
        result[SHUFFLE] = np.random.randint(num_groups + 1) if np.random.random() < 0.5 else 0
    return result


@numba.njit(cache=True)
def _explore(problem, tails, limited, limits, seed, first, count, best, enough, incumbent, begun, sequence):  # type: ignore[no-untyped-def]
    """(start, sequence, makespan, setting) of the best that is better than `best`, and how many rounds were run."""
    n, num_groups = len(problem.worker), len(problem.sequence_start) - 1
    longest, total = np.int64(1), np.int64(0)
    for s in range(n):
        longest = max(longest, tails[s])
        total += problem.duration_ns[s]
    mean = total / max(1, problem.num_workers * num_groups)
    rank, lowest = np.zeros(n), np.zeros(num_groups)
    best_start, best_sequence, best_setting = begun, sequence, incumbent.copy()
    usual = _usual(limited, num_groups)
    tried = 0
    for number in range(first, first + count):
        if best <= enough:
            break
        np.random.seed((seed * 1_000_003 + number) % 4_294_967_291)
        setting = usual[number] if number < len(usual) else _draw(limited, num_groups, best_setting)
        tried += 1
        turn = np.arange(num_groups)
        for _ in range(int(setting[SHUFFLE])):
            a, b = np.random.randint(num_groups), np.random.randint(num_groups)
            turn[a], turn[b] = turn[b], turn[a]
        lowest[:] = np.inf
        near = best < NEVER and np.random.random() < NEAR
        noise = setting[NOISE] if not near else NEAR_NOISES[np.random.randint(len(NEAR_NOISES))]
        for s in range(n):
            g = problem.group[s]
            if near:
                rank[s] = best_start[s]
            else:
                rank[s] = setting[BLEND] * mean * turn[g] - tails[s] + problem.late[s] * setting[LATE] * longest
            if noise > 0:
                rank[s] += noise * longest * (np.random.random() - 0.5)
            lowest[g] = min(lowest[g], rank[s])
        entry = np.argsort(lowest, kind="mergesort")
        reference = problem.sequence
        most_open = int(setting[OPEN]) if setting[OPEN] > 0 else max(1, num_groups)
        if limited and best < NEVER and np.random.random() < 0.5:
            # Any feasible schedule is a reference. All groups are let in, since it may begin with any.
            reference, most_open = best_sequence, max(1, num_groups)
        elif limited:
            reference = np.empty(n, np.int64)
            at = 0
            for g in entry:
                for i in range(problem.sequence_start[g], problem.sequence_start[g + 1]):
                    reference[at] = problem.sequence[i]
                    at += 1
        start, ran, outcome = run_list(
            problem,
            rank,
            int(setting[TIE_BREAK]),
            setting[PATIENCE],
            setting[FULL],
            most_open,
            entry,
            reference,
            limited,
            limits,
            tails,
            best,
        )
        if outcome == 0:
            makespan = np.int64(0)
            for s in range(n):
                makespan = max(makespan, start[s] + problem.duration_ns[s])
            if makespan < best:
                best, best_setting = makespan, setting
                best_start, best_sequence = start, ran
    return best_start, best_sequence, best, best_setting, tried


@numba.njit(cache=True)
def _usual(limited, num_groups):  # type: ignore[no-untyped-def]
    """Settings that are good as a rule, best first: [., 8]."""
    result = np.zeros((9 if limited else 8, 8))
    result[:, LATE], result[:, FULL] = 1e6, 2.0
    if limited:
        result[:, BLEND] = np.array([1.0, 1.0, 0.3, 0.3, 30.0, 0.3, 1.0, 1.0, 1.0])
        result[:, FULL] = np.array([0.9, 2.0, 0.9, 2.0, 0.9, 0.7, 0.9, 0.9, 0.9])
        result[6:, OPEN] = np.array([4.0, 6.0, 8.0])
    else:
        # With room for everything, forwards and backwards by turns lose least, whatever the blend.
        result[:, BLEND] = np.array([0.75, 0.3, 1.25, 0.5, 0.1, 0.0, 0.3, 1.0])
        result[:6, TIE_BREAK], result[7, PATIENCE] = 1, 0.5
    return result
