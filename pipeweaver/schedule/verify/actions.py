"""Rule "actions": a worker's list run symbolically. What it uses is there, what it frees is done with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pipeweaver.model.graph import ModelGraph, positions
from pipeweaver.schedule.ir import (
    Action,
    Buffer,
    Compute,
    Free,
    Load,
    Norm,
    Plan,
    Post,
    Reduce,
    Stage,
    Step,
    Wait,
)
from pipeweaver.schedule.memory import allocations
from pipeweaver.schedule.verify.stages import inside
from pipeweaver.schedule.verify.words import PlanError, buffer_name, describe


def check_actions(plan: Plan, graph: ModelGraph) -> None:
    """Run each worker's list symbolically: what it needs must be there, what it frees must not be needed."""
    incoming: dict[tuple[int, int], list[int]] = {}
    outgoing: dict[tuple[int, int], list[int]] = {}
    for number, edge in enumerate(plan.edges):
        incoming.setdefault(edge.destination, []).append(number)
        outgoing.setdefault(edge.source, []).append(number)
    transfer_of = {(transfer.edge, transfer.phase): number for number, transfer in enumerate(plan.transfers)}
    for worker, actions in enumerate(plan.actions):
        _WorkerCheck(plan, graph, worker, incoming, outgoing, transfer_of).run(actions)


