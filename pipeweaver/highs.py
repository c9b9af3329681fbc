"""The solver HiGHS (highspy) for linear and integer programs: silent, one thread, limited by nodes, never by the clock.

`Silent()` is a `highspy.Highs` that prints nothing; the original writes its name to stdout when it is made.
"""

from __future__ import annotations

import highspy


class Silent(highspy.Highs):  # type: ignore[misc]
    """A solver with one thread and without output."""

    def __init__(self) -> None:
        super().__init__()
        self.silent()
        self.setOptionValue("threads", 1)

    def enableCallbacks(self) -> object:
        """What the constructor calls, and what prints the banner unless silenced before."""
        self.silent()
        return super().enableCallbacks()
