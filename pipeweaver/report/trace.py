"""Timelines as trace events for ui.perfetto.dev: predicted and measured in one file.

One process per replica and kind ("replica 0 measured"); in it, per worker, a lane for compute, one for transfers, one
for copies to the host and one for those back where layers are offloaded, and a counter of its memory. A transfer shows on both of its workers, joined by an arrow from
the stage that made the tensor to the stage that takes it in:

    worker 0 compute    [vision 0F0][vision 0F1]
    worker 0 transfers            [vision 0F0 to 1]...
    worker 1 transfers            [vision 0F0 from 0]...
    worker 1 compute                             [language 1F0]

Where it is known what happens inside a stage, layers and operators lie within its slice. Perfetto colours slices by their name without digits, so names start with the module.
Format: "Trace Event Format" (Chrome), complete events X, flows s/t/f, counters C, metadata M.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipeweaver.report.copies import copy_spans
from pipeweaver.report.memory import memory_over_time
from pipeweaver.schedule.ir import (
    Action,
    Compute,
    Load,
    Measurement,
    Offload,
    Phase,
    Plan,
    Post,
    Reduce,
    Reload,
    Settle,
    Span,
    Stage,
    Transfer,
    Wait,
)

Event = dict[str, Any]

_THREADS_PER_WORKER = 1_000
_TO_HOST, _FROM_HOST = 998, 999
_INSIDE = 0.999

# Names of Chrome's own palette, for viewers that take colours from the file.
_COLOURS = (
    "thread_state_running",
    "rail_animation",
    "thread_state_iowait",
    "rail_response",
    "rail_load",
    "thread_state_runnable",
)


class Inside(NamedTuple):
    """A layer or an operator inside a stage: its name, when it runs, ns from the start of the stage, and what to say."""

    name: str
    span: Span
    arguments: Event


Insides = Callable[[Plan, Compute], Sequence[Inside]]
"""What happens inside a stage as predicted, outer before inner."""


def write_trace(
    path: Path,
    plans: Sequence[Plan],
    measurements: Sequence[Measurement | None] = (),
    insides: Insides | None = None,
) -> None:
    """Write the trace of a step: all its replicas' plans and, where there are any, their measurements in the same order."""
    document = {"traceEvents": trace_events(plans, measurements, insides), "displayTimeUnit": "ms"}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, separators=(",", ":")))


def trace_events(
    plans: Sequence[Plan], measurements: Sequence[Measurement | None] = (), insides: Insides | None = None
) -> list[Event]:
    """Trace events in the order of time, metadata first, outer slices before those inside. `ts` and `dur` are microseconds, as the format wants.

    A plan without prediction and without measurement has nothing to show and adds nothing.
    """
    events: list[Event] = []
    process = 0
    for number, plan in enumerate(plans):
        measured = measurements[number] if number < len(measurements) else None
        for kind, timeline in (("predicted", plan.prediction), ("measured", measured)):
            if timeline is not None:
                process += 1
                name = f"replica {plan.replica} {kind}, step {plan.step}"
                known = insides if kind == "predicted" else None
                events += _process(process, name, plan, timeline.spans, timeline.transfers, known)
    return sorted(events, key=lambda event: (event["ph"] != "M", event.get("ts", 0.0)))


def describe(plan: Plan, action: Action) -> str:
    """What an action is called in timelines: module first, then the stage as in `2F0`."""
    match action:
        case Compute(stage=stage):
            return f"{plan.placement.chunks[stage.chunk].module} {stage}"
        case Load(chunk=chunk, part=part):
            return f"{plan.placement.chunks[chunk].module} load {chunk}.{part}"
        case Offload(chunk=chunk, part=part) | Reload(chunk=chunk, part=part) | Settle(chunk=chunk, part=part):
            return f"{plan.placement.chunks[chunk].module} {type(action).__name__.lower()} {chunk}.{part}"
        case Wait(transfer=number):
            return f"wait {describe_transfer(plan, plan.transfers[number])}"
        case Post(transfer=number):
            return f"post {describe_transfer(plan, plan.transfers[number])}"
        case Reduce(group=group):
            return f"reduce {group}"
        case _:
            return type(action).__name__.lower()


