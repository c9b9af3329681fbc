"""How it is said that no plan of a step fits its memory budget.

raise no_plan_fits(step=3, peak_bytes=(900, 1_200), static_bytes=(400, 400), budget_bytes=1_000)
no plan of step 3 fits: worker 1 needs 1,200 bytes even with one microbatch at a time, 200 more than the budget of ...
"""

from __future__ import annotations

from collections.abc import Sequence


def no_plan_fits(*, step: int, peak_bytes: Sequence[int], static_bytes: Sequence[int], budget_bytes: int) -> ValueError:
    """The error that names the fullest worker. `peak_bytes` [P]: what the plan that needs least holds at most;
    `static_bytes` [P]: what of it is held throughout."""
    worker = max(range(len(peak_bytes)), key=peak_bytes.__getitem__)
    peak = peak_bytes[worker]
    return ValueError(
        f"no plan of step {step} fits: worker {worker} needs {peak:,} bytes even with one microbatch at a time, "
        f"{peak - budget_bytes:,} more than the budget of {budget_bytes:,}; {int(static_bytes[worker]):,} of them are "
        f"parameters, gradients and optimizer state; use more workers, smaller microbatches, or a larger budget "
        f"(workers.memory)"
    )
