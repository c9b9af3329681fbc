"""Load the contents of a plan's parts in the order in which its `Load` actions want them, early if told so.

    loads = Loads([load_0, load_1, ...], executor, ahead=2)     # 0 and 1 are being loaded
    loads.take()                                                # content of 0; 2 is being loaded

On a GPU the device works while the next parts are read and decoded. Worker threads on a CPU core of their own
gain nothing by it, so there a part is loaded when it is wanted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from itertools import islice

from torch import Tensor

Loaded = Mapping[str, Tensor]


class Loads:
    """`ahead` loads are on their way, or done, before they are taken. With `ahead` 0 no thread is used."""

    def __init__(self, loads: Sequence[Callable[[], Loaded]], executor: Executor, ahead: int) -> None:
        self._loads = iter(loads)
        self._executor = executor
        self._ahead = ahead
        self._begun: deque[Future[Loaded]] = deque()
        self._begin(ahead)

    def take(self) -> Loaded:
        """The next content; raises what loading it raised."""
        if not self._ahead:
            return next(self._loads)()
        self._begin(1)
        return self._begun.popleft().result()

    def _begin(self, count: int) -> None:
        self._begun.extend(self._executor.submit(load) for load in islice(self._loads, count))