def describe_transfer(plan: Plan, transfer: Transfer) -> str:
    """`vision 0F3`: the stage that the tensor comes from, or whose gradient it is (`vision 0B3`)."""
    chunk, part = plan.edges[transfer.edge].source
    return f"{plan.placement.chunks[chunk].module} {chunk}{transfer.phase}{part}"


def lanes(spans: Sequence[Span]) -> list[int]:
    """A lane for each span such that no two on a lane overlap, as few lanes as possible; order of input kept."""
    result = [0] * len(spans)
    ends: list[int] = []
    for index in sorted(range(len(spans)), key=lambda i: spans[i]):
        lane = next((lane for lane, end in enumerate(ends) if end <= spans[index].start_ns), len(ends))
        if lane == len(ends):
            ends.append(0)
        ends[lane] = spans[index].end_ns
        result[index] = lane
    return result


def _process(
    process: int,
    name: str,
    plan: Plan,
    spans: Sequence[Sequence[Span]],
    transfers: Sequence[Span],
    insides: Insides | None,
) -> Iterator[Event]:
    yield _metadata("process_name", process, 0, {"name": name})
    yield _metadata("process_sort_index", process, 0, {"sort_index": process})
    computed: dict[Stage, Event] = {}
    for worker, (lane, actions) in enumerate(zip(spans, plan.actions, strict=True)):
        thread = worker * _THREADS_PER_WORKER
        yield from _thread(process, thread, f"worker {worker} compute")
        for span, action in zip(lane, actions, strict=True):
            if span.end_ns > span.start_ns:
                event = _slice(process, thread, describe(plan, action), span, _module(plan, action), plan)
                event["args"] = _arguments(plan, action)
                if isinstance(action, Compute):
                    computed[action.stage] = event
                yield event
                if insides is not None and isinstance(action, Compute):
                    yield from _inside(process, thread, span, insides(plan, action))
        for time_ns, num_bytes in memory_over_time(plan, worker, lane):
            yield _event("C", process, 0, time_ns, name=f"memory worker {worker}", args={"bytes": num_bytes})
        yield from _copies(process, worker, plan, lane)
    sent: dict[int, list[Event]] = {}
    for worker in range(plan.placement.workers):
        mine = [
            number
            for number, (transfer, span) in enumerate(zip(plan.transfers, transfers, strict=True))
            if worker in (transfer.sender, transfer.receiver) and span.end_ns > span.start_ns
        ]
        of_lane = lanes([transfers[number] for number in mine])
        for lane_number in range(max(of_lane, default=0) + 1):
            suffix = f" {lane_number + 1}" if lane_number else ""
            thread = worker * _THREADS_PER_WORKER + 1 + lane_number
            yield from _thread(process, thread, f"worker {worker} transfers{suffix}")
        for number, lane_number in zip(mine, of_lane, strict=True):
            transfer = plan.transfers[number]
            other = f"to {transfer.receiver}" if worker == transfer.sender else f"from {transfer.sender}"
            thread = worker * _THREADS_PER_WORKER + 1 + lane_number
            module = plan.placement.chunks[plan.edges[transfer.edge].source[0]].module
            text = f"{describe_transfer(plan, transfer)} {other}"
            event = _slice(process, thread, text, transfers[number], module, plan)
            event["args"] = {"transfer": number, "bytes": transfer.num_bytes, "shape": list(transfer.shape)}
            sent.setdefault(number, []).append(event)
            yield event
    for number, events in sent.items():
        yield from _arrow(process, number, plan, computed, events)


def _inside(process: int, thread: int, stage: Span, inside: Sequence[Inside]) -> Iterator[Event]:
    for name, span, arguments in inside:
        if span.end_ns > span.start_ns:
            start_ns = stage.start_ns + span.start_ns
            length = (span.end_ns - span.start_ns) / 1_000
            yield _event("X", process, thread, start_ns, name=name, cat="inside", dur=length, args=arguments)


