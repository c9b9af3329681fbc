"""What is usually done instead: policy `sequential`, and policy `task-parallel`.

Example, tasks a (two MetaOps) and b on 4 workers:

    sequential      a.0 on 4 | a.1 on 4 | b.0 on 4
    task-parallel   a.0 on 3 | a.1 on 3         beside it b.0 on 1
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pipeweaver.wavefront.metagraph import FREE, Links, MetaGraph, Schedule, Slice


def sequential(graph: MetaGraph, workers: int, links: Links = FREE) -> Schedule:
    """One task after another, one MetaOp after another, each on the largest useful count."""
    ends_ns = 0
    slices: list[Slice] = []
    last: dict[int, Slice] = {}
    for task in tasks_of(graph).values():
        for number in task:
            op = graph.ops[number]
            count = op.fastest(workers)
            begin = ends_ns
            for flow in graph.flows:
                if flow.destination == number:
                    source = last[flow.source]
                    begin = max(begin, source.end_ns + links.lag_ns(flow.num_bytes, source.workers, count))
            last[number] = Slice(number, 0, op.num_layers, count, begin, begin + op.whole_ns(count))
            ends_ns = last[number].end_ns
            slices.append(last[number])
    return Schedule(workers=workers, slices=tuple(slices), policy="sequential")


def task_parallel(graph: MetaGraph, workers: int, links: Links = FREE) -> Schedule:
    """Whole tasks side by side, each one MetaOp after another on workers of its own.

    Workers are given greedily, by marginal gain per worker or to the slowest task, whichever ends first. With more
    tasks than workers some follow others: the longest first, each to the group of workers that is done first.
    """
    tasks = list(tasks_of(graph).values())
    return min(
        (_side_by_side(graph, workers, links, tasks, preferred) for preferred in (_gain, _slowness)),
        key=lambda schedule: schedule.makespan_ns,
    )


def tasks_of(graph: MetaGraph) -> dict[str, list[int]]:
    """The MetaOps of each task, sources first. Without task names, tasks are what data flows join."""
    if any(op.task for op in graph.ops):
        names = [op.task for op in graph.ops]
    else:
        group = list(range(len(graph.ops)))
        for flow in graph.flows:
            one, other = group[flow.source], group[flow.destination]
            group = [one if g == other else g for g in group]
        names = [str(g) for g in group]
    tasks: dict[str, list[int]] = {name: [] for name in names}
    for number in graph.order:
        tasks[names[number]].append(number)
    return tasks


Preference = Callable[[int, int, int], float]
"""(time now, time with more, how many more workers) -> how much a task deserves them."""


def _gain(now_ns: int, then_ns: int, more: int) -> float:
    return (now_ns - then_ns) / more


def _slowness(now_ns: int, then_ns: int, more: int) -> float:
    return float(now_ns)


def _side_by_side(
    graph: MetaGraph, workers: int, links: Links, tasks: Sequence[Sequence[int]], preferred: Preference
) -> Schedule:
    times = [_times(graph, task, workers) for task in tasks]
    least = [min(of_task) for of_task in times]
    groups = _groups(workers, least, [of_task[count] for of_task, count in zip(times, least, strict=True)])
    steps = [_steps([times[task] for task in group]) for group in groups]
    given = [min(of_group) for of_group in steps]
    spare = workers - sum(given)
    while True:
        offers = [
            (preferred(steps[g][given[g]], time, count - given[g]), -g, -count)
            for g in range(len(groups))
            for count, time in steps[g].items()
            if given[g] < count <= given[g] + spare
        ]
        if not offers:
            break
        _, negative_group, negative_count = max(offers)
        spare -= -negative_count - given[-negative_group]
        given[-negative_group] = -negative_count
    slices: list[Slice] = []
    for group, count in zip(groups, given, strict=True):
        mine = {number for task in group for number in tasks[task]}
        renamed = [number for task in group for number in tasks[task]]
        part = MetaGraph(
            ops=tuple(graph.ops[number] for number in renamed),
            flows=tuple(
                flow._replace(source=renamed.index(flow.source), destination=renamed.index(flow.destination))
                for flow in graph.flows
                if flow.source in mine
            ),
        )
        slices += [piece._replace(op=renamed[piece.op]) for piece in sequential(part, count, links).slices]
    ordered = tuple(sorted(slices, key=lambda piece: (piece.start_ns, piece.op)))
    return Schedule(workers=workers, slices=ordered, policy="task-parallel")


def _times(graph: MetaGraph, task: Sequence[int], workers: int) -> dict[int, int]:
    """Time of a task alone, one MetaOp after another, by number of workers; those that gain nothing are left out."""
    smallest = max(graph.ops[number].counts[0] for number in task)
    if smallest > workers:
        raise ValueError(f"{graph.ops[task[0]].name} and what follows need {smallest} workers, there are {workers}")
    times: dict[int, int] = {}
    for count in sorted({count for number in task for count in graph.ops[number].counts}):
        if smallest <= count <= workers:
            time = sum(graph.ops[number].whole_ns(graph.ops[number].fastest(count)) for number in task)
            if time < min(times.values(), default=time + 1):
                times[count] = time
    return times


def _steps(times: Sequence[Mapping[int, int]]) -> dict[int, int]:
    """Time of several tasks in turn, by number of workers; numbers that gain nothing are left out."""
    smallest = max(min(of_task) for of_task in times)
    steps: dict[int, int] = {}
    for count in sorted({count for of_task in times for count in of_task if count >= smallest}):
        time = sum(of_task[max(c for c in of_task if c <= count)] for of_task in times)
        if time < min(steps.values(), default=time + 1):
            steps[count] = time
    return steps


def _groups(workers: int, least: Sequence[int], times_ns: Sequence[int]) -> list[list[int]]:
    """Tasks that take turns on the same workers: as many groups as there is room for, even in time."""
    room = 0
    count = 0
    for size in sorted(least):
        if room + size > workers:
            break
        room += size
        count += 1
    order = sorted(range(len(least)), key=lambda task: (-least[task], -times_ns[task], task))
    while True:
        groups: list[list[int]] = [[] for _ in range(count)]
        for task in order:
            min(groups, key=lambda group: sum(times_ns[other] for other in group)).append(task)
        if sum(max(least[task] for task in group) for group in groups) <= workers:
            return groups
        count -= 1
