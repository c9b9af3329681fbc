"""Policies: how chunks are placed and stages are ordered, each a pair of pure functions.

    policy = POLICIES["1f1b"]
    placement = policy.place(graph, workers, costs, shares)                                             # per run
    draft = policy.plan(graph, placement, share, costs, budget_bytes=budget_bytes, seed=0, rounds=1)    # per step

All drafts go through the same compiler, verifier, emulator and runtime, so comparisons are like for like.
"""

from __future__ import annotations

from pipeweaver.policies import dynamic, gpipe, interleaved, one_f_one_b, pipeweaver, wavefront
from pipeweaver.policies.policy import Policy

POLICIES: dict[str, Policy] = {
    "gpipe": gpipe.POLICY,
    "1f1b": one_f_one_b.POLICY,
    "interleaved-1f1b": interleaved.POLICY,
    "pipeweaver": pipeweaver.POLICY,
    "dynamic": dynamic.POLICY,
    **wavefront.POLICIES,
}
