"""Batches, made-up costs and a planner process for tests of the planner service.

Run by the service as `service_cases.py FOLDER FD`: a planner process for `PLANNING`, broken as `FOLDER/break.py` says.
"""

import sys
from pathlib import Path

from pipeweaver.costs import FlatCosts
from pipeweaver.data.items import Batch, Sample
from pipeweaver.planner.assign import share_out
from pipeweaver.planner.options import PolicyOptions
from pipeweaver.policies import POLICIES
from pipeweaver.runtime.ahead import Planning
from tests.model.examples import image, text, vision_language


def batch(step, *, images=(1, 0, 2, 1), tokens=8):
    """One sample per microbatch, with so many images; draws go on from step to step."""
    samples = []
    for i, count in enumerate(images):
        draw = step * len(images) + i
        items = (*(image(k, 4, 4, draw=draw) for k in range(count)), text(tokens + 4 * count, draw=draw))
        links = tuple((k, count) for k in range(count))
        samples.append(Sample(task="main", draw=draw, record=draw % 7, items=items, links=links))
    return Batch(step=step, samples=tuple(samples), microbatches=tuple((i,) for i in range(len(images))))


def planning(policy="dynamic", replicas=1, **settings):
    graph = vision_language()
    costs = FlatCosts(layers={module.name: len(module.layers) for module in graph.modules})
    shares = [share for step in range(2) for share in share_out(graph, batch(step), replicas, costs)]
    placement = POLICIES[policy].place(graph, 2, costs, shares)
    return Planning(
        graph=graph,
        placement=placement,
        costs=costs,
        policy=policy,
        options=PolicyOptions(),
        num_replicas=replicas,
        **settings,
    )


if __name__ == "__main__":
    folder = Path(sys.argv.pop(1))
    from pipeweaver.runtime import planner_process

    replicas = int((folder / "replicas").read_text())
    if (folder / "break.py").exists():
        exec((folder / "break.py").read_text(), {"planner_process": planner_process, "folder": folder})
    planner_process.main(lambda begin: planning(replicas=replicas))
