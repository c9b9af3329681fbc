"""The stages of a draft: numbered, with costs, edges and dependencies; checked to be all that is needed.

Successors are (stage, lag) pairs: F along every edge, gradients back along those that carry them, and from a
(chunk, part)'s F to its B or I, from its I to its W.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeweaver.costs import Costs, StageCost
from pipeweaver.data.items import Share, linked
from pipeweaver.model.graph import ModelGraph
from pipeweaver.schedule.connect import connect, has_backward
from pipeweaver.schedule.ir import ITEM_SIZES, Draft, Edge, Stage


@dataclass
class StepStages:
    """What compilation knows of the stages: their numbers, costs, edges and dependencies."""

    graph: ModelGraph
    share: Share
    draft: Draft
    costs: Costs
    dtype: str
    edges: tuple[Edge, ...] = ()
    backward: tuple[bool, ...] = ()
    stages: list[Stage] = field(default_factory=list)
    number: dict[Stage, int] = field(default_factory=dict)
    cost: dict[tuple[int, int], StageCost] = field(default_factory=dict)
    duration_ns: list[int] = field(default_factory=list)
    successors: list[list[tuple[int, int]]] = field(default_factory=list)
    incoming: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    outgoing: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    lag_ns: list[int] = field(default_factory=list)
    edge_bytes: list[int] = field(default_factory=list)
    is_local: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        draft, share = self.draft, self.share
        chunks = draft.placement.chunks
        self.edges = connect(self.graph, draft.placement, share.items, share.links, draft.parts, self.dtype)
        self.backward = (False,) * len(chunks) if draft.forward_only else has_backward(self.graph, draft.placement)
        sources = linked(share.items, share.links)
        for number, parts in enumerate(draft.parts):
            for part_number, part in enumerate(parts):
                self.cost[number, part_number] = self.costs.stage(
                    chunks[number], [share.items[i] for i in part.items], [sources[i] for i in part.items]
                )
        self.stages = [stage for order in draft.order for stage in order]
        self.number = {stage: i for i, stage in enumerate(self.stages)}
        self.duration_ns = [stage_duration_ns(stage, self.cost[stage.chunk, stage.part]) for stage in self.stages]
        self._check_stages()
        for i, edge in enumerate(self.edges):
            self.incoming.setdefault(edge.destination, []).append(i)
            self.outgoing.setdefault(edge.source, []).append(i)
            sender, receiver = chunks[edge.source[0]].worker, chunks[edge.destination[0]].worker
            self.is_local.append(sender == receiver)
            self.edge_bytes.append(edge.num_rows * edge.width * ITEM_SIZES[edge.dtype])
            self.lag_ns.append(
                0 if sender == receiver else self.costs.transfer_ns(sender, receiver, self.edge_bytes[i])
            )
        self.successors = [[] for _ in self.stages]
        for edge, lag in zip(self.edges, self.lag_ns, strict=True):
            self._precede(Stage(*edge.source, "F"), Stage(*edge.destination, "F"), lag)
            if edge.grad and not draft.forward_only:
                self._precede(self.gradient_stage(edge.destination), self.gradient_stage(edge.source), lag)
        for stage in self.stages:
            if stage.phase in "BI":
                self._precede(Stage(stage.chunk, stage.part, "F"), stage, 0)
            elif stage.phase == "W":
                self._precede(Stage(stage.chunk, stage.part, "I"), stage, 0)

    def gradient_stage(self, at: tuple[int, int]) -> Stage:
        """The stage of a (chunk, part) that produces its input gradients: B, or I if the backward is split."""
        fused = Stage(*at, "B")
        return fused if fused in self.number else Stage(*at, "I")

    def last_stage(self, at: tuple[int, int]) -> Stage:
        """The stage of a (chunk, part) after which nothing of it is needed by itself."""
        if not self.backward[at[0]]:
            return Stage(*at, "F")
        return self.gradient_stage(at)

    def _precede(self, first: Stage, second: Stage, lag: int) -> None:
        self.successors[self.number[first]].append((self.number[second], lag))

    def _check_stages(self) -> None:
        chunks = self.draft.placement.chunks
        expected = {Stage(c, p, "F") for c, parts in enumerate(self.draft.parts) for p in range(len(parts))}
        for c, parts in enumerate(self.draft.parts):
            for p in range(len(parts)):
                if self.backward[c]:
                    split = Stage(c, p, "I") in self.number
                    expected |= {Stage(c, p, "I"), Stage(c, p, "W")} if split else {Stage(c, p, "B")}
        missing, surplus = expected - set(self.stages), set(self.stages) - expected
        if missing or surplus or len(self.number) < len(self.stages):
            repeated = (
                {stage for stage in self.number if self.stages.count(stage) > 1} if not (missing or surplus) else set()
            )
            raise ValueError(
                f"the order of policy {self.draft.policy or '(unnamed)'} lacks stages [{stage_text(missing)}], "
                f"has stages that do not belong [{stage_text(surplus)}], repeats [{stage_text(repeated)}]"
            )
        for worker, order in enumerate(self.draft.order):
            for stage in order:
                if chunks[stage.chunk].worker != worker:
                    raise ValueError(
                        f"stage {stage} is in the order of worker {worker}, but {chunks[stage.chunk]} is not there"
                    )


def stage_text(stages: set[Stage]) -> str:
    """The first few stages, for messages."""
    return " ".join(str(stage) for stage in sorted(stages)[:8]) + (" …" if len(stages) > 8 else "")


def stage_duration_ns(stage: Stage, cost: StageCost) -> int:
    """Duration of a stage by its phase."""
    match stage.phase:
        case "F":
            return cost.forward_ns
        case "B":
            return cost.backward_ns
        case "I":
            return cost.input_ns
        case _:
            return cost.weight_ns
