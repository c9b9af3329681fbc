"""What is chosen about a step before its order: a point on a few ladders, and its neighbours.

    grouping   samples in the microbatches drawn, or evened out by cost; so many neighbouring microbatches in one
    parts      into how many parts the fullest microbatch drawn is cut, of the module with most work to cut; 0.5 for parts
               as large as two of it, of several microbatches in one
    level      how much of what it would keep a unit may hold (`leaning.py`)
    split      whether backwards are split into input and weight gradients

The search goes from a choice to its neighbours (`step_search.py`). Example, ladder of parts 1, 2, 3, 4, 6, finer ones first:

    (merge 1, parts 3, level 1)   ->   parts 4, parts 2, merge 2, evened out, not split
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from pipeweaver.costs import Costs
from pipeweaver.data.items import Share
from pipeweaver.data.table import ItemTable
from pipeweaver.model.graph import ModelGraph
from pipeweaver.schedule.ir import Chunk

T = TypeVar("T")

MERGES = (1, 2, 3, 4, 6, 8)
PARTS = (0.5, 0.7, 1, 2, 3, 4, 6, 8, 12, 16)
LEVELS = (1.0, 0.85, 0.7, 0.55, 0.4, 0.2, 0.0)
"""The ladders."""
ASKED = 9
"""Of items of one module that differ in size, so many are costed; the others lie between them."""


class Choice(NamedTuple):
    """`merge` microbatches in one, samples evened out by cost or not; the fullest in `parts` parts; the level of what
    is kept; whether backwards are split."""

    merge: int = 1
    even: bool = False
    parts: float = 1
    level: float = 1.0
    split: bool = False

    @property
    def cut(self) -> Choice:
        """The choice without what units and edges do not depend on."""
        return self._replace(level=1.0, split=False)


class ChoiceStep(NamedTuple):
    """What changes from one choice to another beside it, at which level."""

    field: str
    before: object
    after: object
    level: float


def step_between(one: Choice, other: Choice) -> ChoiceStep:
    """Of two choices that differ in one field."""
    ((field, before, after),) = (
        (field, a, b) for field, a, b in zip(Choice._fields, one, other, strict=True) if a != b
    )
    return ChoiceStep(field, before, after, one.level)


class Ladders(NamedTuple):
    """The values that a step may take."""

    merges: tuple[int, ...] = (1,)
    evens: tuple[bool, ...] = (False,)
    parts: tuple[float, ...] = (1,)
    levels: tuple[float, ...] = (1.0,)
    splits: tuple[bool, ...] = (False,)

    def neighbours(self, choice: Choice, finer_first: bool) -> Iterator[Choice]:
        """Choices one step away, those that help most often first: finer ones where the pipeline has gaps, and coarser
        ones, which lose less to small parts, where it has not."""
        finer = [choice._replace(parts=parts) for parts in _after(self.parts, choice.parts)]
        finer += [choice._replace(merge=merge) for merge in _after(self.merges[::-1], choice.merge)]
        coarser = [choice._replace(parts=parts) for parts in _after(self.parts[::-1], choice.parts)]
        coarser += [choice._replace(merge=merge) for merge in _after(self.merges, choice.merge)]
        cuts = [*finer, *coarser] if finer_first else [*coarser, *finer]
        yield from (cut for cut in cuts if cut.parts * cut.merge >= 1)
        for level in (*_after(self.levels, choice.level), *_after(self.levels[::-1], choice.level)):
            yield choice._replace(level=level)
        for even in self.evens:
            if even != choice.even:
                yield choice._replace(even=even)
        for split in self.splits:
            if split != choice.split:
                yield choice._replace(split=split)


def costliest(graph: ModelGraph, share: Share, work: Mapping[str, int]) -> str | None:
    """The module whose items are cut into parts: the one with most `work` [by module, ns] of those with several items
    in a microbatch and no joint loss."""
    several: set[str] = set()
    for group in share.microbatches:
        counts = Counter(share.items[i].module for i in group)
        several |= {name for name, count in counts.items() if count > 1}
    return max(sorted(several - _joint(graph)), key=lambda name: work[name], default=None)


def has_joint_loss(graph: ModelGraph, share: Share) -> bool:
    """Whether the share has items of a module whose loss mixes them."""
    joint = _joint(graph)
    return any(item.module in joint for item in share.items)


def fullest(share: Share, module: str) -> int:
    """Most items of a module in one microbatch."""
    return max(sum(share.items[i].module == module for i in group) for group in share.microbatches)


def backbone(graph: ModelGraph, share: Share) -> str:
    """The module that every microbatch has items of, and a loss if possible; the last such one."""
    present = [set(share.items[i].module for i in group) for group in share.microbatches]
    names = [module.name for module in graph.modules if all(module.name in of for of in present)]
    losses = [name for name in names if graph.by_name[name].loss is not None]
    return (losses or names or [module.name for module in graph.modules])[-1]


def item_costs(graph: ModelGraph, table: ItemTable, costs: Costs) -> list[int]:
    """Forward and backward of each item of a share alone through its whole module, ns. `table`: its items.

    Of a module with many different items a few are asked for, and the others are put between them by their tokens:
    what is done with these numbers is to make sums even.
    """
    tokens = table.sizes("tokens")
    found = np.zeros(len(table.items), np.int64)
    by_module: dict[tuple[str, str], list[int]] = {}
    for i, item in enumerate(table.items):
        by_module.setdefault((item.task, item.module), []).append(i)
    asked: list[tuple[Chunk, Sequence[int]]] = []
    sizes = []
    for (task, module), members in by_module.items():
        distinct, first = np.unique(tokens[members], return_index=True)
        chosen = np.unique(np.linspace(0, len(distinct) - 1, ASKED).round().astype(np.int64))
        whole = Chunk(task=task, module=module, start=0, stop=len(graph.by_name[module].layers), worker=0)
        asked += [(whole, (members[k],)) for k in first[chosen].tolist()]
        sizes.append(distinct[chosen])
    answers = iter([cost.forward_ns + cost.backward_ns for cost in costs.stages(table, asked)])
    for members, known in zip(by_module.values(), sizes, strict=True):
        found[members] = np.interp(tokens[members], known, np.array([next(answers) for _ in known], np.float64))
    return found.tolist()  # type: ignore[no-any-return]


def _joint(graph: ModelGraph) -> set[str]:
    return {module.name for module in graph.modules if module.loss is not None and module.loss.joint}


def _after(ladder: Sequence[T], value: T) -> Sequence[T]:
    """The value after one on its ladder, if there is one."""
    at = ladder.index(value) + 1
    return ladder[at : at + 1]
