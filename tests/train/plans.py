"""The smallest plan there is."""

from pipeweaver.schedule.ir import Placement, Plan


def empty_plan(step, replica=0, num_replicas=1):
    return Plan(
        step=step, replica=replica, num_replicas=num_replicas, policy="none", seed=0, rounds=0, forward_only=False,
        items=(), links=(), records={}, placement=Placement(workers=1, chunks=()), parts=(), order=((),), edges=(),
        transfers=(), groups=(), normalisers={}, actions=((),), static_bytes=(0,),
    )  # fmt: skip