class _WorkerCheck:
    """The symbolic state of one worker."""

    def __init__(
        self,
        plan: Plan,
        graph: ModelGraph,
        worker: int,
        incoming: dict[tuple[int, int], list[int]],
        outgoing: dict[tuple[int, int], list[int]],
        transfer_of: dict[tuple[int, Literal["F", "B"]], int],
    ) -> None:
        self.plan, self.graph, self.worker = plan, graph, worker
        self.incoming, self.outgoing, self.transfer_of = incoming, outgoing, transfer_of
        self.done: set[Stage] = set()
        self.posted: set[int] = set()
        self.waited: set[int] = set()
        self.held: set[Buffer] = set()
        self.freed: set[Buffer] = set()

    def run(self, actions: Sequence[Action]) -> None:
        for action in actions:
            for buffer, num_bytes in allocations(action):
                if buffer in self.held or buffer in self.freed:
                    self.fail(action, f"allocates {buffer_name(buffer)} a second time")
                if num_bytes < 0:
                    self.fail(action, f"allocates {num_bytes} bytes for {buffer_name(buffer)}")
                self.held.add(buffer)
            match action:
                case Load():
                    self.load(action)
                case Compute():
                    self.compute(action)
                case Post():
                    self.post(action)
                case Wait():
                    if action.transfer not in self.posted or action.transfer in self.waited:
                        self.fail(action, "waits for a transfer that it has not posted, or has already waited for")
                    self.waited.add(action.transfer)
                case Free():
                    for buffer in action.buffers:
                        self.free(action, buffer)
                case Reduce() | Norm() | Step():
                    if len(self.done) < len(self.plan.order[self.worker]):
                        self.fail(action, "comes before the last stage")
        mine = {n for n, t in enumerate(self.plan.transfers) if self.worker in (t.sender, t.receiver)}
        if self.waited != mine:
            raise PlanError(
                "actions", f"worker {self.worker} does not wait for transfers {sorted(mine - self.waited)[:5]}"
            )
        if self.held:
            left = ", ".join(buffer_name(buffer) for buffer in sorted(self.held)[:5])
            raise PlanError("actions", f"worker {self.worker} never frees {left}")

    def load(self, action: Load) -> None:
        if not 0 <= action.chunk < len(self.plan.placement.chunks):
            self.fail(action, "is for a chunk that does not exist")
        if set(action.names) != self.loads(action.chunk):
            self.fail(action, f"should load {sorted(self.loads(action.chunk))}")

    def loads(self, number: int) -> set[str]:
        chunk = self.plan.placement.chunks[number]
        layers = dict(positions(self.graph.by_name[chunk.module]))
        return {name for p in inside(self.graph.by_name[chunk.module], chunk) for name in layers[p].loads}

    def compute(self, action: Compute) -> None:
        stage = action.stage
        at = (stage.chunk, stage.part)
        if stage.phase == "F":
            if self.loads(stage.chunk) and Buffer("loaded", *at) not in self.held:
                self.fail(action, "runs before its data is loaded")
            for number in self.incoming.get(at, ()):
                self.need(action, number, "F", Stage(*self.plan.edges[number].source, "F"))
        elif stage.phase == "W":
            if Stage(*at, "I") not in self.done or Buffer("weight", *at) not in self.held:
                self.fail(action, "runs before I, or after what it needs is freed")
        else:
            if Stage(*at, "F") not in self.done or Buffer("saved", *at) not in self.held:
                self.fail(action, "runs before its forward, or after what it saved is freed")
            for number in self.outgoing.get(at, ()):
                if self.plan.edges[number].grad:
                    self.need(action, number, "B", *self.gradient_stages(self.plan.edges[number].destination))
        expected = {"F": {"saved", "output"}, "B": {"gradient"}, "I": {"gradient", "weight"}, "W": set()}[stage.phase]
        for buffer, _ in action.allocations:
            if buffer.kind not in expected or (buffer.first, buffer.second) != at:
                self.fail(action, f"allocates {buffer_name(buffer)}")
        self.done.add(stage)

    def gradient_stages(self, at: tuple[int, int]) -> tuple[Stage, ...]:
        return Stage(*at, "B"), Stage(*at, "I")

    def need(self, action: Compute, number: int, phase: Literal["F", "B"], *producers: Stage) -> None:
        """The tensor of an edge is here: received and waited for, or produced by a stage of this worker."""
        if (number, phase) in self.transfer_of:
            transfer = self.transfer_of[number, phase]
            if transfer not in self.waited or Buffer("received", transfer) not in self.held:
                self.fail(action, f"runs before transfer {transfer} is waited for, or after it is freed")
        elif not self.done.intersection(producers):
            self.fail(action, f"runs before {producers[0]}, which it depends on")

    def post(self, action: Post) -> None:
        if not 0 <= action.transfer < len(self.plan.transfers):
            self.fail(action, "is for a transfer that does not exist")
        transfer = self.plan.transfers[action.transfer]
        if self.worker not in (transfer.sender, transfer.receiver) or action.transfer in self.posted:
            self.fail(action, "is not this worker's, or is posted twice")
        self.posted.add(action.transfer)
        received = (Buffer("received", action.transfer), transfer.num_bytes)
        wanted = (received,) if transfer.receiver == self.worker else ()
        if tuple(tuple(a) for a in action.allocations) != wanted:
            self.fail(action, "must allocate exactly the tensor that it receives")
        if transfer.sender == self.worker:
            edge = self.plan.edges[transfer.edge]
            producers = (Stage(*edge.source, "F"),) if transfer.phase == "F" else self.gradient_stages(edge.destination)
            if not self.done.intersection(producers):
                self.fail(action, f"sends what {producers[0]} has not produced yet")

    def free(self, action: Free, buffer: Buffer) -> None:
        if buffer not in self.held:
            self.fail(action, f"frees {buffer_name(buffer)}, which is not held")
        at = (buffer.first, buffer.second)
        if buffer.kind == "received":
            transfer = self.plan.transfers[buffer.first]
            edge = self.plan.edges[transfer.edge]
            users = (Stage(*edge.destination, "F"),) if transfer.phase == "F" else self.gradient_stages(edge.source)
            if not self.done.intersection(users):
                self.fail(action, f"frees {buffer_name(buffer)} before {users[0]} has used it")
        elif buffer.kind in ("output", "saved", "gradient"):
            if buffer.kind == "saved" and not self.done.intersection(self.gradient_stages(at)):
                self.fail(action, f"frees {buffer_name(buffer)} before it is used")
            edges = self.incoming if buffer.kind == "gradient" else self.outgoing
            phase: Literal["F", "B"] = "B" if buffer.kind == "gradient" else "F"
            for number in edges.get(at, ()):
                edge = self.plan.edges[number]
                if phase == "B" and not edge.grad:
                    continue
                if (number, phase) in self.transfer_of:
                    if self.transfer_of[number, phase] not in self.waited:
                        self.fail(
                            action,
                            f"frees {buffer_name(buffer)} before transfer {self.transfer_of[number, phase]} is sent",
                        )
                    continue
                user = (Stage(*edge.destination, "F"),) if phase == "F" else self.gradient_stages(edge.source)
                if not self.done.intersection(user):
                    self.fail(action, f"frees {buffer_name(buffer)} before {user[0]} has used it")
        else:
            last = {"loaded": ("F",), "weight": ("W",)}[buffer.kind]
            if not self.done.intersection({Stage(*at, phase) for phase in last}):  # type: ignore[arg-type]
                self.fail(action, f"frees {buffer_name(buffer)} before it is used")
        self.held.remove(buffer)
        self.freed.add(buffer)

    def fail(self, action: Action, what: str) -> None:
        raise PlanError("actions", f"worker {self.worker}: {describe(action, self.plan)} {what}")