def _copies(process: int, worker: int, plan: Plan, spans: Sequence[Span]) -> Iterator[Event]:
    copies = copy_spans(plan, worker, spans)
    for kind, offset, name in ((Offload, _TO_HOST, "to host"), (Reload, _FROM_HOST, "from host")):
        thread = worker * _THREADS_PER_WORKER + offset
        mine = [copy for copy in copies if isinstance(copy.action, kind) and copy.span.end_ns > copy.span.start_ns]
        yield from _thread(process, thread, f"worker {worker} {name}") if mine else ()
        for action, span in mine:
            event = _slice(process, thread, describe(plan, action), span, _module(plan, action), plan)
            event["args"] = {"bytes": action.allocations[0].num_bytes, "planned_us": action.duration_ns / 1_000}
            yield event


def _arrow(
    process: int, number: int, plan: Plan, computed: dict[Stage, Event], sent: Sequence[Event]
) -> Iterator[Event]:
    """From the slice that makes the tensor, through both transfer slices, to the slice that takes it in."""
    transfer = plan.transfers[number]
    source, destination = plan.edges[transfer.edge].source, plan.edges[transfer.edge].destination
    phases: tuple[Phase, ...] = ("F",)
    if transfer.phase == "B":
        source, destination = destination, source
        phases = ("B", "I")
    path = [_first(computed, source, phases), *sorted(sent, key=_sender_first), _first(computed, destination, phases)]
    stops = [event for event in path if event is not None]
    for place, event in enumerate(stops):
        last = place == len(stops) - 1
        # An arrow hangs on the slice that encloses its time: it leaves at the end of a slice and arrives at a start.
        ts = event["ts"] if place else event["ts"] + event["dur"] * _INSIDE
        yield {
            "ph": "s" if place == 0 else "f" if last else "t",
            "id": process * 1_000_000 + number,
            "name": "transfer",
            "cat": "transfer",
            "pid": process,
            "tid": event["tid"],
            "ts": ts,
            **({"bp": "e"} if last else {}),
        }


def _sender_first(event: Event) -> bool:
    return " from " in event["name"]


def _first(computed: dict[Stage, Event], where: tuple[int, int], phases: Sequence[Phase]) -> Event | None:
    return next((computed[Stage(*where, phase)] for phase in phases if Stage(*where, phase) in computed), None)


def _slice(process: int, thread: int, name: str, span: Span, module: str, plan: Plan) -> Event:
    modules = list(dict.fromkeys(chunk.module for chunk in plan.placement.chunks))
    colour = {"cname": _COLOURS[modules.index(module) % len(_COLOURS)]} if module in modules else {}
    duration = (span.end_ns - span.start_ns) / 1_000
    return _event("X", process, thread, span.start_ns, name=name, cat=module or "step", dur=duration, **colour)


def _module(plan: Plan, action: Action) -> str:
    match action:
        case Compute(stage=stage):
            return plan.placement.chunks[stage.chunk].module
        case Load(chunk=chunk) | Offload(chunk=chunk) | Reload(chunk=chunk) | Settle(chunk=chunk):
            return plan.placement.chunks[chunk].module
        case _:
            return ""


def _arguments(plan: Plan, action: Action) -> Event:
    match action:
        case Compute(stage=stage):
            chunk, part = plan.placement.chunks[stage.chunk], plan.parts[stage.chunk][stage.part]
            items = plan.stage_items(stage.chunk, stage.part)
            return {
                "chunk": str(chunk),
                "task": chunk.task,
                "microbatch": part.microbatch,
                "items": len(items),
                "tokens": sum(item.sizes["tokens"] for item in items),
                "planned_us": action.duration_ns / 1_000,
            }
        case Wait(transfer=number) | Post(transfer=number):
            return {"transfer": number, "bytes": plan.transfers[number].num_bytes}
        case Reduce(group=group):
            return {"parameters": ", ".join(plan.groups[group].parameters), "bytes": plan.groups[group].num_bytes}
        case _:
            return {}


def _thread(process: int, thread: int, name: str) -> Iterator[Event]:
    yield _metadata("thread_name", process, thread, {"name": name})
    yield _metadata("thread_sort_index", process, thread, {"sort_index": thread})


def _metadata(name: str, process: int, thread: int, arguments: Event) -> Event:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "args": arguments}


def _event(kind: str, process: int, thread: int, time_ns: int, **fields: Any) -> Event:
    return {"ph": kind, "pid": process, "tid": thread, "ts": time_ns / 1_000, **fields}
